"""Laws through a real engine with prompts that end about position 1,024, where attention begins another segment."""

import pytest

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.engines import LONG_CONTEXT, VOCAB
from alignment_tests.plugin.test_engine import zero

pytestmark = pytest.mark.sglang
ROOM = ["--max-total-tokens", "16384"]
P = laws.prompts((1020, 1023, 1025, 40, 2050), VOCAB, 21)
NEW = 6  # from 1,020 and 1,023 on they cross the border


def model():
    return engines.tiny(max_positions=LONG_CONTEXT)


@pytest.fixture(scope="module")
def long_engine(long_checkpoint):
    with engines.start(long_checkpoint, [*ROOM, "--enable-return-routed-experts"]) as server:
        yield server


def test_decode_across_the_border(long_engine):
    zero(laws.decode_equals_rescoring(long_engine.client, P, 1.0, NEW))
    zero(laws.decode_equals_fresh_prefill(long_engine.client, P[1:2], 0.6, 3))
    zero(laws.alone_equals_batch(long_engine.client, P[1:4], 0.6, NEW))


def test_learner_and_our_sampler(long_engine):
    zero(laws.learner_equals_engine(model(), long_engine.client, P, 0.6, NEW))
    zero(laws.sampler_equals_engine(model(), long_engine.client, P, 1.0, NEW))
    zero(laws.experts_agree(model(), long_engine.client, P[2:4], 2))


@pytest.mark.parametrize("prefix", [1023, 1024, 1025, 2040])
def test_radix_hit_about_the_border(long_engine, prefix):
    zero(laws.hit_equals_miss(long_engine.client, P[4][:prefix], P[3][:8], prefix, NEW))


def test_chunks_pages_and_retraction_across_the_border(long_engine, long_checkpoint):
    """Chunks of 400 positions: the third has both sides of 1,024. The long request is the one that is turned out."""
    few = ["--max-total-tokens", "2400", "--schedule-conservativeness", "0.1"]
    with engines.start(long_checkpoint, [*few, "--chunked-prefill-size", "400", "--page-size", "16"]) as other:
        zero(laws.engines_agree(long_engine.client, other.client, P, 1.0, NEW))
        for prefix, reused in ((1023, 1008), (1030, 1024)):
            zero(laws.hit_equals_miss(other.client, P[4][:prefix], P[3][:8], reused, NEW))
        ids = laws.prompts((1022, *range(30, 58)), VOCAB, 5)
        for _ in range(3):  # which request is turned out is a matter of timing
            found, retractions = laws.squeezed(other.client, long_engine.client, ids, 40)
            zero(found)
            if retractions[0]:
                break
    assert retractions[0] > 0, retractions
