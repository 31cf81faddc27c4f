"""Loading: every stored layout of the same weights gives the same bits, completely, and transformers agrees."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from alignment_tests.bits import assert_bits_equal
from alignment_tests.inputs import f32_of_any_bits
from alignment_tests.model.checkpoints import E, F, fused, hf_config, hf_tensors, refused, write
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe import layout, weights
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

SPARSE = (0, 2)


def by_hand(tensors) -> dict[str, torch.Tensor]:
    """Our parameters of the tiny model from its Hugging Face tensors, spelled out."""
    t = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    out = {name: t[name] for name in ("embed_tokens.weight", "norm.weight", "lm_head.weight") if name in t}
    for i in range(3):
        at = f"layers.{i}."
        out[at + "input_norm.weight"] = t[at + "input_layernorm.weight"]
        out[at + "post_norm.weight"] = t[at + "post_attention_layernorm.weight"]
        out[at + "attn.qkv.weight"] = torch.cat([t[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"])
        out[at + "attn.o.weight"] = t[at + "self_attn.o_proj.weight"]
        for n in ("q_norm", "k_norm"):
            out[f"{at}attn.{n}.weight"] = t[f"{at}self_attn.{n}.weight"]
        if i == 1:
            out[at + "mlp.gate_up.weight"] = torch.cat([t[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")])
            out[at + "mlp.down.weight"] = t[at + "mlp.down_proj.weight"]
            continue
        out[at + "mlp.router.weight"] = t[at + "mlp.gate.weight"]
        experts = [[t[f"{at}mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in range(E)]
        out[at + "mlp.gate_up.weight"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        out[at + "mlp.down.weight"] = torch.stack([down for _, _, down in experts])
    return out


def assert_loads(directory, want: dict[str, torch.Tensor]) -> None:
    """The stream and the model both give exactly these parameters."""
    _, stream = weights.read(directory)
    got = dict(stream)
    model = {name: p.detach() for name, p in Qwen3MoeForCausalLM.from_pretrained(directory).named_parameters()}
    assert list(got) == list(layout.parameter_shapes(weights.read_config(directory)[0]))
    assert got.keys() == want.keys() == model.keys()
    for name, tensor in want.items():
        assert_bits_equal(got[name], tensor, name)
        assert_bits_equal(model[name], tensor, name)


def check_per_expert(tmp_path) -> None:
    tensors = hf_tensors(hf_config())
    assert_loads(write(tmp_path / "per_expert", hf_config(), tensors), by_hand(tensors))


def check_fused(tmp_path) -> None:
    tensors = hf_tensors(hf_config())
    assert_loads(
        write(tmp_path / "fused", hf_config(transformers_version="5.0.0"), fused(tensors, SPARSE, E)), by_hand(tensors)
    )


def test_per_expert_keys(tmp_path):
    check_per_expert(tmp_path)  # 12 experts: their order is that of numbers (2 before 10), not of names


def test_fused_keys_give_the_same_bits(tmp_path):
    check_fused(tmp_path)


def test_a_layer_may_be_fused_and_another_not(tmp_path):
    tensors = hf_tensors(hf_config())
    config = hf_config(transformers_version="5.0.0")
    assert_loads(write(tmp_path, config, fused(tensors, (2,), E)), by_hand(tensors))


def test_shards_give_the_same_bits(tmp_path):
    tensors = hf_tensors(hf_config())
    assert_loads(write(tmp_path, hf_config(), tensors, shards=3), by_hand(tensors))


def test_the_rope_table_is_made_on_the_cpu_wherever_the_parameters_are():
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(hf_config()))
    assert model.norm.weight.is_meta
    assert_bits_equal(model.rope_table, Qwen3MoeForCausalLM(model.config).rope_table)


def test_untied_tied_and_both(tmp_path):
    untied, tied = hf_tensors(hf_config()), hf_tensors(hf_config(tie_word_embeddings=True))
    assert_loads(write(tmp_path / "untied", hf_config(), untied), by_hand(untied))
    config = hf_config(tie_word_embeddings=True)
    assert_loads(write(tmp_path / "tied", config, tied), by_hand(tied))
    both = tied | {"lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    assert_loads(write(tmp_path / "both", config, both), by_hand(tied))
    both["model.embed_tokens.weight"][3, 5], both["lm_head.weight"][3, 5] = 0.0, -0.0
    refused(lambda: Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "sign", config, both)), "differ")
    # A stored head of an untied model is used even when it happens to be there beside the embedding.
    assert not torch.equal(by_hand(untied)["lm_head.weight"], by_hand(untied)["embed_tokens.weight"])


def check_tied_head_must_be_the_embedding(tmp_path) -> None:
    config = hf_config(tie_word_embeddings=True)
    tensors = hf_tensors(config)
    head = tensors["model.embed_tokens.weight"].clone()
    head.view(torch.int16)[3, 5] ^= 1
    write(tmp_path, config, tensors | {"lm_head.weight": head})
    refused(lambda: weights.read(tmp_path), "lm_head.weight", "tie_word_embeddings")


def test_tied_head_that_differs_in_one_bit_is_refused(tmp_path):
    check_tied_head_must_be_the_embedding(tmp_path)


def check_fp32(tmp_path) -> None:
    """FP32 storage is rounded to nearest even: against integer arithmetic, on midpoints, subnormals and any bits."""
    tensors = {name: t.float() for name, t in hf_tensors(hf_config()).items()}
    values = f32_of_any_bits(1, 40 * 64)
    values[~torch.isfinite(values) | (values.abs() > 3.0e38)] = 0
    midpoints = (torch.arange(1, 33, dtype=torch.int32) << 16) + 0x3F808000
    values[: 3 * 32] = torch.cat([midpoints + d for d in (-1, 0, 1)]).view(torch.float32)
    tensors["model.embed_tokens.weight"] = values.view(40, 64)
    bits = values.numpy().view(np.uint32).astype(np.uint64)
    nearest_even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    want = by_hand({name: t.bfloat16() for name, t in tensors.items()})
    want["embed_tokens.weight"] = torch.from_numpy(nearest_even.view(np.int16)).view(torch.bfloat16).view(40, 64)
    assert_loads(write(tmp_path, hf_config(torch_dtype="float32"), tensors), want)


def test_fp32_storage_is_rounded_to_bf16(tmp_path):
    check_fp32(tmp_path)


def test_bf16_and_fp32_may_be_mixed(tmp_path):
    tensors = hf_tensors(hf_config())
    mixed = {name: t.float() if i % 2 else t for i, (name, t) in enumerate(tensors.items())}
    assert_loads(write(tmp_path, hf_config(), mixed), by_hand(tensors))


@pytest.mark.parametrize("width", [F, 2 * F], ids=["D=F", "D=2F"])
def test_undeclared_fused_layout_is_refused(tmp_path, width):
    check_layout_is_declared(tmp_path, width)


def check_layout_is_declared(tmp_path, width: int = 2 * F) -> None:
    """Where the shape can't show a transposed tensor, only a writer that fixes the orientation is accepted."""
    config = hf_config(hidden_size=width)
    tensors = fused(hf_tensors(config), SPARSE, E)
    for version in ("4.57.0", "unknown", None):
        write(tmp_path, config | {"transformers_version": version}, tensors)
        refused(lambda: weights.read(tmp_path), "transposed", "transformers_version", "store one tensor an expert")
    write(tmp_path, config | {"transformers_version": "5.24.0"}, tensors)
    weights.read(tmp_path)


