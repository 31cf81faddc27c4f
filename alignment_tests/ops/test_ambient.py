"""Settings of the process that must not move a bit: torch's default dtype, flushed subnormals, a fork."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alignment_tests import laws
from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer.batch import Batch
from minitransformer.ops import logprob, rope, router
from minitransformer.ops.swiglu import swiglu


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_moves_nothing(dtype):
    model = tiny_model(1)
    batch = Batch.packed(laws.sequences(model, (20, 3)))
    want = laws.logits(model, batch)
    scores = logprob.logprob(want, batch.ids_T)
    weights, _ = router.router(want[:, :8].bfloat16(), 2, True)
    try:
        torch.set_default_dtype(dtype)
        assert_bits_equal(laws.logits(model, batch), want, "logits")
        assert_bits_equal(logprob.logprob(want, batch.ids_T), scores, "log-probs")
        assert_bits_equal(router.router(want[:, :8].bfloat16(), 2, True)[0], weights, "routing weights")
        assert_bits_equal(rope.rope_table(16, 1e4, 96), model.rope_table, "rope table")
    finally:
        torch.set_default_dtype(torch.float32)


PACKAGE = Path(laws.__file__).parents[1] / "minitransformer"
FLOATS = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace"}  # what follows the default dtype


def without_a_dtype(text: str) -> Iterator[int]:
    """Lines of torch.empty(...) and the like that leave the dtype to the process."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FLOATS:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not any(word.arg in ("dtype", None) for word in node.keywords):
                yield node.lineno


def test_no_tensor_takes_the_default_dtype():
    """The kernels of a GPU would write FP32 past the end of a tensor that a process with another default made."""
    assert list(without_a_dtype("torch.empty(3, device=home); torch.empty(3, dtype=x.dtype); numpy.empty(3)")) == [1]
    found = {str(path.relative_to(PACKAGE)): list(without_a_dtype(path.read_text())) for path in PACKAGE.rglob("*.py")}
    integers = "plugins/sglang/prefill_graphs.py"  # torch.full of an integer is int64
    assert not {name: lines for name, lines in found.items() if lines and name != integers}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_self_checks_under_another_default_dtype(dtype):
    from minitransformer.tuning import reverify

    try:
        torch.set_default_dtype(dtype)
        wrong = [result for result in reverify.results(torch.device("cpu")) if result.wrong]
    finally:
        torch.set_default_dtype(torch.float32)
    assert not wrong


def test_flushed_subnormals_are_refused():
    x = torch.full((4, 32), 2.0**-64).bfloat16()
    want = swiglu(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(RuntimeError, match="set_flush_denormal"):
            swiglu(x)
    finally:
        torch.set_flush_denormal(False)
    assert_bits_equal(swiglu(x), want)


FORK = """
import os, torch
from minitransformer.ops.linear import linear
torch.set_num_threads(2)
x, w = torch.ones(64, 32).bfloat16(), torch.ones(48, 32).bfloat16()
want = linear(x, w)
child = os.fork()
same = torch.equal(linear(x, w), want)
if child:
    same &= os.waitpid(child, 0)[1] == 0
os._exit(not same)
"""


def test_a_forked_child_has_threads_of_its_own():
    """With its parent's pool, whose threads it does not have, it would wait for ever."""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=120).returncode == 0
