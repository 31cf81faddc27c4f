"""The law of the choice: whatever the table says, the bits are the CPU's; and doctor finds no fault on this machine."""

import random

import pytest
import torch

from alignment_tests.gpu.values import BF16, agree
from minitransformer.ops import linear
from minitransformer.tuning import checks, machine, proof, subject, table, tune
from minitransformer.tuning.judge import Candidate, fastest, judge
from minitransformer.tuning.table import Product, Proven, Row, Table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
HOME = torch.device("cuda", 0)
SMALL = Product("linear", 1, 320, 576)


@pytest.fixture(autouse=True)
def _as_it_comes():
    """The package's settings filled fresh memory with NaN; deterministic algorithms are another key of the table."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def use(monkeypatch):
    """use(table): the run-time choice follows this table alone."""
    from minitransformer.ops.gpu import choice

    def call(*tables):
        monkeypatch.setattr(table, "tables", lambda: list(tables))
        choice.forget()

    yield call
    choice.forget()


EXPERTS = Product("grouped_linear weighted", 16, 192, 256)


@pytest.mark.parametrize("product", [SMALL, SMALL._replace(out="fp32"), EXPERTS], ids=str)
def test_tune_and_verify(product):
    made = tune.tune(HOME, [product], rows=(1, 40), say=lambda line: None)
    assert {row.M for row in made.rows} >= ({8, 320} if product.groups > 1 else {1, 39, 40})
    for row in made.rows:
        assert row.tile is not None and row.tile_ms > 0
        assert tune.verify(row, HOME, seed=11) == []


def test_a_wrong_candidate_is_refused_however_fast_it_is():
    one = subject.Subject(SMALL, 64, HOME)

    def split(x, w):
        half = x.shape[1] // 2
        parts = (torch.mm(x[:, a:b], w[:, a:b].t(), out_dtype=torch.float32) for a, b in ((0, half), (half, None)))
        return sum(parts).to(BF16)

    candidates = [Candidate("split", split, library="split"), *one.candidates()]
    found = judge(candidates, one.cases(3), lambda named: [float(c.name != "split") for c in named])
    assert found[0].refused.endswith("elements differ)") and found[0].ms is None
    assert fastest(found).candidate.tile is not None


@pytest.mark.parametrize("M", [1, 8, 32, 100, 128, 512, 2000, 2048])
@pytest.mark.parametrize(("N", "K"), [(5120, 2048), (2048, 4096), (1536, 2048), (2048, 768)])
def test_what_the_shipped_table_chooses_has_the_bits(M, N, K):
    x, w = proof.operands("mixed", M, N, K, M)
    rows = sorted({0, 1 % M, M // 2, M - 1})
    want = linear.forward(x[rows].cpu(), w[:96].cpu())
    agree([linear.forward(x, w)[rows][:, :96]], [want], f"{M} rows of {N} x {K}")


def test_where_the_shipped_table_runs_a_library_whole_outputs_are_a_tiles():
    """At random ones of all those numbers of rows, new ones in each run; by the call that a model makes."""
    shipped, seed = table.read(table.SHIPPED), checks.fresh_seed()
    for one in (p for p in shipped.proven if p.product.groups == 1):
        rows = random.Random(seed).sample(every := shipped.runs(one), min(24, len(every)))
        whole = subject.Subject(one.product, max(rows, default=1), HOME)
        x, w = whole.operands("mixed", seed)
        want = whole.reference(x, w)
        for M in rows:
            got = linear.forward(x[:M], w, subject.DTYPES[one.product.out])
            assert proof.first_difference(got, want[:M]) is None, f"{one.product}, {M} rows, seed {seed}"


def test_a_choice_under_capture_is_the_eager_one(use):
    """A library that this machine's table names, captured: nothing waits for the GPU, and the bits stay."""
    row = Row(SMALL, 64, tuple(map(int, (64, 64, 64, 4, 6, 0, 0, 0))), 1.0, "torch.mm", 0.5)
    proven = Proven(SMALL, "torch.mm", ((64, 64, 1),))
    x, w = proof.operands("mixed", 64, SMALL.N, SMALL.K, 1)
    want = linear.forward(x.cpu(), w.cpu())
    for there in (machine.facts(HOME), machine.facts(HOME) | {"driver": "1"}):  # trusted, and to be proven first
        use(Table(there, machine.specs(), [row], [proven]))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            torch.mm(x, w.t())  # the library makes its workspace outside the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = linear.forward(x, w)
        graph.replay()
        agree([y], [want], "captured")
        agree([linear.forward(x, w)], [want], "eager")


@pytest.mark.parametrize(("M", "N", "K"), [(304, 768, 2048), (136, 520, 72), (2048, 1536, 1000), (5000, 256, 64)])
def test_the_persistent_product_with_operands_turned(M, N, K):
    """More tiles than one round of the ring and of the grid, steps fewer than stages, ragged edges."""
    from minitransformer.ops import gpu

    for kind in ("special", "absorbing"):
        x, w = proof.operands(kind, M, N, K, M)
        want = gpu.linear.forward(x, w, BF16, gpu.linear.REFERENCE)
        agree([want[:2]], [linear.forward(x[:2].cpu(), w.cpu())], kind)
        gradient = torch.where(want == want, want, torch.tensor(0x7FC0, dtype=torch.int16).view(BF16).cuda())
        for tile in gpu.linear.CANDIDATES:
            for turned, deep in ((False, False), (True, True), (False, True)) if tile.pingpong else ():
                y = torch.empty_like(want)
                operands = x.t().contiguous() if turned else x, w.t().contiguous() if deep else w
                gpu.pingpong.product(*operands, y, tile, turned, deep)
                agree([y], [(gradient if deep else want).cpu()], f"{tile} {turned} {deep}")


def test_where_deterministic_algorithms_are_asked_for_our_own_tile_runs(use):
    """torch.mm refuses there, or takes another workspace: it is proven first, and left if it can't be."""
    row = Row(SMALL, 64, tuple(map(int, (64, 64, 64, 4, 6, 0, 0, 0))), 1.0, "torch.mm", 0.5)
    use(Table(machine.facts(HOME), machine.specs(), [row], [Proven(SMALL, "torch.mm", ((64, 64, 1),))]))
    x, w = proof.operands("mixed", 64, SMALL.N, SMALL.K, 1)
    torch.use_deterministic_algorithms(True)
    agree([linear.forward(x, w)], [linear.forward(x.cpu(), w.cpu())], "deterministic")


def test_operands_that_begin_anywhere():
    """The copy engine and the proofs want aligned rows; a slice that is not aligned takes another kernel."""
    K = 2048
    flat, w = torch.randn(130 * K + 8, device=HOME).to(BF16), torch.randn(1536, K, device=HOME).to(BF16)
    for shift in (0, 1, 4, 8):
        x = flat[shift : shift + 128 * K].view(128, K)
        agree([linear.forward(x, w)[:3, :64]], [linear.forward(x[:3].cpu(), w[:64].cpu())], f"shift {shift}")


def test_doctor_finds_no_fault():
    found = list(checks.run(seed=checks.fresh_seed()))
    assert not [check for check in found if check.state == "failed"], found
    assert any(check.name == "cuda:0" and check.state == "ok" for check in found)
