"""Bad NVFP4 checkpoints: one line that names the tensor or the key and says what to do, nothing loaded or written."""

import itertools

import pytest
import torch

from alignment_tests.model.checkpoints import hf_config, hf_tensors, refused, write
from alignment_tests.model.nvfp4_checkpoints import FORMS, SUFFIXES, config_of, nvfp4_tensors, refuse
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.models.qwen3_moe.weights_nvfp4 import load_quantised

AT = "model.layers.2.mlp.experts.7."
UP = AT + "up_proj."
both = pytest.mark.parametrize("form", FORMS)


def names(form):
    """(codes, block scales, outer, activation scale) of one up projection."""
    return [UP + suffix for suffix in SUFFIXES[form]]


@both
def test_scales_of_the_wrong_kind(tmp_path, form):
    check_wrong_kind(tmp_path, form)


def check_wrong_kind(directory, form):
    """An encode scale in a decode scale's place, and the reverse, is recognised by its size."""
    outer = names(form)[2]
    for amax in (0.02, 1.0, 60.0):

        def invert(tensors, amax=amax):
            right = 2688 / amax if form == "compressed-tensors" else amax / 2688
            tensors[outer] = (1 / torch.tensor(right)).reshape(tensors[outer].shape)

        kind = "an encode scale" if form == "modelopt" else "a decode scale"
        refuse(directory, form, invert, outer, f"looks like {kind}", "write its inverse")


# A decode scale may be subnormal; as an encode scale it has no finite inverse.
@pytest.mark.parametrize(
    ("form", "bad"),
    [*itertools.product(FORMS, (0.0, -1.0, float("nan"), float("inf"))), ("compressed-tensors", 1e-45)],
)
def test_outer_scales_that_are_none(tmp_path, form, bad):
    outer = names(form)[2]
    refuse(tmp_path, form, lambda t: t.update({outer: torch.full_like(t[outer], bad)}), outer, "no scale")


@both
@pytest.mark.parametrize("bits, word", [(0x7F, "nan"), (0xFF, "nan"), (0x81, "-0.00195"), (0x80, "-0.0")])
def test_block_scales_that_are_none(tmp_path, form, bits, word):
    _, scales, _, _ = names(form)

    def change(tensors):
        tensors[scales].view(torch.uint8)[5, 3] = bits

    refuse(tmp_path, form, change, f"{scales}[5, 3]", word, "not a block scale")


@both
@pytest.mark.parametrize("which", [1, 2])
def test_a_missing_scale_is_named(tmp_path, form, which):
    name = names(form)[which]
    refuse(tmp_path, form, lambda t: t.pop(name), name, "missing beside a packed weight")


def check_scale_of_one_half(directory, form):
    """Gate's or up's outer scale or block scales alone are missing, in one expert."""
    for half in ("gate_proj", "up_proj"):
        for which in (1, 2):
            name = names(form)[which].replace("up_proj", half)
            refuse(directory, form, lambda t, name=name: t.pop(name), name, "missing beside a packed weight")


@both
def test_the_scale_of_one_half_is_missing(tmp_path, form):
    check_scale_of_one_half(tmp_path, form)


@both
def test_missing_activation_scales_are_no_error(tmp_path, form):
    config = config_of(form)
    tensors, _ = nvfp4_tensors(config, form)
    kept = {name: t for name, t in tensors.items() if not name.endswith(SUFFIXES[form][3])}
    assert len(kept) < len(tensors)
    assert load_quantised(write(tmp_path / "m", config, kept)).experts.keys() == {0, 2}


@both
def test_two_outer_scales(tmp_path, form):
    other = UP + SUFFIXES[FORMS[1 - FORMS.index(form)]][2]
    outer = names(form)[2]
    refuse(
        tmp_path,
        form,
        lambda t: t.update({other: 1 / t[outer]}),
        UP[:-1],
        "two outer scales",
        f"keep {SUFFIXES[form][2]}",
    )


@both
def test_a_half_that_is_missing_or_double(tmp_path, form):
    def drop(tensors):
        for name in names(form):
            tensors.pop(name)

    refuse(tmp_path / "missing", form, drop, "3 missing", UP)
    check_double_half(tmp_path / "double", form)


def check_double_half(directory, form):
    def double(tensors):
        for name in names(form):
            tensors[name.replace("up_proj", "gate_up_proj")] = tensors[name].clone()

    refuse(directory, form, double, "not in the model", "gate_up_proj")


@both
def test_weights_that_are_not_packed(tmp_path, form):
    """BF16 weights where the config says NVFP4: that is an ignore list that was forgotten."""

    def change(tensors):
        for name in names(form):
            tensors.pop(name)
        tensors[UP + "weight"] = hf_tensors(hf_config())[UP + "weight"]

    refuse(tmp_path, form, change, UP[:-1], "stored in BF16 or FP32", "ignore list")


