"""How SGLang's functions are called, on the CPU: stand-ins for them, which follow their contracts with our operators.

So a wrong argument (a layout, a slot count, where the routing weight goes, the rows of the stores) gives other bits.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from alignment_tests.learner.tiny import random_sequences, tiny_model
from alignment_tests.plugin.own_kernels import OwnKernels
from minitransformer.errors import InputError
from minitransformer.ops import dispatch
from minitransformer.ops.grouped_linear import grouped_linear
from minitransformer.ops.linear import linear
from minitransformer.ops.logprob import logprob
from minitransformer.ops.rms_norm import rms_norm
from minitransformer.ops.rope import rope
from minitransformer.ops.router import router
from minitransformer.ops.swiglu import swiglu
from minitransformer.plugins.sglang import stock, stock_kernels


def log_softmax(logits):
    every = [logprob(logits, torch.full((len(logits),), v), 1.0) for v in range(logits.shape[1])]
    return torch.stack(every, dim=1)


def moe_fused_gate(logits, bias, topk, scoring_func, renormalize):
    assert scoring_func == "softmax" and bias.dtype == torch.float32 and not bias.any() and len(bias) == 8
    weights, ids = router(logits, topk, renormalize)
    return weights, ids.int()


def apply_rope(q, k, v, k_cache, v_cache, table, positions, rows, *, is_neox):
    assert is_neox and rows.dtype == positions.dtype
    for x, turned in zip((q, k), rope(q.contiguous(), k.contiguous(), positions, table), strict=True):
        x.copy_(turned)
    k_cache[rows], v_cache[rows] = k.flatten(1), v.flatten(1)


def extend_attention(q, o, k, v, k_scale, v_scale, qo_bounds, kv_bounds, kv_rows, prefixes, longest, *, sm_scale):
    bounds = qo_bounds.tolist()
    assert k_scale == v_scale == 1.0 and sm_scale == q.shape[-1] ** -0.5 and not prefixes.any()
    assert kv_bounds.tolist() == bounds and longest == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    o.copy_(OwnKernels().attention(q, k[kv_rows], v[kv_rows], tuple(bounds)))


def moe_align_block_size(ids, block, num_experts):
    assert ids.dtype == torch.int32 and block == 64
    return ids, torch.tensor(num_experts), torch.tensor(0)


def invoke_fused_moe_kernel(x, weight, *rest, filter_expert, router_topk, compute_type, **flags):
    bias, out, x_scale, w_scale, zero, weights, ids, _, experts, _, weighted, top_k, config = rest
    assert bias is x_scale is w_scale is zero is None and not any(flags.values()) and not filter_expert
    assert config == {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
    assert len(weight) == experts and len(x) * top_k == ids.numel() and compute_type == "bf16"
    plan = dispatch.plan(ids.long(), len(weight))
    y = grouped_linear(x[plan.order_R // top_k], weight, plan, weights if weighted else None)
    out.copy_(dispatch.slots(y, plan).view(out.shape))


def moe_sum_reduce(y, out, factor):
    assert factor == 1.0 and y.shape[1] > 2
    out.copy_(OwnKernels().combine(y))


class StandIn(stock_kernels.SglangKernels):
    """SGLang's functions replaced; its norm of a sum and its table of RoPE are torch's, so here they are ours."""

    def __init__(self) -> None:
        self.dense = SimpleNamespace(
            matmul_persistent=lambda a, b: linear(a, b.t()), rms_norm_batch_invariant=rms_norm, log_softmax=log_softmax
        )
        self.moe = SimpleNamespace(
            moe_align_block_size=moe_align_block_size, invoke_fused_moe_kernel=invoke_fused_moe_kernel,
            silu_and_mul=lambda x, out: out.copy_(swiglu(x)), moe_sum_reduce=moe_sum_reduce,
        )  # fmt: skip
        self.gate, self.turn, self.attend, self.bf16 = moe_fused_gate, apply_rope, extend_attention, "bf16"

    add_rms_norm, rope_table = OwnKernels.add_rms_norm, OwnKernels.rope_table


class OwnButBf16Logits(OwnKernels):
    def logits(self, h, weight):
        return linear(h, weight).float()


def check_the_calls(top_k: int) -> None:
    model = tiny_model(2, top_k=top_k, sparse_layers=(True,) * 3)
    sequences, _ = random_sequences(6, 3, longest=16)
    expected = stock.log_probs(model, sequences, OwnButBf16Logits(), [1.0, 0.6, 1.0])
    for a, b in zip(expected, stock.log_probs(model, sequences, StandIn(), [1.0, 0.6, 1.0]), strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_calls_give_what_our_operators_give(top_k):
    check_the_calls(top_k)


def test_the_norm_of_a_sum():
    """Torch's operators around mean_dim; the mean here in FP64, so near the formula of rms_norm, not its bits."""
    kernels = StandIn()
    kernels.dense.mean_dim = lambda x, dim, keepdim: x.double().mean(dim, keepdim=keepdim).float()
    rng = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(*shape, generator=rng).bfloat16() for shape in ((4, 64), (4, 64), (64,)))
    y, total = stock_kernels.SglangKernels.add_rms_norm(kernels, x, residual, weight, 1e-6)
    expected, summed = OwnKernels().add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, summed)
    assert (y.view(torch.int16).int() - expected.view(torch.int16).int()).abs().max() <= 1


