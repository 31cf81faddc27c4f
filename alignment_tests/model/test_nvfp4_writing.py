"""NVFP4 checkpoints, written: names, types, shapes and config fields as their readers expect; errors; activations."""

import json
import math
import re
from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from alignment_tests.bits import assert_bits_equal
from alignment_tests.model.checkpoints import E, F, fused, hf_config, hf_tensors, refused, write
from alignment_tests.model.nvfp4_checkpoints import FORMS, SUFFIXES, quantised
from minitransformer.alignment.trace import Trace
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe import nvfp4_layout, quantise, weights_nvfp4
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS
from minitransformer.ops import nvfp4
from minitransformer.recipe import get

both = pytest.mark.parametrize("form", FORMS)


def test_the_inverse_of_an_inverse_of_an_inverse_is_the_inverse():
    """Why an encode scale gives our decode scales back: for every significand, and at the clamp of the quantiser."""
    one = np.float32(1)
    x = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    decode = one / x
    assert np.array_equal((one / (one / decode)).view(np.uint32), decode.view(np.uint32))
    for encode in (nvfp4_layout.FLT_MAX, nvfp4_layout.FLT_MAX / np.float32(3), one, np.float32(2688)):
        decode = nvfp4_layout.decode_of(encode)
        assert nvfp4_layout.decode_of(nvfp4_layout.encode_of("k", decode)).tobytes() == decode.tobytes()
    # Of arbitrary decode scales every seventh (in powers of two) has no encode scale.
    every = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F000000)).view(np.float32)
    lost = (one / (one / every)) != every
    assert 0.13 < float((lost / every).sum() / (1 / every).sum()) < 0.15
    refused(lambda: nvfp4_layout.encode_of("some.key", every[lost][0]), "some.key", "no FP32 encode scale", "modelopt")


@both
def test_activation_scales_stay_finite(tmp_path, form):
    """Also where the bound of an activation is beyond FP32."""
    tensors = hf_tensors(hf_config())
    tensors["model.layers.0.post_attention_layernorm.weight"][3] = 3e38
    write(tmp_path / "bf16", hf_config(), tensors)
    stored = load_file(quantised(tmp_path, form) / "model.safetensors")
    static = [t for name, t in stored.items() if name.endswith(SUFFIXES[form][3])]
    assert len(static) == 6 * E and all(0 < float(t) < math.inf for t in static)


