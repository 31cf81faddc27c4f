"""What an NVFP4 checkpoint may not say, and what `quantise` refuses: one line each, nothing loaded or written."""

import json

import numpy as np
import pytest

from alignment_tests.model.checkpoints import hf_config, hf_tensors, refused, write
from alignment_tests.model.nvfp4_checkpoints import FORMS, config_of, nvfp4_tensors, refuse
from minitransformer.models.qwen3_moe import quantise
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS
from minitransformer.models.qwen3_moe.weights_nvfp4 import load_quantised
from minitransformer.recipe import get

UP = "model.layers.2.mlp.experts.7.up_proj."
both = pytest.mark.parametrize("form", FORMS)

GROUP = "config_groups/group_0/"
MODELOPT_CONFIGS = [
    ({"quant_algo": "FP8"}, "quant_algo = 'FP8'"),
    ({"quant_algo": None}, "quant_algo = None"),
    ({"config_groups": {"group_0": {"weights": {"group_size": 32}}}}, "blocks of 16"),
    ({"config_groups": {}}, "group_size"),
    ({"group_size": [16]}, "blocks of 16"),
    ({"group_size": {"a": 1}}, "blocks of 16"),
    ({"quant_method": ["modelopt"]}, "quant_method = ['modelopt']"),
    ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "kv_cache_scheme"),
    ({"pre_quant_scale": True}, "pre_quant_scale"),
    ({"ignore": "lm_head"}, "list of names"),
    ({"exclude_modules": ["lm_head"]}, "exclude_modules and ignore differ"),
    ({"config_groups": [], "group_size": 16}, "expected an object"),
    ({GROUP + "weights/num_bits": 8}, "weights.num_bits = 8"),
    ({GROUP + "input_activations/num_bits": 8}, "input_activations.num_bits = 8"),
    ({GROUP + "weights/type": "int"}, "weights.type = 'int'"),
    ({GROUP + "weights": "fp4"}, "group_0.weights: expected an object"),
    ({GROUP + "input_activations": None}, "has ['weights'], but quant_algo NVFP4 quantises ['weights', 'input_act"),
    ({GROUP + "weights": None}, "has ['input_activations'], but quant_algo NVFP4"),
    ({"quant_algo": "W4A16_NVFP4"}, "has ['weights', 'input_activations'], but quant_algo W4A16_NVFP4"),
    ({GROUP + "targets": ["re:.*experts.*"]}, "targets = ['re:.*experts.*']"),
    ({GROUP + "targets": None}, "targets = None"),
    ({GROUP + "output_activations": {"num_bits": 8}}, "output_activations"),
    ({"config_groups/group_1": {"weights": {"num_bits": 8, "group_size": 16}}}, "group_1.weights.num_bits = 8"),
    ({"quant_method": "awq"}, "quant_method = 'awq'"),
]
COMPRESSED_CONFIGS = [
    ({"format": "float-quantized"}, "format = 'float-quantized'"),
    ({GROUP + "weights/group_size": 32}, "group_size = 32"),
    ({GROUP + "weights/num_bits": 8}, "num_bits = 8"),
    ({GROUP + "weights/strategy": "group"}, "strategy = 'group'"),
    ({GROUP + "weights/symmetric": False}, "symmetric"),
    ({GROUP + "weights/actorder": "group"}, "actorder"),
    ({GROUP + "weights/scale_dtype": "torch.uint8"}, "scale_dtype"),
    ({GROUP + "input_activations/dynamic": False}, "dynamic = False"),
    ({GROUP + "output_activations": {"num_bits": 8}}, "output_activations"),
    ({"config_groups/group_1": {"targets": ["Embedding"]}}, "2 groups"),
    ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ({"ignore": ["re:("]}, "regular expression"),
    ({"config_groups": None}, "expected an object"),
    ({GROUP + "targets": "Linear"}, "expected a list of names"),
]


@pytest.mark.parametrize(
    "form, change, word", [(FORMS[0], *c) for c in MODELOPT_CONFIGS] + [(FORMS[1], *c) for c in COMPRESSED_CONFIGS]
)
def test_a_config_that_is_not_understood_is_refused(tmp_path, form, change, word):
    config = json.loads(json.dumps(config_of(form)))
    for path, value in change.items():
        at = config["quantization_config"]
        *parents, last = path.split("/")
        for name in parents:
            at = at[name]
        at[last] = value
    refuse(tmp_path, form, lambda t: None, "quantization_config", word, config=config)


def test_targets_of_compressed_tensors_are_compared_with_what_is_stored(tmp_path):
    experts = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
    cases = {
        "all": ([experts], ""),
        "none": ([], "targets and ignore list leave every expert in BF16"),
        "a class": (["Embedding"], "targets and ignore list leave every expert in BF16"),
        "a layer": ([r"re:.*layers\.0\..*"], "experts.0.down_proj.input_global_scale is quantised, but no target"),
        "half": ([r"re:.*experts\.[0-3]\..*"], "one number format"),
    }
    for name, (targets, words) in cases.items():
        config = config_of("compressed-tensors")
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
        if words:
            refuse(tmp_path / name, "compressed-tensors", lambda t: None, words, config=config)
        else:
            config["quantization_config"]["ignore"] = []  # a target that names the experts needs no list
            tensors, _ = nvfp4_tensors(config, "compressed-tensors")
            assert load_quantised(write(tmp_path / name, config, tensors)).experts.keys() == {0, 2}


