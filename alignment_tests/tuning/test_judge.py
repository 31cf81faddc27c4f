"""A candidate is chosen only if its bits are the spec's, however fast it is; one that fails is named."""

import torch

from alignment_tests.mutations import Mutation, assert_caught, patched
from minitransformer.ops import linear
from minitransformer.tuning import judge as judges
from minitransformer.tuning import proof
from minitransformer.tuning.judge import Candidate, Case, fastest, judge
from minitransformer.tuning.table import Product, Table
from minitransformer.tuning.tune import row_of, spans

TILE = (64, 64, 64, 4, 6, False, False, False)
PRODUCT = Product("linear", 1, 40, 96)


def cases(rows=8):
    for kind in proof.KINDS:
        x, w = proof.operands(kind, rows, PRODUCT.N, PRODUCT.K, 5, "cpu")
        yield Case(kind, (x, w), linear.forward(x, w))


def right(x, w):
    return linear.forward(x, w)


def one_bit_off(x, w):
    """Wrong in one element, and only on `wide` operands."""
    y = linear.forward(x, w)
    if x.abs().max() > 1e6 and torch.isfinite(y).all():
        y.view(torch.int16)[3, 7] ^= 1
    return y


def raises(x, w):
    raise RuntimeError("out of resources: shared memory\nand a second line")


CANDIDATES = [
    Candidate("slow", right, tile=TILE),
    Candidate("wrong", one_bit_off, tile=(16, *TILE[1:])),
    Candidate("lying library", one_bit_off, library="lying library"),
    Candidate("library", right, library="library"),
    Candidate("too large", raises, tile=(256, *TILE[1:])),
]
MS = {"slow": 2.0, "wrong": 0.5, "lying library": 0.1, "library": 1.0, "too large": 0.2}


def clock(named):
    return [MS[c.name] for c in named]


def verdicts():
    return judge(CANDIDATES, cases(), clock)


def test_the_fastest_of_those_with_the_bits_is_chosen():
    found = verdicts()
    assert fastest(found).candidate.name == "library"
    assert {v.candidate.name for v in found if v.refused} == {"wrong", "lying library", "too large"}
    row = row_of(PRODUCT, 8, found)
    assert (row.tile, row.tile_ms, row.library, row.library_ms) == (TILE, 2.0, "library", 1.0)


def test_a_refused_candidate_is_named_with_its_first_element_and_never_timed():
    timed = []
    found = judge(CANDIDATES, cases(), lambda named: [timed.append(c.name) or 1.0 for c in named])
    assert timed == ["slow", "library"]
    by_name = {v.candidate.name: v for v in found}
    assert by_name["wrong"].refused.startswith("wide: row 3, column 7: 0x")
    assert "(1 of 320 elements differ)" in by_name["wrong"].refused and by_name["wrong"].ms is None
    assert by_name["too large"].refused == "normal: RuntimeError: out of resources: shared memory"


def test_whatever_a_candidate_raises_refuses_it():
    class Unlike(Exception):
        """As Triton's OutOfResources, which is no RuntimeError."""

    def fails(x, w):
        raise Unlike

    (found,) = judge([Candidate("fails", fails)], cases())
    assert found.refused == "normal: Unlike: "


def test_nothing_is_chosen_where_nothing_has_the_bits():
    found = judge([CANDIDATES[1], CANDIDATES[4]], cases(), lambda named: [1.0 for _ in named])
    assert fastest(found) is None and row_of(PRODUCT, 8, found).tile is None


def test_a_judge_that_looks_away_is_caught():
    """The law of this file, and the fault that breaks it: differences that are not seen."""
    law = test_the_fastest_of_those_with_the_bits_is_chosen
    blind = patched(judges.proof, "first_difference", lambda got, want: None)
    assert_caught(Mutation("differences are not looked at", "a wrong candidate is never chosen", blind, law))
    first_case_only = patched(judges, "judge", lambda c, k, clock: judge(c, list(k)[:1], clock))

    def law_by_module():
        found = judges.judge(CANDIDATES, cases(), clock)
        assert fastest(found).candidate.name == "library"

    fault = Mutation("only one kind of operand", "a wrong candidate is never chosen", first_case_only, law_by_module)
    assert_caught(fault)


def test_a_library_that_was_refused_is_not_in_the_table():
    table = Table({}, {}, [row_of(PRODUCT, 8, judge(CANDIDATES[:3], cases(), clock))])
    choice = table.choice(PRODUCT, 8)
    assert choice.tile == TILE and choice.library is None
    assert table.rows[0].refused["lying library"].startswith("wide: row 3, column 7")


def test_spans_hold_exactly_the_numbers():
    for numbers in ([], [5], [1, 2, 3, 5, 6], [*range(1, 101), *range(128, 4097, 64), 5000], [1, 3, 4, 8, 16]):
        held = [n for first, last, step in spans(numbers) for n in range(first, last + 1, step)]
        assert held == numbers
