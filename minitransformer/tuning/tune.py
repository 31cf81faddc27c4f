"""Proves, times and chooses. A candidate is timed only after it gave the reference's bits on every kind of operand."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from minitransformer.ops import gpu
from minitransformer.tuning import machine, proof
from minitransformer.tuning.judge import Verdict, fastest, judge
from minitransformer.tuning.origin import origin
from minitransformer.tuning.subject import TOP_K, Subject, WrongReference, tile_name
from minitransformer.tuning.table import Product, Proven, Row, Table, spans

# The widths of Qwen3-30B-A3B: qkv, o, router, both products of an expert alone, lm_head; then the experts.
PRODUCTS = (
    Product("linear", 1, 5120, 2048), Product("linear", 1, 2048, 4096), Product("linear", 1, 128, 2048),
    Product("linear", 1, 1536, 2048), Product("linear", 1, 2048, 768), Product("linear", 1, 151936, 2048),
    Product("linear", 1, 151936, 2048, "fp32"), Product("grouped_linear", 128, 1536, 2048),
    Product("grouped_linear weighted", 128, 2048, 768),
)  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 16384)
MOST_OUTPUTS = 1 << 28


def products_of(config: Any, experts: bool = True) -> tuple[Product, ...]:
    """Those of a model, by its config; experts: in BF16 (4-bit ones are in no table)."""
    D, V, E, F = config.hidden_size, config.vocab_size, config.num_experts, config.expert_size
    heads, sparse = (config.num_heads, config.num_kv_heads), any(config.sparse_layers)
    widths = [((heads[0] + 2 * heads[1]) * config.head_dim, D), (D, heads[0] * config.head_dim)]
    widths += [(E, D)] * sparse
    widths += [] if all(config.sparse_layers) else [(2 * config.intermediate_size, D), (D, config.intermediate_size)]
    found = [*(Product("linear", 1, N, K) for N, K in widths), Product("linear", 1, V, D, "fp32")]
    if sparse and experts:
        found += [Product("grouped_linear", E, 2 * F, D), Product("grouped_linear weighted", E, D, F)]
    return tuple(dict.fromkeys(found))


def numbers_of(product: Product, rows: Sequence[int]) -> list[int]:
    """The M that are tuned: slots of tokens for experts; a dense M up to 512 has a row of its own, without those below
    it, since a tile of the copy engine that M rows fill is slow where they do not."""
    if product.groups > 1:
        return [M * TOP_K for M in sorted(set(rows))]
    return [M for M in sorted({*rows, *(M - 1 for M in rows if 8 < M <= 512)}) if M * product.N <= MOST_OUTPUTS]


def between(row: Row, before: int, home: torch.device, seed: int) -> list[Row]:
    """Where a row and the numbers of rows above `before` that it serves want other choices (the tile, the library):
    a row in between, the last of those."""

    def at(M: int) -> Row:
        subject = Subject(row.product, M, home)
        named = [subject.of_tile(row.tile), *(c for c in subject.libraries() if c.library == row.library)]
        ours, theirs = (round(ms, 5) for ms in subject.clock(seed)(named))
        return replace(row, M=M, tile_ms=ours, library_ms=theirs, refused={})

    if row.library is None or row.tile is None or row.M - before <= 8:
        return []
    low, high = at(before + 1), row.M
    if low.by_library == row.by_library:
        return []
    while high - low.M > max(8, row.M // 16):
        middle = at((low.M + high) // 2)
        if middle.by_library == row.by_library:
            high = middle.M
        else:
            low = middle
    return [low]


def row_of(product: Product, M: int, verdicts: Sequence[Verdict]) -> Row:
    """The table's row: the fastest of our tiles, the fastest library, and every candidate that was refused.

    Of two libraries within 15 % the first in the list: it is torch.mm as it comes, which turns no switch. One that does
    must be faster than our tile by a tenth: layers with it are not repeated (ops/gpu/repeat.py).
    """
    tile = fastest(v for v in verdicts if v.candidate.tile is not None)
    most = 0.9 * tile.ms if tile else float("inf")
    named = [v for v in verdicts if v.candidate.library is not None and v.ms is not None]
    named = [v for v in named if v.candidate.library != "torch.mm unsplit" or v.ms < most]
    library = next((v for v in named if v.ms <= 1.15 * min(w.ms for w in named)), None)
    refused = {v.candidate.name: v.refused for v in verdicts if v.refused is not None}
    ours = (tuple(map(int, tile.candidate.tile)), round(tile.ms, 5)) if tile else (None, None)
    theirs = (library.candidate.library, round(library.ms, 5)) if library else (None, None)
    return Row(product, M, *ours, *theirs, refused)


def evidence(product: Product, M: int, verdicts: Sequence[Verdict]) -> dict:
    """Of every candidate its milliseconds, or what was wrong."""
    ms = {v.candidate.name: round(v.ms, 5) for v in verdicts if v.ms is not None}
    refused = {v.candidate.name: v.refused for v in verdicts if v.refused is not None}
    return {"bench": "tuning", **product._asdict(), "M": M, "ms": ms, "refused": refused}


def refusal(product: Product, M: int, library: str, home: torch.device, seed: int = 0) -> str | None:
    """Why a library may not be used for this shape here, or None: the proof of one shape at its first use."""
    subject = Subject(product, M, home)
    candidates = [c for c in subject.libraries() if c.library == library]
    if not candidates:
        return "there is no such library product"
    return judge(candidates, subject.cases(seed, ("mixed",), on_cpu=False))[0].refused


def proven_rows(product: Product, library: str, rows: Sequence[int], home: torch.device, seed: int) -> Proven:
    """The numbers of rows, of `rows`, at which the whole output of a dense library product has the bits."""
    whole = Subject(product, max(rows), home)
    x, w = whole.operands("mixed", seed)
    want, run = whole.reference(x, w), next(c.run for c in whole.libraries() if c.library == library)
    wrong = torch.zeros(len(rows), dtype=torch.int64, device=home)
    for i, M in enumerate(rows):
        part = x[:M] if gpu.library.layout(x) == "n" else x.t()[:, :M].contiguous().t()
        wrong[i] = proof.differing(run(part, w), want[:M]).sum()
    return Proven(product, library, spans([M for M, bad in zip(rows, wrong.tolist(), strict=True) if not bad]))


def tune(
    home: torch.device, products: Sequence[Product] = PRODUCTS, rows: Sequence[int] = ROWS, seed: int = 0,
    say: Callable[[str], None] = print, seconds: float = float("inf"), note: Callable[[dict], None] = lambda row: None,
) -> Table:  # fmt: skip
    """A table of this machine. rows: tokens; experts see TOP_K times as many. seconds: no row is begun after them.

    note: is given every candidate's time or refusal, a row at a time.
    """
    begin, late, table = time.monotonic(), [], Table(machine.facts(home), machine.specs())
    for product in products:
        used, before = set(), 0
        for M in numbers_of(product, rows):
            if time.monotonic() - begin > seconds:
                late.append(f"{product}, {M} rows")
                continue
            subject = Subject(product, M, home)
            first = all(row.product != product for row in table.rows)  # the CPU is slow: once a product
            cases = subject.cases(seed, proof.KINDS if first else ("normal", "mixed"), on_cpu=first)
            verdicts = judge(subject.candidates(before + 1 if before else M), cases, subject.clock(seed))
            row = row_of(product, M, verdicts)
            # Below the first row nothing was tried here; a table that this one joins may have rows there.
            more = between(row, before, home, seed) if before and product.groups == 1 else []
            table.rows += [*more, row]
            note(origin() | evidence(product, M, verdicts))
            for one in (*more, row):
                say(line(one))
                used |= {one.library} if one.by_library else set()
            if row.by_library and product.groups > 1:
                table.proven.append(Proven(product, row.library, ((M, M, 1),)))
            before = M
            torch.cuda.empty_cache()
        rest, most = Table(table.machine, table.spec, table.rows), min(max(rows), MOST_OUTPUTS // product.N)
        for library in sorted(used) if product.groups == 1 else ():
            # Everywhere that it would be the choice: milliseconds each.
            if not (every := rest.runs(Proven(product, library, ((1, most, 1),)))):
                continue
            table.proven.append(proven_rows(product, library, every, home, seed))
            say(f"{product}: {library} has the bits for rows {table.proven[-1].rows}")
    if late:
        say(f"out of time after {seconds:.0f} s: {len(late)} rows were not begun, from {late[0]} on; raise --seconds")
    _merge(table)
    return Table(table.machine, table.spec, table.rows, table.proven)


def _merge(table: Table) -> None:
    """One Proven for a product and a library."""
    found: dict[tuple, tuple] = {}
    for p in table.proven:
        found[p.product, p.library] = found.get((p.product, p.library), ()) + p.rows
    table.proven = [Proven(*key, rows) for key, rows in found.items()]


def line(row: Row) -> str:
    tile = f"tile {tile_name(row.tile)} {row.tile_ms:.4f} ms" if row.tile else "no tile"
    library = f"{row.library} {row.library_ms:.4f} ms" if row.library else "no library"
    chosen = "library" if row.by_library else "tile"
    refused = "".join(f"\n    refused: {name}: {why}" for name, why in row.refused.items())
    return f"{str(row.product):44} M {row.M:6}  {chosen:7} {tile}; {library}{refused}"


def verify(row: Row, home: torch.device, seed: int) -> list[str]:
    """What is wrong with the candidates that a row may choose, on fresh operands; empty if their bits are right."""
    subject = Subject(row.product, row.M, home)
    named = [subject.of_tile(row.tile)] if row.tile is not None else []
    named += [c for c in subject.libraries() if row.by_library and c.library == row.library]
    try:
        verdicts = judge(named, subject.cases(seed, ("normal", "mixed"), on_cpu=row.M in (1, TOP_K)))
    except WrongReference as error:
        return [str(error)]
    return [f"{row.product}, {row.M} rows: {v.candidate.name}: {v.refused}" for v in verdicts if v.refused]


def verify_proven(one: Table, home: torch.device, seed: int, most: int = 64) -> tuple[int, int, list[str]]:
    """Proves dense libraries again, on fresh operands, at up to `most` random ones of each proof's numbers of rows.

    -> (at how many, of how many at which a library runs, what is wrong).
    """
    again, of, wrong = 0, 0, []
    for p in one.proven:
        rows, known = one.runs(p), p.product.groups == 1 and p.library in gpu.library.DENSE
        some = sorted(random.Random(seed).sample(rows, min(most, len(rows)))) if known else []
        held = proven_rows(p.product, p.library, some, home, seed) if some else p
        for M in (M for M in some if not held.holds(M)):
            why = refusal(p.product, M, p.library, home, seed) or "other bits on some operands"
            wrong.append(f"{p.product}, {M} rows: {p.library}: {why}")
        again, of = again + len(some), of + len(rows)
    return again, of, wrong
