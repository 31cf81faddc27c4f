"""trace.py, compare.py: rows find each other by (request, position), whatever batch computed them."""

import pytest
import torch

from minitransformer.alignment.compare import (
    ComparingTrace,
    compare,
    first_divergence,
    nothing_compared,
    unlike_requests,
)
from minitransformer.alignment.trace import STAGES, Trace, TraceConflict, stage_kind, stage_order
from minitransformer.alignment.ulp import NAN_ULP
from minitransformer.batch import Batch
from minitransformer.errors import InputError

SEQUENCES = [[1, 2, 3, 4, 5], [6, 7, 8]]


def value(request, position, width=4):
    """Bits that only this row has."""
    return torch.full((width,), 100.0 * request + position) + torch.arange(width) / 8


def rows_of(batch, width=4, dtype=torch.bfloat16):
    rows = []
    for s, request in enumerate(batch.request_ids):
        positions = batch.positions_T[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]].tolist()
        rows += [value(request, p, width) for p in positions]
    return torch.stack(rows).to(dtype)


def fill(trace, batch):
    note = trace.bind(batch)
    x = rows_of(batch)
    note("embedding", x)
    note("layers.0.qkv", x + 1)
    logits = rows_of(batch, 6, torch.float32)
    note("logits", logits if batch.logit_rows_L is None else logits[batch.logit_rows_L])


def packed():
    trace = Trace()
    fill(trace, Batch.packed(SEQUENCES))
    return trace


def chunked(strict=True):
    """The same rows from three passes: chunks, another order of requests, logits of the last rows only."""
    trace = Trace(strict=strict)
    fill(trace, Batch.paged([[6, 7], [1, 2, 3]], [0, 0], [[0], [1]], 8, logit_rows=[4], request_ids=[1, 0]))
    fill(trace, Batch.paged([[4, 5], [8]], [3, 2], [[1], [0]], 8, logit_rows=[1, 2], request_ids=[0, 1]))
    return trace


def by_stage(results):
    return {r.stage: r for r in results}


def test_chunks_match_the_packed_pass():
    results = by_stage(compare(chunked(), packed()))
    assert [r.rows for r in results.values()] == [8, 8, 3]
    assert all(r.equal for r in results.values())
    assert results["logits"].only_b == 5 and results["embedding"].only_a == 0
    assert list(results) == ["embedding", "layers.0.qkv", "logits"]


def test_rows_can_be_looked_up():
    trace = chunked()
    assert torch.equal(trace.row("embedding", 0, 4), value(0, 4).bfloat16())
    assert trace.row("embedding", 0, 9) is None and trace.row("swiglu", 0, 0) is None
    assert trace.row("logits", 0, 0) is None


def test_a_differing_element_is_found_counted_and_placed():
    a, b = packed(), packed()
    row = b.row("layers.0.qkv", 1, 2)
    row[1:3] += torch.tensor([2.0, 1.0])
    b.row("layers.0.qkv", 0, 3)[3] = float("nan")
    results = compare(a, b)
    worst = first_divergence(results)
    assert worst.stage == "layers.0.qkv" and worst.differing == 3 and worst.max_ulp == NAN_ULP
    assert worst.places == ((0, 3, 3), (1, 2, 1), (1, 2, 2)) and worst.first == (0, 3, 3)
    assert worst.values[1] == (a.row("layers.0.qkv", 1, 2)[1].item(), row[1].item())
    assert by_stage(results)["embedding"].equal


def test_the_sign_of_zero_is_a_difference():
    a, b = Trace(), Trace()
    batch = Batch.packed([[1]])
    a.bind(batch)("embedding", torch.tensor([[0.0]]))
    b.bind(batch)("embedding", torch.tensor([[-0.0]]))
    (result,) = compare(a, b)
    assert result.differing == 1 and result.max_ulp == 0 and not result.equal


def test_comparing_on_the_fly_says_the_same_as_two_traces():
    comparing = ComparingTrace(chunked())
    fill(comparing, Batch.packed(SEQUENCES))
    assert comparing.results() == compare(chunked(), packed())


def test_a_second_run_that_computes_rows_twice_has_them_once():
    comparing = ComparingTrace(chunked())
    for _ in range(2):
        fill(comparing, Batch.packed([*SEQUENCES, [9]]))
    results = by_stage(comparing.results())
    assert (results["embedding"].only_a, results["embedding"].only_b, results["embedding"].rows) == (0, 1, 16)
    assert (results["logits"].only_a, results["logits"].only_b) == (0, 6)


def test_missing_stages_and_rows_are_shown():
    a, b = Trace(), packed()
    a.bind(Batch.packed(SEQUENCES[:1]))("final_norm", torch.zeros(5, 2))
    results = by_stage(compare(a, b))
    assert results["final_norm"].only_a == 5 and results["final_norm"].rows == 0
    assert results["embedding"].only_b == 8 and nothing_compared(results.values())


