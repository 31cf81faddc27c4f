"""attention_warp.cu's own text on a CPU (cluster.h): its PTX becomes calls, everything else stays as it is.

A copy is done where it is asked for, so values, masks, orders, addresses and who waits for whom are checked; that
nothing is touched while it is under way is not.
"""

import ctypes

import torch
from torch import Tensor

from alignment_tests.gpu import cuda_host, emulated_cluster
from minitransformer.batch import Batch
from minitransformer.ops.attention import SEGMENT, _scale
from minitransformer.ops.gpu import attention_fold, attention_prefill, cuda
from minitransformer.ops.gpu import attention_warp as warp
from minitransformer.ops.rounding import ex2_table

CALLS = {
    "griddepcontrol.wait": "if (ended) std::call_once(*ended, in_front_ends);",
    "prefetch": "(void)*(volatile const char *)(at + b);",
    "membar": ";",
    "discard": "memset((void *)(in.acc + mine * WIDTH + j), 0xFF, 128);",
    "{.reg .pred p": "if (valid) memcpy(v, at, 4 * OWN);",
    **emulated_cluster.CALLS,
}
# old_rows, old_positions: what the kernel in front writes over.
ENTRY = """
extern "C" void run(int blocks, const float *table, i64 *old_rows, i64 *old_positions, const u16 *q, const u16 *k,
        const u16 *v, const i64 *positions, const i64 *rows, const int *bounds, u16 *o, float *m, float *l, float *acc,
        float scale, int heads, int max_keys, int lines, int sequences, int segments, int store_rows, int rest,
        int fetching) {
    exp2_table = table;
    std::once_flag once;
    ended = &once;
    in_front_ends = [=] {
        memcpy(old_rows, rows, 8LL * sequences * max_keys), memcpy(old_positions, positions, 8LL * lines / heads);
    };
    launch(blocks, 32, SLOTS * KEYS * WIDTH, [=] {
        alone(q, k, v, old_positions, old_rows, bounds, o, m, l, acc, scale, heads, max_keys, lines, sequences,
            segments, store_rows, rest, fetching);
    });
}
"""
FOLD = """
extern "C" void run(int blocks, const float *table, const float *m_in, const float *l_in, const float *acc_in,
        const i64 *positions, u16 *o, float *m, float *l, int heads, int lines) {
    exp2_table = table;
    launch(blocks, 32, 16, [=] { fold(m_in, l_in, acc_in, positions, o, m, l, heads, lines); });
}
"""


def library(text: str, entry: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    text = cuda_host.translated(text, CALLS, entry, emulated_cluster.NOTHING, emulated_cluster.HEADER)
    return cuda_host.compiled(text, defines)


def _call(run, blocks: int, arguments) -> None:
    table = ctypes.c_void_p(ex2_table().ctypes.data)
    run(blocks, table, *(cuda_host.pointer(a) if a is None or isinstance(a, Tensor) else a for a in arguments))


def fold(m: Tensor, l: Tensor, acc: Tensor, positions: Tensor, text: str | None = None):
    """m, l [segments, T, N] and acc [segments, T, N, H] of each segment -> o, m, l."""
    _, T, N, H = acc.shape
    run = library(text or cuda.source_of(attention_fold.SOURCE), FOLD, attention_fold.defines(H)).run
    outputs = torch.full((T, N, H), torch.nan, dtype=torch.bfloat16), *torch.full((2, T, N), torch.nan)
    _call(run, T * N, (m, l, acc, positions, *outputs, N, T * N))
    return outputs


def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch, slots: int, texts=(None, None)):
    """As gpu.attention.forward, on CPU tensors. texts: of the kernel and of the fold."""
    (T, N, H), G = q.shape, k.shape[1]
    sequences, max_keys = batch.key_rows_SL.shape
    longest = max(b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))
    segments = -(-max_keys // SEGMENT)
    o, m, l = torch.full_like(q, torch.nan), *(torch.full((segments, T, N), torch.nan) for _ in range(2))
    acc = torch.full((segments, T, N, H), torch.nan) if segments > 1 else None
    bounds = None if T == sequences else torch.tensor(batch.cu_seqlens, dtype=torch.int32)
    text = texts[0] or cuda.source_of(warp.SOURCE)
    run = library(text, ENTRY, warp.defines(longest, N // G, H, slots)).run
    pieces, scale = G * sequences * segments, ctypes.c_float(float(_scale(H)))
    rows, positions = batch.key_rows_SL, batch.positions_T
    old = torch.randint_like(rows, len(k)), torch.full_like(positions, max_keys - 1)
    _call(run, pieces, (*old, q, k, v, positions, rows, bounds, o, m, l, acc, scale, N, max_keys, T * N, sequences,
                        segments, len(k), (attention_prefill.box(batch.page_size) or 1) - 1, 2))  # fmt: skip
    return (o, m[0], l[0]) if segments == 1 else fold(m, l, acc, batch.positions_T, texts[1])
