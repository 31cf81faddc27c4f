"""One copy of a long prompt's keys and values out of their pages, so that the copy engine can load whole tiles."""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitransformer.ops.attention import KEY_TILE
from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.launch import cdiv, quick


@quick
@triton.jit
def gather_kernel(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, key_rows_ptr, starts_ptr, positions_ptr, bounds_ptr, max_keys, stride,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (tile of keys, sequence): the store's rows in order of position; zeros to the end of the last tile.

    A sequence without tokens has no keys (graphs of prefills, plugins/sglang/prefill_graphs.py)."""
    tile, sequence = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    last = tl.load(positions_ptr + end - 1, mask=begin < end, other=-1).to(tl.int32)
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
    return [0, *accumulate(cdiv(n, KEY_TILE) * KEY_TILE for n in kv_lens[:-1])]


def gather(k: Tensor, v: Tensor, key_rows: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor, kv_lens):
    """Keys and values out of their pages, position j of sequence s in row starts[s] + j."""
    tiles = [cdiv(n, KEY_TILE) for n in kv_lens]
    k_out, v_out = (torch.empty(sum(tiles) * KEY_TILE, *x.shape[1:], dtype=x.dtype, device=x.device) for x in (k, v))
    gather_kernel[(max(tiles), len(tiles))](
        k, v, k_out, v_out, key_rows, starts, positions, bounds, key_rows.shape[1], k.shape[1] * k.shape[2],
        KEY_TILE, 256, num_warps=8, **device.ROWS,
    )  # fmt: skip
    return k_out, v_out
