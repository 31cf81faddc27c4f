"""Results as text: a rich table on a terminal, aligned columns without a line or a colour code when piped.

One line stands for a kind of stage in all layers that agree; a layer in which it differs has its own line.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minitransformer.alignment.difference import SHOWN, StageResult
from minitransformer.alignment.gap import CLIP, Gap
from minitransformer.alignment.trace import stage_kind, stage_order
from minitransformer.alignment.ulp import NAN_ULP

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
OWN_LINES = 3  # differing layers of a kind that have a line of their own
Table = list[list[str]]
STAGE_COLUMNS = ["stage", "layers", "rows", "a/b only", "elements", "differing", "max ulp", "first difference"]
GAP_COLUMNS = ["log-prob gap to the sampler", "tokens", "differing", "max nats", "mean nats", "P99 nats", "clipped"]


def stage_rows(results: Sequence[StageResult], full: bool = False) -> Table:
    """Lines of the stage table. full: one a layer. Otherwise a kind's equal layers share one line, its first differing
    layers have their own, and where many differ (a difference spreads to all later layers) the rest share one."""
    ordered = sorted(results, key=lambda r: stage_order(r.stage))
    if full:
        return [_stage_row([result]) for result in ordered]
    kinds: dict[str, list[StageResult]] = {}
    for result in sorted(ordered, key=lambda r: (stage_order(r.stage)[0], stage_order(r.stage)[2])):
        kinds.setdefault(stage_kind(result.stage)[0], []).append(result)
    rows = []
    for group in kinds.values():
        equal = [r for r in group if r.equal and r.rows]
        other = [r for r in group if r not in equal]
        own = other if len(other) <= OWN_LINES else other[:1]
        lines = [[r] for r in own] + [line for line in (equal, other[len(own) :]) if line]
        rows += [_stage_row(line) for line in sorted(lines, key=lambda line: stage_order(line[0].stage))]
    return rows


def _stage_row(group: Sequence[StageResult]) -> list[str]:
    kinds = [stage_kind(r.stage) for r in group]
    ulp = max(r.max_ulp for r in group)
    sides = [sum(r.only_a for r in group), sum(r.only_b for r in group)]
    return [
        kinds[0][0],
        _ranges([layer for _, layer in kinds if layer is not None]),
        f"{sum(r.rows for r in group):,}",
        "/".join(map(str, sides)) if any(sides) else "-",
        f"{sum(r.elements for r in group):,}",
        f"{sum(r.differing for r in group):,}",
        "NaN" if ulp == NAN_ULP else f"{ulp:,}" if ulp < 10**6 else f"{ulp:.1e}",
        _verdict(group[0]),
    ]


def _verdict(result: StageResult) -> str:
    if not result.rows:
        return "NOT COMPARED"
    return "equal" if result.first is None else "r{} p{} e{}".format(*result.first)


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'; cut to the column's width."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return text if len(text) <= 14 else text[:11] + "..."


def first_values(result: StageResult, a: str = "a", b: str = "b") -> list[str]:
    """Lines that show the first differing values of a stage; a and b name the sides."""
    lines = [f"first diverging stage: {result.stage} ({result.differing:,} of {result.elements:,} elements differ)"]
    for place, (x, y) in list(zip(result.places, result.values, strict=True))[:SHOWN]:
        lines.append("  request {}, position {}, element {}:".format(*place) + f"  {a} {x!r}  {b} {y!r}")
    return lines


def gap_row(name: str, gap: Gap | str) -> list[str]:
    """One line of the log-prob table; a string instead of a gap is the reason why there is none."""
    if isinstance(gap, str):
        return [name, f"not run: {gap}"]
    numbers = [_nats(x) for x in (gap.max, gap.mean, gap.p99)]
    return [name, f"{gap.tokens:,}", f"{gap.differing:,}", *numbers, f"{100 * gap.clip_share:.2f} %"]


def stage_footnote(a: str, b: str) -> str:
    return f"a/b only: rows only in a, the {a} | only in b, the {b}; r p e: request, position, element"


def gap_footnote() -> str:
    return f"clipped: share of tokens whose ratio exp(learner - sampler) is outside [{CLIP[0]:.2f}, {CLIP[1]:.2f}]"


def _nats(x: float) -> str:
    return "0" if x == 0 else "NaN" if math.isnan(x) else f"{x:.3g}" if x >= 1e-3 else f"{x:.2e}"


def print_table(console: "Console", columns: Sequence[str], rows: Table) -> None:
    """Columns of numbers to the right, the first and (if it is words) the last to the left. A row that is shorter
    than the columns lets its last cell run on."""
    if console.is_terminal:
        _print_rich(console, columns, rows)
        return
    lines = [list(columns), *rows]
    whole = [line for line in lines if len(line) == len(columns)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(columns))]
    widths[0] = max(len(line[0]) for line in lines)
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= WIDTH else " "
    for line in lines:
        right = len(line) == len(columns)
        cells = [
            cell.rjust(width) if right and not _left(columns, i) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        print(gap.join(cells).rstrip(), file=console.file)


def _print_rich(console: "Console", columns: Sequence[str], rows: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if _left(columns, i) else "right", overflow="fold")
    notes = []
    for row in rows:
        if len(row) < len(columns):
            notes.append("  ".join(row))
            continue
        bad = row[-1].startswith(("r", "NOT"))
        style = "bold red" if bad else "green" if row[-1] == "equal" else ""
        table.add_row(*(Text(cell) for cell in row[:-1]), Text(row[-1], style=style))
    console.print(table)
    for note in notes:
        console.print(note, style="yellow", highlight=False, markup=False)


def _left(columns: Sequence[str], i: int) -> bool:
    return i == 0 or columns[i] in ("layers", "first difference")
