"""SGLang's own code reads the NVFP4 checkpoints that `quantise` writes, and holds the bits that we compute with.

read_nvfp4.py drives SGLang in a process of its own, on a CPU: its config classes on our config files, its Qwen3-MoE
with the parameters of the quantised layers, its loader on our tensors, and what it derives for its kernels. The kernels
themselves need a Blackwell and are not run.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.mutations.nvfp4_checkpoint_mutations import MUTATIONS
from minitransformer.models.qwen3_moe import quantise, weights
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS
from minitransformer.ops import nvfp4
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.plugins.sglang.launch import environment
from minitransformer.recipe import get

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: make test-sglang"),
]
Tensors = dict[str, torch.Tensor]
MODELOPT, COMPRESSED = "ModelOptNvFp4FusedMoEMethod", "CompressedTensorsW4A4Nvfp4MoE"
# (format, backend, options) -> the method of quantised experts, and whether SGLang keeps up's rows before gate's.
READINGS = {
    ("modelopt", "marlin", ""): (MODELOPT, False),
    ("modelopt", "flashinfer_cutlass", "pretend"): (MODELOPT, True),
    ("compressed-tensors", "flashinfer_cutlass", "pretend"): (COMPRESSED, True),
}
# ModelOpt's outer scale is a decode scale; of the inverse that compressed-tensors stores SGLang takes 1 / stored.
OUTER = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}
NAMES = {  # ours -> SGLang's
    "attn.qkv": "self_attn.qkv_proj", "attn.o": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm", "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm",
    "mlp.router": "mlp.gate", "mlp.gate_up": "mlp.experts.w13_weight", "mlp.down": "mlp.experts.w2_weight",
}  # fmt: skip
CONFIGS = """
import json, sys
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
separate, whole = (json.load(open(sys.argv[1] + name)) for name in ("/hf_quant_config.json", "/config.json"))
a, b = map(ModelOptFp4Config.from_config, (separate, whole["quantization_config"]))
excluded = [a.is_layer_excluded(f"model.layers.{i}.mlp.experts") for i in (1, 2)]
print(vars(a) == vars(b), a.is_checkpoint_nvfp4_serialized, a.group_size, *excluded)
"""


def checkpoint(directory: Path, form: str, recipe: str = "nvfp4_per_token") -> Path:
    """Layers 0 and 2 in NVFP4, layer 1 in BF16. All sparse, as SGLang's Qwen3-MoE always is, and in whole tiles of 128
    rows, which its kernels need of a gated layer; directory/bf16 is what it was made from."""
    shape = dict(sparse_layers=(True,) * 3, vocab_size=128, hidden_size=128, expert_size=64)
    tiny_model(3, **shape).save_pretrained(directory / "bf16")
    chosen = get(recipe).with_overrides([("1", "bf16")], 3)
    quantise.quantise(directory / "bf16", directory / form, chosen, FORMATS[form])
    return directory / form


def in_sglang(*arguments: str) -> subprocess.CompletedProcess:
    """A Python process that can import SGLang on a CPU."""
    env = environment(cpu=True, stock=True)
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)


def read(path: Path, backend: str, options: str) -> tuple[Tensors, dict[str, str], str]:
    """(SGLang's tensors, its method of each module, what stopped it) of a checkpoint."""
    out = path.with_suffix(".safetensors")
    script = Path(__file__).with_name("read_nvfp4.py")
    done = in_sglang(str(script), str(path), str(out), backend, *options.split())
    assert done.returncode == 0, done.stderr[-3000:]
    with safe_open(out, "pt") as file:
        facts = file.metadata()
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(facts["methods"]), facts["stopped"]


def theirs_of(name: str) -> str:
    """SGLang's name of one of our parameters."""
    words = name.removesuffix(".weight").split(".")
    if words[0] != "layers":
        return name if words[0] == "lm_head" else f"model.{name}"
    inner = NAMES[".".join(words[2:])]
    return f"model.layers.{words[1]}.{inner}" + ("" if "experts" in inner else ".weight")


def rows(tensor: torch.Tensor, up_first: bool) -> torch.Tensor:
    """[E, gate's rows then up's, ...] in SGLang's order."""
    return torch.cat(tensor.chunk(2, 1)[::-1], 1) if up_first else tensor


def check_experts(tensors: Tensors, at: str, q: Nvfp4, form: str, up_first: bool) -> None:
    """Codes, block scales and outer scales as loaded; then what SGLang derives of them."""
    E, fused = q.scales.shape[0], at.endswith("w13")
    packed = "_packed" if form == "compressed-tensors" else ""
    codes, scales = (rows(x, up_first and fused) for x in (q.codes, q.scales))
    outer = q.outer[:, None].expand(E, 2) if fused else q.outer
    assert_bits_equal(tensors[f"loaded.{at}_weight{packed}"], codes, f"{at} codes")
    assert_bits_equal(tensors[f"loaded.{at}_weight_scale"], scales, f"{at} block scales")
    stored = tensors[f"loaded.{at}_{OUTER[form]}"]
    assert_bits_equal(1 / stored if form == "compressed-tensors" else stored, outer, f"{at} outer scales")
    if f"derived.{at}_weight" in tensors:
        got = tensors[f"derived.{at}_weight_scale"].view(E, -1)
        assert_bits_equal(got, nvfp4.swizzle_128x4(scales), f"{at} block scales, swizzled")
        assert_bits_equal(tensors[f"derived.{at}_weight"], codes, f"{at} codes, derived")
        # Of a compressed-tensors checkpoint SGLang takes gate's for both, and we write the same for both.
        decode = q.outer if form == "compressed-tensors" else outer
        assert_bits_equal(tensors[f"derived.{at}_weight_scale_2"], decode, f"{at} outer scales, derived")


def check(directory: Path, reading: tuple[str, str, str]) -> None:
    form, backend, options = reading
    method, up_first = READINGS[reading]
    tensors, methods, stopped = read(checkpoint(directory, form), backend, options)
    # Marlin's repacking is a CUDA kernel; all else that SGLang does before it computes has run.
    assert ("CUDA" in stopped) if backend == "marlin" else stopped == "", stopped
    quantised = {name for name, m in methods.items() if m == method}
    assert quantised == {f"model.layers.{i}.mlp.experts" for i in (0, 2)}, methods
    assert all(m.startswith("Unquantized") for name, m in methods.items() if name not in quantised), methods
    for name, parameter in weights.read(directory / "bf16")[1]:
        theirs, fused = theirs_of(name), name.endswith("gate_up.weight")
        if "experts" in theirs and ".layers.1." not in theirs:
            q = nvfp4.quantize(parameter, "expert")
            check_experts(tensors, theirs.removesuffix("_weight"), q, form, up_first)
        else:
            assert_bits_equal(tensors[f"loaded.{theirs}"], rows(parameter, up_first and fused), name)
    for name, tensor in tensors.items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), f"{name}: nobody has loaded a part of it"


