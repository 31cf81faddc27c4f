"""The commands about number formats: quantize end to end, recipes and describe with the standard library alone."""

import json
import re
import signal
import subprocess
import sys

import pytest

from alignment_tests.model.checkpoints import hf_config, hf_tensors, write
from minitransformer.cli import main, parser
from minitransformer.models.qwen3_moe import quantise
from minitransformer.recipe import RECIPES

# Nothing that pip installs can be imported below this line.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] not in sys.stdlib_module_names | {'minitransformer'}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Blocker())
from minitransformer.cli import main
sys.exit(main(sys.argv[1:]))
"""


def alone(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BLOCKER, *arguments], capture_output=True, text=True)


def test_recipes_need_nothing_but_python():
    done = alone("recipes")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(RECIPES)


@pytest.mark.parametrize("name", ["nvfp4_per_token", "w4a8_mxfp8"])
def test_describe_needs_nothing_but_python(name):
    done = alone("describe", name)
    assert done.returncode == 0 and done.stderr == ""
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words[0] == f"{name}:" and {"forward", "backward", "coverage", "layout"} <= set(words)


def test_the_blocker_blocks():
    done = alone("align", "--model", ".", "--prompts", "x")
    assert done.returncode != 0 and "blocked" in done.stderr


def test_an_unknown_recipe_offers_the_closest():
    done = alone("describe", "nvfp4_per_tokn")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: recipe 'nvfp4_per_tokn' is not known; did you mean nvfp4_per_token?\n"


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", hf_config(), hf_tensors(hf_config()))


@pytest.mark.parametrize(
    "form, suffix", [("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")]
)
def test_quantize_writes_a_checkpoint_and_tells_its_errors(source, tmp_path, capsys, form, suffix):
    line = f"quantize --model {source} --out {tmp_path}/out --format {form} --layers 2=bf16 --json {tmp_path}/e.json"
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    table = out.splitlines()
    assert err == "" and table[0].split()[:4] == ["layer", "weight", "relative", "L2"]
    assert re.fullmatch(r"0 +gate_up +0\.09\d+ +20\.\d+ +\d\.\d+e-03 +(\d\.\d+%) +0\.00% +\1", table[1])
    assert len(table) == 4 and f"{form}, nvfp4_per_token, experts of 1 layers quantised" in table[3]
    said = json.loads((tmp_path / "e.json").read_text())
    assert [e["projection"] for e in said["errors"]] == ["gate_up", "down"] and said["format"] == form
    assert suffix.encode() in (tmp_path / "out" / "model.safetensors").read_bytes()[:20000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "out", "source"]


def test_layers_may_be_given_twice():
    for command in ("quantize --model m --out o", "align --model m --prompts p"):
        args = parser().parse_args(f"{command} --layers 0=bf16 --layers 1=bf16 2=w4a16".split())
        assert args.layers == ["0=bf16", "1=bf16", "2=w4a16"]
        assert parser().parse_args(command.split()).layers == []


@pytest.mark.parametrize(
    "options, message",
    [
        ("--recipe nvfp4_per_tokens", "did you mean nvfp4_per_token"),
        ("--recipe w4a8_mxfp8", "can't state it"),
        ("--layers 3=bf16", "matches no layer"),
        ("--layers 2", "PATTERN=RECIPE"),
        ("--layers 2=fp8", "not known"),
        ("--format gguf", "invalid choice"),
        ("--json {source}", "is a directory"),
        ("--json {source}/../out", "lies in --out"),
        ("--out {source} --json {source}/e.json", "lies in --out"),
        ("--out {source}", "not an empty directory"),
        ("--model {source}/absent", "no such directory"),
    ],
)
def test_bad_input_writes_nothing(source, tmp_path, capsys, options, message):
    line = f"quantize --model {source} --out {tmp_path}/out " + options.format(source=source)
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and message in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def bad_weights_leave_nothing(directory) -> None:
    """Found while the checkpoint is written: neither the directory nor those above it, which were made for it, stay."""
    tensors = hf_tensors(hf_config())
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"][1, 2] = float("nan")
    source, there = write(directory / "source", hf_config(), tensors), directory / "there"
    there.mkdir()
    for out in ("out", "new/deep/out", "there/deep/out"):
        assert main(f"quantize --model {source} --out {directory}/{out}".split()) == 2
    assert sorted(path.name for path in directory.iterdir()) == ["source", "there"] and not list(there.iterdir())


def test_bad_weights_leave_nothing(tmp_path, capsys):
    bad_weights_leave_nothing(tmp_path)
    err = capsys.readouterr().err
    assert err.count("experts.3.up_proj.weight[1, 2] is nan, not a finite BF16 number") == err.count("\n") == 3


def test_sigterm_leaves_nothing(source, tmp_path, monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(quantise, "write_sharded", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        main(f"quantize --model {source} --out {tmp_path}/new/out".split())
    assert stop.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_mxfp8_names_the_layer_and_its_own_recipe(tmp_path, capsys):
    config = hf_config(moe_intermediate_size=48)
    source = write(tmp_path / "source", config, hf_tensors(config))
    (tmp_path / "p").write_text('{"ids": [1]}')
    line = f"generate --model {source} --prompts {tmp_path}/p --recipe nvfp4_per_token --layers 2=w4a8_mxfp8"
    assert main(line.split()) == 2
    assert "layer 2, w4a8_mxfp8: MXFP8 needs" in capsys.readouterr().err


def test_the_beginning_of_a_name_offers_the_default():
    assert "did you mean nvfp4_per_token?" in alone("describe", "nvfp4").stderr


def test_a_quantised_checkpoint_aligns(source, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2, 3, 4, 5]}\n{"ids": [9]}\n')
    assert main(f"quantize --model {source} --out {tmp_path}/out".split()) == 0
    line = f"align --model {tmp_path}/out --prompts {prompts} --max-new-tokens 4 --no-contrast"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert re.search("fingerprint [0-9a-f]{16}, recipe nvfp4_per_token\n", out)
    assert "gate_up_codes" in out and "down_outer" in out and "EQUAL: 0 of " in out
    assert main((line + " --recipe w4a16").split()) == 0
    assert main((line + " --recipe nvfp4_per_row").split()) == 2
    assert "only quantised" in capsys.readouterr().err