def test_transposed_fused_experts_are_refused_by_shape(tmp_path):
    config = hf_config(hidden_size=96, transformers_version="5.0.0")
    tensors = fused(hf_tensors(config), SPARSE, E)
    key = "model.layers.2.mlp.experts.gate_up_proj"
    tensors[key] = tensors[key].transpose(1, 2).contiguous()
    write(tmp_path, config, tensors)
    refused(lambda: weights.read(tmp_path), key, "[12, 96, 64]", "[12, 64, 96]")


sizes = st.integers(1, 3)


@given(
    layers=st.lists(st.booleans(), min_size=1, max_size=3),
    E=sizes,
    G=sizes,
    group=sizes,
    tied=st.booleans(),
    data=st.data(),
)
def test_every_element_is_filled_once_from_a_tensor_used_once(layers, E, G, group, tied, data):
    fused_layers = frozenset(
        data.draw(st.sets(st.sampled_from([i for i, s in enumerate(layers) if s]))) if any(layers) else ()
    )
    config = replace(
        Qwen3MoeConfig.from_hf(hf_config()), num_layers=len(layers), sparse_layers=tuple(layers), num_experts=E,
        top_k=1, num_heads=G * group, num_kv_heads=G, tie_word_embeddings=tied,
    )  # fmt: skip
    shapes = layout.parameter_shapes(config)
    counts = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in shapes.items()}
    keys = []
    for piece in layout.pieces(config, fused_layers):
        view = counts[piece.parameter][piece.index]
        assert tuple(view.shape) == layout.piece_shape(shapes[piece.parameter], piece.index)
        view += 1
        keys.append(piece.key)
    assert len(set(keys)) == len(keys)
    assert all((count == 1).all() for count in counts.values())


def test_load_into_keeps_the_storage(tmp_path):
    first, second = hf_tensors(hf_config()), hf_tensors(hf_config(), seed=1)
    model = Qwen3MoeForCausalLM.from_pretrained(write(tmp_path / "first", hf_config(), first))
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    version = model.weights_version
    weights.load_into(model, write(tmp_path / "second", hf_config(), second))
    for name, tensor in by_hand(second).items():
        assert_bits_equal(model.get_parameter(name).detach(), tensor, name)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert model.weights_version > version
    other = write(tmp_path / "other", hf_config(rope_theta=5e5), second)
    refused(lambda: weights.load_into(model, other), "rope_theta", "500000.0")


def oracle(directory, **options):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the independent oracle")
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options)


@pytest.mark.parametrize("original_format", [True, False], ids=["per_expert", "fused"])
def test_what_transformers_writes_is_read(tmp_path, original_format):
    """Also that its fused tensors are [E, 2F, D], gate first, where the shape can't show it (D = 2F)."""
    tensors = hf_tensors(hf_config())
    model = oracle(write(tmp_path / "ours", hf_config(), tensors), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", save_original_format=original_format)
    with safe_open(tmp_path / "theirs" / "model.safetensors", framework="pt") as file:
        assert ("model.layers.0.mlp.experts.gate_up_proj" in file.keys()) is not original_format
    assert_loads(tmp_path / "theirs", by_hand(tensors))


def check_logits_against_transformers(tmp_path) -> None:
    """FP32 of the same weights; the tolerance is BF16's rounding over three layers."""
    write(tmp_path, hf_config(transformers_version="5.0.0"), fused(hf_tensors(hf_config()), SPARSE, E))
    ids = [3, 17, 5, 39, 0, 21, 8, 8, 30]
    with torch.no_grad():
        want = oracle(tmp_path, dtype=torch.float32)(torch.tensor([ids])).logits[0]
        got = Qwen3MoeForCausalLM.from_pretrained(tmp_path)(Batch.packed([ids]))
    error = (got - want).norm() / want.norm()
    assert error < 0.02, f"relative error {error}"


def test_logits_against_transformers(tmp_path):
    check_logits_against_transformers(tmp_path)
