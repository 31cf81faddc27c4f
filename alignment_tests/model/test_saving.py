"""Saving: transformers reads it, the same weights give the same files, and a failed save leaves nothing behind."""

import json
import os

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.model.checkpoints import E, fused, hf_config, hf_tensors, refused, write
from alignment_tests.model.test_weights import SPARSE, assert_loads, by_hand, oracle
from minitransformer.models.qwen3_moe import weights
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM


@pytest.mark.parametrize("limit", [10**9, 40_000], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_reads_what_we_save(tmp_path, limit, tied):
    tensors = hf_tensors(hf_config(tie_word_embeddings=tied))
    model = Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "a", hf_config(tie_word_embeddings=tied), tensors))
    weights.save(model, tmp_path / "b", max_shard_bytes=limit)
    assert (tmp_path / "b" / "model.safetensors.index.json").exists() == (limit < 10**9)
    assert_loads(tmp_path / "b", by_hand(tensors))
    theirs, info = oracle(tmp_path / "b", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.generation_config.eos_token_id == [7]
    for name, tensor in fused(tensors, SPARSE, E).items():
        assert_bits_equal(theirs.get_parameter(name).detach(), tensor, name)


def test_saving_twice_gives_the_same_files_and_replaces_the_first(tmp_path):
    model = Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "a", hf_config(), hf_tensors(hf_config())))
    weights.save(model, tmp_path / "b", max_shard_bytes=40_000)
    weights.save(model, tmp_path / "c")
    weights.save(model, tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
    assert sorted(os.listdir(tmp_path / "b")) == ["config.json", "generation_config.json", "model.safetensors"]
    for name in os.listdir(tmp_path / "b"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["num_local_experts"] == E


def check_a_failed_save_changes_nothing(tmp_path, monkeypatch) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "a", hf_config(), hf_tensors(hf_config())))
    weights.save(model, tmp_path / "b")
    before = {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    for place in ("b", "new"):
        refused(
            lambda place=place: weights.save(model, tmp_path / place), place, "No space left", "nothing was changed"
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == before


def test_a_failed_save_changes_nothing(tmp_path, monkeypatch):
    check_a_failed_save_changes_nothing(tmp_path, monkeypatch)


def test_save_refuses_what_it_must_not_replace_or_write(tmp_path):
    model = Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "a", hf_config(), hf_tensors(hf_config())))
    (tmp_path / "a" / "notes.txt").write_text("mine")
    refused(lambda: weights.save(model, tmp_path / "a"), "notes.txt", "choose another place")
    refused(lambda: weights.save(model, tmp_path / "a" / "notes.txt"), "a file")
    with torch.no_grad():
        model.layers[2].mlp.down.weight[4, 3, 2] = float("nan")
    refused(lambda: weights.save(model, tmp_path / "b"), "model.layers.2.mlp.experts.4.down_proj.weight[3, 2]", "nan")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"] and (tmp_path / "a" / "notes.txt").read_text() == "mine"