@both
def test_written_names_types_and_shapes(tmp_path, form):
    """What SGLang, vLLM and TensorRT-LLM allocate before they copy a tensor of this name into it."""
    path = quantised(tmp_path, form)
    source = hf_tensors(hf_config())
    codes, scales, outer, static = SUFFIXES[form]
    scalar = [] if form == "modelopt" else [1]
    with safe_open(path / "model.safetensors", "pt") as file:
        found = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}
    want = {}
    for name, tensor in source.items():
        if ".experts." in name:
            (N, K), module = tensor.shape, name.removesuffix("weight")
            want |= {module + codes: ("U8", [N, K // 2]), module + scales: ("F8_E4M3", [N, K // 16])}
            want |= {module + outer: ("F32", scalar), module + static: ("F32", scalar)}
        else:
            want[name] = ("BF16", list(tensor.shape))
    assert found == want
    stored = load_file(path / "model.safetensors")
    for name, tensor in source.items():
        if ".experts." not in name:
            assert_bits_equal(stored[name], tensor, name)


@both
def test_written_shards_are_the_same_tensors(tmp_path, form):
    whole = load_file(quantised(tmp_path, form) / "model.safetensors")
    quantise.quantise(tmp_path / "bf16", tmp_path / "cut", get("nvfp4_per_token"), FORMATS[form], max_shard_bytes=20000)
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    parts = [load_file(tmp_path / "cut" / name) for name in files]
    assert sum(map(len, parts)) == len(whole)
    for part in parts:
        for name, tensor in part.items():
            assert tensor.dtype == whole[name].dtype
            assert tensor.reshape(-1).view(torch.uint8).tolist() == whole[name].reshape(-1).view(torch.uint8).tolist()
    assert weights_nvfp4.load_quantised(tmp_path / "cut").experts.keys() == {0, 2}


# Modules as the engines name them (q, k, v and gate, up fused), and whether they expect 4-bit tensors there.
ENGINE_MODULES = {
    "lm_head": False, "model.layers.0.self_attn.qkv_proj": False, "model.layers.0.self_attn.o_proj": False,
    "model.layers.0.mlp.gate": False, "model.layers.0.mlp.experts": True, "model.layers.1.mlp.gate_up_proj": False,
    "model.layers.1.mlp.down_proj": False, "model.layers.2.mlp.experts": False, "model.layers.2.mlp.gate": False,
}  # fmt: skip


def test_left_out_modules_as_the_engines_match_them(tmp_path):
    """Layer 1 is dense, layer 2 is left in BF16 by the recipe."""
    quantised(tmp_path, "modelopt", overrides=[("2", "bf16")])
    separate = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())
    inline = json.loads((tmp_path / "modelopt" / "config.json").read_text())["quantization_config"]
    entries = separate["quantization"]["exclude_modules"]
    assert inline["ignore"] == entries and inline["quant_method"] == "modelopt"
    assert inline["quant_algo"] == separate["quantization"]["quant_algo"] == "NVFP4"
    assert separate["producer"]["name"] == "modelopt"  # vLLM and SGLang ask for this name
    assert separate["quantization"]["kv_cache_quant_algo"] is None  # SGLang asks for the key
    assert inline["config_groups"]["group_0"]["weights"]["group_size"] == separate["quantization"]["group_size"] == 16
    for module, wanted in ENGINE_MODULES.items():
        wildcards = [e.replace(".", r"\.").replace("*", ".*") for e in entries]
        sglang = any(re.fullmatch(w, module) for w in wildcards)
        vllm = any(e in module or fnmatch(module, e) for e in entries)
        assert sglang == vllm == (not wanted), module

    quantised(tmp_path, "compressed-tensors", overrides=[("2", "bf16")])
    said = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())["quantization_config"]
    assert not (tmp_path / "compressed-tensors" / "hf_quant_config.json").exists()

    def ignored(name):
        return any(re.match(e[3:], name) if e.startswith("re:") else e == name for e in said["ignore"])

    for module, wanted in ENGINE_MODULES.items():
        shards = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        head, _, last = module.rpartition(".")
        names = [f"{head}.{shard}" for shard in shards.get(last, ())] or [module]
        if last == "experts":  # vLLM asks for the projections of expert 0
            names = [f"{module}.0.{p}_proj" for p in ("gate", "up", "down")]
        assert {ignored(name) for name in names} == {not wanted}, module


@pytest.mark.parametrize("recipe", ["nvfp4_per_token", "w4a16"])
def test_compressed_tensors_reads_the_config_and_the_weights(tmp_path, recipe):
    """The format's own library, where it is installed."""
    library = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    path = quantised(tmp_path, "compressed-tensors", recipe)
    said = json.loads((path / "config.json").read_text())["quantization_config"]
    config = library.quantization.QuantizationConfig.model_validate(said)
    (scheme,) = config.config_groups.values()
    wanted = library.quantization.preset_name_to_scheme("NVFP4" if recipe != "w4a16" else "NVFP4A16", ["Linear"])
    for part in ("weights", "input_activations"):
        ours, theirs = getattr(scheme, part), getattr(wanted, part)
        assert (ours is None) == (theirs is None)
        for field in ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic") if ours else ():
            assert getattr(ours, field) == getattr(theirs, field), (part, field)
    module, stored = "model.layers.0.mlp.experts.3.up_proj.", load_file(path / "model.safetensors")
    state = {name.removeprefix(module): t for name, t in stored.items() if name.startswith(module)}
    compressor = library.compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    theirs = compressor.decompress(state, wanted)["weight"]
    ours = nvfp4.dequantize(weights_nvfp4.load_quantised(path).experts[0]["gate_up"])[3, F:]
    assert torch.allclose(theirs.float(), ours, rtol=2.0**-7, atol=0)


def test_fused_experts_give_the_same_checkpoint(tmp_path):
    config = hf_config()
    source = write(tmp_path / "fused", config | {"transformers_version": "5.1.0"}, fused(hf_tensors(config), (0, 2), E))
    quantise.quantise(source, tmp_path / "b", get("nvfp4_per_token"))
    a = (quantised(tmp_path, "modelopt") / "model.safetensors").read_bytes()
    assert a == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["transformers_version"] == "5.1.0"


def test_the_activation_bound_holds_for_bf16_weights(tmp_path):
    path = quantised(tmp_path, "modelopt")
    stored = load_file(path / "model.safetensors")
    trace = Trace()
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "bf16")
    with torch.no_grad():
        model(Batch.packed([list(range(40))]), trace=trace)

    source = load_file(tmp_path / "bf16" / "model.safetensors")

    def norm(layer):
        return source[f"model.layers.{layer}.post_attention_layernorm.weight"].double()

    def largest(stage):
        return max(trace.row(stage, 0, p).float().abs().max().item() for p in range(40))

    for i in (0, 2):
        at = f"model.layers.{i}.mlp.experts."
        gate, up = (stored[f"{at}0.{p}_proj.input_scale"] for p in ("gate", "up"))
        assert torch.equal(gate, up)
        down = min(float(stored[f"{at}{e}.down_proj.input_scale"]) for e in range(E))
        assert 0.2 * 2688 * float(gate) < largest(f"layers.{i}.post_norm") <= 2688 * float(gate)
        assert 0 < largest(f"layers.{i}.swiglu") <= 2688 * down
        # By hand, of one expert: D times the lengths of a pair of rows, each weight times the norm's.
        gate, up = (source[f"{at}3.{p}_proj.weight"].double() * norm(i) for p in ("gate", "up"))
        reach = (gate.norm(dim=1) * up.norm(dim=1)).max() * gate.shape[1]
        assert float(stored[f"{at}3.down_proj.input_scale"]) == pytest.approx(float(reach) / 2688, rel=1e-5)


