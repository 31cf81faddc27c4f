"""attention_cluster.cu's own text on a CPU (cluster.h): its PTX becomes calls, everything else stays as it is.

A copy is done where it is asked for, so values, masks, orders, addresses and who waits for whom are checked; that
nothing is touched while it is under way is not.
"""

import ctypes

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host
from minitransformer.batch import Batch
from minitransformer.ops.attention import SEGMENT, _scale
from minitransformer.ops.gpu import attention_cluster as cluster
from minitransformer.ops.gpu import cuda
from minitransformer.ops.rounding import ex2_table

# The start of an instruction's text -> the call that stands for it.
CALLS = {
    "cp.async.cg": "copy_or_zero(to, from, valid);",
    "ldmatrix.sync.aligned.m8n8.x4.shared": "v = load_matrices(at);",
    "ldmatrix.sync.aligned.m8n8.x4.trans": "v = load_turned_matrices(at);",
    "mma.sync": "mma_m16n8k16(c, a, {b0, b1});",
    "ex2.approx.ftz": "y = ex2(x);",
    "cvt.rn.bf16x2": "pair = pack_bf16(low, high);",
    "mapa": "remote = address(p) | rank << 24;",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32": "give_bytes(at, &value, 4, barrier);",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4": "give_words(at, a, b, c, d, barrier);",
    "mbarrier.init": "barrier_init(address(barrier), 1);",
    "mbarrier.arrive.expect_tx": "barrier_arrive(address(barrier), bytes);",
    "{.reg .pred done": "barrier_wait(address(barrier), parity);",
    "barrier.cluster.arrive": "cluster_arrive();",
    "barrier.cluster.wait": "cluster_wait();",
    "st.global.L2::cache_hint.v2.f32": "at[0] = a, at[1] = b;",
    "ld.relaxed.gpu.global.u32": "memcpy(&word, at, 4);",
}
HEADER = '"cluster.h"'
NOTHING = ("cp.async.commit", "cp.async.wait", "griddepcontrol", "fence.")
ENTRY = """
extern "C" void run(int blocks, const float *table, const u16 *q, const u16 *k, const u16 *v, const i64 *positions,
        const i64 *rows, const int *bounds, u16 *o, float *m, float *l, float *acc, float scale, int heads,
        int max_keys, int lines, int sequences, int segments) {
    exp2_table = table;
    launch(blocks, THREADS, SHARED, [=] {
        gridDim.x = blocks;
        together(q, k, v, positions, rows, bounds, o, m, l, acc, scale, heads, max_keys, lines, sequences, segments);
    }, CLUSTER);
}
"""


def library(text: str, *shape: int) -> ctypes.CDLL:
    text = cuda_host.translated(text, CALLS, ENTRY, NOTHING, HEADER)
    return cuda_host.compiled(text, cluster.defines(*shape))


def parts(q: Tensor, k: Tensor, v: Tensor, batch: Batch, blocks: int, clusters: int, text=None):
    """o, m, l if no sequence has more than a segment of keys, else m, l, acc of each segment. By `clusters` of
    `blocks` blocks."""
    (T, N, H), G = q.shape, k.shape[1]
    sequences, max_keys = batch.key_rows_SL.shape
    longest = max(b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))
    segments = -(-max_keys // SEGMENT)
    run = library(text or cuda.source_of(cluster.SOURCE), longest, N // G, H, blocks).run
    o, m, l = torch.full_like(q, torch.nan), *(torch.full((segments, T, N), torch.nan) for _ in range(2))
    acc = torch.full((segments, T, N, H), torch.nan) if segments > 1 else None
    bounds = None if T == sequences else torch.tensor(batch.cu_seqlens, dtype=torch.int32)
    tensors = q, k, v, batch.positions_T, batch.key_rows_SL, bounds, o, m, l, acc
    table, scale = ctypes.c_void_p(ex2_table().ctypes.data), ctypes.c_float(float(_scale(H)))
    sizes = N, max_keys, T * N, sequences, segments
    run(clusters * blocks, table, *map(cuda_host.pointer, tensors), scale, *sizes)
    return (m, l, acc) if segments > 1 else (o, m[0], l[0])
