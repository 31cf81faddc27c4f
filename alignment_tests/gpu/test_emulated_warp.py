"""The CUDA C++ of attention for many keys on a CPU: the bits of attention, and faults in its text that are seen."""

import itertools
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

pytest.importorskip("triton", reason="Triton is not installed: its package holds the kernel's launch")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_warp as emulated
from alignment_tests.gpu.test_emulated_cluster import fold
from minitransformer.batch import Batch
from minitransformer.ops import attention
from minitransformer.ops.attention import SEGMENT
from minitransformer.ops.gpu import attention_fold, attention_warp, cuda

# Query heads a key/value head, of which there are how many, head size, per sequence how many keys lie before its
# queries and how many queries, rows of a page, half tiles in shared memory.
CASES = {
    "several sequences": (8, 4, 128, [(260, 1), (0, 1), (70, 1)], 16, 7),
    "several queries": (3, 9, 64, [(10, 2), (150, 4)], 16, 4),
    "sixteen rows": (8, 1, 128, [(200, 2)], 48, 7),
    "segments": (8, 2, 64, [(1090, 1), (1023, 1)], 24, 5),
    "long tables": (8, 1, 64, [(1000, 1), (1100, 1), (5, 1)], 1, 7),
}


def check(case: str, texts=(None, None)) -> None:
    group, G, H, parts, page, slots = CASES[case]
    keys, queries = [a + n for a, n in parts], [n for _, n in parts]
    pages = [-(-n // page) for n in keys]
    free = (1 + inputs.integers(4, 1 << 40, sum(pages) + 1).argsort()).tolist()  # nobody has page 0
    tables = [[free.pop() for _ in range(n)] for n in pages]
    batch = Batch.paged([[0] * n for n in queries], [a for a, _ in parts], tables, page)
    used = torch.cat([rows[:n] for rows, n in zip(batch.key_rows_SL, keys, strict=True)])
    if case == "long tables":
        batch = replace(batch, key_rows_SL=pad(batch.key_rows_SL, (0, 4 * SEGMENT), value=-1))
    rows = (sum(pages) + 2) * page
    q, k, v = (inputs.bf16(i, n, h, H) for i, n, h in ((1, sum(queries), group * G), (2, rows, G), (3, rows, G)))
    others = torch.ones(rows, dtype=torch.bool).index_fill(0, used, False)
    k[others] = v[others] = torch.nan  # of the store's rows that no sequence has
    got, want = emulated.forward(q, k, v, batch, slots, texts), attention.forward(q, k, v, batch)
    for a, b, what in zip(got, want, "oml", strict=True):
        assert_bits_equal(a, b, f"{case}, {what}")


@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_spec(case):
    check(case)


@pytest.mark.parametrize("H", [64, 128])
def test_the_fold_takes_any_number_of_segments(H):
    """1, as many as it loads at a time, one more, twice that; and -0, which a sum with zeros would lose."""
    positions = torch.tensor([0, SEGMENT, 31 * SEGMENT + 5, 32 * SEGMENT, 70 * SEGMENT - 1])
    m, l, acc = (inputs.normal(i, 70, 5, 2, *more) for i, more in ((1, ()), (2, ()), (3, (H,))))
    m, l = 30 * m, l.abs() + 1
    m[0, :, 1], m[1, :, 1], acc[0, :, 1, :8], acc[1:, :, 1, :8] = 0, 4, -1e-45, -0.0  # the sum of these is -0
    for s, n in itertools.product(range(70), range(5)):  # what no segment has written is not read
        if s > positions[n] // SEGMENT:
            m[s, n] = l[s, n] = acc[s, n] = torch.nan
    want, got = fold(m, l, acc, positions), emulated.fold(m, l, acc, positions)  # which ends acc
    for a, b, what in zip(got, want, "oml", strict=True):
        assert_bits_equal(a, b, what)


# A fault in the text: what it replaces, by what, and the case that must see it.
FAULTS = {
    "a key too few": ("<= position[h]", "< position[h]", "several queries"),
    "another order of the row sum": ("sum[h], 2)", "sum[h], 3)", "several queries"),
    "another head's keys": ("(item.head * CHUNKS + chunk) * 8", "chunk * 8", "several sequences"),
    "another row's queries": ("r % GROUP) * WIDTH", "0) * WIDTH", "several queries"),
    "keys for values": ("in.k : in.v", "in.k : in.k", "sixteen rows"),
    "the other half's rows": ("row[H], x + mine", "row[0], x + mine", "several sequences"),
    "another chunk of a row": ("(x + mine & 7)", "(mine & 7)", "sixteen rows"),
    "what lies behind the end": ("* 16, x < valid", "* 16, true", "several queries"),
    "a tile's own maximum": ("m[h] = fmaxf(run.m[h], top[h]);", "m[h] = top[h];", "segments"),
    "what the kernel in front writes over": ("    in_turn();\n    Item item", "    Item item", "long tables"),
    "another page's rows": ("(j & ~rest)", "(j & ~31)", "several queries"),
    "a page's first row": (" + (j & rest)", "", "sixteen rows"),
    "a segment's numbers where the first's belong": ("(i64)item.segment * in.lines", "0", "segments"),
    "segments in another order": ("__shfl_sync(~0u, now, s)", "__shfl_sync(~0u, now, s ^ 1)", "segments"),
    "a segment's factor for both": ("part[s][j] * b", "part[s][j] * a", "segments"),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    before, after, case = FAULTS[fault]
    texts = [cuda.source_of(file) for file in (attention_warp.SOURCE, attention_fold.SOURCE)]
    which = int(before not in texts[0])
    texts[which] = cuda_host.faulty(texts[which], before, after)
    with pytest.raises(AssertionError, match="differ"):
        check(case, tuple(texts))


@pytest.mark.slow
def test_a_zero_for_no_segment_is_seen(monkeypatch):
    text = cuda_host.faulty(cuda.source_of(attention_fold.SOURCE), "v[j] = -0.f", "v[j] = 0")
    monkeypatch.setattr(cuda, "source_of", lambda file: text)
    with pytest.raises(AssertionError, match="differ"):
        test_the_fold_takes_any_number_of_segments(128)
