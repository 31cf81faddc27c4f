"""What a group of four warps does with 64 query rows of attention/2: the pipeline over the key tiles of a segment.

The scores of tile t run beside the P V product of tile t - 1, and that product beside the softmax of tile t. The order
of every sum is that of ops/attention.py. Tiles are numbered over everything the program has done: tile t lies in slot
t mod STAGES of the ring.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

HALF = gl.constexpr(64)  # rows of a group of four warps


@gluon.jit
def _arrived(ring, t, pred):
    """Waits for tile t of the ring."""
    k_bufs, v_bufs, full, empty = ring
    mbarrier.wait(full.index(t % k_bufs.shape[0]), t // k_bufs.shape[0] & 1, pred=pred)


@gluon.jit
def _scores(q, ring, t, S_LAYOUT: gl.constexpr):
    """Issues tile t's scores."""
    k_bufs, v_bufs, full, empty = ring
    KEYS: gl.constexpr = k_bufs.shape[1]
    zero = gl.zeros((HALF, KEYS), gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k_bufs.index(t % k_bufs.shape[0]).permute((1, 0)), zero, use_acc=False, is_async=True)


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
    """Issues acc + p V for tile t."""
    k_bufs, v_bufs, full, empty = ring
    return warpgroup_mma(p, v_bufs.index(t % k_bufs.shape[0]), acc, is_async=True)


@gluon.jit
def _tile(
    q, p, acc, m, l, ring, t, stop, position, scale,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tile t's scores and softmax beside the P V product of tile t - 1, whose p comes in; waits for tile t + 1."""
    k_bufs, v_bufs, full, empty = ring
    s = _scores(q, ring, t, S_LAYOUT)
    acc = _product(p, acc, ring, t - 1)
    s = warpgroup_mma_wait(1, deps=(s,))
    p, m, l, shrink = _softmax(s, m, l, t, position, scale, k_bufs.shape[1], S_LAYOUT, MASKED)
    # Here, so that the softmax stays in front: the assembler would move it behind the wait for the product.
    _arrived(ring, t + 1, t + 1 < stop)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((t - 1) % k_bufs.shape[0]))
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, O_LAYOUT, 2))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return p, acc, m, l


@gluon.jit
def attend_segment(
    q, ring, start, whole, stop, position, scale,
    WIDTH: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Tiles start .. stop - 1, those below `whole` seen in full by every row -> acc, m, l."""
    k_bufs, v_bufs, full, empty = ring
    m = gl.full((HALF,), -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.full((HALF,), 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros((HALF, WIDTH), gl.float32, O_LAYOUT)
    _arrived(ring, start, True)
    s = _scores(q, ring, start, S_LAYOUT)
    s = warpgroup_mma_wait(0, deps=(s,))
    p, m, l, shrink = _softmax(s, m, l, start, position, scale, k_bufs.shape[1], S_LAYOUT, True)
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, O_LAYOUT, 2))
    _arrived(ring, start + 1, start + 1 < stop)
    middle = gl.minimum(gl.maximum(whole, start + 1), stop)
    for t in range(start + 1, middle):
        p, acc, m, l = _tile(q, p, acc, m, l, ring, t, stop, position, scale, S_LAYOUT, O_LAYOUT, False)
    for t in range(middle, stop):
        p, acc, m, l = _tile(q, p, acc, m, l, ring, t, stop, position, scale, S_LAYOUT, O_LAYOUT, True)
    acc = warpgroup_mma_wait(0, deps=(_product(p, acc, ring, stop - 1),))
    mbarrier.arrive(empty.index((stop - 1) % k_bufs.shape[0]))
    return acc, m, l