@both
def test_the_other_formats_names(tmp_path, form):
    other = FORMS[1 - FORMS.index(form)]
    tensors, _ = nvfp4_tensors(config_of(form), other)
    path = write(tmp_path / "m", config_of(form), tensors)
    refused(lambda: load_quantised(path), f"the config says {form}", f"name of {other}")


@both
@pytest.mark.parametrize(
    "which, change, words",
    [
        (0, lambda t: t[:, :-1], "[32, 31]"),
        (0, lambda t: t.view(torch.int8), "I8"),
        (1, lambda t: t.t().contiguous(), "[4, 32]"),
        (1, lambda t: t.float(), "F32"),
        (1, lambda t: t.view(torch.uint8), "U8"),
        (2, lambda t: t.reshape(1, 1), "[1, 1]"),
        (2, lambda t: t.bfloat16(), "BF16"),
        (2, lambda t: t.expand(32).contiguous(), "[32]"),
        (3, lambda t: t.double(), "F64"),
    ],
)  # fmt: skip
def test_types_and_shapes(tmp_path, form, which, change, words):
    name = names(form)[which]
    refuse(tmp_path, form, lambda t: t.update({name: change(t[name]).contiguous()}), name, words, "the config asks for")


@both
def test_one_expert_left_out(tmp_path, form):
    entry = AT + "up_proj" if form == "modelopt" else r"re:.*layers\.2.*experts\.7\.up_proj"
    config = config_of(form, (entry,))
    refuse(tmp_path, form, lambda t: None, UP[:-1], "one number format", config=config)


def check_the_list_is_obeyed(directory, form):
    """Quantised tensors in a layer that the list leaves in BF16."""
    entry = "model.layers.2.mlp*" if form == "modelopt" else r"re:model\.layers\.2\..*"
    refuse(directory, form, lambda t: None, "model.layers.2", "leaves it in BF16", config=config_of(form, (entry,)))


@both
def test_the_list_is_obeyed(tmp_path, form):
    check_the_list_is_obeyed(tmp_path, form)


LEFT_OUT = {  # module -> what names it in the config of both formats (nvfp4_checkpoints.config_of)
    "lm_head": ("lm_head", "lm_head"),
    "model.layers.0.self_attn.q_proj": ("*.self_attn*", "re:.*self_attn.*"),
    "model.layers.0.mlp.gate": ("model.layers.*.mlp.gate", "re:.*mlp.gate$"),
    "model.layers.1.mlp.down_proj": ("model.layers.1*", "re:model.layers.1.mlp.*"),
}


def check_what_the_list_forgot(directory, form):
    """An engine would look for packed tensors where the list does not name what is stored in BF16."""
    for i, (module, entries) in enumerate(LEFT_OUT.items()):
        config = config_of(form)
        config["quantization_config"]["ignore"].remove(entries[FORMS.index(form)])
        at = directory / str(i)
        words = "the config quantises it by name", "stored in BF16 or FP32", "ignore list"
        refuse(at, form, lambda t: None, module.rpartition(".")[0], *words, config=config)


@both
def test_what_the_list_forgot(tmp_path, form):
    check_what_the_list_forgot(tmp_path, form)


@both
def test_one_activation_scale_of_many_is_missing(tmp_path, form):
    name = names(form)[3]
    refuse(tmp_path, form, lambda t: t.pop(name), name, "for all or for none")


@both
def test_everything_left_out(tmp_path, form):
    config = config_of(form, ("model*",) if form == "modelopt" else ("re:model",))
    refuse(tmp_path, form, lambda t: None, "every expert", config=config)


def test_quantised_attention_and_caches(tmp_path):
    key = "model.layers.0.self_attn.q_proj."
    config = config_of("modelopt")
    config["quantization_config"]["ignore"] = ["lm_head", "model.layers.*.mlp.gate", "model.layers.1*"]

    def attention(tensors):
        tensors[key + "weight"] = torch.zeros(64, 32, dtype=torch.uint8)
        tensors[key + "weight_scale"] = torch.zeros(64, 4).to(torch.float8_e4m3fn)

    refuse(tmp_path / "a", "modelopt", attention, key[:-1], "only experts may be", config=config)
    cache = "model.layers.0.self_attn.k_proj.k_scale"
    refuse(tmp_path / "b", "modelopt", lambda t: t.update({cache: torch.tensor(1.0)}), cache, "KV cache")


def test_non_finite_bf16_weight_of_a_quantised_checkpoint(tmp_path):
    config = config_of("modelopt")
    tensors, _ = nvfp4_tensors(config, "modelopt")
    tensors["model.layers.0.mlp.gate.weight"][3, 4] = float("inf")
    path = write(tmp_path / "m", config, tensors)
    refused(lambda: Qwen3MoeForCausalLM.from_pretrained(path), "mlp.gate.weight[3, 4] is inf")
