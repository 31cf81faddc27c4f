"""Settings of the process that must not move a bit: torch's default dtype, and flushed subnormals."""

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