@pytest.mark.parametrize("method, other", [
    ("combine", lambda self, y: y[:, 0] + y[:, 1] + y[:, 2]),
    ("linear", lambda self, x, w: linear(x, w.flip(0))),
    ("swiglu", lambda self, x: swiglu(torch.cat(x.chunk(2, dim=1)[::-1], dim=1))),
])  # fmt: skip
def test_a_fault_is_seen(method, other, monkeypatch):
    monkeypatch.setattr(StandIn, method, other)
    with pytest.raises(AssertionError):
        check_the_calls(3)


@pytest.fixture
def imported(monkeypatch):
    """Stand-ins for SGLang's modules -> (what SGLang sees of the variable at each import, what its module has read)."""
    seen, read = [], SimpleNamespace(_ENABLE_MM_DEEPGEMM=False, ENABLE_JIT_DEEPGEMM=True)

    class Module(ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            seen.append(os.environ.get(*stock_kernels.ENVIRONMENT))
            return read

    for name in ("kernels.ops.attention.extend_attention", "kernels.ops.attention.rope",
                 "kernels.ops.moe.moe_fused_gate", "srt.batch_invariant_ops",
                 "srt.layers.moe.moe_runner.triton_utils"):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"sglang.{name}", Module(name))
    language = SimpleNamespace(bfloat16="bf16")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(language=language, __spec__=None))
    return seen, read


@pytest.mark.parametrize("before", [None, "1"])
def test_the_environment_is_the_imports_alone(imported, monkeypatch, before):
    (name,) = stock_kernels.ENVIRONMENT
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    stock_kernels.SglangKernels()
    assert len(imported[0]) == 5 and set(imported[0]) == {"0"} and os.environ.get(name) == before
    monkeypatch.setitem(sys.modules, "sglang.srt.batch_invariant_ops", None)
    with pytest.raises(InputError, match="kernels can't be loaded"):
        stock_kernels.SglangKernels()
    assert os.environ.get(name) == before


def test_deepgemm_that_was_imported_before(imported):
    imported[1]._ENABLE_MM_DEEPGEMM = True
    with pytest.raises(InputError, match="imported here before, with DeepGEMM; start this process with SGLANG_BATCH"):
        stock_kernels.SglangKernels()
    imported[1].ENABLE_JIT_DEEPGEMM = False
    stock_kernels.SglangKernels()
