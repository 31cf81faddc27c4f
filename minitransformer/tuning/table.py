"""The table of choices: for a product on a machine, the fastest schedule, and the library where it was proven.

A JSON file, one row a line. A row is of one product and one number of rows M: our fastest tile, the fastest library
that has the bits, both times, and what was refused and why. `proven` lists, for a product and a library, every number
of rows at which the library's whole output had the bits: [first, last, step].

What a row may decide. Our own tiles have the same bits for every M, so the row of the next larger M serves all below.
A library may choose another kernel for the next M, so it is used only at an M that is listed, on the machine of the
table; anywhere else, only after that very shape is proven in this process. No choice moves a bit.
"""

import json
import os
import warnings
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minitransformer.errors import InputError
from minitransformer.files import parse_json, read_text, replacing_file

FORMAT = 1
SHIPPED = Path(__file__).resolve().parent.parent / "data" / "tuning_h200.json"


class Product(NamedTuple):
    """What a choice is for, M aside. op: 'linear', 'grouped_linear', or 'mm' with the operands' layout ('mm nn').

    groups: experts, 1 if there are none. N, K: columns and depth. out: 'bf16' or 'fp32'.
    """

    op: str
    groups: int
    N: int
    K: int
    out: str = "bf16"

    def __str__(self) -> str:
        experts = f"{self.groups} x " if self.groups > 1 else ""
        return f"{self.op} {experts}{self.N} x {self.K} {self.out}"


@dataclass(frozen=True)
class Row:
    """tile: the fields of ops/gpu/tiles.Tile. library: its name in ops/gpu/library.py. refused: candidate -> why."""

    product: Product
    M: int
    tile: tuple[int, ...] | None = None
    tile_ms: float | None = None
    library: str | None = None
    library_ms: float | None = None
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def by_library(self) -> bool:
        """Whether the library is faster by a hundredth: below that our tile, which serves every number of rows."""
        return self.library is not None and (self.tile_ms is None or self.library_ms < 0.99 * self.tile_ms)


class Proven(NamedTuple):
    """Numbers of rows at which a library had the bits."""

    product: Product
    library: str
    rows: tuple[tuple[int, int, int], ...]

    def holds(self, M: int) -> bool:
        return any(first <= M <= last and (M - first) % step == 0 for first, last, step in self.rows)


def spans(numbers: Iterable[int]) -> tuple[tuple[int, int, int], ...]:
    """Ascending numbers as (first, last, step)."""
    found: list[list[int]] = []
    for n in numbers:
        if found and (found[-1][0] == found[-1][1] or n - found[-1][1] == found[-1][2]):
            found[-1][1:] = n, n - found[-1][1]
        else:
            found.append([n, n, 1])
    return tuple(map(tuple, found))


class Choice(NamedTuple):
    """tile: as in Row; None: the operator's own choice. library: its name, to be used if `proven`, or once it is."""

    tile: tuple[int, ...] | None = None
    library: str | None = None
    proven: bool = False


