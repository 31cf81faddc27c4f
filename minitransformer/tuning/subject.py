"""A product with some rows on a GPU: operands, the reference, candidates, and how long one takes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minitransformer.ops import dispatch, gpu, grouped_linear, linear
from minitransformer.tuning import proof
from minitransformer.tuning.judge import Candidate, Case, Clock
from minitransformer.tuning.table import Product
from minitransformer.tuning.timing import copies, medians_ms

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOP_K = 8  # slots a token where experts are timed


class WrongReference(RuntimeError):
    """The tile that candidates are compared with has not the CPU's bits on this GPU."""


class Subject:
    """A product with M rows on a GPU: its cases, its candidates, and how long one takes."""

    def __init__(self, product: Product, M: int, home: torch.device):
        self.product, self.M, self.home = product, M, home
        self.weighted = product.op.endswith("weighted")
        self.grouped = product.op.startswith("grouped_linear")

    def operands(self, kind: str, seed: int) -> tuple:
        """(x, w), or (x, w, plan, weights or None) for experts."""
        p = self.product
        gen = torch.Generator(self.home).manual_seed(seed)
        x = proof.operand(kind, self.M, p.K, gen, True)
        if not self.grouped:
            w = proof.operand(kind, p.N, p.K, gen, False)
            if p.op[-2:-1] == "t":  # a is the transpose of a matrix whose rows lie one after another
                x = x.t().contiguous().t()
            return (x, w) if p.op == "linear" or p.op.endswith("t") else (x, w.t().contiguous().t())
        w = proof.operand(kind, p.groups * p.N, p.K, gen, False).view(p.groups, p.N, p.K)
        plan = _routing(self.M, p.groups, seed).to(self.home)
        of = {"dtype": torch.float32, "device": self.home}
        weights = torch.rand(plan.rows_TK.shape, generator=gen, **of) if self.weighted else None
        return x, w, plan, weights

    def reference(self, *operands) -> Tensor:
        """By a plain tile of our own, itself compared with the CPU in `cases`."""
        if self.grouped:
            return gpu.grouped_linear.forward(*operands, gpu.grouped_linear.REFERENCE)
        x, w = operands
        return gpu.linear.forward(x, w, DTYPES[self.product.out], gpu.linear.REFERENCE)

    def cases(self, seed: int, kinds: Sequence[str] = proof.KINDS, on_cpu: bool = True) -> Iterator[Case]:
        """WrongReference if the reference has not the CPU's bits in some rows."""
        for i, kind in enumerate(kinds):
            operands = self.operands(kind, seed + i)
            want = self.reference(*operands)
            unlike = self._against_cpu(operands, want) if on_cpu else None
            if unlike is not None:
                raise WrongReference(f"{self.product}, {self.M} rows, {kind}: the GPU's own tile is wrong: {unlike}")
            yield Case(kind, operands, want)

    def _against_cpu(self, operands: tuple, want: Tensor) -> proof.Difference | None:
        if not self.grouped:
            rows = sorted({0, self.M // 2, self.M - 1})
            x, w = operands[0][rows].cpu(), operands[1].cpu()
            return proof.first_difference(want[rows].cpu(), linear.forward(x, w, want.dtype))
        x, w, plan, weights = operands
        bounds = plan.bounds_E1.tolist()
        used = [e for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)) if b > a][:3]
        rows = torch.tensor([bounds[e] for e in used])
        small = dispatch.plan(torch.arange(len(used))[:, None], len(used))
        scale = None if weights is None else weights.cpu().reshape(-1)[plan.order_R.cpu()[rows]][:, None]
        of_cpu = grouped_linear.forward(x[rows.to(x.device)].cpu(), w[used].cpu(), small, scale)
        return proof.first_difference(want[rows.to(want.device)].cpu(), of_cpu)

    def candidates(self, fewest: int | None = None) -> list[Candidate]:
        """Our tiles that are worth a try for `fewest` (M) to M rows, and the libraries."""
        p = self.product
        if self.grouped:
            tiles = [t for t in gpu.grouped_linear.CANDIDATES if gpu.grouped_linear.fits(t, self.M, p.groups)]
        else:
            every = gpu.linear.CANDIDATES if p.op == "linear" else ()
            tiles = [t for t in every if gpu.linear.fits(t, self.M, p.N, p.K, fewest)]
        return [*map(self.of_tile, tiles), *self.libraries()]

    def of_tile(self, tile: tuple) -> Candidate:
        tile, out = gpu.tiles.Tile(*tile), DTYPES[self.product.out]
        if self.grouped:
            return Candidate(tile_name(tile), lambda *args: gpu.grouped_linear.forward(*args, tile), tile)
        return Candidate(tile_name(tile), lambda x, w: gpu.linear.forward(x, w, out, tile), tile)

    def libraries(self) -> list[Candidate]:
        out = DTYPES[self.product.out]
        if self.weighted:  # the weight enters before the one rounding, which no library does
            return []
        if self.grouped:
            runs = {n: lambda x, w, plan, _, f=f: f(x, w.transpose(1, 2), plan.bounds_E1)
                    for n, f in gpu.library.GROUPED.items()}  # fmt: skip
        else:
            runs = {n: lambda x, w, f=f: f(x, w.t(), out) for n, f in gpu.library.DENSE.items()}
        return [Candidate(n, run, library=n) for n, run in runs.items()]

    def clock(self, seed: int) -> Clock:
        """Median ms over operands that do not stay in the L2 cache; the candidates take turns."""
        p = self.product
        few = copies(2 * p.N * p.K) if not self.grouped else 4 if self.M < 16 * TOP_K else 1
        sets = [self.operands("normal", seed)]
        for i in range(1, few):
            x, w, *rest = sets[0]
            sets.append((x, torch.randn_like(w), *rest) if not self.grouped
                        else (x, w, _routing(self.M, p.groups, seed + i).to(self.home), *rest[1:]))  # fmt: skip
        return lambda named: medians_ms([[lambda c=c, ops=ops: c.run(*ops) for ops in sets] for c in named], replays=7)


def tile_name(tile: tuple) -> str:
    return " ".join(str(int(x)) for x in tile)


def _routing(R: int, groups: int, seed: int) -> dispatch.Plan:
    slots = TOP_K if R % TOP_K == 0 and groups >= TOP_K else 1
    gen = torch.Generator().manual_seed(seed)
    return dispatch.plan(torch.rand(R // slots, groups, dtype=torch.float32, generator=gen).topk(slots).indices, groups)
