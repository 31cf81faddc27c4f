"""NVFP4 checkpoints, read: every code and scale as it is stored, the same bits on every way in."""

from pathlib import Path

import numpy as np
import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.model.checkpoints import E, F, hf_config, hf_tensors, refused, write
from alignment_tests.model.nvfp4_checkpoints import (
    FORMS,
    bf16_checkpoint,
    config_of,
    nvfp4_tensors,
    outer_scale,
    quantised,
    value,
    written,
)
from minitransformer import devices
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe import weights_nvfp4
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.ops import nvfp4
from minitransformer.recipe import get

BATCH = [[1, 2, 3, 4, 5, 6], [7, 8, 30, 31]]


def loaded_parts(experts):
    """module -> (codes, scales, outer FP32 scalar), gate being the first half of gate_up's rows."""
    found = {}
    for i, layer in experts.items():
        for e in range(E):
            for p, name, rows, column in (
                ("gate", "gate_up", slice(0, F), 0),
                ("up", "gate_up", slice(F, 2 * F), 1),
                ("down", "down", slice(None), 0),
            ):
                q = layer[name]
                outer = q.outer.reshape(E, -1)[e, column]
                found[f"model.layers.{i}.mlp.experts.{e}.{p}_proj"] = q.codes[e, rows], q.scales[e, rows], outer
    return found


def check_reading(directory: Path, outer=outer_scale) -> None:
    """Codes, block scales and outer scales of each expert and projection are the stored ones, and so are the values."""
    for form in FORMS:
        path, _, meant = written(directory, form, outer=outer)
        checkpoint = weights_nvfp4.load_quantised(path)
        found = loaded_parts(checkpoint.experts)
        assert found.keys() == meant.keys()
        for module, (codes, scales, decode) in meant.items():
            assert_bits_equal(found[module][0], codes, f"{form} {module} codes")
            assert_bits_equal(found[module][1], scales, f"{form} {module} scales")
            assert_bits_equal(found[module][2], torch.tensor(decode), f"{form} {module} outer")
        for i in (0, 2):
            for name in ("gate_up", "down"):
                got = nvfp4.dequantize(checkpoint.experts[i][name])
                for e in range(E):
                    at = f"model.layers.{i}.mlp.experts.{e}."
                    projections = ("gate", "up") if name == "gate_up" else ("down",)
                    want = torch.cat([value(*meant[f"{at}{p}_proj"]) for p in projections])
                    assert_bits_equal(got[e], want, f"{form} {at}{name}")
        parameters = dict(checkpoint.parameters)
        assert_bits_equal(
            parameters["layers.0.mlp.router.weight"], hf_tensors(hf_config())["model.layers.0.mlp.gate.weight"]
        )
        assert not any("layers.0.mlp.gate_up" in name or "layers.2.mlp.down" in name for name in parameters)
        assert "layers.1.mlp.gate_up.weight" in parameters and len(parameters) == 3 * 6 + 2 + 2 + 3


def test_what_is_read_is_what_was_stored(tmp_path):
    check_reading(tmp_path)


def pair(gate: float, up: float):
    """outer_scale with these decode scales for gate and up of every expert."""

    def outer(form, expert, projection):
        if projection == "down":
            return outer_scale(form, expert, projection)
        decode = np.float32(gate if projection == "gate" else up)
        stored = decode if form == "modelopt" else np.float32(1) / decode
        return stored, decode if form == "modelopt" else np.float32(1) / stored

    return outer


def check_gate_and_up_keep_their_scales(directory: Path) -> None:
    check_reading(directory / "powers", pair(1, 2))
    check_reading(directory / "published", pair(3.85e-5, 4.83e-5))


def test_gate_and_up_keep_their_scales(tmp_path):
    check_gate_and_up_keep_their_scales(tmp_path)


def test_one_scale_for_both_would_be_off_by_their_ratio(tmp_path):
    path, _, meant = written(tmp_path, "modelopt", outer=pair(3.85e-5, 4.83e-5))
    q = weights_nvfp4.load_quantised(path).experts[0]["gate_up"]
    right = nvfp4.dequantize(q)
    merged = nvfp4.dequantize(nvfp4.Nvfp4(q.codes, q.scales, q.outer.amax(1)))
    some = right[:, :F] != 0
    inflation = (merged[:, :F][some] / right[:, :F][some]).unique()
    assert torch.allclose(inflation, torch.tensor(1.2545), atol=1e-4)
    assert_bits_equal(merged[:, F:], right[:, F:])


