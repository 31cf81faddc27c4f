"""split -> rms_norm(q, k) -> rope -> kv_store in one kernel: the sampler's way between two products, untraced.

The same operations as rms_norm/1, rope/1 and kv_store/1 in the same order, each rounding in its place; what is saved
are launches and journeys through memory. Heads have a power of two of elements, 128 at most: then a lane of the norm's
sum holds one element, and the first halving that adds anything adds the halves that rope pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, on, quick
from minitransformer.ops.gpu.scalar import _add, _halve, div
from minitransformer.ops.gpu.tiles import in_turn, to_bf16


@triton.jit
def _tree(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The lower part of lane_tree: [ROWS, HALF] -> [ROWS]."""
    if HALF >= 64:
        x = _halve(x, ROWS, 32)
    if HALF >= 32:
        x = _halve(x, ROWS, 16)
    if HALF >= 16:
        x = _halve(x, ROWS, 8)
    if HALF >= 8:
        x = _halve(x, ROWS, 4)
    if HALF >= 4:
        x = _halve(x, ROWS, 2)
    return tl.reduce(x, 1, _add)


@quick
@triton.jit(do_not_specialize=["lines", "P", "R"])
def qkv_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, positions_ptr, table_ptr, store_rows_ptr, q_ptr, k_ptr, v_ptr, faults_ptr,
    eps, lines, P, R, N: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, ROPE: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """ROWS lines (token, head) a program; qkv [T, N + 2G, 2 HALF], q [T, N, ..], k and v [R, G, ..], table [P, ..]."""
    in_turn()
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, valid = line // (N + 2 * G), line % (N + 2 * G), line < lines
    i, inside = tl.arange(0, HALF)[None, :], valid[:, None]
    at = line[:, None] * (2 * HALF) + i
    raw_a = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    raw_b = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    mean = div(_tree(a * a + b * b, ROWS, HALF), tl.full((ROWS,), 2 * HALF, tl.float32))
    inverse = div(tl.full((ROWS,), 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))[:, None]
    weight = tl.where((head < N)[:, None], q_weight_ptr + i, k_weight_ptr + i)
    a = to_bf16((a * inverse) * tl.load(weight).to(tl.float32)).to(tl.float32)
    b = to_bf16((b * inverse) * tl.load(weight + HALF).to(tl.float32)).to(tl.float32)
    position = tl.load(positions_ptr + token, mask=valid, other=0)
    outside = (position < 0) | (position >= P)
    tl.atomic_min(faults_ptr + ROPE + tl.zeros_like(token), token.to(tl.int32), mask=valid & outside, sem="relaxed")
    angle = table_ptr + tl.where(outside, 0, position)[:, None] * (2 * HALF) + i
    c, s = tl.load(angle), tl.load(angle + HALF)
    turned_a, turned_b = to_bf16(a * c - b * s), to_bf16(b * c + a * s)
    to_q = q_ptr + (token * N + head)[:, None] * (2 * HALF) + i
    is_q, is_k = valid & (head < N), (head >= N) & (head < N + G)
    tl.store(to_q, turned_a, mask=is_q[:, None])
    tl.store(to_q + HALF, turned_b, mask=is_q[:, None])
    row = tl.load(store_rows_ptr + token, mask=valid, other=0)
    good = (row >= 0) & (row < R)
    tl.atomic_min(faults_ptr + STORE + tl.zeros_like(token), token.to(tl.int32), mask=valid & ~good, sem="relaxed")
    cache = tl.where(is_k, k_ptr, v_ptr) + (row * G + (head - N) % G) * (2 * HALF)
    stored = (valid & good & (head >= N))[:, None]
    tl.store(cache[:, None] + i, tl.where(is_k[:, None], turned_a, raw_a), mask=stored)
    tl.store(cache[:, None] + HALF + i, tl.where(is_k[:, None], turned_b, raw_b), mask=stored)


def takes(qkv_THH: Tensor) -> bool:
    """Whether the heads have a size for this kernel."""
    H = qkv_THH.shape[2]
    return 4 <= H <= 128 and H & (H - 1) == 0


def forward(
    qkv_THH: Tensor, q_weight_H: Tensor, k_weight_H: Tensor, eps: float, positions_T: Tensor, table_PH: Tensor,
    k_cache_RGH: Tensor, v_cache_RGH: Tensor, store_rows_T: Tensor,
) -> Tensor:  # fmt: skip
    """qkv BF16 [T, N + 2G, H] -> q BF16 [T, N, H], normed and turned; keys and values go into rows of the caches."""
    home, (T, heads, H), (R, G, _) = qkv_THH.device, qkv_THH.shape, k_cache_RGH.shape
    if not (k_cache_RGH.is_contiguous() and v_cache_RGH.is_contiguous()):
        raise ValueError("qkv: the caches must be contiguous")
    qkv, qw, kw, *caches = device.take(
        "qkv", home, torch.bfloat16, qkv_THH, q_weight_H, k_weight_H, k_cache_RGH, v_cache_RGH
    )
    positions, rows = device.take("qkv", home, torch.int64, positions_T, store_rows_T)
    (table,) = device.take("qkv", home, torch.float32, table_PH)
    N = heads - 2 * G
    q = torch.empty(T, N, H, dtype=torch.bfloat16, device=home)
    if qkv.numel():
        block = max(1, 512 // (H // 2))
        with on(home):
            qkv_kernel[(cdiv(T * heads, block),)](
                qkv, qw, kw, positions, table, rows, q, *caches, device.faults(home), eps, T * heads, table.shape[0],
                R, N, G, H // 2, block, device.slot("rope"), device.slot("kv_store"),
                num_warps=4, **device.ROWS, **device.EARLY,
            )  # fmt: skip
    return q
