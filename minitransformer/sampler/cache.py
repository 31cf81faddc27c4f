"""The paged key/value store: one tensor of keys and one of values a layer, rows in pages."""

from collections.abc import Sequence
from typing import Protocol

import torch

# What a sampler takes for keys and values when it is not told how many pages to use.
DEFAULT_CACHE_BYTES = 1 << 29


class CacheShape(Protocol):
    """The part of a model's config that the store depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KVCache:
    """k[i], v[i]: BF16 [rows, G, H] of layer i, rows = num_pages * page_size, not initialised.

    Row `page * page_size + offset` holds the token at that offset of that page. BF16 is what attention reads, so
    storing rounds nothing.
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        self.num_pages, self.page_size = num_pages, page_size
        size = (num_pages * page_size, shape.num_kv_heads, shape.head_dim)
        self.k = self._tensors(shape.num_layers, size, device)
        self.v = self._tensors(shape.num_layers, size, device)

    @staticmethod
    def bytes_per_row(shape: CacheShape) -> int:
        """Bytes that one token takes in all layers."""
        return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * torch.bfloat16.itemsize

    @staticmethod
    def _tensors(num_layers: int, size: Sequence[int], device: torch.device | str) -> list[torch.Tensor]:
        return [torch.empty(tuple(size), dtype=torch.bfloat16, device=device) for _ in range(num_layers)]


def default_num_pages(shape: CacheShape, page_size: int, max_positions: int, max_sequences: int) -> int:
    """Pages for max_sequences whole contexts, or as many as fit DEFAULT_CACHE_BYTES, but for one whole context at
    least."""
    context = -(-max_positions // page_size)
    affordable = DEFAULT_CACHE_BYTES // (KVCache.bytes_per_row(shape) * page_size)
    return max(context, min(affordable, context * max_sequences))
