"""What a pass allocates on a CPU: nothing of tokens x vocabulary or tokens x experts (on a GPU: gpu/ has the same).

NumPy tells tracemalloc of its arrays, so of these the peak is known; of PyTorch's, by its dispatcher, the largest.
"""

import tracemalloc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment_tests import inputs
from alignment_tests.learner.tiny import tiny_config, tiny_model
from minitransformer.learner import scoring
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.layers import no_trace
from minitransformer.models.qwen3_moe.model import SparseMlp
from minitransformer.ops import dispatch
from minitransformer.recipe import get


class Largest(TorchDispatchMode):
    """bytes: of the largest storage that an operator's results have."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in tensors)])
        return result


def peak(call) -> int:
    """The larger of NumPy's most bytes at a time and PyTorch's most in one tensor, in the second call."""
    with Largest():  # PyTorch imports much at its first use
        call()  # compiles, and makes what stays
    tracemalloc.start()
    try:
        with Largest() as largest:
            call()
        return max(largest.bytes, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_score_has_the_logits_of_some_rows_at_a_time(monkeypatch):
    T, V, chunk = 400, 20000, 1 << 20
    model = tiny_model(vocab_size=V, max_positions=T + 1)
    learner, ids = Learner(model, max_tokens_per_pack=T), inputs.integers(1, V, T + 1).tolist()
    monkeypatch.setattr(scoring, "CHUNK_BYTES", chunk)
    assert peak(lambda: learner.score([ids], [1])) < chunk + model.lm_head.weight.nbytes < 4 * T * V // 8
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 1 << 40)
    assert peak(lambda: learner.score([ids], [1])) >= 4 * T * V  # what is forbidden is seen


def check_an_update() -> None:
    """Neither the logits, nor their gradient, which would be 16 MB in BF16."""
    T, V, chunk = 400, 20000, 1 << 20
    model = tiny_model(vocab_size=V, max_positions=T + 1)
    learner, ids = Learner(model, max_tokens_per_pack=T), inputs.integers(1, V, T + 1).tolist()
    (one,) = learner._pack([ids], [1])
    largest_weight = 4 * V * model.config.hidden_size  # the embedding's gradient is made in FP32

    def call():
        learner._log_probs(one, [1.0]).sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CHUNK_BYTES", chunk)
        assert (used := peak(call)) < 2 * chunk + largest_weight < T * V, used
        patch.setattr(scoring, "CHUNK_BYTES", 1 << 40)
        assert peak(call) >= 4 * T * V


def test_an_update_has_parts_of_the_logits_at_a_time():
    check_an_update()


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_per_token", "w4a16"])
def test_experts_have_their_rows_alone(recipe):
    T, K, D, F, E = 1000, 2, 32, 32, 512
    config = tiny_config(hidden_size=D, expert_size=F, num_experts=E, top_k=K)
    mlp = SparseMlp(config)
    with torch.no_grad():
        for p in mlp.parameters():
            p.normal_()
    mlp.set_recipe(get(recipe).for_layer(0))
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(1)).topk(K).indices
    x, plan, weights = inputs.bf16(2, T, D), dispatch.plan(ids, E), torch.full((T, K), 0.5)
    with torch.no_grad():
        used = peak(lambda: mlp.experts(mlp, x, plan, weights, no_trace))
    assert used < max(16 * T * K * (D + 2 * F), mlp.gate_up.weight.nbytes) < T * E * F // 4, used


def test_every_expert_for_every_token_is_seen():
    x, w = torch.ones(200, 16), torch.ones(64, 32, 16)
    assert peak(lambda: torch.einsum("td,efd->tef", x, w).sum()) >= 4 * 200 * 64 * 32
