"""The documents say what is there: specs are gathered, paths and tests that are named exist, commands parse."""

import importlib.util
import re
from pathlib import Path

import pytest

from minitransformer.cli import parser
from minitransformer.spec import OPS, QUANTISED_OPS, UPDATE_OPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def gather():
    spec = importlib.util.spec_from_file_location("gather_specs", ROOT / "docs" / "gather_specs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_op_is_gathered_in_order(gather):
    found = list(gather.specs(gather.OPS))
    assert set(OPS + UPDATE_OPS) <= set(found) <= set(OPS + QUANTISED_OPS + UPDATE_OPS)
    assert found == [op for op in gather.ORDER if op in found]


def test_a_stale_page_is_noticed(gather, tmp_path, monkeypatch, capsys):
    page = tmp_path / "execution_spec.md"
    monkeypatch.setattr(gather, "ROOT", tmp_path)
    monkeypatch.setattr(gather, "PAGE", page)
    assert gather.main(["--check"]) == 1 and "is stale: run `make docs`" in capsys.readouterr().err
    assert gather.main([]) == 0 and gather.main(["--check"]) == 0
    page.write_text(page.read_text().replace("truncated", "rounded", 1))
    assert gather.main(["--check"]) == 1


@pytest.mark.parametrize("source", ['"""Another file."""\nSPEC = "linear/1"\n', 'SPEC = "linear/1"\n'])
def test_a_spec_without_its_first_line_is_refused(gather, tmp_path, source):
    (tmp_path / "linear.py").write_text(source)
    with pytest.raises(ValueError, match="linear.py: its docstring must start with"):
        gather.specs(tmp_path)


def test_an_op_without_a_place_is_refused(gather, tmp_path):
    (tmp_path / "newop.py").write_text('"""Execution spec newop/1: new."""\nSPEC = "newop/1"\n')
    with pytest.raises(ValueError, match="newop.py: has a SPEC but no place"):
        gather.specs(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_tests_exist(page):
    text = page.read_text(encoding="utf-8")
    links = {target for target in re.findall(r"\]\(([^)#:]+)\)", text)}
    for target in links:
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    names = re.findall(r"`((?:minitransformer|alignment_tests|docs|examples|benchmarks)/[\w./]+)(?:::(\w+))?`", text)
    for path, test in names:
        assert (ROOT / path).exists(), f"{page.name} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{page.name} names {path}::{test}"


def test_named_sections_exist():
    """A link to a section names a heading as GitHub makes its anchor: lower case, no punctuation, - for a space."""
    headings = {
        page: {
            re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
            for text in re.findall(r"^#+ (.+)$", page.read_text(), re.M)
        }
        for page in PAGES
    }
    links = [(page, *found) for page in PAGES for found in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text())]
    assert links and not [
        f"{page.name}: {target}#{anchor}"
        for page, target, anchor in links
        if anchor not in headings.get((page.parent / target).resolve() if target else page, ())
    ]


def test_commands_of_the_readme_parse():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *(?:\$ )?(?:\.venv/bin/)?minitransformer (\w.*)$", text, re.MULTILINE)
    assert commands
    for line in commands:
        parser().parse_args(line.split())


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
