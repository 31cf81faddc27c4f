"""Execution spec attention/2: causal grouped-query attention over one key/value store, packed or paged.

A query at absolute position i of its sequence sees the keys at positions 0..i. key_rows (batch.py) says in which row
of the store each position lives; that is the only difference between packed and paged. Keys are visited in tiles of 64
absolute positions (0..63, 64..127, ...), ascending, so a query's bits know nothing of chunks, pages, packing or its
neighbours. head h of N reads key/value head h // (N / G). Per query row, with scale = FP32(H^-0.5 * log2 e), in each
segment of 1024 absolute positions (0..1023, 1024..2047, ...) from

    m = -1e30, l = +0, acc = +0                                        FP32

over the segment's tiles
    s  = fl(chain over h of q * k, times scale)                        -infinity where the key is masked
    m' = max(m, max over the tile of s)
    p  = exp2_hw(fl(s - m')), a = exp2_hw(fl(m - m'))                  rounding.py; p FP32, 0 where masked
    l  = fl(fl(l * a) + quad_sum(p))                                   of the unrounded p, masked columns included as 0
    acc = chain over the tile's keys of bf16(p) * v, started from fl(acc * a)
    m  = m'

and the segments' m, l, acc are folded in ascending order, from the first one's as they are:

    M' = max(M, m), A = exp2_hw(fl(M - M')), a = exp2_hw(fl(m - M'))
    L  = fl(fl(L * A) + fl(l * a)), the same for acc; M = M'
    o  = bf16(ACC / L)                                                 IEEE divide

A tile or segment that is masked whole changes nothing. The segments are what few queries with many keys are spread over
the GPU by; they lie at fixed positions, so no batch, chunk or page can move them. Up to 1024 keys this is attention/1,
the same as a plain Triton kernel on an H200 for any BLOCK_M (known answer: alignment_tests/goldens). K and V must be
finite, which is not checked here: 0 * infinity in the masked part of a tile is NaN, and the router refuses the rows
that follow.

Backward (packed batches), from the saved M and L, called m and l; u = FP32(H^-0.5):
    p  = fl(exp2_hw(fl(s - m)) * fl(1 / l)), delta = lane sum over h of fl(dO * O), dP = chain over h of dO * V
    dS = bf16(fl(p * fl(dP - delta)))
    dQ = bf16(fl(u * chain over keys ascending of dS * K))
    dK = bf16(fl(u * chain over the group's heads ascending, in each over queries ascending, of dS * Q))
    dV = bf16(chain in the same order of bf16(p) * dO)
Each head's queries start a new step of 16 (the last one padded with zeros). Q and dO must be finite too: what lies in
the masked part is zero products, which change nothing, so a kernel need not visit them.
Refused: H that is not a multiple of 16, N that is not a multiple of G, a gradient through a paged store.
"""

import math

import numpy as np
import torch
from torch import Tensor

from minitransformer.batch import Batch
from minitransformer.ops import cpu, gpu
from minitransformer.ops.autograd import apply
from minitransformer.ops.jit import jit
from minitransformer.ops.linear import round_bf16
from minitransformer.ops.mma import (
    COLUMNS,
    NO_ACCUMULATOR,
    ROWS,
    STEP,
    chain_bits,
    chain_block,
    split,
    workspace,
)
from minitransformer.ops.rounding import bf16_to_f32, ex2_table, exp2_hw, f32_to_bf16, lane_sum, quad_sum

SPEC = "attention/2"
KEY_TILE = 64
SEGMENT = 1024
_M_START = np.float32(-1e30)


def _scale(head_dim: int) -> np.float32:
    return np.float32(head_dim**-0.5 * math.log2(math.e))


@jit
def _softmax_row(s, visible, m, l, scale, table, p_bits):
    """One row of one tile: raw scores s [64] -> p as BF16 bits; returns the new m and l, and the factor of acc."""
    top = m
    for j in range(visible):
        s[j] = s[j] * scale
        top = max(top, s[j])
    for j in range(KEY_TILE):
        s[j] = exp2_hw(s[j] - top, table) if j < visible else np.float32(0)
        p_bits[j] = f32_to_bf16(s[j])
    shrink = exp2_hw(m - top, table)
    return top, l * shrink + quad_sum(s), shrink


