"""Tests with a real SGLang engine; `make test-sglang` runs them in the environment that has one."""

import importlib.util

import pytest

from alignment_tests.plugin import engines

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_engine*.py", "test_mutations.py"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The tiny BF16 checkpoint of every engine."""
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    engines.tiny().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory):
    """The same weights; contexts of several segments of attention."""
    directory = tmp_path_factory.mktemp("long") / "tiny"
    engines.tiny(max_positions=engines.LONG_CONTEXT).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def engine(checkpoint):
    """One engine for all tests of a process that leave its weights as they found them: radix cache on, whole prefill,
    expert ids captured."""
    with engines.start(checkpoint, ["--enable-return-routed-experts"]) as server:
        yield server
