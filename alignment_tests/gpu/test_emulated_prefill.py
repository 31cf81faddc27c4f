"""The CUDA C++ of attention for many queries on a CPU: the bits of attention, and faults in its text that are seen."""

import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its package holds the kernel's launch")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from alignment_tests.gpu import emulated_prefill as emulated
from minitransformer.batch import Batch
from minitransformer.ops import attention, gpu
from minitransformer.ops.gpu import attention_prefill, cuda
from minitransformer.ops.gpu.attention import Prefill, _lie_together, _prefill

# Query heads a key/value head, head size, per sequence how many keys lie before its queries and how many queries,
# programs, schedule, rows of a page; 0: the sequences' keys lie one after another.
CASES = {
    "several sequences, two programs": (3, 64, [(0, 100), (0, 1), (130, 66)], 2, Prefill(3), 0),
    "128 wide, an odd number of tiles": (8, 128, [(120, 17), (0, 3)], 1, Prefill(3), 0),
    "three segments": (8, 64, [(2040, 16), (1000, 30)], 1, Prefill(3), 0),
    "one head, a sequence of one tile": (1, 64, [(0, 64), (3, 5)], 3, Prefill(2), 0),
    "pages of 8": (8, 64, [(70, 30), (0, 1), (0, 9)], 1, Prefill(3), 8),
    "pages of 48, 128 wide": (2, 128, [(120, 40), (0, 5), (0, 100)], 2, Prefill(2), 48),
    "pages of 128": (8, 64, [(140, 20), (5, 2)], 2, Prefill(3), 128),
}