@jit
def _fold_row(m, l, acc, m_all, l_all, acc_all, table):
    """One row of one segment, m, l and acc [H], into the row of the segments before; acc_all in place."""
    top = max(m_all, m)
    old, new = exp2_hw(m_all - top, table), exp2_hw(m - top, table)
    for h in range(acc.size):
        acc_all[h] = acc_all[h] * old + acc[h] * new
    return top, l_all * old + l * new


@jit
def _load_tile(store, rows, head, tile):
    """64 keys or values of one head into tile [64, H]; zeros past the sequence's end."""
    for j in range(KEY_TILE):
        for h in range(tile.shape[1]):
            tile[j, h] = store[rows[j], head, h] if j < rows.size else np.uint16(0)


@jit
def _attend_block(q, rows_q, positions, k, v, key_rows, head, scale, table, out, m_out, l_out):
    """rows_q [r, 2]: (token, query head) of at most ROWS rows that share a key/value head and a sequence."""
    rows, width = rows_q.shape[0], q.shape[2]
    work, no_c = workspace(), np.empty((0, 0), np.float32)
    q_bits = np.empty((rows, width), np.uint16)
    for i in range(rows):
        for h in range(width):
            q_bits[i, h] = q[rows_q[i, 0], rows_q[i, 1], h]
    q_values, q_exponents = np.empty((rows, width), np.float32), np.empty((rows, width), np.int32)
    split(q_bits, q_values, q_exponents, 0, rows)
    p_bits = np.zeros((rows, KEY_TILE), np.uint16)
    p_values, p_exponents = np.empty((rows, KEY_TILE), np.float32), np.empty((rows, KEY_TILE), np.int32)
    tile, s = np.empty((KEY_TILE, width), np.uint16), np.empty((rows, KEY_TILE), np.float32)
    m, l = np.full(rows, _M_START, np.float32), np.zeros(rows, np.float32)
    acc = np.zeros((rows, width), np.float32)
    m_all, l_all, acc_all = m.copy(), l.copy(), acc.copy()
    keys = positions[rows_q[rows - 1, 0]] + 1
    for j0 in range(0, keys, KEY_TILE):
        if j0 % SEGMENT == 0:
            m[:], l[:], acc[:] = _M_START, np.float32(0), np.float32(0)
        tile_rows = key_rows[j0 : min(j0 + KEY_TILE, key_rows.size)]
        _load_tile(k, tile_rows, head, tile)
        for n0 in range(0, KEY_TILE, COLUMNS):
            chain_block(q_bits, q_values, q_exponents, 0, rows, tile, False, n0, no_c, work)
            for i in range(rows):
                for j in range(COLUMNS):
                    s[i, n0 + j] = work[3][i, j]
        for i in range(rows):
            visible = min(positions[rows_q[i, 0]] + 1 - j0, KEY_TILE)
            if visible > 0:
                m[i], l[i], shrink = _softmax_row(s[i], visible, m[i], l[i], scale, table, p_bits[i])
                for h in range(width):
                    acc[i, h] = acc[i, h] * shrink
        split(p_bits, p_values, p_exponents, 0, rows)
        _load_tile(v, tile_rows, head, tile)
        for n0 in range(0, width, COLUMNS):
            chain_block(p_bits, p_values, p_exponents, 0, rows, tile, True, n0, acc, work)
            for i in range(rows):
                if positions[rows_q[i, 0]] >= j0:  # a wholly masked tile changes nothing
                    for j in range(min(COLUMNS, width - n0)):
                        acc[i, n0 + j] = work[3][i, j]
        if (j0 + KEY_TILE) % SEGMENT == 0 or j0 + KEY_TILE >= keys:
            for i in range(rows):
                if positions[rows_q[i, 0]] >= j0 // SEGMENT * SEGMENT:
                    m_all[i], l_all[i] = _fold_row(m[i], l[i], acc[i], m_all[i], l_all[i], acc_all[i], table)
    for i in range(rows):
        t, n = rows_q[i]
        m_out[t, n], l_out[t, n] = m_all[i], l_all[i]
        for h in range(width):
            out[t, n, h] = f32_to_bf16(acc_all[i, h] / l_all[i])