@dataclass
class Table:
    """machine: machine.gpu of where it was measured. spec: the versions of the specs whose bits were compared."""

    machine: dict[str, str]
    spec: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    proven: list[Proven] = field(default_factory=list)
    path: Path | None = None

    def __post_init__(self) -> None:
        self._rows: dict[Product, list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.M):
            self._rows.setdefault(row.product, []).append(row)

    def row(self, product: Product, M: int) -> Row | None:
        """The row that serves M: of the next larger number of rows, or of the largest."""
        rows = self._rows.get(product, [])
        return rows[min(bisect_left([row.M for row in rows], M), len(rows) - 1)] if rows else None

    def choice(self, product: Product, M: int) -> Choice | None:
        row = self.row(product, M)
        if row is None:
            return None
        listed = any(p.product == product and p.library == row.library and p.holds(M) for p in self.proven)
        return Choice(row.tile, row.library, True) if row.by_library and listed else Choice(row.tile)

    def runs(self, proof: Proven) -> list[int]:
        """The numbers of rows of one of the proofs at which its library is the choice."""
        every = sorted({M for first, last, step in proof.rows for M in range(first, last + 1, step)})
        rows = ((M, self.row(proof.product, M)) for M in every)
        return [M for M, row in rows if row is not None and row.by_library and row.library == proof.library]

    def text(self) -> str:
        def lines(items: list[dict]) -> str:
            return "[\n  " + ",\n  ".join(json.dumps(item) for item in items) + "\n ]" if items else "[]"

        rows = [{"product": row.product._asdict()} | {k: v for k, v in asdict(row).items() if v and k != "product"}
                for row in self.rows]  # fmt: skip
        proven = [p._asdict() | {"product": p.product._asdict()} for p in self.proven]
        head = {"format": FORMAT, "machine": self.machine, "spec": self.spec}
        fields = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
        return "{\n" + ",\n".join([*fields, f' "rows": {lines(rows)}', f' "proven": {lines(proven)}']) + "\n}\n"

    def write(self, path: Path) -> None:
        """Appears whole or not at all; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary:
            temporary.write_text(self.text(), encoding="utf-8")

    def updated(self, other: "Table") -> "Table":
        """This table with the other's rows in place of its own of the same product and M, and without the proofs of
        what the other tried and refused: it tries a library wherever its own rows choose it."""
        new = {(row.product, row.M) for row in other.rows}
        rows = [row for row in self.rows if (row.product, row.M) not in new] + other.rows
        most = {row.product: row.M for row in sorted(other.rows, key=lambda row: row.M)}
        kept = []
        for p in self.proven:
            tried = other.runs(p._replace(rows=((1, most.get(p.product, 0), 1),)))
            left = {M for first, last, step in p.rows for M in range(first, last + 1, step)}.difference(tried)
            kept += [p._replace(rows=spans(sorted(left)))] if left else []
        return Table(other.machine, other.spec, rows, kept + other.proven, self.path)


def read(path: Path) -> Table:
    """InputError, which names the file, for anything that is not a table of this format."""
    content = parse_json(str(path), read_text(path, "expected a table of `minitransformer doctor --tune`"))
    try:
        if content["format"] != FORMAT:
            raise InputError(f"{path}: format {content['format']!r} is not {FORMAT}; tune again")
        rows = [_row(item) for item in content["rows"]]
        proven = [
            Proven(Product(**p["product"]), p["library"], tuple((int(a), int(b), int(c)) for a, b, c in p["rows"]))
            for p in content["proven"]
        ]
        if any(step < 1 for p in proven for _, _, step in p.rows):
            raise ValueError("a step below 1")
        return Table(dict(content["machine"]), dict(content["spec"]), rows, proven, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a table of choices ({type(error).__name__}: {error}); tune again") from None


def _row(item: dict[str, Any]) -> Row:
    tile = item.get("tile")
    fields = item | {"product": Product(**item["product"]), "tile": None if tile is None else tuple(map(int, tile))}
    row = Row(**fields)
    timed = ((row.tile, row.tile_ms), (row.library, row.library_ms))
    good = type(row.M) is int and row.M > 0 and type(row.library) in (str, type(None))
    good &= all(type(ms) in (int, float) if what is not None else ms is None for what, ms in timed)
    if not good or (row.tile is not None and not _is_tile(row.tile)):
        raise ValueError(f"a bad row {item}")
    return row


def _is_tile(tile: tuple[int, ...]) -> bool:
    """Fields of tiles.Tile: powers of two, warps, stages, up to five flags."""
    sizes, flags = tile[:5], tile[5:]
    powers = all(n & (n - 1) == 0 for n in sizes[:3])
    return len(sizes) == 5 and min(sizes) > 0 and powers and len(flags) <= 5 and set(flags) <= {0, 1}


def user_path() -> Path:
    """Where `doctor --tune` writes. InputError for a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise InputError("this user has no home directory for a table; set XDG_CACHE_HOME to a folder") from None
    return cache / "minitransformer" / "tuning.json"


def paths() -> list[Path]:
    """The files that there are: the user's, then the one that comes with the package."""
    try:
        found = [user_path(), SHIPPED]
    except InputError:
        found = [SHIPPED]
    return [path for path in found if os.path.exists(path)]  # not Path.exists, which raises where it may not look


def tables() -> list[Table]:
    """Those of paths(). One that can't be read is told and left out."""
    found = []
    for path in paths():
        try:
            found.append(read(path))
        except InputError as error:
            warnings.warn(f"{error}; it is not used", RuntimeWarning, stacklevel=2)
    return found
