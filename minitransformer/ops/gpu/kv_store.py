"""kv_store/1 on Hopper: rows of keys and values copied into the store (ops/kv_store.py has the spec)."""

import torch
from torch import Tensor

from minitransformer.ops.gpu import device
from minitransformer.ops.gpu.copy import copy


def store(k_TGH: Tensor, v_TGH: Tensor, k_cache_RGH: Tensor, v_cache_RGH: Tensor, store_rows_T: Tensor) -> None:
    home = k_cache_RGH.device
    k, v, *caches = device.take("kv_store", home, torch.bfloat16, k_TGH, v_TGH, k_cache_RGH, v_cache_RGH)
    (rows,) = device.take("kv_store", home, torch.int64, store_rows_T)
    for x, cache in zip((k, v), caches, strict=True):
        copy("kv_store", x, rows, cache, cache.shape[0], scatter=True)
