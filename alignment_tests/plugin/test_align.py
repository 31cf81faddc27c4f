"""`align --sampler` against a stand-in server: equal, different, stock, and what is told before anything is sampled."""

import json
import re

import pytest

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin.fake import Fake
from minitransformer.cli import main
from minitransformer.errors import InputError
from minitransformer.plugins.sglang.align import EngineAlignment, align_engine
from minitransformer.plugins.sglang.client import Client
from minitransformer.sampler.sequence import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11], [1, 2, 3, 4, 5, 6, 7, 8, 30, 31]]
ALL_SPARSE = dict(sparse_layers=(True,) * 3)


def run(server: Fake, model=None, temperature: float = 0.7) -> EngineAlignment:
    params = [SamplingParams(6, temperature, seed=i) for i in range(len(PROMPTS))]
    return align_engine(model or tiny_model(0), Client(server.url), PROMPTS, params)


def check_equal() -> None:
    with Fake(tiny_model(0)) as server:
        found = run(server)
    assert found.equal and not found.stock, found
    assert {r.stage: r.rows for r in found.stages} == {"log_prob": 18, "prompt_log_prob": 17}


def test_a_server_that_agrees_is_equal():
    check_equal()


def test_the_servers_own_prefill_is_shown_where_its_temperature_is_1():
    with Fake(tiny_model(0)) as server:
        assert isinstance(run(server).rescored, str)
        for temperature in (1.0, 0.0):
            assert (found := run(server, temperature=temperature)).equal
            assert (found.rescored.tokens, found.rescored.differing) == (18, 0)


def test_a_server_that_computes_otherwise_differs():
    with Fake(tiny_model(0)) as server:
        server.model.layers[0].eps = 1e-3
        found = run(server)
    assert not found.equal and found.gap.differing == found.gap.tokens == 18


def test_lost_log_probs_are_no_equality():
    """A server that leaves out what it should tell."""
    with Fake(tiny_model(0)) as server:
        whole = server.generate
        server.generate = lambda body: [
            a | {"meta_info": a["meta_info"] | {"input_token_logprobs": []}} for a in whole(body)
        ]
        with pytest.raises(InputError, match="prompts.0.: the server gave 6 log-probs, 20 were asked for"):
            run(server)


def test_stock_is_named():
    with Fake(tiny_model(0, **ALL_SPARSE), stock=True) as server:
        assert run(server, tiny_model(0, **ALL_SPARSE)).stock
        with pytest.raises(InputError, match="layer 1 is dense"):
            run(server)


def told_before_sampling(server: Fake, model, words: str) -> None:
    reply = server.reply
    server.reply = lambda path, body: (500, "sampled too early") if path == "/generate" else reply(path, body)
    with pytest.raises(InputError, match=words):
        run(server, model)


def check_another_recipe() -> None:
    model = tiny_model(0)
    model.set_recipe("nvfp4_per_token")
    with Fake(tiny_model(0)) as server:
        told_before_sampling(server, model, "different execution specs.*options.recipe")


def check_other_weights() -> None:
    with Fake(tiny_model(1)) as server:
        told_before_sampling(server, tiny_model(0), "29 of 29 tensors differ .*minitransformer sync")


def test_another_recipe_is_refused():
    check_another_recipe()


def test_other_weights_are_refused():
    check_other_weights()


def test_a_backward_format_is_no_difference():
    """A server computes no gradients."""
    model = tiny_model(0)
    model.set_recipe(model.recipe.with_backward("mxfp8"))
    with Fake(tiny_model(0)) as server:
        assert run(server, model).equal


@pytest.fixture
def line(tmp_path):
    tiny_model(0, **ALL_SPARSE).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS))
    return f"align --model {tmp_path}/model --prompts {tmp_path}/prompts --no-contrast --max-new-tokens 4".split()


def test_the_command(line, tmp_path, capsys):
    with Fake(tiny_model(0, **ALL_SPARSE)) as server:
        assert main([*line, "--sampler", server.url, "--json", str(tmp_path / "found.json")]) == 0
        out = capsys.readouterr().out
        assert "SGLang 0.5.17: miniTransformer's model, same fingerprint and weights" in out
        assert "EQUAL: 0 of 29 elements differ, in 2 stages and 12 log-probs" in out
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["equal"] and found["server"] == {"version": "0.5.17", "model_path": "fake", "stock": False}
        assert found["rescored"]["differing"] == 0 and len(found["requests"]) == 3
        server.stock, server.model.layers[0].eps = True, 1e-3
        assert main([*line, "--sampler", server.url]) == 1
        out = capsys.readouterr().out
        assert "a STOCK server, SGLang's own model" in out and "DIFFERENT: 29 of 29" in out


def test_a_prompt_without_room_on_the_server(line, capsys):
    """Told by its line, before anything is sampled."""
    with Fake(tiny_model(0, **ALL_SPARSE)) as server:
        server.told = {"max_req_input_len": 16}
        assert main([*line, "--sampler", server.url, "--max-new-tokens", "6"]) == 0
        server.generate = None
        assert main([*line, "--sampler", server.url, "--max-new-tokens", "7"]) == 2
    assert re.search(r"prompts:3: the prompt has 10 tokens and asks for 7: more than the 16", capsys.readouterr().err)


def test_bad_options_are_told(line, capsys):
    for options, words in (
        ("--sampler here", "expected sglang or http"),
        ("--sampler http://127.0.0.1:9", "no server answers"),
        ("--sampler http://127.0.0.1:9 --sglang-arg=--x", "is for a server that is started"),
        ("--sampler http://127.0.0.1:9 --stock", "no server answers"),
        ("--sampler http://127.0.0.1:9 --page-size 8", "--page-size is for miniTransformer's own sampler"),
        ("--sampler http://127.0.0.1:9 --stages logits", "--stages is for miniTransformer's own sampler"),
        ("--sampler sglang --recipe nvfp4_per_token --layers 0=bf16", "--layers can't be told to SGLang"),
        ("--sampler sglang --sglang-arg=--port=5", "sglang-arg --port: the command chooses it itself"),
        ("--sampler sglang --sglang-arg=--host=::", "sglang-arg --host: the command chooses"),
        ("--sampler sglang --sglang-arg=--x=1 --sglang-arg=--mod=z", "sglang-arg --mod: the command chooses"),
        ("--sampler http://", "it names no host and port"),
        ("--sampler sglang --sglang-arg='--page-size", "no closing quotation; expected words"),
        ("--stock", "is for --sampler; add --sampler sglang"),
    ):
        assert main([*line, *options.split()]) == 2 and words in capsys.readouterr().err, options
