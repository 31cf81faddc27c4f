"""What the plugin refuses, each with a sentence that says what is supported. No SGLang is needed here."""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from alignment_tests.learner.tiny import tiny_model
from minitransformer.errors import InputError
from minitransformer.plugins.sglang import arguments as arguments_module
from minitransformer.plugins.sglang import plugin, weights
from minitransformer.plugins.sglang.build import require_capturable
from minitransformer.plugins.sglang.client import Client


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return str(tmp_path)


def test_plain_arguments_are_taken(model):
    arguments_module.check(SimpleNamespace(model_path=model, tp_size=1, dtype="auto", kv_cache_dtype="auto"))


@pytest.mark.parametrize(
    "name, value, supported",
    [
        ("kv_cache_dtype", "fp8_e4m3", "keys and values are BF16"),
        ("dtype", "float16", "bfloat16"),
        ("speculative_algorithm", "EAGLE", "no speculative decoding"),
        ("enable_lora", True, "no LoRA"),
        ("lora_paths", ["a"], "no LoRA"),
        ("tp_size", 2, "one GPU a server"),
        ("pp_size", 2, "one GPU a server"),
        ("dp_size", 2, "one GPU a server"),
        ("ep_size", 2, "one GPU a server"),
        ("quantization", "fp8", "minitransformer_recipe"),
        ("torchao_config", "int4wo-128", "minitransformer_recipe"),
        ("attention_backend", "fa3", "leave it out"),
        ("decode_attention_backend", "fa3", "leave it out"),
        ("sampling_backend", "flashinfer", "leave it out"),
        ("rl_on_policy_target", "fsdp", "leave it out"),
        ("load_format", "gguf", "safetensors"),
        ("disaggregation_mode", "prefill", "one server"),
        ("is_embedding", True, "no embeddings"),
        ("enable_hierarchical_cache", True, "SGLang's pool on the GPU alone"),
        ("hicache_storage_backend", "file", "SGLang's pool on the GPU alone"),
        ("enable_lmcache", True, "SGLang's pool on the GPU alone"),
        ("enable_flexkv", True, "SGLang's pool on the GPU alone"),
        ("radix_cache_backend", "flexkv", "SGLang's pool on the GPU alone"),
        ("enable_hisparse", True, "SGLang's pool on the GPU alone"),
        ("prefill_only_disable_kv_cache", True, "SGLang's pool on the GPU alone"),
        ("kv_canary", "log", "SGLang's pool on the GPU alone"),
        ("enable_pdmux", True, "one batch at a time"),
        ("enable_single_batch_overlap", True, "one batch at a time"),
        ("enable_mis", True, "a prompt of its own"),
        ("dllm_algorithm", "LowConfidence", "from left to right"),
        ("dcp_size", 2, "one GPU a server"),
        ("attn_cp_size", 2, "one GPU a server"),
        ("moe_dp_size", 2, "one GPU a server"),
        ("dwdp_size", 2, "one GPU a server"),
        ("nnodes", 2, "one GPU a server"),
        ("enable_dp_attention", True, "one GPU a server"),
        ("enable_eplb", True, "one GPU a server"),
        ("enable_memory_saver", True, "stay where they are"),
        ("enable_weights_cpu_backup", True, "stay where they are"),
        ("cpu_offload_gb", 4, "stay where they are"),
        ("offload_group_size", 2, "stay where they are"),
        ("kt_weight_path", "/amx", "stay where they are"),
        ("weight_cache_mode", "client", "stay where they are"),
    ],
)
def test_an_argument_is_refused(model, name, value, supported):
    with pytest.raises(InputError, match=supported) as refused:
        arguments_module.check(SimpleNamespace(**{"model_path": model, name: value}))
    assert f"--{name.replace('_', '-')} {value} is not supported" in str(refused.value)


@pytest.mark.parametrize(
    "name, supported",
    [
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "scored at the temperature"),
        ("SGLANG_USE_HND_KVCACHE", "all heads of a position"),
        ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "stay where they are"),
    ],
)
def test_a_variable_is_refused(model, monkeypatch, name, supported):
    for value in ("", "0", "false"):
        monkeypatch.setenv(name, value)
        arguments_module.check(SimpleNamespace(model_path=model))
    monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match=f"{name} is not supported by miniTransformer: .*{supported}.*; unset it"):
        arguments_module.check(SimpleNamespace(model_path=model))


def test_every_refused_argument_names_what_is_supported():
    for name, (allowed, supported) in arguments_module._ONLY.items():
        assert allowed and len(supported) > 10, name


