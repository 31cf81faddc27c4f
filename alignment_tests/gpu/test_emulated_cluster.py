"""The CUDA C++ of attention by clusters on a CPU: the bits of attention, and faults in its text that are seen."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

pytest.importorskip("triton", reason="Triton is not installed: its package holds the kernel's launch")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_cluster as emulated
from minitransformer.batch import Batch
from minitransformer.ops import attention
from minitransformer.ops.attention import SEGMENT, _fold_row
from minitransformer.ops.gpu import attention_cluster, cuda
from minitransformer.ops.rounding import ex2_table

# Query heads a key/value head, of which there are how many, head size, per sequence how many keys lie before its
# queries and how many queries, blocks of a cluster, how many clusters run.
CASES = {
    "a block without a tile": (8, 1, 128, [(260, 1), (0, 1)], 8, 1),
    "several queries": (3, 2, 64, [(10, 2), (150, 4)], 4, 2),
    "sixteen rows": (8, 1, 128, [(200, 2)], 4, 1),
    "segments": (8, 1, 64, [(1090, 1), (1023, 1)], 4, 1),
    "long tables": (8, 1, 64, [(1000, 1), (1100, 1), (5, 1)], 4, 2),
}


def fold(m, l, acc, positions) -> tuple[torch.Tensor, ...]:
    """Every segment's numbers -> o, m, l."""
    _, T, N, H = acc.shape
    o, table = torch.empty(T, N, H, dtype=torch.bfloat16), ex2_table()
    m_all, l_all = torch.full((T, N), -1e30), torch.zeros(T, N)
    for t in range(T):
        for n in range(N):
            total = np.zeros(H, np.float32)
            for s in range(int(positions[t]) // SEGMENT + 1):
                old, new = ([np.float32(x[at]) for x in two] for two, at in
                            (((m_all, l_all), (t, n)), ((m, l), (s, t, n))))  # fmt: skip
                m_all[t, n], l_all[t, n] = _fold_row(*new, acc[s, t, n].numpy(), *old, total, table)
            o[t, n] = (torch.from_numpy(total) / l_all[t, n]).bfloat16()
    return o, m_all, l_all


def check(case: str, text: str | None = None) -> None:
    group, G, H, parts, blocks, clusters = CASES[case]
    keys, queries = [a + n for a, n in parts], [n for _, n in parts]
    rows = inputs.integers(4, 1 << 40, sum(keys) + 5).argsort().tolist()
    tables = [[rows.pop() for _ in range(n)] for n in keys]
    batch = Batch.paged([[0] * n for n in queries], [a for a, _ in parts], tables, 1)
    if case == "long tables":
        batch = replace(batch, key_rows_SL=pad(batch.key_rows_SL, (0, 40 * SEGMENT), value=-1))
    shapes = (1, sum(queries), group * G), (2, sum(keys) + 5, G), (3, sum(keys) + 5, G)
    q, k, v = (inputs.bf16(i, n, h, H) for i, n, h in shapes)
    k[rows] = v[rows] = torch.nan  # of the store's rows that no sequence has
    got, want = emulated.parts(q, k, v, batch, blocks, clusters, text), attention.forward(q, k, v, batch)
    got = got if batch.key_rows_SL.shape[1] <= SEGMENT else fold(*got, batch.positions_T)
    for a, b, what in zip(got, want, "oml", strict=True):
        assert_bits_equal(a, b, f"{case}, {what}")


@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_spec(case):
    check(case)


# A fault in the text: what it replaces, by what, and the case that must see it.
FAULTS = {
    "a key too few": ("<= position[h]", "< position[h]", "several queries"),
    "another order of the row sum": ("sum[h], 2)", "sum[h], 3)", "segments"),
    "the sum of rounded weights": ("sum[h] += one;", "sum[h] += bf16(nearest_bf16(one));", "segments"),
    "the maximum of later tiles too": ("if (t <= tile)", "if (true)", "a block without a tile"),
    "another block's columns": ("rank * COLUMNS + part * 8", "part * 8", "a block without a tile"),
    "another row's queries": ("r % GROUP) * WIDTH", "0) * WIDTH", "several queries"),
    "another order of the weights": ("two[2], two[4]", "two[4], two[2]", "segments"),
    "the second rows' weights left out": ("p1 = from[32]", "p1 = from[0]", "sixteen rows"),
    "another value's row": ("value_row[x] * stride", "value_row[0] * stride", "a block without a tile"),
    "a segment's numbers where the first's belong": ("(i64)item.segment * in.lines", "0", "segments"),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    before, after, case = FAULTS[fault]
    text = cuda_host.faulty(cuda.source_of(attention_cluster.SOURCE), before, after)
    with pytest.raises(AssertionError, match="differ"):
        check(case, text)
