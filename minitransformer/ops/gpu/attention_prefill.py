"""attention/2 for whole prompts: a warp loads keys by the copy engine, two groups of four warps own 64 rows each.

While one group exponentiates, the other's products keep the tensor core busy; inside a group the scores of a tile run
beside the P V product of the tile before. The order of every sum is that of ops/attention.py.
"""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import device

HALF = gl.constexpr(64)  # rows of a group of four warps


@gluon.jit
def _produce(k_desc, v_desc, ring, row0, column, tiles):
    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    KEYS: gl.constexpr = k_bufs.shape[1]
    for t in range(tiles):
        slot = t % STAGES
        free = (t // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), free)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row0 + t * KEYS, column], k_full.index(slot), k_bufs.index(slot))
        mbarrier.wait(v_empty.index(slot), free)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row0 + t * KEYS, column], v_full.index(slot), v_bufs.index(slot))


@gluon.jit
def _scores(q, ring, t, S_LAYOUT: gl.constexpr):
    """Issues tile t's scores."""
    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    KEYS: gl.constexpr = k_bufs.shape[1]
    mbarrier.wait(k_full.index(t % STAGES), t // STAGES & 1)
    zero = gl.zeros((HALF, KEYS), gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k_bufs.index(t % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s, m, l, t, position, scale, KEYS: gl.constexpr, S_LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    s = s * scale
    if MASKED:
        j = t * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
        s = gl.where(j[None, :] <= position[:, None], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s - top[:, None])
    shrink = gl.exp2(m - top)
    return p, top, l * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _product(p, acc, ring, t):
    """Issues acc + p V for tile t, whose values have arrived."""
    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty = ring
    return warpgroup_mma(p, v_bufs.index(t % v_bufs.shape[0]), acc, is_async=True)


@gluon.jit
def _tile(
    q, p, acc, m, l, ring, t, position, scale, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, MASKED: gl.constexpr
):
    """Tile t's scores and softmax beside the P V product of tile t - 1, whose p comes in."""
    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    KEYS: gl.constexpr = k_bufs.shape[1]
    s = _scores(q, ring, t, S_LAYOUT)
    acc = _product(p, acc, ring, t - 1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(t % STAGES))
    p, m, l, shrink = _softmax(s, m, l, t, position, scale, KEYS, S_LAYOUT, MASKED)
    # Here, so that the softmax stays in front: the assembler would move it behind the wait for the product.
    mbarrier.wait(v_full.index(t % STAGES), t // STAGES & 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index((t - 1) % STAGES))
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, O_LAYOUT, 2))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return p, acc, m, l


@gluon.jit
def _segment(
    q, ring, start, whole, stop, position, scale,
    WIDTH: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles start .. stop - 1, those below `whole` seen in full by every row -> acc, m, l."""
    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty = ring
    STAGES: gl.constexpr = k_bufs.shape[0]
    KEYS: gl.constexpr = k_bufs.shape[1]
    m = gl.full((HALF,), -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.full((HALF,), 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros((HALF, WIDTH), gl.float32, O_LAYOUT)
    s = warpgroup_mma_wait(0, deps=(_scores(q, ring, start, S_LAYOUT),))
    mbarrier.arrive(k_empty.index(start % STAGES))
    p, m, l, shrink = _softmax(s, m, l, start, position, scale, KEYS, S_LAYOUT, True)
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(v_full.index(start % STAGES), start // STAGES & 1)
    middle = gl.minimum(gl.maximum(whole, start + 1), stop)
    for t in range(start + 1, middle):
        p, acc, m, l = _tile(q, p, acc, m, l, ring, t, position, scale, S_LAYOUT, O_LAYOUT, False)
    for t in range(middle, stop):
        p, acc, m, l = _tile(q, p, acc, m, l, ring, t, position, scale, S_LAYOUT, O_LAYOUT, True)
    acc = warpgroup_mma_wait(0, deps=(_product(p, acc, ring, stop - 1),))
    mbarrier.arrive(v_empty.index((stop - 1) % STAGES))
    return acc, m, l


@gluon.jit
def _consume(which, ring, q_buf, sum_buf, tensors, place, scale, N, constants: gl.constexpr):
    """Rows 64 * which .. of the program's 128: all their segments, then o, m and l."""
    k_bufs, v_bufs, k_full, k_empty, v_full, v_empty = ring
    q_ptr, positions_ptr, o_ptr, m_ptr, l_ptr = tensors
    first, end, g, begin, tiles = place
    GROUP: gl.constexpr = constants[0]
    WIDTH: gl.constexpr = constants[1]
    SEGMENT: gl.constexpr = constants[2]
    Q_REGISTERS: gl.constexpr = constants[3]
    KEYS: gl.constexpr = k_bufs.shape[1]
    TOKENS: gl.constexpr = HALF // GROUP
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    first += which * TOKENS
    i = gl.arange(0, HALF, gl.SliceLayout(1, Q_LAYOUT))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
    token = gl.minimum(first + i // GROUP, end - 1)  # spare rows repeat the last token and are not stored
    line = token.to(gl.int64) * N + g * GROUP + i % GROUP
    q = gl.load(q_ptr + line[:, None] * WIDTH + h[None, :])
    if Q_REGISTERS:
        q = gl.convert_layout(q, gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        q_buf.store(q)
        fence_async_shared()
        gl.thread_barrier()
        q = q_buf

    i = gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    token = gl.minimum(first + i // GROUP, end - 1)
    position = gl.load(positions_ptr + token).to(gl.int32)
    whole = (begin + 1) // KEYS
    acc, m, l = _segment(
        q, ring, 0, whole, gl.minimum(tiles, SEGMENT // KEYS), position, scale, WIDTH, S_LAYOUT, O_LAYOUT
    )
    for start in range(SEGMENT // KEYS, tiles, SEGMENT // KEYS):
        sum_buf.store(acc)  # the segments before, out of the way of the registers
        stop = gl.minimum(tiles, start + SEGMENT // KEYS)
        acc_s, m_s, l_s = _segment(q, ring, start, whole, stop, position, scale, WIDTH, S_LAYOUT, O_LAYOUT)
        top = gl.maximum(m, m_s)
        old, new = gl.exp2(m - top), gl.exp2(m_s - top)
        m, l = top, l * old + l_s * new
        old = gl.convert_layout(old, gl.SliceLayout(1, O_LAYOUT))
        new = gl.convert_layout(new, gl.SliceLayout(1, O_LAYOUT))
        acc = sum_buf.load(O_LAYOUT) * old[:, None] + acc_s * new[:, None]

    i = gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    line = (first + i // GROUP).to(gl.int64) * N + g * GROUP + i % GROUP
    valid = (first + i // GROUP < end) & (i < TOKENS * GROUP)
    gl.store(m_ptr + line, m, mask=valid)
    gl.store(l_ptr + line, l, mask=valid)
    i = gl.arange(0, HALF, gl.SliceLayout(1, O_LAYOUT))
    h = gl.arange(0, WIDTH, gl.SliceLayout(0, O_LAYOUT))
    line = (first + i // GROUP).to(gl.int64) * N + g * GROUP + i % GROUP
    sums = gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT))
    nan = gl.full((HALF, WIDTH), 0x7FC0, gl.int16, O_LAYOUT).to(gl.bfloat16, bitcast=True)
    o = gl.div_rn(acc, gl.expand_dims(sums, 1) + gl.zeros((HALF, WIDTH), gl.float32, O_LAYOUT))
    o = gl.where(o == o, o.to(gl.bfloat16), nan)
    valid = (first + i // GROUP < end) & (i < TOKENS * GROUP)
    gl.store(o_ptr + line[:, None] * WIDTH + h[None, :], o, mask=valid[:, None])


@gluon.jit(do_not_specialize=["pairs", "blocks"])
def prefill_kernel(
    q_ptr, k_desc, v_desc, positions_ptr, bounds_ptr, starts_ptr, o_ptr, m_ptr, l_ptr, scale, N, pairs, blocks,
    GROUP: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr,
):  # fmt: skip
    """A program: 128 rows, (token, query head) pairs of a sequence and a key/value head. Late tokens start first."""
    KEYS: gl.constexpr = k_desc.block_type.shape[0]
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    TOKENS: gl.constexpr = HALF // GROUP * 2
    pair, block = gl.program_id(0) % pairs, blocks - 1 - gl.program_id(0) // pairs
    sequence, g = pair // (N // GROUP), pair % (N // GROUP)
    first, end = gl.load(bounds_ptr + sequence) + block * TOKENS, gl.load(bounds_ptr + sequence + 1)
    # A block past a short sequence's end repeats its last token, and stores nothing.
    begin = gl.load(positions_ptr + gl.minimum(first, end - 1)).to(gl.int32)
    tiles = gl.load(positions_ptr + gl.minimum(first + TOKENS, end) - 1).to(gl.int32) // KEYS + 1
    row0 = gl.load(starts_ptr + sequence)
    if first >= end:
        begin, tiles = 0, 1

    k_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, WIDTH], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, WIDTH], v_desc.layout)
    q_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, WIDTH], k_desc.layout)
    SUM_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    sum_bufs = gl.allocate_shared_memory(gl.float32, [2, HALF, WIDTH], SUM_LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_empty.index(s), count=2)
    ring = (k_bufs, v_bufs, k_full, k_empty, v_full, v_empty)
    place = (first, end, g, begin, tiles)
    tensors = (q_ptr, positions_ptr, o_ptr, m_ptr, l_ptr)
    constants: gl.constexpr = (GROUP, WIDTH, SEGMENT, Q_REGISTERS)
    gl.warp_specialize(
        [
            (_consume, (0, ring, q_bufs.index(0), sum_bufs.index(0), tensors, place, scale, N, constants)),
            (_consume, (1, ring, q_bufs.index(1), sum_bufs.index(1), tensors, place, scale, N, constants)),
            (_produce, (k_desc, v_desc, ring, row0, g * WIDTH, tiles)),
        ],
        [4, 1],
        [240, 24],
    )


@triton.jit
def gather_kernel(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, key_rows_ptr, starts_ptr, positions_ptr, bounds_ptr, max_keys, stride,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (tile of keys, sequence): the store's rows in order of position; zeros to the end of the last tile."""
    tile, sequence = tl.program_id(0), tl.program_id(1)
    last = tl.load(positions_ptr + tl.load(bounds_ptr + sequence + 1) - 1).to(tl.int32)
    if tile * KEYS <= last:
        j = tile * KEYS + tl.arange(0, KEYS)
        row = tl.load(key_rows_ptr + sequence.to(tl.int64) * max_keys + j, mask=j <= last, other=0)
        to = (tl.load(starts_ptr + sequence) + j).to(tl.int64) * stride
        for c in range(0, stride, BLOCK):
            column = c + tl.arange(0, BLOCK)
            inside = column[None, :] < stride
            at, there = row[:, None] * stride + column[None, :], (j <= last)[:, None] & inside
            tl.store(k_out_ptr + to[:, None] + column[None, :], tl.load(k_ptr + at, mask=there, other=0.0), mask=inside)
            tl.store(v_out_ptr + to[:, None] + column[None, :], tl.load(v_ptr + at, mask=there, other=0.0), mask=inside)


def starts(kv_lens: tuple[int, ...]) -> list[int]:
    """Where each sequence's keys begin once gathered: every one ends with a whole tile."""
    return [0, *accumulate(triton.cdiv(n, KEY_TILE) * KEY_TILE for n in kv_lens[:-1])]


def gather(k: Tensor, v: Tensor, key_rows: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor, kv_lens):
    """Keys and values out of their pages, position j of sequence s in row starts[s] + j."""
    tiles = [triton.cdiv(n, KEY_TILE) for n in kv_lens]
    k_out, v_out = (torch.empty(sum(tiles) * KEY_TILE, *x.shape[1:], dtype=x.dtype, device=x.device) for x in (k, v))
    gather_kernel[(max(tiles), len(tiles))](
        k, v, k_out, v_out, key_rows, starts, positions, bounds, key_rows.shape[1], k.shape[1] * k.shape[2],
        KEY_TILE, 256, num_warps=8, **device.ROWS,
    )  # fmt: skip
    return k_out, v_out


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor, longest: int,
    outputs: tuple[Tensor, Tensor, Tensor], stages: int = 4, q_registers: bool = True,
) -> None:  # fmt: skip
    """Fills o, m, l. Position j of sequence s lies in row starts[s] + j of k and v; bounds [S + 1] are those of q."""
    (_, N, H), G, sequences = q.shape, k.shape[1], len(bounds) - 1
    layout = gl.NVMMASharedLayout.get_default_for([KEY_TILE, H], gl.bfloat16)
    k_desc, v_desc = (TensorDescriptor.from_tensor(x.view(-1, G * H), [KEY_TILE, H], layout) for x in (k, v))
    blocks, pairs = triton.cdiv(longest, 64 // (N // G) * 2), sequences * G
    prefill_kernel[(blocks * pairs,)](
        q, k_desc, v_desc, positions, bounds, starts, *outputs, float(_scale(H)), N, pairs, blocks, N // G, SEGMENT,
        stages, q_registers, num_warps=4, maxnreg=168, **device.STRICT,
    )  # fmt: skip
