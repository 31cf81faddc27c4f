"""Broken checkpoints: each is refused with one line that says what, where and what to do."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from alignment_tests.model.checkpoints import E, fused, hf_config, hf_tensors, refused, write
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe import weights
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.2.mlp.experts.11.down_proj.weight"
KEYS = sorted(hf_tensors(hf_config()))


def refused_load(directory, *words) -> str:
    """Streaming and building a model are refused alike."""
    refused(lambda: list(weights.read(directory)[1]), *words)
    return refused(lambda: Qwen3MoeForCausalLM.from_pretrained(directory), *words)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS))
def test_any_missing_tensor_is_named(tmp_path, key):
    tensors = hf_tensors(hf_config())
    del tensors[key]
    refused_load(write(tmp_path, hf_config(), tensors), str(tmp_path), "1 missing", key)


def check_extra_tensor(tmp_path) -> None:
    for key in ("model.layers.3.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"):
        extra = hf_tensors(hf_config()) | {key: torch.zeros(64).bfloat16()}
        refused_load(write(tmp_path, hf_config(), extra), "1 not in the model", key)


def test_extra_tensor_is_named(tmp_path):
    check_extra_tensor(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path):
    message = refused_load(
        write(tmp_path, hf_config(), {"lm_head.weight": torch.zeros(40, 64).bfloat16()}), f"{len(KEYS) - 1} missing"
    )
    assert len(message) < 400


def test_missing_head_says_that_the_config_is_untied(tmp_path):
    tensors = hf_tensors(hf_config(tie_word_embeddings=True))
    refused_load(write(tmp_path, hf_config(), tensors), "lm_head.weight", "tie_word_embeddings = false")


def test_layer_with_fused_and_single_experts_is_refused(tmp_path):
    tensors = hf_tensors(hf_config())
    both = tensors | fused(tensors, (0,), E)
    config = hf_config(transformers_version="5.0.0")
    refused_load(write(tmp_path, config, both), "36 not in the model", "model.layers.0.mlp.experts.0.down_proj.weight")


def test_dense_layer_where_the_config_says_sparse(tmp_path):
    refused_load(write(tmp_path, hf_config(mlp_only_layers=[]), hf_tensors(hf_config())), "37 missing", "3 not in")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS))
def test_any_wrong_shape_is_named(tmp_path, key):
    tensors = hf_tensors(hf_config())
    tensors[key] = tensors[key][1:].contiguous()
    refused_load(write(tmp_path, hf_config(), tensors), key, "has the shape", "asks for")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16, torch.float8_e4m3fn])
def test_wrong_dtype_is_named(tmp_path, dtype):
    tensors = hf_tensors(hf_config())
    tensors[DOWN] = tensors[DOWN].to(dtype)
    refused_load(write(tmp_path, hf_config(), tensors), DOWN, "is stored as", "convert")


def check_non_finite(tmp_path) -> None:
    for value, dtype in ((float("nan"), torch.bfloat16), (float("-inf"), torch.bfloat16), (3.4e38, torch.float32)):
        tensors = hf_tensors(hf_config())
        tensors[DOWN] = tensors[DOWN].to(dtype)
        tensors[DOWN][63, 31] = float("inf")
        tensors[DOWN][5, 2] = value
        refused_load(write(tmp_path, hf_config(), tensors), f"{DOWN}[5, 2]", "not a finite BF16 number")


def test_an_fp32_router_among_bf16_weights_is_not_rounded_in_silence(tmp_path):
    key, tensors = "model.layers.2.mlp.gate.weight", hf_tensors(hf_config())
    tensors[key] = tensors[key].float()
    Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "exact", hf_config(), tensors))  # FP32 in name only
    tensors[key][1, 2] += 2.0**-20
    refused_load(write(tmp_path / "finer", hf_config(), tensors), key, "FP32 router")


def test_non_finite_weight_is_named_with_its_place(tmp_path):
    check_non_finite(tmp_path)  # 3.4e38 is finite in FP32 but rounds to infinity


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncated_file_is_refused(tmp_path, cut):
    file = write(tmp_path, hf_config(), hf_tensors(hf_config())) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(cut * len(content))])
    refused_load(tmp_path, str(file), "not a complete safetensors file", "again")


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 a pickle in a zip", struct.pack("<Q", 2**63), struct.pack("<Q", 8) + b"not json", b"\0" * 64],
)
def test_malformed_file_is_refused(tmp_path, content):
    file = write(tmp_path, hf_config(), hf_tensors(hf_config())) / "model.safetensors"
    file.write_bytes(content)
    refused_load(tmp_path, str(file), "not a complete safetensors file")


def edit_index(directory, edit) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.pop(DOWN), (DOWN, "does not say where")),
        (lambda m: m.update({"ghost": m[DOWN]}), ("ghost", "does not say where")),
        (lambda m: m.update({DOWN: next(f for f in m.values() if f != m[DOWN])}), (DOWN, "does not say where")),
        (lambda m: m.update({DOWN: "model-00009-of-00009.safetensors"}), ("model-00009-of-00009", "missing but named")),
        (lambda m: m.update({DOWN: "../model.safetensors"}), ("../model.safetensors", "no file name")),
        (lambda m: m.update({DOWN: 3}), (DOWN, "no file name")),
        (lambda m: m.clear(), ("no weight_map",)),
    ],
)
def test_index_that_does_not_fit_its_shards(tmp_path, edit, words):
    write(tmp_path, hf_config(), hf_tensors(hf_config()), shards=3)
    edit_index(tmp_path, edit)
    refused_load(tmp_path, INDEX if "missing but" not in words[-1] else "", *words)


def test_tensor_in_two_shards_is_refused(tmp_path):
    tensors = hf_tensors(hf_config())
    write(tmp_path, hf_config(), tensors, shards=2)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(f for f in places.values() if f != places[DOWN])
    save_file({n: t for n, t in tensors.items() if places[n] == other or n == DOWN}, tmp_path / other)
    refused_load(tmp_path, DOWN, "stored twice")


def test_missing_shard_is_named(tmp_path):
    write(tmp_path, hf_config(), hf_tensors(hf_config()), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused_load(tmp_path, "model-00002-of-00003.safetensors", "download it again")


def test_single_file_beside_an_index_is_refused(tmp_path):
    write(tmp_path, hf_config(), hf_tensors(hf_config()), shards=2)
    write(tmp_path, hf_config(), hf_tensors(hf_config()))
    refused_load(tmp_path, "both", INDEX)


def test_pickle_is_never_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    torch.save(hf_tensors(hf_config()), tmp_path / "pytorch_model.bin")
    refused_load(tmp_path, "pytorch_model.bin", "run code", "convert them to safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    refused_load(tmp_path, "no model.safetensors")


def test_directory_and_config_errors(tmp_path):
    refused_load(tmp_path / "Qwen" / "Qwen3-30B-A3B", "no such directory", "local directory")
    refused_load(tmp_path, "no config.json")
    config = tmp_path / "config.json"
    for content in ('{"model_type": ', '{"a": 1, "a": 2}', "[]", "\xff\xfe", "[" * 100_000):
        config.write_bytes(content.encode("latin-1"))
        refused_load(tmp_path, str(tmp_path), "config.json")
    write(tmp_path, hf_config(use_sliding_window=True), hf_tensors(hf_config()))
    refused_load(tmp_path, f"{config}: use_sliding_window = True")
    write(tmp_path, hf_config(), hf_tensors(hf_config()))
    generation = tmp_path / "generation_config.json"
    generation.write_text("[1]")
    refused_load(tmp_path, f"{generation}: expected an object")
    generation.unlink()
    generation.mkdir()
    refused_load(tmp_path, f"{generation}: is not a file")
    generation.rmdir()
    generation.symlink_to(tmp_path / "gone")
    refused_load(tmp_path, f"{generation}: is not a file")
    generation.unlink()


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    write(tmp_path, hf_config(), hf_tensors(hf_config()))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    refused(lambda: Qwen3MoeForCausalLM.from_pretrained(tmp_path), "tokenizer.json", "not a tokenizer")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_damaged_header_never_escapes_as_another_error(tmp_path, data):
    """Any byte of the header changed: read as before, or an InputError; nothing else."""
    file = write(tmp_path, hf_config(), hf_tensors(hf_config())) / "model.safetensors"
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, 8 + struct.unpack("<Q", content[:8])[0] - 1))
    content[place] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        list(weights.read(tmp_path)[1])
    except InputError as error:
        assert "\n" not in str(error)
