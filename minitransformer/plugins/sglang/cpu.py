"""What SGLang has only for GPUs and a machine without one needs: pinned memory, and two page-allocating kernels.

Integers only; which rows of the pool a request gets moves no bit (alignment_tests/plugin/test_engines.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def host_cache(original: Any, cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """BaseHostCache.__init__, in memory that is not pinned."""
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


class Kernel:
    """kernel[grid](...) of a plain function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.function


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, out: Tensor, _: int, page_size: int
) -> None:
    """Rows for positions prefix_lens[s] .. seq_lens[s] of each request: the rest of its last page, then free pages."""
    done, taken = 0, 0
    for prefix, end, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        begun = min(-prefix % page_size, end - prefix)
        pages = -(-(end - prefix - begun) // page_size)
        rows = [last + 1 + torch.arange(begun)]
        rows += [int(p) * page_size + torch.arange(page_size) for p in free_pages[taken : taken + pages]]
        found = torch.cat(rows)[: end - prefix]
        out[done : done + len(found)] = found  # too few free pages: the caller sees that by itself
        done, taken = done + end - prefix, taken + pages


def alloc_decode(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, out: Tensor, _: int, page_size: int) -> None:
    """The row of the newest position seq_lens[s] - 1 of each request."""
    alloc_extend(seq_lens - 1, seq_lens, last_loc, free_pages, out, _, page_size)
