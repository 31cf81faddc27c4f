"""Real servers that must not come up, and requests that must not end a running one."""

import ast
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.test_engine import P, zero
from minitransformer.errors import InputError
from minitransformer.plugins.sglang import ANY_VERSION_VARIABLE, arguments

pytestmark = pytest.mark.sglang


def refused(checkpoint, arguments=(), environment=None) -> str:
    with pytest.raises(InputError) as error, engines.start(checkpoint, arguments, environment=environment):
        pass
    assert "miniTransformer is not live, so this server stops: " in str(error.value)
    return str(error.value)


def test_an_argument_ends_the_server(checkpoint):
    """Another one: test_align_starts_a_server."""
    assert "one GPU a server" in refused(checkpoint, ["--tp-size", "2"])


def test_keys_that_are_brought_during_a_pass_are_refused(checkpoint):
    assert "SGLang's pool on the GPU alone" in refused(checkpoint, ["--enable-hierarchical-cache"])


def test_what_is_refused_is_sglangs_argument_and_its_default_is_not():
    """A name that SGLang does not have would refuse nothing. Read, not imported: that needs a GPU's packages."""
    source = Path(find_spec("sglang").origin).parent / "srt/server_args.py"
    (args,) = (x for x in ast.parse(source.read_text()).body if getattr(x, "name", None) == "ServerArgs")
    defaults = {x.target.id: x.value for x in args.body if isinstance(x, ast.AnnAssign)}
    for name, (allowed, _) in arguments._ONLY.items():
        assert ast.literal_eval(defaults[name]) in allowed, name
    known = (source.parent / "environ.py").read_text()
    assert [name for name in arguments._UNSET if f"    {name} = " not in known] == []


def test_another_model_ends_the_server(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert "serves qwen3_moe only" in refused(tmp_path / "other")


def test_a_config_that_our_model_can_not_follow(checkpoint, tmp_path):
    """SGLang's own model would serve it; ours says what it is that it can't do."""
    shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((checkpoint / "config.json").read_text()) | {"attention_bias": True}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert "attention_bias = True is not supported" in refused(tmp_path / "other")


def test_a_plugin_left_out_ends_the_server(checkpoint):
    assert "leaves its plugin out" in refused(checkpoint, environment={"SGLANG_PLUGINS": "another"})


def test_a_version_that_was_not_tested(checkpoint, tmp_path):
    info = tmp_path / "sglang-0.5.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    said = refused(checkpoint, environment={"PYTHONPATH": str(tmp_path)})
    assert "SGLang 0.5.99 is installed, 0.5.17 was tested" in said and ANY_VERSION_VARIABLE in said


def test_a_plugin_that_fails(checkpoint, tmp_path):
    """One of its modules can't be imported: SGLang would log that and go on; the server must stop."""
    info = tmp_path / "breaks-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaks\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbreaks = breaks:plugin\n")
    broken = "import sys\nsys.modules['minitransformer.plugins.sglang.logits'] = None\ndef plugin(): pass\n"
    (tmp_path / "breaks.py").write_text(broken)
    said = refused(checkpoint, environment={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert "ModuleNotFoundError" in said and "minitransformer.plugins.sglang.logits" in said


def test_bad_requests_leave_the_server_alone(engine):
    client = engine.client
    first = laws.run(client, P)
    for change in (
        {"min_p": 0.5}, {"temperature": 1e9}, {"sampling_seed": -1}, {"temperature": -1.0}, {"sampling_seed": 1.5},
        {"top_k": 1 << 40}, {"logit_bias": {"5": 1e300}}, {"repetition_penalty": 1e-30}, {"regex": "[0-9]"},
    ):  # fmt: skip
        with pytest.raises(InputError, match="refuses"):
            client.generate([P[0]], laws.params(1, 1.0, 4)[0] | change)
    with pytest.raises(InputError, match="is outside the vocabulary"):
        client.generate([[1, engines.VOCAB]], laws.params(1, 1.0, 4))
    for change in (
        {"temperature": "hot"}, {"top_p": [0.5]}, {"stop_token_ids": [["a"]]}, {"logit_bias": [1]}, {"no_field": 1},
        {"frequency_penalty": {}}, {"max_new_tokens": "4"},
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"refuses \(400\)"):
            client.generate([P[0]], laws.params(1, 1.0, 4)[0] | change)
    for asked in ([engines.VOCAB], ["a"], [0.5], [1] * 2000):
        with pytest.raises(InputError, match=r"refuses \(400\).*token_ids_logprob"):
            client.generate([P[0]], laws.params(1, 1.0, 4), token_ids_logprob=[asked])
    for change in ({"first": -2}, {"top_logprobs_num": -3}, {"top_logprobs_num": 1 << 20}):
        with pytest.raises(InputError, match="refuses.*must be an integer from"):
            client.generate([P[0]], laws.params(1, 1.0, 4), **change)
    with pytest.raises(InputError, match="refuses.*no token"):
        client.generate([P[0], []], laws.params(2, 1.0, 4))
    with pytest.raises(InputError, match="refuses.*input_embeds"):
        client.call("/generate", {"input_embeds": [[0.0] * 64], "sampling_params": {"max_new_tokens": 1}})
    zero(laws.same(first, laws.run(client, P)))


def test_weights_are_read_with_torchs_own_default_type():
    """SGLang's is BF16 while it loads a checkpoint: on a GPU quantising again made its scales of that type."""
    from minitransformer.plugins.sglang.models.qwen3_moe import Qwen3MoeForCausalLM as Entry

    seen = []
    torch.set_default_dtype(torch.bfloat16)
    try:
        Entry._in_float32(None, lambda: seen.append(torch.get_default_dtype()))
        assert seen == [torch.float32] and torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_bad_updates_leave_the_weights_alone(engine, tmp_path):
    """A checkpoint of another size, one with a NaN, one that is not there: refused, and nothing was written."""
    poisoned = engines.tiny(2)
    poisoned.save_pretrained(tmp_path / "poisoned")
    shutil.copytree(tmp_path / "poisoned", tmp_path / "cut")
    file = tmp_path / "poisoned" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, file)
    (tmp_path / "cut" / "model.safetensors").write_bytes(file.read_bytes()[:-4096])
    engines.tiny(1, vocab_size=engines.VOCAB + 16).save_pretrained(tmp_path / "large")
    group = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]]}
    client = engine.client
    first, held = laws.run(client, P), (client.checksums(), client.identity())
    for name in ("large", "poisoned", "cut", "absent"):
        with pytest.raises(InputError, match="Nothing was written: SGLang goes on with the weights it had"):
            laws.update_from_disk(client, tmp_path / name)
        assert (client.checksums(), client.identity()) == held
    with pytest.raises(InputError, match="Nothing was written"):
        client.call("/update_weights_from_distributed", group)
    zero(laws.same(first, laws.run(client, P)))
