"""attention_prefill.cu's own text on a CPU (warpgroup.h): its PTX becomes calls, everything else stays as it is.

A product is done where it is asked for and a tile is there when its load returns, so values, masks, orders, addresses,
descriptors and the counting of barriers are checked; that nothing is touched while it is under way is not.
"""

import ctypes
from itertools import accumulate

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host
from minitransformer.batch import Batch
from minitransformer.ops.attention import _scale
from minitransformer.ops.gpu import attention_prefill as prefill
from minitransformer.ops.gpu import cuda
from minitransformer.ops.gpu.attention import Prefill
from minitransformer.ops.rounding import ex2_table

# The start of an instruction's text -> the call that stands for it.
CALLS = {
    "mbarrier.init": "barrier_init(address(barrier), count);",
    "mbarrier.arrive.shared": "barrier_arrive(address(barrier), 0);",
    "mbarrier.arrive.expect_tx": "barrier_arrive(address(barrier), bytes);",
    "{.reg .pred done": "barrier_wait(address(barrier), parity);",
    "cp.async.bulk.tensor.2d": "copy_tile(address(to), map->words, column, row, address(barrier));",
    "{.reg .pred p; setp.ne.b32 p, %2, 0": "if (valid) memcpy(at, &bits, 4);",
    "{.reg .pred p; setp.ne.b32 p, %34": "wgmma(d, a, b, more);",
    "wgmma.mma_async": "wgmma(d, a, b, true, true);",
    "cp.async.cg.shared.global": "memcpy(to, from, 16);",
    "ex2.approx.ftz": "y = ex2(x);",
    "cvt.rn.bf16x2": "pair = pack_bf16(low, high);",
    "bar.sync %0, 128": "four().barrier.arrive_and_wait();",
}
NOTHING = ("wgmma.fence", "wgmma.commit", "wgmma.wait", "fence.", "setmaxnreg", "cp.async.wait_all")
ENTRY = """
extern "C" void run(int blocks, int shared, const float *table, const TensorMap *k, const TensorMap *v,
        const u16 *q,
        const i64 *positions, const int *bounds, const int *starts, u16 *o, float *m, float *l, float scale, int heads,
        int pairs, int items) {
    exp2_table = table;
    launch(blocks, 128 * GROUPS + 128, shared, [=] {
        gridDim.x = blocks;
        prefill(*k, *v, q, positions, bounds, starts, o, m, l, scale, heads, pairs, items);
    });
}
"""


def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch, programs: int, schedule: Prefill, text=None):
    """As gpu.attention.forward by `programs` blocks, on CPU tensors; k, v: the sequences' keys one after another."""
    (T, N, H), G = q.shape, k.shape[1]
    host = cuda_host.translated(text or cuda.source_of(prefill.SOURCE), CALLS, ENTRY, NOTHING, '"warpgroup.h"')
    run = cuda_host.compiled(host, prefill.defines(N // G, H, *schedule)).run
    outputs = torch.full_like(q, torch.nan), torch.full((T, N), torch.nan), torch.full((T, N), torch.nan)
    begin = 0, *accumulate(batch.kv_lens)
    bounds, starts = (torch.tensor(x, dtype=torch.int32) for x in (batch.cu_seqlens, begin))
    maps = [(ctypes.c_uint64 * 16)(x.data_ptr(), len(x), G * H, prefill.KEY_TILE, 64, 2) for x in (k, v)]
    pointers = map(cuda_host.pointer, (q, batch.positions_T, bounds, starts, *outputs))
    items = -(-int(bounds.diff().max()) // (prefill.ROWS // (N // G) * schedule.groups))
    run(programs, prefill.shared(H, *schedule), ctypes.c_void_p(ex2_table().ctypes.data), *maps, *pointers,
        ctypes.c_float(float(_scale(H))), N, batch.num_sequences * G, items)  # fmt: skip
    return outputs