def test_two_configs_that_disagree(tmp_path):
    config = config_of("modelopt")
    tensors, _ = nvfp4_tensors(config, "modelopt")
    path = write(tmp_path / "m", config, tensors)
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    ignore = config["quantization_config"]["ignore"]
    separate = {"producer": {"name": "modelopt"}, "quantization": said | {"exclude_modules": ignore}}
    (path / "hf_quant_config.json").write_text(json.dumps(separate))
    assert load_quantised(path).experts
    (path / "config.json").write_text(json.dumps(hf_config()))  # as older tools write it: only the separate file
    assert load_quantised(path).experts and Qwen3MoeForCausalLM.from_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    separate["quantization"]["exclude_modules"] = ["lm_head"]
    (path / "hf_quant_config.json").write_text(json.dumps(separate))
    refused(lambda: load_quantised(path), "hf_quant_config.json", "disagree")
    separate["quantization"] = said | {"exclude_modules": ignore, "kv_cache_quant_algo": "FP8"}
    (path / "hf_quant_config.json").write_text(json.dumps(separate))
    refused(lambda: load_quantised(path), "kv_cache_quant_algo = FP8")


def test_a_separate_config_that_is_no_file_or_says_nothing(tmp_path):
    path = write(tmp_path / "m", hf_config(), hf_tensors(hf_config()))
    separate = path / "hf_quant_config.json"
    separate.write_text("null")
    refused(lambda: Qwen3MoeForCausalLM.from_pretrained(path), "hf_quant_config.json: quantization: expected an object")
    separate.unlink()
    separate.mkdir()
    refused(lambda: Qwen3MoeForCausalLM.from_pretrained(path), "hf_quant_config.json: is not a file")


@both
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_quantising_bad_weights_writes_nothing(tmp_path, form, bad):
    tensors = hf_tensors(hf_config())
    tensors[UP + "weight"][9, 10] = bad
    source = write(tmp_path / "m", hf_config(), tensors)
    call = lambda: quantise.quantise(source, tmp_path / "o", get("nvfp4_per_token"), FORMATS[form])  # noqa: E731
    refused(call, UP + "weight[9, 10]", "finite")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@both
def test_weights_whose_outer_scale_no_reader_takes(tmp_path, form):
    for reach, path in ((43008, "most"), (43264, "above")):  # neighbours in BF16; 16 * 2688 is the limit
        tensors = hf_tensors(hf_config())
        tensors[UP + "weight"][9, 10] = reach
        source = write(tmp_path / path, hf_config(), tensors)
        call = lambda: quantise.quantise(source, tmp_path / f"o{path}", get("w4a16"), FORMATS[form])  # noqa: B023, E731
        if path == "most":
            call()
            assert float(load_quantised(tmp_path / "omost").experts[2]["gate_up"].outer[7, 1]) == 16
        else:
            refused(call, "model.layers.2.mlp.experts.7.gate_proj.", "reach 4.326e+04")  # gate and up share it
            assert not (tmp_path / "oabove").exists()


def test_quantising_what_cannot_be_stated_or_written(tmp_path):
    source = write(tmp_path / "m", hf_config(), hf_tensors(hf_config()))

    def refuse_to(words, recipe="nvfp4_per_token", overrides=(), model=source, out=tmp_path / "o"):
        before = sorted(tmp_path.rglob("*"))
        chosen = get(recipe).with_overrides(overrides, 3)
        refused(lambda: quantise.quantise(model, out, chosen), *words)
        assert sorted(tmp_path.rglob("*")) == before

    refuse_to(["bf16", "can't state it"], "bf16")
    refuse_to(["nvfp4_per_tensor", "when loading"], "nvfp4_per_tensor")
    refuse_to(["nvfp4_per_row", "one outer scale a tensor"], "nvfp4_per_row")
    refuse_to(["layer 0", "w4a16 beside nvfp4_per_token"], overrides=[("0", "w4a16")])
    refuse_to(["nothing to quantise"], overrides=[("layers.*", "bf16")])
    refuse_to(["no layer with experts"], overrides=[("1", "bf16")])  # a dense layer
    refuse_to(["not an empty directory"], out=source)
    refuse_to(["not an empty directory"], out=source / "config.json")
    refuse_to(["no such directory"], model=tmp_path / "absent")
    quantised = tmp_path / "q"
    (tmp_path / "q").mkdir()  # an empty directory may be there already
    quantise.quantise(source, quantised, get("w4a16"))
    refuse_to(["quantised already"], model=quantised)
    dense = write(tmp_path / "d", config := hf_config(mlp_only_layers=[0, 1, 2]), hf_tensors(config))
    refuse_to(["nothing to quantise"], model=dense)


def test_an_expert_of_zeros_and_one_too_small_to_scale(tmp_path):
    tensors = hf_tensors(hf_config())
    for name in tensors:
        if name.startswith("model.layers.0.mlp.experts.3."):
            tensors[name].zero_()
        if name.startswith("model.layers.0.mlp.experts.4."):
            tensors[name].fill_(2.0**-130)  # 2688 / amax overflows
    source = write(tmp_path / "m", hf_config(), tensors)
    for form in FORMS:
        quantise.quantise(source, tmp_path / form, get("nvfp4_per_token"), FORMATS[form])
        experts = load_quantised(tmp_path / form).experts[0]
        outer = experts["gate_up"].outer
        assert outer[3].tolist() == [1, 1] and not (experts["gate_up"].codes[3] & 0x77).any()
        assert np.float32(outer[4, 0]) == np.float32(1) / np.finfo(np.float32).max