@pytest.mark.parametrize("reading", READINGS, ids=" ".join)
def test_sglang_holds_our_bits(tmp_path, reading):
    check(tmp_path, reading)


FAULTS = {  # of the writer -> the format, and what the error says
    "block scales written swizzled": ("modelopt", "block scales"),
    "a decode scale written as an encode scale": ("compressed-tensors", "outer scales"),
}


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.name in FAULTS], ids=lambda m: m.name)
def test_a_fault_of_the_writer_shows(tmp_path, mutation):
    form, words = FAULTS[mutation.name]
    with mutation.apply(), pytest.raises(AssertionError, match=words):
        check(tmp_path, (form, "flashinfer_cutlass", "pretend"))


def test_what_sglang_does_not_read(tmp_path):
    """W4A16 for a whole model: vLLM and TensorRT-LLM list it, SGLang 0.5.17 does not."""
    for form, words in (("modelopt", "currently only supports"), ("compressed-tensors", "has no attribute 'num_bits'")):
        with pytest.raises(AssertionError, match=words):
            read(checkpoint(tmp_path / form, form, "w4a16"), "flashinfer_cutlass", "pretend")


def test_the_separate_config_says_the_same(tmp_path):
    """hf_quant_config.json and config.json through SGLang's class."""
    done = in_sglang("-c", CONFIGS, str(checkpoint(tmp_path, "modelopt")))
    assert done.stdout.split()[-5:] == ["True", "True", "16", "True", "False"], done.stdout + done.stderr[-2000:]