def test_log_prob_of_a_token_lies_in_the_row_that_scored_it():
    trace = Trace()
    trace.note_log_probs(7, [3, 4], [-0.5, -0.25])
    assert trace.row("log_prob", 7, 2).item() == -0.5 and trace.row("log_prob", 7, 3).item() == -0.25
    trace.note_log_probs(7, [], [])
    assert trace.row("log_prob", 7, 4) is None


def test_a_row_computed_again_must_have_the_same_bits():
    again = Batch.packed([[1, 2, 3, 4, 5, 9]])
    trace = chunked()
    fill(trace, again)
    assert all(r.equal for r in trace.conflicts()) and trace.conflicts()[0].rows == 5
    assert torch.equal(trace.row("embedding", 0, 5), value(0, 5).bfloat16())
    other = rows_of(again)
    other[2, 1] += 4
    with pytest.raises(TraceConflict, match="embedding"):
        trace.bind(again)("embedding", other)
    recording = chunked(strict=False)
    recording.bind(again)("embedding", other)
    (conflict,) = recording.conflicts()
    assert conflict.differing == 1 and conflict.first == (0, 2, 1)
    recording.bind(Batch.packed(SEQUENCES))("embedding", 2 * rows_of(Batch.packed(SEQUENCES)))
    (conflict,) = recording.conflicts()
    # Of both requests, the first one's rows twice; 0 is the only element that is not doubled.
    assert (conflict.rows, conflict.elements, conflict.differing) == (13, 52, 1 + 31)
    assert recording.conflicts({1})[0].elements == 12
    assert torch.equal(recording.row("embedding", 0, 2), value(0, 2).bfloat16()), "the first bits stay"


def test_patterns_choose_stages():
    trace = Trace(["layers.*.qkv", "logits"])
    fill(trace, Batch.packed(SEQUENCES))
    assert trace.stages == ["layers.0.qkv", "logits"]


def test_wrong_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="embedding: 3 rows for 8 tokens"):
        Trace().bind(Batch.packed(SEQUENCES))("embedding", torch.zeros(3, 2))


def test_order_of_the_stages():
    names = ["log_prob", "layers.10.qkv", "other", "layers.2.combine", "embedding", "layers.2.qkv", "logits"]
    expected = ["embedding", "layers.2.qkv", "layers.2.combine", "layers.10.qkv", "logits", "log_prob", "other"]
    assert sorted(names, key=stage_order) == expected
    assert stage_kind("layers.10.qkv") == ("qkv", 10) and stage_kind("logits") == ("logits", None)
    assert len(set(STAGES)) == len(STAGES)


def test_saved_and_loaded(tmp_path):
    trace = chunked()
    trace.spec = {"name": "mini/1", "options.rms_eps": 1e-6}
    trace.requests = {0: {"prompt_ids": [1, 2, 3], "token_ids": [4, 5]}}
    trace.note_log_probs(0, [3], [-1.5])
    trace.save(tmp_path / "a.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    loaded = Trace.load(tmp_path / "a.safetensors")
    assert loaded.spec == trace.spec and loaded.requests == trace.requests and loaded.stages == trace.stages
    for result in compare(trace, loaded):
        assert result.equal and result.rows and not result.only_a and not result.only_b


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="no such trace"):
        Trace.load(path)
    path.write_bytes(b"hello")
    with pytest.raises(InputError, match="not a readable safetensors"):
        Trace.load(path)
    chunked().save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="not a readable safetensors"):
        Trace.load(path)
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="not a trace"):
        Trace.load(path)
    save_file({"w": torch.zeros(1)}, path, metadata={"format": "minitransformer-trace/1", "stages": "[]"})
    with pytest.raises(InputError, match="damaged"):
        Trace.load(path)


def test_other_specs_and_other_models_are_refused():
    a, b = packed(), packed()
    a.spec, b.spec = {"options.rms_eps": 1e-6, "x": 1}, {"options.rms_eps": 1e-5, "x": 1}
    with pytest.raises(InputError, match=r"options.rms_eps: 1e-06 != 1e-05$"):
        compare(a, b)
    assert first_divergence(compare(a, b, any_spec=True)) is None
    wide = Trace()
    wide.bind(Batch.packed(SEQUENCES))("embedding", torch.zeros(8, 9))
    with pytest.raises(InputError, match="stage embedding.*different models"):
        compare(packed(), wide)


def test_requests_with_other_ids_are_named():
    a, b = packed(), packed()
    a.requests = {0: {"prompt_ids": [1, 2], "token_ids": [3, 4]}, 1: {"prompt_ids": [6], "token_ids": [7]}}
    b.requests = {0: {"prompt_ids": [1, 2], "token_ids": [3, 9]}, 1: {"prompt_ids": [6], "token_ids": [7, 8]}}
    assert unlike_requests(a, b) == [
        "request 0: the ids differ from position 3 on",
        "request 1: the ids differ from position 2 on",
    ]
    assert unlike_requests(a, a) == []
