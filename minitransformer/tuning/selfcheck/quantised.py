"""NVFP4, MXFP8, products with 4-bit weights, and 4-bit experts whole."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from minitransformer.ops import dispatch, gpu, mxfp8, nvfp4, quantised_linear, swiglu
from minitransformer.tuning.selfcheck import cases
from minitransformer.tuning.selfcheck.cases import BF16, COUNTS, FP32, Pair, both, check, integers, normal, numbers


def _quiet(seed: int, rows: int, K: int) -> Tensor:
    """Blocks of every size below the row's: scales normal, subnormal and 0; zeros of both signs; a row of zeros."""
    x = normal(seed, rows, K).float().unflatten(-1, (-1, 16))
    x = x * torch.exp2(-integers(seed + 1, 26, rows, K // 16, 1).float())
    x = torch.where(integers(seed + 2, 9, rows, K // 16, 1) == 0, -0.0, x).flatten(-2)
    x[rows // 2] = 0
    return x.to(BF16)


def _ties(seed: int, rows: int, K: int) -> Tensor:
    """Values on the ties of E2M1 once a row's and a block's largest value is 6."""
    x = (integers(seed, 49, rows, K).float() - 24) / 4
    x[:, ::16] = 6.0
    return (x * 448 / 2 ** integers(seed + 1, 8, rows, 1).float()).to(BF16)


def _inputs(seed: int, rows: int, K: int) -> Iterator[tuple[str, Tensor]]:
    for name, make in (("numbers", numbers), ("quiet blocks", _quiet), ("ties", _ties)):
        x = make(seed, rows, K)
        yield name, x
        yield f"{name} in FP32", cases.wide_fp32(x)


@check("nvfp4")
def _nvfp4(home: torch.device) -> Iterator[Pair]:
    def run(x):
        q = nvfp4.quantize(x, outer)
        return q, nvfp4.decode(q), nvfp4.dequantize(q), nvfp4.row_amax(x)

    for K, outer in ((576, "row"), (2048, "tensor")):
        for name, x in _inputs(60, 70, K):
            yield both(f"{name}, 70 x {K}, {outer}", home, run, x)
    yield both("at once", home, nvfp4.quantize_decoded, _quiet(61, 5, 768), nvfp4.row_amax(_quiet(61, 5, 768)))


@check("mxfp8")
def _mxfp8(home: torch.device) -> Iterator[Pair]:
    def run(x):
        q = mxfp8.quantize(x)
        return q, mxfp8.decode(q)

    for name, x in _inputs(62, 70, 576):
        yield both(name, home, run, x)
        yield both(f"{name}, at once", home, mxfp8.quantize_decoded, x)


def _weights(seed: int, E: int, N: int, K: int) -> nvfp4.Nvfp4:
    """Every code with every scale that the quantiser gives, an outer scale a row."""
    codes, scales = integers(seed, 256, E, N, K // 2), integers(seed + 1, 127, E, N, K // 16)
    outer = (integers(seed + 2, 1000, E, N) + 1).float() / 300
    return nvfp4.Nvfp4(codes.to(torch.uint8), scales.to(torch.uint8), outer)


def _product(x, scale, q, plan, out_dtype):
    return quantised_linear.forward(x, scale, nvfp4.decode(q), q.outer, plan, out_dtype)


def _product_packed(x, scale, q, plan, out_dtype):
    return quantised_linear.forward(x, scale, gpu.pack.pack(q), q.outer, plan, out_dtype)


@check("quantised_linear")
def _quantised_linear(home: torch.device) -> Iterator[Pair]:
    few = dispatch.plan(torch.randperm(12, generator=torch.Generator().manual_seed(64))[:8, None], len(COUNTS))
    for plan, (N, K), out in itertools.product((few, cases.uneven_plan()), ((192, 576),), (FP32, BF16)):
        q, rows = _weights(65, plan.num_experts, N, K), _weights(68, 1, plan.num_rows, K)
        x, run = nvfp4.decode(rows)[0], partial(_product, out_dtype=out)
        packed = partial(_product_packed, out_dtype=out)
        for kind, operand, scale in (("4-bit", x, rows.outer[0]), ("BF16", numbers(71, plan.num_rows, K), None)):
            what = f"{plan.num_rows} {kind} rows to {out}"
            yield both(f"{what}, weights decoded", home, run, operand, scale, q, plan)
            yield both(f"{what}, weights packed", home, run, operand, scale, q, plan, joined=packed)


def _experts(x, plan, routed, gate_up, down):
    """Operator by operator."""

    def product(rows, amax, q, out_dtype):
        made, decoded = nvfp4.quantize_decoded(rows, amax)
        outer = nvfp4.expand_rows(q.outer, q.shape[:-1]).contiguous()
        return quantised_linear.forward(decoded, made.outer, nvfp4.decode(q), outer, plan, out_dtype)

    h = swiglu.swiglu_amax(product(*dispatch.gather_amax(x, plan), gate_up, FP32))
    return dispatch.combine_weighted(product(*h, down, BF16), plan, routed)


def _experts_at_once(x, plan, routed, *weights):
    pairs = [(gpu.pack.pack(q), nvfp4.expand_rows(q.outer, q.shape[:-1]).contiguous()) for q in weights]
    torch.cuda.synchronize(x.device)  # its first kernel may read weights before the one in front has ended
    return gpu.quantised_experts.forward(x, plan, routed, *pairs)


@check("NVFP4 experts")
def _nvfp4_experts(home: torch.device) -> Iterator[Pair]:
    """Operator by operator; and without a trace: one kernel for 1 to 4 tokens, else few kernels."""
    slots, E, D, F = 4, 12, 256, 192
    gate_up = nvfp4.quantize(normal(72, E, 2 * F, D), "expert")
    down = nvfp4.quantize(normal(73, E, D, F), "expert")
    for T in (1, 3, 40, 300):
        ids = torch.rand(T, E, dtype=torch.float32, generator=torch.Generator().manual_seed(T)).topk(slots).indices
        x, routed = normal(74, T, D), (integers(75, 1000, T, slots) + 1).float() / 2000
        case = x, dispatch.plan(ids, E), routed, gate_up, down
        yield both(f"{T} tokens, operator by operator", home, _experts, *case)
        yield both(f"{T} tokens, at once", home, _experts, *case, joined=_experts_at_once)
