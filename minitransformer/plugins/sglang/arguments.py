"""What a user may ask of SGLang while our model is in it: the rest is refused before anything starts."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minitransformer.errors import InputError
from minitransformer.plugins.sglang.identity import CUMEM, NCCL_DECIDES
from minitransformer.plugins.sglang.plugin import ATTENTION, fail, log

_ONE_GPU = "one GPU a server; start one server a GPU behind a router"
_IN_POOL = "keys and values live in SGLang's pool on the GPU alone, where attention reads them"
_STAYS = "weights, keys and values stay where they are; graphs read them there"
# Argument -> (the values that are supported, what is supported in words).
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "kv_cache_dtype": (("auto", "bf16", "bfloat16"), "keys and values are BF16, which is what attention reads"),
    "dtype": (("auto", "bfloat16"), "weights and activations are bfloat16"),
    "speculative_algorithm": ((None,), "a token is drawn from its own forward pass; there is no speculative decoding"),
    "enable_lora": ((None, False), "there is no LoRA; merge the adapter and send the whole weights"),
    "lora_paths": ((None, []), "there is no LoRA; merge the adapter and send the whole weights"),
    "tp_size": ((1,), _ONE_GPU),
    "pp_size": ((1,), _ONE_GPU),
    "dp_size": ((1,), _ONE_GPU),
    "ep_size": ((1,), _ONE_GPU),
    "dcp_size": ((1,), _ONE_GPU),
    "attn_cp_size": ((1,), _ONE_GPU),
    "moe_dp_size": ((1,), _ONE_GPU),
    "dwdp_size": ((1,), _ONE_GPU),
    "nnodes": ((1,), _ONE_GPU),
    "enable_dp_attention": ((False,), _ONE_GPU),
    "enable_eplb": ((False,), _ONE_GPU),
    "quantization": ((None,), "the checkpoint or minitransformer_recipe says how experts are quantised"),
    "torchao_config": (("", None), "the checkpoint or minitransformer_recipe says how experts are quantised"),
    "modelopt_quant": ((None,), "the checkpoint or minitransformer_recipe says how experts are quantised"),
    "load_format": (("auto", "safetensors", "dummy", None), "checkpoints are safetensors, or 'dummy', none yet"),
    "attention_backend": ((None, ATTENTION, "torch_native"), "attention is miniTransformer's own; leave it out"),
    "prefill_attention_backend": ((None,), "attention is miniTransformer's own; leave it out"),
    "decode_attention_backend": ((None,), "attention is miniTransformer's own; leave it out"),
    "sampling_backend": ((None, "pytorch"), "sampling is miniTransformer's own; leave it out"),
    "rl_on_policy_target": ((None,), "it rounds logits to BF16; leave it out, the log-probs agree without it"),
    "is_embedding": ((False,), "the model generates; it gives no embeddings"),
    "enable_torch_compile": ((False,), "the operators are compiled already"),
    "enable_two_batch_overlap": ((False,), "one batch at a time"),
    "enable_single_batch_overlap": ((False,), "one batch at a time"),
    "enable_pdmux": ((False,), "one batch at a time, on one stream"),
    "enable_mis": ((False,), "a batch's sequences are apart; send each item as a prompt of its own"),
    "dllm_algorithm": ((None,), "the model generates from left to right"),
    # SGLang brings a prefix's rows layer by layer while the pass runs; attention reads them without waiting.
    "enable_hierarchical_cache": ((False,), _IN_POOL),
    "hicache_storage_backend": ((None,), _IN_POOL),
    "enable_lmcache": ((False,), _IN_POOL),
    "enable_flexkv": ((False,), _IN_POOL),
    "radix_cache_backend": ((None,), _IN_POOL),
    "enable_hisparse": ((False,), _IN_POOL),
    "prefill_only_disable_kv_cache": ((False,), _IN_POOL),
    "kv_canary": (("none",), _IN_POOL),
    "enable_memory_saver": ((False,), _STAYS),
    "enable_weights_cpu_backup": ((False,), _STAYS),
    "cpu_offload_gb": ((0,), _STAYS),
    "offload_group_size": ((-1,), _STAYS),
    "kt_weight_path": ((None,), _STAYS),
    "weight_cache_mode": (("off",), _STAYS),
    "enable_page_major_kv_layout": ((False,), "keys and values lie layer by layer"),
    "enable_unified_memory": ((False,), "keys and values lie layer by layer"),
    "disaggregation_mode": (("null", None), "prefill and decode run in one server"),
    "cuda_graph_backend_decode": ((None, "full", "disabled"), "a decode step is one graph or none"),
    "cuda_graph_backend_prefill": ((None, "disabled"), "a short prefill is a graph of ours; 'disabled': none"),
    "cuda_graph_config": ((None,), "a decode step is one graph or none: --cuda-graph-backend-decode full"),
    "model_impl": (("auto", "sglang"), "the model is miniTransformer's own"),
}  # fmt: skip
# Variables of SGLang's that may not be set.
_UNSET = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "a sampled token is scored at the temperature that it was drawn at",
    "SGLANG_USE_HND_KVCACHE": "a row of the pool has all heads of a position",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": _STAYS,
}
RECIPE = "minitransformer_recipe"
INTEGERS = ("sampling_seed", "top_k", "max_new_tokens", "min_new_tokens")
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Logits stay finite, so that a softmax exists: an error in the scheduler would end the server.
LARGEST_BIAS, SMALLEST_PENALTY = 1e6, 1e-3
MOST_IDS = 1024  # whose log-probs a request may ask for at each position: the scheduler waits for them


def post_init(original: Any, args: Any) -> None:
    """ServerArgs.__post_init__: refuses first, then SGLang resolves the rest, on our backends."""
    try:
        check(args)
    except InputError as error:
        fail(str(error))
    if args.enable_deterministic_inference:
        log.warning("--enable-deterministic-inference adds nothing here: every operator is deterministic")
    args.enable_deterministic_inference = False
    args.attention_backend = "torch_native" if args.device == "cpu" else ATTENTION
    args.sampling_backend = "pytorch"  # the name under which plugin.py registers our sampler
    if args.disable_prefill_cuda_graph:
        args.cuda_graph_backend_prefill = "disabled"  # batch.with_prefills reads it, of ours
    args.disable_prefill_cuda_graph = True  # SGLang's own
    args.disable_cuda_graph |= args.device == "cpu"
    # SGLang turns cuMem off unless somebody has spoken; one GPU uses NCCL for updates alone, whose sender has it on.
    os.environ.setdefault(CUMEM, NCCL_DECIDES)
    original(args)


def check(args: Any) -> None:
    """InputError that names the first argument that is not supported, and what is."""
    for name, (allowed, supported) in _ONLY.items():
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            raise InputError(f"--{name.replace('_', '-')} {value} is not supported by miniTransformer: {supported}")
    for name, supported in _UNSET.items():
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            raise InputError(f"{name} is not supported by miniTransformer: {supported}; unset it")
    check_model(args.model_path)


def check_model(model_path: str) -> None:
    """InputError unless this is a local Qwen3-MoE checkpoint."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        raise InputError(f"{model_path}: no config.json; miniTransformer loads a local directory, so download it first")
    try:
        hf = json.loads(config.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{config}: not JSON ({error})") from None
    kind = hf.get("model_type") if isinstance(hf, Mapping) else None
    if kind != "qwen3_moe":
        raise InputError(f"{config}: model_type is {kind!r}; miniTransformer's plugin serves qwen3_moe only")


def verify(original: Any, params: Any, vocab_size: int) -> None:
    """SamplingParams.verify: a request that our sampler can't draw for is turned away, not the server stopped."""
    original(params, vocab_size)
    for name in INTEGERS:
        if not isinstance(value := getattr(params, name), int | None):
            raise ValueError(f"{name} = {value!r} must be an integer")
    if params.top_k > 1 << 30:  # how SGLang writes "all"
        raise ValueError(f"top_k = {params.top_k} must be -1 (all) or from 1 to 2**30")
    if params.min_p > 0:
        raise ValueError(f"min_p = {params.min_p} is not supported by miniTransformer; use top_p or top_k")
    if not 1e-6 <= params.temperature <= 1e6:
        raise ValueError(f"temperature = {params.temperature} must be 0 (greedy) or from 1e-6 to 1e6")
    if params.sampling_seed is not None and not 0 <= params.sampling_seed < 1 << 63:
        raise ValueError(f"sampling_seed = {params.sampling_seed} must be an integer from 0 to 2**63 - 1")
    bias = next((x for x in (params.logit_bias or {}).values() if not abs(x) <= LARGEST_BIAS), None)
    if bias is not None:
        raise ValueError(f"logit_bias = {bias} must be a number from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}")
    grammar = next((name for name in GRAMMARS if getattr(params, name) is not None), None)
    if grammar and not torch.cuda.is_available():
        raise ValueError(f"{grammar} needs a GPU: SGLang keeps a grammar's mask in pinned memory; leave it out")
    if params.repetition_penalty < SMALLEST_PENALTY:
        raise ValueError(f"repetition_penalty = {params.repetition_penalty} must be from {SMALLEST_PENALTY:g} to 2")


def validate(original: Any, manager: Any, obj: Any, input_ids: Any) -> None:
    """TokenizerManager._validate_one_request: an id outside the vocabulary would stop the scheduler."""
    with _typed():
        original(manager, obj, input_ids)
    if getattr(obj, "input_embeds", None) is not None or input_ids is None:
        raise ValueError("miniTransformer takes token ids or text; there are no input embeddings")
    if not input_ids:
        raise ValueError("the prompt has no token; send one at least")
    size = manager.model_config.vocab_size
    for name, least, most in (("top_logprobs_num", 0, min(size, MOST_IDS)), ("logprob_start_len", -1, 1 << 31)):
        value = getattr(obj, name, None)
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            raise ValueError(f"{name} = {value!r} must be an integer from {least} to {most}")
    asked = getattr(obj, "token_ids_logprob", None) or []
    if not isinstance(asked, list) or len(asked) > MOST_IDS or not all(type(i) is int and 0 <= i < size for i in asked):
        raise ValueError(f"token_ids_logprob must be at most {MOST_IDS} ids of the vocabulary of {size}")
    bad = next((i for i in input_ids if not 0 <= i < size), None)
    if bad is not None:
        raise ValueError(f"input_ids: {bad} is outside the vocabulary of {size}; check the tokenizer")


def tokenized(original: Any, manager: Any, *rest: Any, **options: Any) -> Any:
    """TokenizerManager._create_tokenized_object, which reads sampling_params."""
    with _typed():
        return original(manager, *rest, **options)


@contextmanager
def _typed() -> Iterator[None]:
    """What an ill-typed field leads to in SGLang is the request's fault, HTTP 400, not the server's, 500."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise ValueError(f"sampling_params: a field is unknown or of a wrong type ({error})") from error


def unquantised(original: Any, model_config: Any) -> None:
    """ModelConfig._parse_quant_hf_config: SGLang sees no quantisation; ours reads it from the checkpoint by itself."""
    model_config.hf_config.__dict__.pop("quantization_config", None)
