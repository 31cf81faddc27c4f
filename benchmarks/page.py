"""Tables of docs/performance.md and its notes from results/: `python benchmarks/page.py` says which are stale.

--write renews them. A table follows a line `<!-- NAME -->`, in the one page or the other; the page owns its head and a
row's words, the results own the numbers.
"""

import argparse
import sys
from pathlib import Path

from page_tables import TABLES

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, NOTES = DOCS / "performance.md", DOCS / "performance_notes.md"
OF_NOTES = {"dense floors"}
TABLES_OF = {PAGE: [name for name in TABLES if name not in OF_NOTES], NOTES: sorted(OF_NOTES)}


def renewed(text: str, names: list[str] = TABLES_OF[PAGE]) -> tuple[str, list[str]]:
    """A page with its tables' rows as the results have them, and the names of the tables that were otherwise."""
    lines, stale = text.splitlines(), []
    for name, make in ((name, TABLES[name]) for name in names):
        begin = lines.index(f"<!-- {name} -->") + 3
        end = next(i for i in range(begin, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
        old = [line.strip().removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[begin:end]]
        new = ["| " + " | ".join(row) + " |" for row in make(old)]
        stale += [name] if new != lines[begin:end] else []
        lines[begin:end] = new
    return "\n".join(lines) + "\n", stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the pages")
    write = parser.parse_args().write
    stale = []
    for page, names in TABLES_OF.items():
        text, old = renewed(page.read_text(encoding="utf-8"), names)
        stale += old
        if write:
            page.write_text(text, encoding="utf-8")
    print(f"{'renewed' if write else 'stale'}: {', '.join(stale) or 'no table'}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
