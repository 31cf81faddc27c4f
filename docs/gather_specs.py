"""Collect the execution specs of all operators, the docstrings that open their files, into docs/execution_spec.md.

Example: python docs/gather_specs.py --check      (exit status 1 if the page is stale; without --check it is written)
"""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "minitransformer" / "ops"
PAGE = ROOT / "docs" / "execution_spec.md"

# The order of the diagram; first what lies under every operator.
ORDER = (
    "mma", "rounding", "embedding", "rms_norm", "linear", "rope", "kv_store", "attention", "router", "dispatch",
    "grouped_linear", "swiglu", "nvfp4", "mxfp8", "quantised_linear", "logprob", "sample", "adamw",
)  # fmt: skip

HEAD = """# Execution spec

The spec of an operator decides its bits: formula, casts, every rounding, the order of each reduction, ties, and what is
refused. It is the docstring of the operator's file; this page collects all of them in the order of the diagram
(`make docs` writes it, do not edit it). [spec_log.md](spec_log.md) says what changed between versions, and why;
[learning_alignment.md](learning_alignment.md) shows what goes wrong where two engines decide these things differently.

How to read a formula: `fl` is one FP32 operation, rounded to nearest even; `bf16` and `f32` round to that type;
`chain` is the tensor-core chain of the first section. Capital letters after a name are the sizes of its dimensions:
T tokens, D hidden size, N query heads, G key/value heads, H head size, E experts, K experts a token (or the inner
dimension of a product), R routed rows, V vocabulary.
"""


def specs(folder: Path) -> dict[str, str]:
    """Operator -> docstring, for each file that has a SPEC. ValueError for one without a place in ORDER."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        names = {t.id for node in module.body if isinstance(node, ast.Assign) for t in node.targets if hasattr(t, "id")}
        if "SPEC" not in names:
            continue
        text = ast.get_docstring(module)
        if path.stem not in ORDER:
            raise ValueError(f"{path.name}: has a SPEC but no place in the order of {Path(__file__).name}")
        if not text or not text.startswith("Execution spec "):
            raise ValueError(f"{path.name}: its docstring must start with 'Execution spec NAME/VERSION:'")
        found[path.stem] = text
    return {op: found[op] for op in ORDER if op in found}


def page(folder: Path) -> str:
    parts = [HEAD]
    for op, text in specs(folder).items():
        first, _, rest = text.partition("\n")
        name, _, what = first.removeprefix("Execution spec ").partition(": ")
        parts.append(f"## {op}: {name}\n\n{what[:1].upper() + what[1:]}\n\n```text\n{rest.strip(chr(10))}\n```\n")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is stale")
    args = parser.parse_args(argv)
    text = page(OPS)
    if args.check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is stale: run `make docs` and commit it", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(specs(OPS))} specs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
