"""Laws between engines: chunked prefill, pages, memory pressure, number formats, updated weights; and stock SGLang."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.engines import VOCAB
from alignment_tests.plugin.test_engine import P, zero
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample
from minitransformer.plugins.sglang.checksums import checksums
from minitransformer.plugins.sglang.launch import environment

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("chunk", [16, pytest.param(64, marks=pytest.mark.slow)])  # quick with pages of 16 below
def test_chunked_prefill_equals_whole(engine, checkpoint, chunk):
    with engines.start(checkpoint, ["--chunked-prefill-size", str(chunk)]) as chunked:
        zero(laws.engines_agree(engine.client, chunked.client, P))
        zero(laws.decode_equals_rescoring(chunked.client, P))
        zero(laws.alone_equals_batch(chunked.client, P[:4], 0.6, 8))
        log = chunked.log.read_text()
    assert f"#new-token: {chunk}," in log and f"#new-token: {chunk + 1}" not in log


def test_prompts_and_decoding_requests_in_one_step(engine, checkpoint):
    """SGLang's mixed chunks: a chunk of a prompt beside tokens that are being decoded."""
    with engines.start(checkpoint, ["--chunked-prefill-size", "32", "--enable-mixed-chunk"]) as mixed:
        zero(laws.engines_agree(engine.client, mixed.client, P, 1.0, 40))
        zero(laws.engines_agree(engine.client, mixed.client, P, 0.6, 40))


@pytest.mark.parametrize("chunk", ["64", pytest.param("2048", marks=pytest.mark.slow)])
def test_pages_of_16(engine, checkpoint, chunk):
    """Hits of no page, exactly one, one but for a token, and several; and the same bits as with pages of one."""
    with engines.start(checkpoint, ["--page-size", "16", "--chunked-prefill-size", chunk]) as paged:
        zero(laws.engines_agree(engine.client, paged.client, P))
        for prefix, reused in ((15, 0), (16, 16), (17, 16), (31, 16), (32, 32), (100, 96)):
            zero(laws.hit_equals_miss(paged.client, P[7][:prefix], P[2], reused))


def test_a_retracted_request_gives_the_same(engine, checkpoint):
    """A pool of 300 tokens for 24 requests of up to 75."""
    ids = laws.prompts([20 + i for i in range(24)], VOCAB, seed=5)
    with engines.start(checkpoint, ["--max-total-tokens", "300", "--schedule-conservativeness", "0.1"]) as small:
        found, retractions = laws.squeezed(small.client, engine.client, ids, 32)
    zero(found)
    assert any(retractions), "the pool was never short: the test shows nothing"


def test_two_engines_give_the_same(engine, checkpoint):
    with engines.start(checkpoint) as other:
        for temperature in (0.6, 1.0, 0.0):
            zero(laws.engines_agree(engine.client, other.client, P, temperature))
        assert other.client.checksums() == engine.client.checksums()


def check_against(model, server) -> None:
    """One engine's laws in short, and that it holds this very model."""
    found = server.client.checksums()
    assert {name: found[name] for name in checksums(model)} == checksums(model)
    assert server.client.identity()["fingerprint"] == model.spec.fingerprint()
    zero(laws.learner_equals_engine(model, server.client, P))
    zero(laws.learner_equals_engine(model, server.client, P[:3], 0.6))
    zero(laws.decode_equals_rescoring(server.client, P))
    zero(laws.alone_equals_batch(server.client, P[2:], 0.6, 8))


def updated(steps: int):
    """The tiny model after some updates of a learner."""
    model = engines.tiny()
    learner = Learner(model, lr=1e-2)
    for _ in range(steps):
        learner.update([Sample(ids, 3) for ids in laws.prompts([12, 9], VOCAB, seed=9)], nll)
    return model


def test_an_update_from_disk_is_the_learners_model(engine, checkpoint, tmp_path):
    """Before, after, and back: the engine is the learner's model each time; the same weights again change nothing."""
    before, after = engines.tiny(), updated(2)
    after.save_pretrained(tmp_path / "after")
    check_against(before, engine)
    first = laws.run(engine.client, P)
    laws.update_from_disk(engine.client, checkpoint)
    zero(laws.same(first, laws.run(engine.client, P)))
    laws.update_from_disk(engine.client, tmp_path / "after")
    check_against(after, engine)
    assert laws.same(first, laws.run(engine.client, P)).differing, "the update changed no output"
    laws.update_from_disk(engine.client, checkpoint)
    check_against(before, engine)
    zero(laws.same(first, laws.run(engine.client, P)))


def test_the_offline_engine(engine, checkpoint):
    """sglang.Engine in a script, with nothing but the environment: the log-probs of the server."""
    script = str(Path(__file__).with_name("offline.py"))
    run = subprocess.run(
        [sys.executable, script, str(checkpoint), json.dumps(P)], env=environment(cpu=True), capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert engines.LIVE in run.stderr + run.stdout, run.stderr[-2000:]
    [line] = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    wanted = [out.log_probs for out in laws.run(engine.client, P)]
    assert json.loads(line.removeprefix("RESULT ")) == wanted
