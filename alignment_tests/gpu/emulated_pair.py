"""pair_product.cu's own text on a CPU (warpgroup_pair.h), as emulated_prefill.py has attention's: pair after pair.

So a pair that waited for one that has not begun would wait for ever; here it goes on without, and has other bits.
"""

import ctypes
import re

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host, emulated_prefill
from minitransformer.ops.gpu import cuda, pair_product

# The start of an instruction's text -> the call that stands for it.
CALLS = {
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast":
        "copy_tile(address(to), map->words, column, row, address(barrier), true);",
    "mov.u32 %0, %%cluster_ctarank": "r = block_rank();",
    "barrier.cluster": "whole_cluster->arrive_and_wait();",
    "{.reg .u32 there": "barrier_arrive(address(barrier), 0, block);",
    "{.reg .u32 its": "value = first_of(address(at));",
    "ldmatrix": "load_turned(matrices(half) + j * 2048, pairs);",
    "stmatrix": "store_turned(matrices(half) + j * 2048, pairs);",
    "ld.acquire.gpu": "seen = std::max(turn, std::atomic_ref<int>(*done).load());",
    "st.release.gpu": "std::atomic_ref<int>(*done).store(turn + 1);",
    **emulated_prefill.CALLS,
}  # fmt: skip
ENTRY = """
extern "C" void run(int blocks, const TensorMap *x, const TensorMap *w, const TensorMap *other, u16 *y,
        const int *schedule, const float *weights, const i64 *order, float4 *lanes, int *done, int tiles, int N, int K,
        float *out, int backwards) {
    launch(blocks, 384, SHARED, [=] {
        gridDim.x = blocks;
        pair_product(*x, *w, *other, y, schedule, weights, order, lanes, done, tiles, N, K);
    }, 2, backwards);
#if WEIGHTED
    launch(4 * tiles, 128, 0, [=] { lane_trees(schedule, tiles, lanes, order, out); });
#endif
}
"""

PRODUCT = """
template <int N> void product(float (&d)[64], u64 columns, u64 rows, int add) {
    wgmma_shared<N>(d, columns, rows, add, true, false);
}
"""


def host_text(text: str) -> str:
    text = re.sub(r"// Lists of a product's registers.*?\n}\n", PRODUCT, text, flags=re.S)
    own = "((u32)((const char *)p - block_memory) | block_rank() << 24)"
    text = text.replace("(u32)__cvta_generic_to_shared(p)", own)
    return cuda_host.translated(text, CALLS, ENTRY, emulated_prefill.NOTHING, '"warpgroup_pair.h"')


def schedule_of(offsets: list[int]) -> tuple[Tensor, int]:
    """As ops/gpu/schedule.py makes it."""
    tiles = []
    for e, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
        count, base = -(-(b - a) // pair_product.ROWS), len(tiles)
        rows = -(-(b - a) // max(count, 1) // 8) * 8
        tiles += [(e, first, min(first + rows, b), base, count) for first in range(a, b, rows)] if count else []
    return torch.tensor([x for tile in tiles for x in tile] + [len(tiles)], dtype=torch.int32), len(tiles)


def dx(dy, w, out, programs: int, offsets: list[int], weights=None, order=None, x=None, text=None,
    backwards=False):  # fmt: skip
    """Fills out by `programs` pairs of blocks -> the dots, if there are weights. offsets: of the experts' rows;
    backwards: the last pair begins first."""
    (R, K), N = dy.shape, out.shape[1]
    schedule, tiles = schedule_of(offsets)
    lanes, dots = torch.full((tiles, 2, 16, 128, 4), torch.nan), torch.empty(R)
    done = torch.zeros(2 * tiles + 1, dtype=torch.int32)
    mapped = dy, w.view(-1, N), dy if x is None else x
    maps = [(ctypes.c_uint64 * 16)(m.data_ptr(), *m.shape, 64, 64, 2) for m in mapped]
    tensors = out, schedule, weights, order, lanes, done, dots
    *pointers, last = map(cuda_host.pointer, tensors)
    text, defines = text or cuda.source_of(pair_product.SOURCE), pair_product.defines(weights is not None)
    cuda_host.compiled(host_text(text), defines).run(2 * programs, *maps, *pointers, tiles, N, K, last, int(backwards))
    return dots
