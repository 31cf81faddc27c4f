"""What a pass allocates on a GPU, by the allocator's own count: nothing of tokens x vocabulary or tokens x experts."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.gpu.memory import peak
from alignment_tests.gpu.test_model_agrees import LAYER
from alignment_tests.learner.tiny import tiny_config
from minitransformer.learner import scoring
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.layers import no_trace
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM, SparseMlp
from minitransformer.ops import dispatch, gpu, nvfp4
from minitransformer.recipe import get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to measure"),
]
MIB = 1 << 20


def filled(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
    return module


def test_score_has_the_logits_of_some_rows_at_a_time(monkeypatch):
    """8,192 tokens of 151,936 ids: all logits would be 5 GB. Beside a chunk of them there are 16 KiB a token."""
    T, V, chunk = 8192, 151936, 1 << 28
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(tiny_config(vocab_size=V, hidden_size=256, head_dim=64, max_positions=T + 1,
                                                expert_size=64, tie_word_embeddings=True))  # fmt: skip
    learner = Learner(filled(model), max_tokens_per_pack=T)
    ids = inputs.integers(1, V, T + 1).tolist()
    monkeypatch.setattr(scoring, "CHUNK_BYTES", chunk)
    used = peak(lambda: learner.score([ids], [1]))
    assert 0.9 * chunk < used < chunk + T * (16 << 10), f"{used / MIB:.0f} MiB"
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 1 << 40)
    assert peak(lambda: learner.score([ids], [1])) > 4 * (T - 1) * V  # what is forbidden is seen


# Recipe, whether every stage is asked for, and bytes a row that are alive at a time, for each column of D and of F.
# BF16 keeps the rows and outputs of both products. NVFP4 has, with the last output, FC1's in FP32 and SwiGLU's decoded;
# with stages, codes, scales and what they were made of.
EXPERTS = {
    "bf16": ("bf16", False, 4, 6),
    "nvfp4": ("nvfp4_per_token", False, 2, 10),
    "nvfp4, every stage": ("nvfp4_per_token", True, 5, 13),
    "nvfp4 weights alone": ("w4a16", False, 2, 10),
}


@pytest.mark.parametrize("T", [4, 64, 4096])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_their_rows_alone(name, T):
    """128 experts, top-8, the widths of Qwen3-30B-A3B: T x E x F in BF16 would be 768 MiB at 4,096 tokens."""
    recipe, stages, of_D, of_F = EXPERTS[name]
    config = tiny_config(**LAYER)
    D, F, E, K = config.hidden_size, config.expert_size, config.num_experts, config.top_k
    with torch.device("cuda"):
        mlp = filled(SparseMlp(config))
    mlp.set_recipe(get(recipe).for_layer(0))
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(T)).topk(K).indices
    x, weights, plan = inputs.bf16(2, T, D).cuda(), torch.full((T, K), 0.125, device="cuda"), dispatch.plan(ids, E)
    plan, note = plan.to("cuda"), (lambda *args: None) if stages else no_trace
    with torch.no_grad():
        used = peak(lambda: mlp.experts(mlp, x, plan, weights, note))
    bound = T * K * (of_D * D + of_F * F + 64) + 2 * T * D + MIB // 16
    assert used < bound < 2 * T * E * F, f"{used / MIB:.2f} of {bound / MIB:.2f} MiB"


def test_a_product_of_decoded_weights_has_its_output_alone():
    R, N, K, E = 2048, 1536, 2048, 16
    w = torch.randn(E, N, K, device="cuda").bfloat16()
    decoded, scale = nvfp4.decode(nvfp4.quantize(w, "expert")), torch.ones(E, N, device="cuda")
    plan = dispatch.plan(inputs.integers(3, E, R, 1), E).to("cuda")
    x, ones = inputs.bf16(4, R, K).cuda(), torch.ones(R, device="cuda")
    used = peak(lambda: gpu.quantised_linear.forward(x, ones, decoded, scale, plan, torch.float32))
    assert used < 4 * R * N + 64 * R + MIB // 16, f"{used / MIB:.2f} MiB"