@pytest.mark.parametrize(
    "content, said",
    [
        ({"model_type": "llama"}, "serves qwen3_moe only"),
        ([1], "serves qwen3_moe only"),
        (None, "no config.json"),
        ("{", "not JSON"),
    ],
)
def test_another_model_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=said):
        arguments_module.check_model(str(tmp_path))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"min_p": 0.1}, "min_p"), ({"temperature": 1e-9}, "temperature"), ({"sampling_seed": -1}, "sampling_seed"),
        ({"sampling_seed": 1.5}, "sampling_seed"), ({"top_k": 1.5}, "top_k"), ({"top_k": 1 << 40}, "top_k"),
        ({"max_new_tokens": 2.5}, "max_new"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias"), ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"), ({"regex": "a"}, "regex needs a GPU"),
        ({"json_schema": "{}"}, "json_schema needs a GPU"),
    ],
)  # fmt: skip
def test_a_request_is_turned_away(change, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plain = dict.fromkeys(("sampling_seed", "logit_bias", "json_schema", "regex", "ebnf", "structural_tag"))
    plain |= {"min_p": 0.0, "temperature": 1.0, "repetition_penalty": 1.0, "top_k": 1}
    plain |= {"max_new_tokens": None, "min_new_tokens": 0}
    verify = partial(arguments_module.verify, lambda params, vocab_size: None)
    verify(SimpleNamespace(**plain), 100)
    with pytest.raises(ValueError, match=said):
        verify(SimpleNamespace(**plain | change), 100)


@pytest.mark.parametrize(
    "change, ids, said",
    [
        ({"top_logprobs_num": -1}, [1], "top_logprobs_num"), ({"top_logprobs_num": 101}, [1], "top_logprobs_num"),
        ({"logprob_start_len": -2}, [1], "logprob_start_len"), ({}, [1, 100], "outside the vocabulary"),
        ({}, [], "no token"), ({}, [-1], "outside the vocabulary"),
        ({"input_embeds": [[0.0]]}, None, "no input embeddings"),
    ],
)  # fmt: skip
def test_a_request_that_would_end_the_scheduler_is_turned_away(change, ids, said):
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    plain = {"top_logprobs_num": 100, "logprob_start_len": -1, "input_embeds": None}
    validate = partial(arguments_module.validate, lambda *_: None, manager)
    validate(SimpleNamespace(**plain), [0, 99])
    with pytest.raises(ValueError, match=said):
        validate(SimpleNamespace(**plain | change), ids)


def test_a_server_that_does_not_answer_is_said_to():
    with pytest.raises(InputError, match="no server answers"):
        Client("http://127.0.0.1:9", timeout=2).generate([[1]], {})


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_a_server_does_not_outlive_a_killed_parent():
    start = (
        "import subprocess, sys, time; from minitransformer.plugins.sglang.launch import _end_with_parent;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(99)'],"
        " start_new_session=True, preexec_fn=_end_with_parent); time.sleep(99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"1\n"  # the child is there, and holds the pipe
    parent.kill()
    parent.wait()
    with parent.stdout:
        assert parent.stdout.read() == b""  # its end: nobody holds the pipe any more


def test_what_is_said_of_an_update_that_fails_is_what_the_server_holds():
    """Before the first write nothing is lost; after it the weights are partly new, whatever SGLang says."""
    model = SimpleNamespace(weights_version=3)
    updater = SimpleNamespace(get_model=lambda: SimpleNamespace(model=model))

    def fails(writes: int):
        model.weights_version += writes
        raise ValueError("no")

    sglang = "no. The full weights of the ModelRunner are partially updated. Please discard the whole weights."
    assert weights._guarded(updater, lambda: (True, "done")) == (True, "done")
    assert weights._guarded(updater, lambda: fails(0), "x: ") == (False, f"x: no. {weights.KEPT}")
    assert weights._guarded(updater, lambda: (False, sglang)) == (False, f"no. {weights.KEPT}")
    assert weights._guarded(updater, lambda: fails(1)) == (False, f"no. {weights.PARTLY}")


def test_graphs_where_padding_moves_bits():
    """The one recipe with a scale of the whole batch: graphs pad batches."""
    model = tiny_model(0)
    for name in ("bf16", "nvfp4_per_token", "w4a16"):
        model.set_recipe(name)
        require_capturable(model)
    model.set_recipe("nvfp4_per_tensor")
    with pytest.raises(InputError, match="nvfp4_per_tensor.*--cuda-graph-backend-decode disabled"):
        require_capturable(model)


def test_a_method_that_is_gone_is_named(monkeypatch):
    """Another version of SGLang, allowed by the user: the server stops, and says where the two don't fit."""
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.5.99")
    with pytest.raises(InputError, match="SGLang 0.5.99 has no SimpleNamespace.handle, which miniTransformer replaces"):
        plugin._wrap(SimpleNamespace, "handle", lambda original: None)
