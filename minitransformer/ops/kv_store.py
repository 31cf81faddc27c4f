"""Execution spec kv_store/1: k_cache[rows[t]] = k[t], v_cache[rows[t]] = v[t]; row copies in place, no arithmetic.

rows is a batch's store_rows_T: page * page_size + offset. No autograd: the learner's keys and values are its batch's.
Refused: a row outside the store, two tokens for one row (the order of writes would decide), shapes, dtypes, devices.
"""

import numpy as np
from torch import Tensor

from minitransformer.ops import cpu, gpu
from minitransformer.ops.jit import jit

SPEC = "kv_store/1"


@jit
def _forward_cpu(begin, end, k, v, k_cache, v_cache, rows):
    for t in range(begin, end):
        k_cache[rows[t], :] = k[t, :]
        v_cache[rows[t], :] = v[t, :]


def store(k_TGH: Tensor, v_TGH: Tensor, k_cache_RGH: Tensor, v_cache_RGH: Tensor, store_rows_T: Tensor) -> None:
    """Writes k, v [T, G, H] BF16 into rows store_rows [T] int64 of the caches [R, G, H] BF16 (contiguous), in place.

    Raises ValueError on shapes, layouts or rows that do not fit, TypeError on dtypes, UnsupportedDevice off the CPU.
    """
    (T, G, H), R = k_TGH.shape, k_cache_RGH.shape[0]
    if v_TGH.shape != (T, G, H) or store_rows_T.shape != (T,):
        shapes = f"v is {tuple(v_TGH.shape)}, store_rows is {tuple(store_rows_T.shape)}"
        raise ValueError(f"kv_store: k is {(T, G, H)}, {shapes}")
    if k_cache_RGH.shape != (R, G, H) or v_cache_RGH.shape != (R, G, H):
        raise ValueError(f"kv_store: caches of {k_cache_RGH.shape}, {v_cache_RGH.shape} do not take {(T, G, H)}")
    # A copy made for contiguity would take the writes and lose them.
    if not (k_cache_RGH.is_contiguous() and v_cache_RGH.is_contiguous()):
        raise ValueError("kv_store: the caches must be contiguous")
    if k_cache_RGH.is_cuda:  # rows outside are left out and flagged; rows for two tokens are the batch's to avoid
        return gpu.kv_store.store(k_TGH, v_TGH, k_cache_RGH, v_cache_RGH, store_rows_T)
    cpu.on_cpu("kv_store", k_TGH, v_TGH, k_cache_RGH, v_cache_RGH)
    rows = cpu.i64(store_rows_T)
    if T and (rows.min() < 0 or rows.max() >= R):
        raise ValueError(f"kv_store: rows {rows.min()}..{rows.max()} are outside the store of {R} rows")
    if np.unique(rows).size != T:
        raise ValueError("kv_store: two tokens go to the same row of the store")
    flat = [cpu.bf16_bits(x).reshape(-1, G * H) for x in (k_TGH, v_TGH, k_cache_RGH, v_cache_RGH)]
    cpu.parallel(_forward_cpu, T, *flat, rows, grain=64)