def stored(k, v, starts: list[int], keys: list[int], before: list[int], page: int):
    """Keys and values over pages in turned order; NaN where no sequence has any -> (k, v, batch)."""
    pages = [-(-n // page) for n in keys]
    free = list(range(sum(pages) + 1))
    tables = [[free.pop() for _ in range(n)] for n in pages]
    new = [[0] * (n - a) for n, a in zip(keys, before, strict=True)]
    batch = Batch.paged(new, before, tables, page)
    stores = [torch.full(((sum(pages) + 1) * page, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)]
    for store, x in zip(stores, (k, v), strict=True):
        for rows, start, n in zip(batch.key_rows_SL, starts, keys, strict=True):
            store[rows[:n]] = x[start : start + n]
    return *stores, batch


def check(case: str, text: str | None = None) -> None:
    group, H, parts, programs, schedule, page = CASES[case]
    keys, queries, before = [a + n for a, n in parts], [n for _, n in parts], [a for a, _ in parts]
    starts = [sum(keys[:s]) for s in range(len(keys))]
    G = 2 if page else 1
    q, k, v = (inputs.bf16(i, sum(n), h, H) for i, n, h in ((1, queries, group * G), (2, keys, G), (3, keys, G)))
    v[: starts[1] // 2] = 0  # a quotient that the quick division leaves
    v[starts[1] : starts[1] + keys[1]] = torch.nan  # which no other sequence may see
    wanted = torch.tensor([s != 1 for s, n in enumerate(queries) for _ in range(n)])
    k, v, batch = stored(k, v, starts, keys, before, page or 1)
    if not page:
        rows = torch.cat([rows[:n] for rows, n in zip(batch.key_rows_SL, keys, strict=True)])
        tables = [list(range(start, start + n)) for start, n in zip(starts, keys, strict=True)]
        k, v, batch = k[rows], v[rows], Batch.paged([[0] * n for n in queries], before, tables, 1)
    box = attention_prefill.box(page) if page else 0
    got, want = emulated.forward(q, k, v, batch, programs, schedule, text, box), attention.forward(q, k, v, batch)
    for a, b, what in zip(got, want, "oml", strict=True):
        assert_bits_equal(a[wanted], b[wanted], f"{case}, {what}")


@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_spec(case):
    check(case)


def quotients(text: str | None = None) -> None:
    """Sums of three values, all weights 1, where the product with 1 / l is another number of BF16 than the quotient: it
    is the middle between two or a step of FP32 from it. Each by itself: what one warp finds decides for all. And a NaN.
    """
    whole = torch.arange(1 << 23, 1 << 24, dtype=torch.int32)
    for keys, step in ((7, 0), (7, 1), (41, -1), (2, None)):
        v = torch.zeros(keys, 1, 64, dtype=torch.bfloat16)
        v[0, 0, 5] = torch.nan if step is None else 0
        if step is not None:
            quick = whole.float() * (torch.ones(()) / keys)
            found = quick.bfloat16() != (whole.float() / keys).bfloat16()
            found &= quick.view(torch.int32) & 0xFFFF == 0x8000 + step
            some = whole[found][torch.arange(64) % found.sum()]
            v[:3, 0] = torch.stack([some & 0xFF0000, some & 0xFF00, some & 0xFF]).bfloat16()  # a byte each: exact
        q, k = inputs.bf16(1, keys, 8, 64), torch.zeros_like(v)
        batch = Batch.packed([[0] * keys])
        got, want = emulated.forward(q, k, v, batch, 1, Prefill(2), text), attention.forward(q, k, v, batch)
        for a, b, what in zip(got, want, "oml", strict=True):
            assert_bits_equal(a, b, f"{keys} keys, {what}")


def test_quotients_are_rounded_once_to_fp32_and_once_to_bf16():
    quotients()


def test_empty_sequences_are_passed_over():
    """As a graph of prefills has them (plugins/sglang/prefill_graphs.py)."""
    batch = Batch.paged([[0] * 70, [0] * 20], [3, 0], [range(73), range(73, 93)], 1)
    q, k, v = (inputs.bf16(i, n, h, 64) for i, n, h in ((1, 90, 2), (2, 93, 1), (3, 93, 1)))
    with_empty = SimpleNamespace(
        positions_T=batch.positions_T, cu_seqlens=(0, 0, 70, 70, 70, 90), kv_lens=(0, 73, 0, 0, 20), num_sequences=5
    )
    got, want = emulated.forward(q, k, v, with_empty, 2, Prefill(2)), attention.forward(q, k, v, batch)
    for a, b, what in zip(got, want, "oml", strict=True):
        assert_bits_equal(a, b, what)


# A fault in the text: what it replaces, by what, and the case that must see it.
FAULTS = {
    "a key too few": ("% 2 > position", "% 2 >= position", "128 wide, an odd number of tiles"),
    "another order of the row sum": ("sum[h], 2)", "sum[h], 3)", "128 wide, an odd number of tiles"),
    "the sum of rounded weights": ("] += s[i];", "] += bf16(nearest_bf16(s[i]));", "three segments"),
    "one segment": ("t % SEGMENT == 0", "t == 0", "three segments"),
    "a segment's factor for both": ("o[i] * now[0]", "o[i] * old[0]", "three segments"),
    "another sequence's values": ("arrived(at.full_v, t), clear(t);", ";", "several sequences, two programs"),
    "one of two rows not rescaled": ("shrink[h] != 1", "shrink[0] != 1", "three segments"),
    "the last tile's sum": ("add_up();\n        finish", "finish", "three segments"),
    "another tile's values": ("product(o, p, v, slot(t))", "product(o, p, v, slot(t + 1))",
                              "several sequences, two programs"),
    "another group's queries": ("item.first + g * TOKENS, &", "item.first, &", "128 wide, an odd number of tiles"),
    "another head's queries": ("c, item.head * GROUP, item", "c, 0, item", "pages of 128"),
    "lines stored in another order": ("(c ^ row % 8) * 16", "(c ^ row % 4) * 16", "128 wide, an odd number of tiles"),
    "a step below the middle": ("low, 0x80018001", "low, 0x80008000", quotients),
    "a step above the middle": (" > 2 && max", " > 1 && max", quotients),
    "another NaN": ("<= 0xff00;", "<= 0xffff;", quotients),
    "another page's rows": ("__shfl_sync(~0u, row, i)", "__shfl_sync(~0u, row, 0)", "pages of 8"),
    "another sequence's pages": ("(i64)item.keys * in.max_keys", "0", "pages of 8"),
    "keys' pages for the values": ("v, column, row_v,", "v, column, row,", "pages of 48, 128 wide"),
    "the second half of the head": ("| 8192 >> 4 << 16", "| 4096 >> 4 << 16",
                                    "128 wide, an odd number of tiles"),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    before, after, case = FAULTS[fault]
    text = cuda_host.faulty(cuda.source_of(attention_prefill.SOURCE), before, after)
    with pytest.raises(AssertionError, match="differ"):
        case(text) if callable(case) else check(case, text)


@pytest.mark.parametrize(
    ("queries", "keys", "page", "together"),
    [
        ([4096] * 4, 4096, 16, 0), ([4096] * 4, 4096, 64, 64), ([4096] * 4, 4096, 96, 32), ([2048], 30000, 16, 0),
        ([256], 30000, 16, 16), ([512] * 4, 8192, 16, 16), ([300] * 8, 1000, 24, 8), ([512] * 4, 8192, 8, 0),
        ([1024], 1024, 8, 8), ([1024], 1024, 1, 0), ([70, 0, 9], 100, 20, 0),
    ],
)  # fmt: skip
def test_pages_are_copied_first_where_that_was_faster(queries, keys, page, together, monkeypatch):
    monkeypatch.setattr(gpu.device, "multiprocessors", lambda home: 132)
    bounds = tuple(itertools.accumulate(queries, initial=0))
    batch = SimpleNamespace(page_size=page, cu_seqlens=bounds, kv_lens=[keys] * len(queries))
    assert _lie_together(Prefill(3), batch, 8, 4, 128, torch.device("cpu")) == together


def test_operands_at_odd_addresses_are_copied_first(monkeypatch):
    seen, batch = [], Batch.packed([[0] * 40])
    monkeypatch.setattr(attention_prefill, "forward", lambda q, k, v, *rest: seen.extend((q, k, v)))
    q, k, v = (torch.randn(1 + 40 * n * 64).bfloat16()[1:].view(40, n, 64) for n in (4, 2, 2))
    _prefill(Prefill(3), q, k, v, batch, None, None, None, 40, ())
    assert all(x.data_ptr() % 16 == 0 for x in seen) and all(map(torch.equal, seen, (q, k, v)))
