"""`compare` says EQUAL only where everything was compared: what is left out is status 1 and a line."""

import json

import pytest
import torch

from minitransformer.alignment.trace import Trace
from minitransformer.batch import Batch
from minitransformer.cli import main

PROMPT, TOKENS = [1, 2, 3], [4, 5]
POSITIONS = range(4)  # the last token is never an input


def trace(positions=POSITIONS, requests=(0,), stages=("embedding", "logits"), tokens=TOKENS):
    made = Trace()
    for request in requests:
        batch = Batch.packed([list(range(max(positions) + 1))], request_ids=[request])
        note = Trace.bind(made, batch) if len(positions) == len(batch.ids_T) else None
        for stage in stages:
            rows = torch.arange(10.0 * request, 10.0 * request + len(positions))[:, None]
            if note:
                note(stage, rows)
            else:
                made.take(stage, made.keys.number((request, p) for p in positions), rows + min(positions))
        made.requests[request] = {"prompt_ids": PROMPT, "token_ids": list(tokens)}
    return made


@pytest.fixture
def compare(tmp_path, capsys):
    def call(a, b):
        a.save(tmp_path / "a")
        b.save(tmp_path / "b")
        capsys.readouterr()
        status = main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "r.json")])
        return status, capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())

    return call


def test_equal_also_where_a_prefix_cache_hit_spared_rows(compare):
    for b in (trace(), trace(positions=range(2, 4))):
        status, out, found = compare(trace(), b)
        assert status == 0 and found["equal"] and "EQUAL: no element differs, in 2 stages" in out, out
        assert "DIFFERENT" not in out and found["not_compared"] == []


@pytest.mark.parametrize(
    ("b", "line"),
    [
        (dict(stages=("embedding",)), "logits: no row was compared"),
        (dict(requests=(0, 1)), "only in the second trace: request 1"),
        (dict(positions=range(3)), "embedding: 1 rows of generated tokens are in one trace only"),
        (dict(positions=range(3, 4)), "logits: 1 rows of generated tokens are in one trace only"),
    ],
)
def test_what_was_not_compared_is_not_called_equal(compare, b, line):
    for pair in ((trace(), trace(**b)), (trace(**b), trace())):
        status, out, found = compare(*pair)
        assert status == 1 and not found["equal"] and found["first_diverging_stage"] is None
        assert line.replace("second ", "") in out.replace("second ", "").replace("first trace", "trace"), out
        assert "DIFFERENT: 0 of" in out and "were not compared whole" in out and "no element differs" not in out
        assert found["not_compared"]


def test_other_ids_are_not_called_equal(compare):
    status, out, found = compare(trace(), trace(tokens=[4, 6]))
    assert status == 1 and not found["equal"] and "request 0: the ids differ from position 4 on" in out
    assert "DIFFERENT: 0 of 8 elements in 0 of 2 stages; 1 requests have other ids" in out
