"""Damaged trace files: each is refused with one line before anything is said about it."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from alignment_tests.model.checkpoints import refused
from minitransformer.alignment.trace import Trace

IDS = {"prompt_ids": [1], "token_ids": [2]}
TENSORS = {
    "keys": torch.tensor([[0, 0], [0, 1]]),
    "stage/layers.0.qkv": torch.zeros(2, 4),
    "rows/layers.0.qkv": torch.tensor([0, 1]),
}
METADATA = {
    "format": "minitransformer-trace/1",
    "spec": "{}",
    "requests": json.dumps({"0": IDS}),
    "stages": '["layers.0.qkv"]',
}


def named(stage):
    """The metadata and tensors of a trace whose only stage has this name."""
    tensors = {"keys": TENSORS["keys"]} | {
        f"{k}/{stage}": TENSORS[f"{k}/layers.0.qkv"].clone() for k in ("stage", "rows")
    }
    return {"stages": json.dumps([stage])}, tensors


def write(path, metadata, tensors):
    save_file({k: v for k, v in (TENSORS | tensors).items() if v is not None}, path, metadata=METADATA | metadata)


def test_the_undamaged_one_is_read(tmp_path):
    write(tmp_path / "t", {}, {})
    loaded = Trace.load(tmp_path / "t")
    assert loaded.stages == ["layers.0.qkv"] and loaded.requests == {0: IDS}
    loaded.save(tmp_path / "u")
    with safe_open(tmp_path / "u", "pt") as file:
        assert file.metadata() == METADATA


BAD = [
    ({"requests": json.dumps({"first": IDS})}, {}, "request 'first'"),
    ({"requests": json.dumps({"1" * 5000: IDS})}, {}, "request '111"),
    ({"requests": json.dumps({"0": {"token_ids": [2]}})}, {}, "request 0 lacks prompt_ids"),
    ({"requests": json.dumps({"0": [1, 2]})}, {}, "request 0"),
    ({"requests": json.dumps({"0": IDS | {"token_ids": [1.5]}})}, {}, "token_ids"),
    ({"requests": json.dumps({"0": IDS | {"prompt_ids": "ab"}})}, {}, "prompt_ids"),
    ({"requests": "[]"}, {}, "requests is []"),
    ({"requests": '{"0": ' + "1" * 5000 + "}"}, {}, "an integer of thousands of digits"),
    ({"requests": "[" * 100_000}, {}, "nested too deeply"),
    ({"spec": '"mini/1"'}, {}, "spec is 'mini/1'"),
    ({"spec": "{"}, {}, "spec: not valid JSON"),
    ({"stages": '"layers.0.qkv"'}, {}, "stages is"),
    ({"stages": "[3]"}, {}, "3 is no name"),
    ({"stages": '["layers.0.qkv", "layers.0.qkv"]'}, {}, "stands twice"),
    ({"stages": '["logits"]'}, {}, "stage/logits is missing"),
    (*named("layers.x.qkv"), "'layers.x.qkv' is no name"),
    (*named("layers.0"), "'layers.0' is no name"),
    (*named("layers"), "'layers' is no name"),
    (*named("log\nits"), "is no name"),
    ({}, {"rows/layers.0.qkv": torch.tensor([0.0, 1.0])}, "do not fit"),
    ({}, {"rows/layers.0.qkv": torch.tensor([0, 2])}, "do not fit"),
    ({}, {"rows/layers.0.qkv": torch.tensor([1, 1])}, "do not fit"),
    ({}, {"rows/layers.0.qkv": torch.tensor([[0, 1]])}, "do not fit"),
    ({}, {"rows/layers.0.qkv": None}, "rows/layers.0.qkv is missing"),
    ({}, {"stage/layers.0.qkv": torch.zeros(2, 4, dtype=torch.float64)}, "no bit view"),
    ({}, {"stage/layers.0.qkv": torch.tensor(0.0)}, "do not fit"),
    ({}, {"keys": torch.tensor([0, 1])}, "keys must be int64 pairs"),
    ({}, {"keys": torch.tensor([[0, 1, 2], [0, 2, 3]])}, "keys must be int64 pairs"),
    ({}, {"keys": torch.zeros(2, 2)}, "keys must be int64 pairs"),
    ({}, {"keys": torch.zeros(2, 2, dtype=torch.int64)}, "keys must be distinct"),
]


@pytest.mark.parametrize(
    ("metadata", "tensors", "word"), BAD, ids=[f"{i} {word[:20]}" for i, (*_, word) in enumerate(BAD)]
)
def test_damage_is_named(tmp_path, metadata, tensors, word):
    write(tmp_path / "t", metadata, tensors)
    message = refused(lambda: Trace.load(tmp_path / "t"), str(tmp_path / "t"), "a damaged trace", word)
    assert len(message) < 400


@pytest.mark.parametrize("key", ["spec", "requests", "stages"])
def test_missing_metadata_is_named(tmp_path, key):
    save_file(TENSORS, tmp_path / "t", metadata={k: v for k, v in METADATA.items() if k != key})
    refused(lambda: Trace.load(tmp_path / "t"), f"{key} is missing")
