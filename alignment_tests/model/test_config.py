"""config.json: either spelling is read, both are written, gaps and unknowns are refused, YaRN equals transformers'."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment_tests.model.checkpoints import hf_config, refused
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig, Yarn, inverse_frequencies

transformers = pytest.importorskip("transformers", reason="needs transformers, the independent oracle")

# As published with Qwen3-30B-A3B.
PUBLISHED = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_published_config_is_read():
    config = Qwen3MoeConfig.from_hf(PUBLISHED, {"eos_token_id": [151645, 151643], "temperature": 0.6})
    assert config == Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, expert_size=768, num_experts=128, top_k=8, norm_topk_prob=True,
        sparse_layers=(True,) * 48, rms_eps=1e-6, rope_theta=1e6, max_positions=40960, tie_word_embeddings=False,
        eos_token_ids=(151645, 151643),
    )  # fmt: skip


def test_both_spellings_give_the_same_config():
    v4 = hf_config()
    v5 = hf_config(num_experts=None, rope_theta=None, torch_dtype=None, num_local_experts=v4["num_experts"])
    v5 |= {"rope_parameters": {"rope_theta": v4["rope_theta"], "rope_type": "default"}, "dtype": "bfloat16"}
    assert Qwen3MoeConfig.from_hf(v4) == Qwen3MoeConfig.from_hf(v5)
    assert Qwen3MoeConfig.from_hf(v4).rope_theta == 1e6


def test_head_dim_and_norm_topk_prob_are_read_not_derived():
    config = Qwen3MoeConfig.from_hf(hf_config(head_dim=32))
    assert config.head_dim == 32 != config.hidden_size // config.num_heads
    for value in (True, False):
        assert Qwen3MoeConfig.from_hf(hf_config(norm_topk_prob=value)).norm_topk_prob is value


def test_sparse_layers_as_transformers_chooses_them():
    for dense, step in (([], 1), ([0, 3], 1), ([], 2), ([3], 2), ([2], 3)):
        hf = hf_config(num_hidden_layers=6, mlp_only_layers=dense, decoder_sparse_step=step)
        got = Qwen3MoeConfig.from_hf(hf).sparse_layers
        with torch.device("meta"):
            oracle = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**hf))
        assert got == tuple(hasattr(layer.mlp, "experts") for layer in oracle.model.layers), (dense, step)


_YARNS = st.builds(
    Yarn,
    factor=st.floats(1, 64),
    original_max_positions=st.integers(32, 2**17),
    beta_fast=st.floats(8, 64),
    beta_slow=st.floats(0.5, 4),
    attention_factor=st.none() | st.floats(0.5, 2),
    mscale=st.none() | st.floats(0.5, 2),
    mscale_all_dim=st.none() | st.floats(0.5, 2),
    truncate=st.booleans(),
)


@given(
    yarn=st.none() | _YARNS,
    sparse=st.lists(st.booleans(), min_size=1, max_size=6),
    eos=st.lists(st.integers(0, 39), max_size=3, unique=True),
    tied=st.booleans(),
    theta=st.floats(2, 1e7),
)
def test_what_is_written_is_read_back(yarn, sparse, eos, tied, theta):
    base = Qwen3MoeConfig.from_hf(hf_config())
    config = replace(
        base, rope_scaling=yarn, sparse_layers=tuple(sparse), num_layers=len(sparse), eos_token_ids=tuple(eos),
        tie_word_embeddings=tied, rope_theta=theta,
    )  # fmt: skip
    assert Qwen3MoeConfig.from_hf(config.to_hf()) == config


def test_transformers_understands_what_we_write():
    config = Qwen3MoeConfig.from_hf(hf_config(norm_topk_prob=False, num_experts=6))
    config = replace(config, rope_scaling=Yarn(4.0, 16))
    theirs = transformers.Qwen3MoeConfig(**config.to_hf())
    assert theirs.num_experts == theirs.num_local_experts == 6
    assert theirs.norm_topk_prob is False and theirs.head_dim == config.head_dim and theirs.mlp_only_layers == [1]
    assert theirs.rope_parameters["rope_theta"] == 1e6 and theirs.rope_parameters["factor"] == 4.0
    # And back from transformers' own writer.
    assert Qwen3MoeConfig.from_hf(theirs.to_dict()) == config
    assert Qwen3MoeConfig.from_hf(theirs.to_diff_dict()) == config


@given(yarn=_YARNS, theta=st.sampled_from([1e4, 1e5, 1e6, 1e7]), head_dim=st.sampled_from([16, 64, 128]))
def test_yarn_equals_transformers(yarn, theta, head_dim):
    check_yarn(yarn, theta, head_dim)


def check_yarn(yarn: Yarn, theta: float, head_dim: int) -> None:
    """Frequencies within FP32's error: the oracle computes in FP32."""
    config = replace(
        Qwen3MoeConfig.from_hf(hf_config()), rope_scaling=yarn, rope_theta=theta, head_dim=head_dim, max_positions=2**18
    )
    want, want_factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](
        transformers.Qwen3MoeConfig(**config.to_hf())
    )
    got, got_factor = inverse_frequencies(config)
    assert got.dtype == "float64" and got.shape == (head_dim // 2,)
    assert (abs(got / want.double().numpy() - 1) < 1e-5).all()
    assert abs(got_factor - want_factor) < 1e-12


def test_frequencies_without_yarn():
    got, factor = inverse_frequencies(Qwen3MoeConfig.from_hf(PUBLISHED))
    want = 1e6 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    assert factor == 1.0 and (abs(got / want.numpy() - 1) < 1e-14).all()


REQUIRED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob",
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_theta", "hidden_act", "model_type",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_refused(key):
    said = refused(lambda: Qwen3MoeConfig.from_hf(hf_config(**{key: None})), "config.json", key)
    assert "add it" in said or "only" in said  # what to do


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BAD = [
    ({"model_type": "qwen3"}, "model_type"),
    ({"architectures": ["Qwen3NextForCausalLM"]}, "architectures"),
    ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"),
    ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
    ({"n_shared_experts": 1}, "n_shared_experts"),
    ({"use_qk_norm": False}, "use_qk_norm"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"logit_softcapping": 30.0}, "logit_softcapping"),
    ({"torch_dtype": "float16"}, "torch_dtype"),
    ({"dtype": "float32"}, "dtype"),  # against torch_dtype = bfloat16
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "rope_parameters.rope_theta"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ({"rope_scaling": {"type": "yarn", "rope_type": "default"}}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
    ({"rope_scaling": YARN | {"short_factor": 1.0}}, "short_factor"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "factor"),
    ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}}, "disagree"),
    ({"head_dim": 24}, "head_dim"),
    ({"hidden_size": 72}, "hidden_size"),
    ({"moe_intermediate_size": 40}, "moe_intermediate_size"),
    ({"intermediate_size": 40}, "intermediate_size"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_experts_per_tok": 13}, "num_experts_per_tok"),
    ({"num_hidden_layers": 0, "mlp_only_layers": []}, "num_hidden_layers"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers"),
    ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ({"vocab_size": True}, "vocab_size"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": 1e-60}, "rms_norm_eps"),  # 0 in FP32
    ({"rms_norm_eps": 1e-39}, "rms_norm_eps"),  # subnormal
    ({"num_hidden_layers": 2**14, "num_experts": 2**16, "mlp_only_layers": []}, "num_experts"),
    ({"max_position_embeddings": 2**24, "head_dim": 256}, "max_position_embeddings"),
    ({"mlp_only_layers": [10**400]}, "mlp_only_layers"),
    ({"eos_token_id": 10**400}, "eos_token_id"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"mlp_only_layers": [3]}, "mlp_only_layers"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ({"eos_token_id": 40}, "eos_token_id"),
    ({"eos_token_id": "stop"}, "eos_token_id"),
]


SIZES = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "max_position_embeddings",
]  # fmt: skip
BAD += [({key: value}, key) for key in SIZES for value in (10**10, 10**12, 10**30, 10**400)]
BAD += [({"rope_scaling": YARN | {"original_max_position_embeddings": n}}, "original_max") for n in (0, 2**32, 10**400)]
BAD += [
    ({"rope_scaling": YARN | {key: value}}, f"rope_scaling {key} =")
    for key in ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    for value in (float("inf"), float("nan"), -1.0, 1e300)
]


@pytest.mark.parametrize(("changes", "word"), BAD, ids=[str(sorted(c)) for c, _ in BAD])
def test_unsupported_option_is_refused(changes, word):
    refused(lambda: Qwen3MoeConfig.from_hf(hf_config(**changes)), "config.json", word)


def test_switched_off_options_are_accepted():
    off = {"shared_expert_intermediate_size": 0, "qkv_bias": False, "use_qk_norm": True, "sliding_window": 4096}
    off["layer_types"] = ["full_attention"] * 3
    assert Qwen3MoeConfig.from_hf(hf_config() | off) == Qwen3MoeConfig.from_hf(hf_config())
