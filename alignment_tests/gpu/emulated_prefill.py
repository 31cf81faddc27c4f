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
    "cp.async.bulk.tensor.3d": "copy_box(address(to), map->words, x, y, z, address(barrier));",
    "{.reg .pred p; setp.ne.b32 p, %2, 0": "if (valid) memcpy(at, &bits, 4);",
    "{.reg .pred p; setp.ne.b32 p, %5": "if (valid) memcpy(at, &v, 16);",
    "{.reg .pred p; setp.ne.b32 p, %34": "wgmma(d, a, b, more);",
    "wgmma.mma_async": "wgmma(d, a, b, true, true);",
    "{.reg .pred p; elect.sync": "yes = lane() == 0;",
    "ex2.approx.ftz": "y = ex2(x);",
    "cvt.rn.bf16x2": "pair = pack_bf16(low, high);",
    "bar.sync %0, 128": "four().barrier.arrive_and_wait();",
}
NOTHING = ("wgmma.fence", "wgmma.commit", "wgmma.wait", "fence.", "setmaxnreg")
ENTRY = """
extern "C" void run(int blocks, int shared, const float *table, const TensorMap *q, const TensorMap *k,
        const TensorMap *v, const i64 *positions, const i64 *key_rows, const int *bounds, const int *starts, u16 *o,
        float *m, float *l, float scale, int heads, int pairs, int items, int max_keys) {
    exp2_table = table;
    launch(blocks, 128 * GROUPS + 128, shared, [=] {
        gridDim.x = blocks;
        prefill(*q, *k, *v, positions, key_rows, bounds, starts, o, m, l, scale, heads, pairs, items, max_keys);
    });
}
"""


def forward(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, programs: int, schedule: Prefill, text=None, keys: int = 0
):  # fmt: skip
    """As gpu.attention.forward by `programs` blocks, on CPU tensors; k, v: the sequences' keys one after another or, if
    `keys` of them lie together, a store."""
    (T, N, H), G = q.shape, k.shape[1]
    host = cuda_host.translated(text or cuda.source_of(prefill.SOURCE), CALLS, ENTRY, NOTHING, '"warpgroup.h"')
    run = cuda_host.compiled(host, prefill.defines(N // G, H, *schedule, keys or prefill.KEY_TILE)).run
    outputs = torch.full_like(q, torch.nan), torch.full((T, N), torch.nan), torch.full((T, N), torch.nan)
    begin = 0, *accumulate(batch.kv_lens)
    bounds, starts = (torch.tensor(x, dtype=torch.int32) for x in (batch.cu_seqlens, begin))
    key_rows, starts = (batch.key_rows_SL, None) if keys else (None, starts)
    box = keys or prefill.KEY_TILE, 64, 2
    maps = [(ctypes.c_uint64 * 16)(q.data_ptr(), T, N, H, prefill.ROWS // (N // G), N // G)]
    maps += [(ctypes.c_uint64 * 16)(x.data_ptr(), len(x), G * H, *box) for x in (k, v)]
    pointers = map(cuda_host.pointer, (batch.positions_T, key_rows, bounds, starts, *outputs))
    items = -(-int(bounds.diff().max()) // (prefill.ROWS // (N // G) * schedule.groups))
    sizes = N, batch.num_sequences * G, items, batch.key_rows_SL.shape[1] if keys else 0
    run(programs, prefill.shared(H, *schedule), ctypes.c_void_p(ex2_table().ctypes.data), *maps, *pointers,
        ctypes.c_float(float(_scale(H))), *sizes)  # fmt: skip
    return outputs
