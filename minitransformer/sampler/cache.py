"""The paged key/value store: one tensor of keys and one of values a layer, rows in pages."""

import os
from collections.abc import Sequence
from typing import Protocol

import torch

from minitransformer.devices import free_bytes
from minitransformer.errors import InputError

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
    storing rounds nothing. spare_pages more follow the num_pages: rows that pad a batch write there.
    """

    def __init__(self, shape: CacheShape, num_pages: int, page_size: int, device="cpu", spare_pages: int = 0) -> None:
        """Raises InputError that says how much memory is needed if the device has less."""
        self.num_pages, self.page_size, self.spare_pages = num_pages, page_size, spare_pages
        rows = (num_pages + spare_pages) * page_size
        needed, held = rows * self.bytes_per_row(shape), _memory(torch.device(device))
        # Asked beforehand: the system may grant memory that it lacks and end the process when it is used.
        if needed > held:
            raise InputError(_too_large(num_pages, page_size, needed, held))
        size = (rows, shape.num_kv_heads, shape.head_dim)
        try:
            self.k = self._tensors(shape.num_layers, size, device)
            self.v = self._tensors(shape.num_layers, size, device)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise InputError(_too_large(num_pages, page_size, needed, held)) from None

    @staticmethod
    def bytes_per_row(shape: CacheShape) -> int:
        """Bytes that one token takes in all layers."""
        return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * torch.bfloat16.itemsize

    @staticmethod
    def _tensors(num_layers: int, size: Sequence[int], device: torch.device | str) -> list[torch.Tensor]:
        return [torch.empty(tuple(size), dtype=torch.bfloat16, device=device) for _ in range(num_layers)]


def _memory(device: torch.device) -> int:
    """Bytes that the machine has in all, or that a GPU has free; 2^62 where it cannot be asked."""
    if device.type != "cpu":
        return free_bytes(device)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


def _too_large(num_pages: int, page_size: int, needed: int, held: int) -> str:
    size = f"{needed / 2**30:,.1f} GiB" if needed < 1 << 80 else f"more than 2^{needed.bit_length() - 1} bytes"
    count, rows = (f"{n:,}" if n < 10**15 else f"about 2^{n.bit_length() - 1}" for n in (num_pages, page_size))
    return (
        f"num_pages: {count} pages of page_size {rows} need {size} for keys and values, more than the memory of the "
        f"device ({held / 2**30:,.1f} GiB); lower num_pages or page_size"
    )


def default_num_pages(shape: CacheShape, page_size: int, max_positions: int, max_sequences: int) -> int:
    """Pages for max_sequences whole contexts, or as many as fit DEFAULT_CACHE_BYTES, but for one whole context at
    least."""
    context = -(-max_positions // page_size)
    affordable = DEFAULT_CACHE_BYTES // (KVCache.bytes_per_row(shape) * page_size)
    return max(context, min(affordable, context * max_sequences))