def test_the_error_table(tmp_path):
    config = hf_config()
    tensors = hf_tensors(config)
    tensors["model.layers.2.mlp.experts.0.down_proj.weight"][:, :16] = 0  # a column of zero blocks
    write(tmp_path / "bf16", config, tensors)
    done = []
    errors = quantise.quantise(tmp_path / "bf16", tmp_path / "out", get("nvfp4_per_token"), on_layer=done.append)
    assert done == [0, 1, 2]
    assert [(e.layer, e.projection) for e in errors] == [(i, p) for i in (0, 2) for p in ("gate_up", "down")]
    q = weights_nvfp4.load_quantised(tmp_path / "out").experts[2]["down"]
    w = torch.stack([tensors[f"model.layers.2.mlp.experts.{e}.down_proj.weight"] for e in range(E)]).double()
    lost = nvfp4.dequantize(q).double() - w
    e = errors[3]
    assert math.isclose(e.relative_l2, float(lost.norm() / w.norm()), rel_tol=1e-12)
    assert math.isclose(e.snr_db, 10 * math.log10(float(w.square().sum() / lost.square().sum())), rel_tol=1e-12)
    assert math.isclose(e.mae, float(lost.abs().mean()), rel_tol=1e-12)
    assert e.zero_values == float((nvfp4.dequantize(q) == 0).double().mean())
    assert e.zero_codes == sum(int(v & 7 == 0) + int(v >> 4 & 7 == 0) for v in q.codes.flatten().tolist()) / w.numel()
    assert e.zero_scales == 64 / q.scales.numel() and 15 < e.snr_db < 25


def test_a_block_whose_scale_is_zero_counts_as_zero_values(tmp_path):
    """Its codes are 7, not 0."""
    config = hf_config()
    tensors = hf_tensors(config)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors[name][:, :16] = 2.0**-40
    write(tmp_path / "bf16", config, tensors)
    errors = quantise.quantise(tmp_path / "bf16", tmp_path / "out", get("nvfp4_per_token"))
    q = weights_nvfp4.load_quantised(tmp_path / "out").experts[0]["down"]
    assert (nvfp4.unpack(q.codes[0, :, :8]) == 7).all() and not nvfp4.decode(q)[0, :, :16].any()
    assert errors[1].zero_values == float((nvfp4.decode(q) == 0).double().mean())
    assert math.isclose(errors[1].zero_codes + errors[1].zero_scales, errors[1].zero_values)
    assert errors[1].zero_values >= errors[1].zero_scales == tensors[name].shape[0] / q.scales.numel()
