"""The CUDA C++ of attention for many queries on a CPU: the bits of attention, and faults in its text that are seen."""

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
from minitransformer.ops import attention
from minitransformer.ops.gpu import attention_prefill, cuda
from minitransformer.ops.gpu.attention import Prefill, _prefill

# Query heads and head size, per sequence how many keys lie before its queries and how many queries, programs, schedule.
CASES = {
    "several sequences, two programs": (3, 64, [(0, 100), (0, 1), (130, 66)], 2, Prefill(3)),
    "128 wide, an odd number of tiles": (8, 128, [(120, 17), (0, 3)], 1, Prefill(3)),
    "three segments": (8, 64, [(2040, 16), (1000, 30)], 1, Prefill(3)),
    "one head, a sequence of one tile": (1, 64, [(0, 64), (3, 5)], 3, Prefill(2)),
}


def check(case: str, text: str | None = None) -> None:
    group, H, parts, programs, schedule = CASES[case]
    keys, queries = [a + n for a, n in parts], [n for _, n in parts]
    starts = [sum(keys[:s]) for s in range(len(keys))]
    tables = [list(range(start, start + n)) for start, n in zip(starts, keys, strict=True)]
    batch = Batch.paged([[0] * n for n in queries], [a for a, _ in parts], tables, 1)
    q, k, v = (inputs.bf16(i, n, h, H) for i, n, h in ((1, sum(queries), group), (2, sum(keys), 1), (3, sum(keys), 1)))
    v[: starts[1] // 2] = 0  # a quotient that the quick division leaves
    v[starts[1] : starts[1] + keys[1]] = torch.nan  # which no other sequence may see
    wanted = torch.tensor([s != 1 for s, n in enumerate(queries) for _ in range(n)])
    got, want = emulated.forward(q, k, v, batch, programs, schedule, text), attention.forward(q, k, v, batch)
    for a, b, what in zip(got, want, "oml", strict=True):
        assert_bits_equal(a[wanted], b[wanted], f"{case}, {what}")


@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_spec(case):
    check(case)


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
    "queries in another order": ("chunk % 8 ^ first % 8", "chunk % 8 ^ first % 4", "128 wide, an odd number of tiles"),
    "lines stored in another order": ("i / 2 ^ row % 8", "i / 2 ^ row % 4", "128 wide, an odd number of tiles"),
    "the second half of the head": ("| 8192 >> 4 << 16", "| 4096 >> 4 << 16",
                                    "128 wide, an odd number of tiles"),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    before, after, case = FAULTS[fault]
    text = cuda_host.faulty(cuda.source_of(attention_prefill.SOURCE), before, after)
    with pytest.raises(AssertionError, match="differ"):
        check(case, text)


def test_operands_at_odd_addresses_are_copied_first(monkeypatch):
    seen, batch = [], Batch.packed([[0] * 40])
    monkeypatch.setattr(attention_prefill, "forward", lambda q, k, v, *rest: seen.extend((q, k, v)))
    q, k, v = (torch.randn(1 + 40 * n * 64).bfloat16()[1:].view(40, n, 64) for n in (4, 2, 2))
    _prefill(Prefill(3), q, k, v, batch, None, None, None, 40, ())
    assert all(x.data_ptr() % 16 == 0 for x in seen) and all(map(torch.equal, seen, (q, k, v)))