@jit
def _attend(begin, end, blocks, q, positions, k, v, key_rows, kv_lens, scale, table, out, m_out, l_out):
    """Work items: (sequence, key/value head, first token, last token) blocks."""
    group = q.shape[1] // k.shape[1]
    for item in range(begin, end):
        sequence, head, first, last = blocks[item]
        rows_q = np.empty(((last - first) * group, 2), np.int64)
        for i in range(rows_q.shape[0]):
            rows_q[i, 0], rows_q[i, 1] = first + i // group, head * group + i % group
        keys = key_rows[sequence, : kv_lens[sequence]]
        _attend_block(q, rows_q, positions, k, v, keys, head, scale, table, out, m_out, l_out)


def _blocks(batch: Batch, kv_heads: int, group: int) -> np.ndarray:
    """Pieces of at most ROWS query rows; how they are cut moves no bit."""
    tokens = max(1, ROWS // group)
    bounds = batch.cu_seqlens
    return np.array(
        [
            (s, g, first, min(first + tokens, bounds[s + 1]))
            for s in range(batch.num_sequences)
            for first in range(bounds[s], bounds[s + 1], tokens)
            for g in range(kv_heads)
        ],
        np.int64,
    )


def forward(q_TNH: Tensor, k_RGH: Tensor, v_RGH: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """-> (o [T, N, H] BF16, m [T, N] FP32, l [T, N] FP32)."""
    if q_TNH.is_cuda:
        return gpu.attention.forward(q_TNH, k_RGH, v_RGH, batch)
    cpu.on_cpu("attention", q_TNH, k_RGH, v_RGH)
    tokens, heads, width = q_TNH.shape
    out = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    m, l = np.empty((tokens, heads), np.float32), np.empty((tokens, heads), np.float32)
    blocks = _blocks(batch, k_RGH.shape[1], heads // k_RGH.shape[1])
    cpu.parallel(
        _attend, len(blocks), blocks, cpu.bf16_bits(q_TNH), cpu.i64(batch.positions_T), cpu.bf16_bits(k_RGH),
        cpu.bf16_bits(v_RGH), cpu.i64(batch.key_rows_SL), np.array(batch.kv_lens), _scale(width), ex2_table(),
        cpu.bf16_bits(out), m, l,
    )  # fmt: skip
    return out, torch.from_numpy(m), torch.from_numpy(l)


@jit
def _score_gradients(begin, end, s, dp, o, do, m, l, scale, table, p_bits, ds_bits):
    """Rows begin..end of one head: raw scores and dP [n, n] FP32 -> bf16(p) and dS as BF16 bits."""
    terms = np.empty(o.shape[1], np.float32)
    for i in range(begin, end):
        for h in range(o.shape[1]):
            terms[h] = bf16_to_f32(do[i, h]) * bf16_to_f32(o[i, h])
        delta, inverse = lane_sum(terms), np.float32(1) / l[i]
        for j in range(s.shape[1]):
            p = exp2_hw(s[i, j] * scale - m[i], table) * inverse if j <= i else np.float32(0)
            p_bits[i, j] = f32_to_bf16(p)
            ds_bits[i, j] = f32_to_bf16(p * (dp[i, j] - delta)) if j <= i else np.uint16(0)


def _padded_rows(x: np.ndarray) -> np.ndarray:
    """Zero rows up to a multiple of 16, so that the next head starts a new step of the chain."""
    return np.concatenate([x, np.zeros((-len(x) % STEP, *x.shape[1:]), x.dtype)])


def _backward_group(do, q, k, v, o, m, l, scale):
    """One sequence and one key/value head: do, q, o [n, heads, H] bits, k, v [n, H] bits, m, l [n, heads]."""
    n, heads, width = q.shape
    unit = np.float32(width**-0.5)
    dq, dk, dv = np.empty(q.shape, np.float32), NO_ACCUMULATOR, NO_ACCUMULATOR
    for h in range(heads):
        q_h, do_h, o_h = (np.ascontiguousarray(x[:, h]) for x in (q, do, o))
        s, dp = chain_bits(q_h, k, False), chain_bits(do_h, v, False)
        p, ds = np.empty((n, n), np.uint16), np.empty((n, n), np.uint16)
        m_h, l_h = np.ascontiguousarray(m[:, h]), np.ascontiguousarray(l[:, h])
        cpu.parallel(_score_gradients, n, s, dp, o_h, do_h, m_h, l_h, scale, ex2_table(), p, ds, grain=32)
        dq[:, h] = chain_bits(ds, k, True)
        dk = chain_bits(np.ascontiguousarray(_padded_rows(ds).T), _padded_rows(q_h), True, dk)
        dv = chain_bits(np.ascontiguousarray(_padded_rows(p).T), _padded_rows(do_h), True, dv)
    return dq * unit, dk * unit, dv  # FP32 products: one rounding each


def backward(do_TNH, q_TNH, k_TGH, v_TGH, o_TNH, m_TN, l_TN, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """-> (dQ [T, N, H], dK [T, G, H], dV [T, G, H]) BF16, for a packed batch."""
    if do_TNH.is_cuda:
        return gpu.attention_backward.backward(do_TNH, q_TNH, k_TGH, v_TGH, o_TNH, m_TN, l_TN, batch)
    do, q, k, v, o = (cpu.bf16_bits(x) for x in (do_TNH, q_TNH, k_TGH, v_TGH, o_TNH))
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]
    group = heads // kv_heads
    dq, dk, dv = (np.empty(x.shape, np.float32) for x in (q, k, v))
    for first, last in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        t = slice(first, last)
        for g in range(kv_heads):
            h = slice(g * group, (g + 1) * group)
            k_g, v_g = np.ascontiguousarray(k[t, g]), np.ascontiguousarray(v[t, g])
            m, l = m_TN.numpy()[t, h], l_TN.numpy()[t, h]
            dq[t, h], dk[t, g], dv[t, g] = _backward_group(do[t, h], q[t, h], k_g, v_g, o[t, h], m, l, _scale(width))
    return tuple(round_bf16(d.reshape(len(d), -1)).reshape(d.shape) for d in (dq, dk, dv))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_RGH, v_RGH, batch):
        o, m, l = forward(q_TNH, k_RGH, v_RGH, batch)
        ctx.save_for_backward(q_TNH, k_RGH, v_RGH, o, m, l)
        ctx.batch = batch
        return o

    @staticmethod
    def backward(ctx, do_TNH):
        batch = ctx.batch
        if batch.kv_lens != tuple(b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
            raise ValueError("attention: no gradient through a paged store; train on Batch.packed")
        return *backward(do_TNH, *ctx.saved_tensors, batch), None


def attention(q_TNH: Tensor, k_RGH: Tensor, v_RGH: Tensor, batch: Batch) -> Tensor:
    """Causal attention of q [T, N, H] over a store of keys and values [rows, G, H], all BF16 -> o [T, N, H] BF16.

    batch.key_rows_SL maps positions to rows of the store: the batch's own rows (learner) or pages (sampler).
    Raises ValueError on shapes that do not fit, TypeError on dtypes, UnsupportedDevice off the CPU.
    """
    if q_TNH.dim() != 3 or k_RGH.dim() != 3 or q_TNH.shape[0] != batch.cu_seqlens[-1]:
        raise ValueError(
            f"attention: q is {tuple(q_TNH.shape)}, k {tuple(k_RGH.shape)}; the batch has {batch.cu_seqlens[-1]} tokens"
        )
    if k_RGH.shape[0] < batch.num_store_rows:
        raise ValueError(f"attention: the batch reads {batch.num_store_rows} rows, the store has {k_RGH.shape[0]}")
    heads, width, kv_heads = q_TNH.shape[1], q_TNH.shape[2], k_RGH.shape[1]
    if heads % kv_heads or width % STEP or k_RGH.shape != v_RGH.shape or k_RGH.shape[2] != width:
        raise ValueError(
            f"attention: q {tuple(q_TNH.shape)}, k {tuple(k_RGH.shape)}, v {tuple(v_RGH.shape)}: heads must be a "
            f"multiple of the key/value heads and the head size a multiple of {STEP}"
        )
    return apply(_Attention, q_TNH, k_RGH, v_RGH, batch)
