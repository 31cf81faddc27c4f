"""The self-checks compare what they say, and name an operator of which one bit is wrong."""

import importlib
import pkgutil

import pytest
import torch

from minitransformer import ops
from minitransformer.tuning import proof, reverify, selfcheck
from minitransformer.tuning.selfcheck import cases

CPU = torch.device("cpu")
# mma and rounding are in all of them.
INSIDE = {"mma", "rounding"}


@pytest.fixture
def only(monkeypatch):
    def keep(name):
        monkeypatch.setattr(selfcheck, "CHECKS", {name: selfcheck.CHECKS[name]})

    return keep


def test_every_operator_with_a_spec_is_checked():
    names = {m.name for m in pkgutil.iter_modules(ops.__path__) if not m.ispkg}
    specs = {n for n in names if hasattr(importlib.import_module(f"minitransformer.ops.{n}"), "SPEC")}
    assert specs - INSIDE <= set(selfcheck.CHECKS), specs - INSIDE - set(selfcheck.CHECKS)


@pytest.mark.parametrize("name", selfcheck.CHECKS)
def test_a_case_is_the_same_on_one_machine(name, only):
    """All of a check's code but the kernels: every output of both sides is compared."""
    only(name)
    (found,) = reverify.results(CPU)
    assert found.wrong is None and found.outputs > 30


class _Flipped:
    """The GPU's side of the n-th case with one bit of its last output flipped."""

    def __init__(self, real, n):
        self.real, self.left = real, n

    def __call__(self, *args):
        made, self.left = self.real(*args), self.left - 1
        if self.left == -1:
            flat = made[-1].reshape(-1).clone()
            bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
            bits[-1] ^= 1
            made[-1] = flat.reshape(made[-1].shape)
        return made


@pytest.mark.parametrize("name", selfcheck.CHECKS)
def test_one_wrong_bit_in_the_first_case_is_named(name, only, monkeypatch):
    only(name)
    monkeypatch.setattr(cases, "on_gpu", _Flipped(cases.on_gpu, 0))
    (found,) = reverify.results(CPU)
    assert found.name == name and "where the spec says 0x" in found.wrong and "(1 of " in found.wrong, found.wrong


@pytest.mark.parametrize("name", ["rope", "router", "swiglu", "rms_norm", "embedding"])
def test_one_wrong_bit_in_the_last_gradients_is_named(name, only, monkeypatch):
    last = len(list(selfcheck.CHECKS[name](CPU))) - 1
    only(name)
    monkeypatch.setattr(cases, "on_gpu", _Flipped(cases.on_gpu, last))
    (found,) = reverify.results(CPU)
    assert "gradients: row " in found.wrong and "(1 of " in found.wrong, found.wrong


def test_a_difference_is_found_in_every_type():
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
        want = torch.zeros(3, 2, 4, dtype=dtype)
        got = want.clone()
        got[1, 1, 2] = 1
        found = proof.first_difference(got, want)
        assert (found.row, found.column, found.want, found.count, found.of) == (1, 6, 0, 1, 24) and found.got > 0
        assert proof.first_difference(want, want) is None
    minus = torch.tensor(-0.0)
    assert proof.first_difference(minus, -minus).got == 0x80000000
    assert proof.first_difference(torch.empty(0, 4), torch.empty(0, 4)) is None