def check_round_trip(directory: Path) -> None:
    """Quantised on load, read from ModelOpt, read from compressed-tensors: the same codes, scales and logits."""
    recipe = "nvfp4_per_token"
    on_load = Qwen3MoeForCausalLM.from_pretrained(bf16_checkpoint(directory), recipe=recipe)
    batch = Batch.packed(BATCH)
    with torch.no_grad():
        want = on_load(batch)
    for form in FORMS:
        path = quantised(directory, form)
        checkpoint = weights_nvfp4.load_quantised(path)
        assert checkpoint.recipe == get(recipe)
        for i, experts in checkpoint.experts.items():
            mlp = on_load.layers[i].mlp
            for name, q in experts.items():
                ours = mlp.experts.quantised(name, getattr(mlp, name).weight)
                assert_bits_equal(q.codes, ours.codes, f"{form} layer {i} {name} codes")
                assert_bits_equal(q.scales, ours.scales, f"{form} layer {i} {name} scales")
                assert_bits_equal(q.row_outer(), ours.row_outer(), f"{form} layer {i} {name} outer")
        model = Qwen3MoeForCausalLM.from_pretrained(path)
        assert model.spec.entries() == on_load.spec.entries()
        with torch.no_grad():
            assert_bits_equal(model(batch), want, f"{form} logits")


def test_quantised_on_load_equals_read_from_either_format(tmp_path):
    check_round_trip(tmp_path)


def check_left_out_layers_stay_bf16(directory: Path) -> None:
    for form, entry in (("modelopt", "model.layers.2.mlp.experts*"), ("modelopt", "model.layers.2.mlp.experts"),
                        ("compressed-tensors", r"re:model\.layers\.2\.mlp\.experts\..*"),
                        ("compressed-tensors", "model.layers.2.mlp.experts")):  # fmt: skip
        config = config_of(form, (entry,))
        tensors, _ = nvfp4_tensors(config, form, layers=(0,))
        path = write(directory / form, config, tensors)
        checkpoint = weights_nvfp4.load_quantised(path)
        assert checkpoint.experts.keys() == {0} and checkpoint.recipe.for_layer(2).name == "bf16"
        assert checkpoint.recipe.for_layer(0).name == "nvfp4_per_token"
        up = dict(checkpoint.parameters)["layers.2.mlp.gate_up.weight"][:, F:]
        want = torch.stack([tensors[f"model.layers.2.mlp.experts.{e}.up_proj.weight"] for e in range(E)])
        assert_bits_equal(up, want)
        model = Qwen3MoeForCausalLM.from_pretrained(path)
        assert type(model.layers[2].mlp.experts).__name__ == "Bf16Experts"
        with torch.no_grad():
            assert model(Batch.packed(BATCH)).isfinite().all()
        for name in ("config.json", "model.safetensors"):
            (path / name).unlink()


def test_left_out_layers_stay_bf16(tmp_path):
    check_left_out_layers_stay_bf16(tmp_path)


def test_an_explicit_recipe_beats_the_config(tmp_path):
    path = quantised(tmp_path, "modelopt", overrides=[("2", "bf16")])
    model = Qwen3MoeForCausalLM.from_pretrained(path, recipe="w4a16")
    assert (model.recipe.for_layer(0).name, model.recipe.for_layer(2).name) == ("w4a16", "bf16")
    bf16 = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "bf16", get("w4a16").with_overrides([("2", "bf16")], 3))
    with torch.no_grad():
        assert_bits_equal(model(Batch.packed(BATCH)), bf16(Batch.packed(BATCH)))
    refused(lambda: Qwen3MoeForCausalLM.from_pretrained(path, recipe="nvfp4_per_row"), "layer 0", "only quantised")
    refused(lambda: model.save_pretrained(tmp_path / "again"), "NVFP4")
    stated = Qwen3MoeForCausalLM.from_pretrained(quantised(tmp_path, "compressed-tensors", "w4a16"))
    assert stated.recipe.name == "w4a16"


def test_a_gpu_without_room_is_told_before_anything_is_moved(tmp_path, monkeypatch):
    """Codes, block scales and what is BF16; the experts' BF16 weights, which do not exist, are not counted."""
    path, config, _ = written(tmp_path, "modelopt")
    model = Qwen3MoeForCausalLM.from_pretrained(path)
    values = 3 * config["moe_intermediate_size"] * config["hidden_size"] * config["num_experts"] * 2  # of two layers
    needed = values * 9 // 16 + sum(2 * p.numel() for p in model.parameters())
    monkeypatch.setattr(devices, "free_bytes", lambda device: needed - 1)
    with pytest.raises(InputError, match=r"the weights in NVFP4 and BF16: .* GiB are needed on cpu, .* are free"):
        Qwen3MoeForCausalLM.from_pretrained(path)
    monkeypatch.setattr(devices, "free_bytes", lambda device: needed)
    Qwen3MoeForCausalLM.from_pretrained(path)
