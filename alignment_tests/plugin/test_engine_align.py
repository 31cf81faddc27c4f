"""`minitransformer align` with servers that it starts, and with stock SGLang, whose differences every law must show."""

import pytest

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.test_engine import P
from minitransformer.cli import main
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang.send import ROUTES
from minitransformer.plugins.sglang.sync import sync

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A checkpoint with sparse layers only, for SGLang's own class knows no others, and a file of prompts."""
    directory = tmp_path_factory.mktemp("stock")
    engines.tiny(sparse_layers=(True,) * 3).save_pretrained(directory / "model")
    write_prompts(directory)
    return directory


@pytest.fixture(scope="module")
def stock(sparse):
    with engines.start(sparse / "model", ["--attention-backend", "torch_native"], stock=True) as server:
        yield server


def write_prompts(directory) -> None:
    (directory / "prompts").write_text("".join(f'{{"ids": {ids}}}\n' for ids in P[:3]))


def line(model, directory) -> list[str]:
    return f"--model {model} --prompts {directory}/prompts --no-contrast".split()


def test_stock_sglang_differs_and_is_named(stock):
    """The laws see what SGLang's own model does."""
    model = engines.tiny(sparse_layers=(True,) * 3)
    assert stock.client.identity() is None
    assert laws.decode_equals_rescoring(stock.client, P).differing
    found = laws.learner_equals_engine(model, stock.client, P)
    assert found.differing and found.largest < 1, f"another model, or none: {found}"


def test_stock_shows_its_gap_and_proves_nothing(sparse, stock, capsys):
    """Named, its gap shown, exit status 1; it takes weights, and nothing is proven."""
    assert main(["align", *line(sparse / "model", sparse), "--sampler", stock.url]) == 1
    out = capsys.readouterr().out
    assert "a STOCK server, SGLang's own model" in out and "DIFFERENT: " in out
    learner = Learner(engines.tiny(sparse_layers=(True,) * 3))
    for route in ROUTES:
        report = sync(learner, stock, route)
        assert not report.equal and report.probe.differing and report.verdict().startswith("NOT PROVEN")


@pytest.mark.slow
def test_align_starts_a_stock_server(sparse, capsys):
    assert main(["align", *line(sparse / "model", sparse), "--sampler", "sglang", "--stock"]) == 1
    out = capsys.readouterr().out
    assert "a STOCK server, SGLang's own model" in out
    assert "the learner runs on its own operators: SGLang's kernels need a GPU" in out


def test_align_starts_a_server(checkpoint, tmp_path, capsys):
    write_prompts(tmp_path)
    command = ["align", *line(checkpoint, tmp_path), "--recipe", "nvfp4_per_token", "--sampler", "sglang"]
    assert main([*command, "--sglang-arg=--chunked-prefill-size 16"]) == 0
    out = capsys.readouterr().out
    assert "EQUAL: 0 of " in out and "expert_ids" in out
    assert main([*command, "--sglang-arg=--kv-cache-dtype fp8_e5m2"]) == 2
    assert "keys and values are BF16" in capsys.readouterr().err
