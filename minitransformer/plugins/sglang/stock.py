"""The learner's forward pass on SGLang's own kernels: its log-probs are those of an unmodified server's prefill.

The model is the learner's, its weights are used as they are; only the operators are SGLang's (stock_kernels.py).

Which prefill: that of a server with --enable-deterministic-inference. There every operator gives a row the same bits
whatever else is in the batch, and attention reads a row's keys in the same blocks however the prompt was cut. So the
learner may pack the sequences as it likes, and need not know the batches and chunks that the server made
(`python -m alignment_tests.plugin.stock_h200 packing` compares the packings on bits). Without that flag SGLang chooses
its kernels by the size of the batch: no learner could know what to equal, and `unable` refuses such a server.
A decode is another kernel in any case, so what the server emitted is equalled by no prefill, its own included.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minitransformer.batch import Batch
from minitransformer.devices import naming_memory
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.layers import Note, no_trace
from minitransformer.plugins.sglang.plugin import check_version, sglang_version
from minitransformer.plugins.sglang.stock_kernels import ARGUMENTS, SglangKernels

# /server_info -> the values with which a server's prefill is that of these kernels, in BF16, on one GPU. A field that
# this SGLang does not tell is no reason to refuse.
_ONE, _OFF, _NONE = (1, None), (False, None), (None, "", "none", [], {})
SETTINGS: dict[str, tuple[Any, ...]] = {
    "enable_deterministic_inference": (True,), "attention_backend": ("triton",),
    "prefill_attention_backend": (None, "triton"), "moe_runner_backend": ("triton",), "moe_a2a_backend": _NONE,
    "dtype": ("auto", "bfloat16"), "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
    "quantization": _NONE, "torchao_config": _NONE, "modelopt_quant": _NONE,
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size", "attn_cp_size", "moe_dp_size"), _ONE),
    "ep_num_redundant_experts": (0, None), "speculative_algorithm": _NONE, "lora_paths": _NONE,
    "load_format": ("auto", "safetensors"), "json_model_override_args": ("{}", *_NONE),
    "model_impl": ("auto", "sglang"), "rl_on_policy_target": _NONE, "forward_hooks": _NONE,
    **dict.fromkeys((
        "enable_lora", "enable_eplb", "enable_torch_compile", "enable_fused_qk_norm_rope", "enable_fp32_lm_head",
        "enable_tf32_matmul", "enable_fused_moe_sum_all_reduce", "enable_two_batch_overlap",
        "enable_single_batch_overlap", "enable_dp_attention", "triton_attention_reduce_in_fp32",
    ), _OFF),
}  # fmt: skip
CUTS = {  # by attention backend
    "triton": "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE", "flashinfer": "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE"
}  # fmt: skip
CHUNK_BYTES = 1 << 28  # of the logits at a time: an engine may hold most of the GPU's memory
HEADS = (64, 128, 256)  # other sizes take another path in SGLang's RoPE
# Of one pass, in whole sequences; a longer one goes alone. At the widths of Qwen3-30B-A3B about 2 GB.
PASS_TOKENS = 16384
__all__ = ["SglangKernels", "hidden", "log_probs", "stalls", "unable", "warm"]


def unable(model: Any, server: Mapping[str, Any]) -> str | None:
    """Why the learner can't call the kernels of this stock server; None if it can. server: its /server_info."""
    try:
        check_version()
        here, there = sglang_version(), server.get("version")
    except InputError as error:
        return str(error)
    if there != here:
        return f"the server runs SGLang {there}, the kernels here are those of {here}"
    return unable_here(model) or _started_otherwise(server)


def unable_here(model: Any) -> str | None:
    """The part of `unable` that needs no server."""
    config = model.config
    if model.device.type != "cuda":
        return f"SGLang's kernels need a GPU, the learner is on {model.device}"
    if model.recipe.name != "bf16" or model.recipe.overrides or any(x.mlp.gate_up is None for x in model.layers):
        return f"the learner's recipe is {model.recipe.name}, a stock server's experts are in BF16"
    if config.head_dim not in HEADS:
        return f"SGLang turns heads of {config.head_dim} by another kernel; supported are {HEADS}"
    if config.rope_scaling is not None:
        return "SGLang makes its own table for a scaled RoPE"
    return None


def _started_otherwise(server: Mapping[str, Any]) -> str | None:
    wrong = [
        f"{name} is {server[name]!r}"
        for name, allowed in SETTINGS.items()
        if name in server and server[name] not in allowed
    ]
    return f"the server was started otherwise ({'; '.join(wrong)}); use {' '.join(ARGUMENTS)}" if wrong else None


def stalls(server: Mapping[str, Any], longest: int) -> str | None:
    """Why this server would never answer for a prompt of `longest` tokens; None if it would.

    A deterministic SGLang cuts prompts only at multiples of a number; where a chunk is below it, a longer prompt waits
    for ever (add_one_req in SGLang's schedule_policy.py).
    """
    variable = CUTS.get(server.get("attention_backend"))
    chunk = server.get("chunked_prefill_size") or -1
    if variable is None or not server.get("enable_deterministic_inference") or not 0 < chunk < longest:
        return None
    given = os.environ.get(variable, "")
    cut = int(given) if given.isdecimal() else 4096
    if chunk >= cut:
        return None
    return (
        f"this deterministic server never begins a prompt of more than its chunk, {chunk} tokens, since that is below "
        f"{variable} ({cut}), and up to {longest} will be sent; start it with --chunked-prefill-size {cut}, or set "
        "that variable, for the server and for this command, to the chunk"
    )


@torch.no_grad()
def warm(model: Any, kernels: Any) -> None:
    """Compiles the kernels for this model, those of batches whose size is a multiple of 16 and those of others."""
    for n in (17, 32):
        log_probs(model, [[i % model.config.vocab_size for i in range(min(n, model.config.max_positions))]], kernels)


@torch.no_grad()
def log_probs(
    model: Any,
    sequences: Sequence[Sequence[int]],
    kernels: Any,
    temperatures: Sequence[float] | None = None,
    trace: Any = None,
) -> list[Tensor]:
    """FP32 [len - 1] of each sequence, on the host: every token but the first.

    kernels: SglangKernels(), or operators with its methods. temperatures: one a sequence, positive; None for 1.
    Passes of at most PASS_TOKENS tokens (module docstring: no bit depends on them); a longer sequence has its own.
    InputError for a sequence without a token, beyond the model's positions, or too long for the GPU's memory.
    """
    for s, ids in enumerate(sequences):
        if not 0 < len(ids) <= model.config.max_positions:
            raise InputError(f"sequences[{s}] has {len(ids)} tokens; SGLang scores 1 to {model.config.max_positions}")
    found: list[Tensor] = []
    for begin, end in passes([len(ids) for ids in sequences]):
        some, total = sequences[begin:end], sum(map(len, sequences[begin:end]))
        with naming_memory(f"a pass of {total:,} tokens on SGLang's kernels", "use shorter sequences"):
            found += _one_pass(model, some, kernels, (temperatures or [1.0] * len(sequences))[begin:end], begin, trace)
    return found


def passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of whole sequences, in order, of at most PASS_TOKENS tokens or one sequence each."""
    begin, total = 0, 0
    for s, length in enumerate(lengths):
        if s > begin and total + length > PASS_TOKENS:
            yield begin, s
            begin, total = s, 0
        total += length
    if begin < len(lengths):
        yield begin, len(lengths)


def _one_pass(
    model: Any, sequences: Sequence[Sequence[int]], kernels: Any, temperatures: Sequence[float], first: int, trace: Any
) -> list[Tensor]:
    """first: the index of the first of these sequences, for the trace."""
    batch = Batch.packed(sequences, range(first, first + len(sequences))).to(model.device)
    h_TD = hidden(model, batch, kernels, no_trace if trace is None else trace.bind(batch))
    most = max(1, CHUNK_BYTES // (4 * model.config.vocab_size))
    found = []
    for s, ids in enumerate(sequences):
        targets_L = torch.tensor(ids[1:], dtype=torch.int64, device=model.device)
        parts = []
        for a in range(0, len(targets_L), most):
            begin, b = batch.cu_seqlens[s] + a, min(a + most, len(targets_L))
            logits_LV = kernels.logits(h_TD[begin : begin + b - a], model.head)
            parts.append(kernels.logprob(logits_LV, targets_L[a:b], temperatures[s]).cpu())
        found.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32))
    return found


def hidden(model: Any, batch: Batch, kernels: Any, note: Note = no_trace) -> Tensor:
    """The last norm's output [T, D] BF16; the model's own `hidden`, with its operators exchanged."""
    table_PH, eps = kernels.rope_table(model), model.config.rms_eps
    x_TD, residual_TD = functional.embedding(batch.ids_T, model.embed_tokens.weight), None
    note("embedding", x_TD)
    for i, layer in enumerate(model.layers):

        def here(stage: str, tensor: Tensor, i: int = i) -> None:
            note(f"layers.{i}.{stage}", tensor)

        if residual_TD is None:
            h_TD, residual_TD = kernels.rms_norm(x_TD, layer.input_norm.weight, eps), x_TD
        else:
            h_TD, residual_TD = kernels.add_rms_norm(x_TD, residual_TD, layer.input_norm.weight, eps)
        here("input_norm", h_TD)
        o_TD = _attention(layer.attn, h_TD, batch, table_PH, kernels, here)
        here("o", o_TD)
        h_TD, residual_TD = kernels.add_rms_norm(o_TD, residual_TD, layer.post_norm.weight, eps)
        here("post_norm", h_TD)
        x_TD = _experts(layer.mlp, h_TD, kernels, here)
        here("combine", x_TD)
    h_TD, _ = kernels.add_rms_norm(x_TD, residual_TD, model.norm.weight, eps)
    note("final_norm", h_TD)
    return h_TD


def _attention(attn: Any, x_TD: Tensor, batch: Batch, table_PH: Tensor, kernels: Any, note: Note) -> Tensor:
    N, G, H, eps = attn.config.num_heads, attn.config.num_kv_heads, attn.config.head_dim, attn.config.rms_eps
    qkv_THH = kernels.linear(x_TD, attn.qkv.weight).view(len(x_TD), N + 2 * G, H)
    note("qkv", qkv_THH)
    q_TNH, k_TGH, v_TGH = qkv_THH.split([N, G, G], dim=1)
    q_TNH, k_TGH = (
        kernels.rms_norm(x.reshape(-1, H), norm.weight, eps).view(x.shape)
        for x, norm in ((q_TNH, attn.q_norm), (k_TGH, attn.k_norm))
    )
    note("q_norm", q_TNH), note("k_norm", k_TGH)
    q_TNH, k_TGH, v_TGH = kernels.rope(q_TNH, k_TGH, v_TGH, batch.positions_T, table_PH)
    note("q_rope", q_TNH), note("k_rope", k_TGH)
    o_TNH = kernels.attention(q_TNH, k_TGH, v_TGH, batch.cu_seqlens)
    note("attention", o_TNH)
    return kernels.linear(o_TNH.flatten(1), attn.o.weight)


def _experts(mlp: Any, x_TD: Tensor, kernels: Any, note: Note) -> Tensor:
    logits_TE = kernels.linear(x_TD, mlp.router.weight)
    note("router_logits", logits_TE)
    weights_TK, ids_TK = kernels.router(logits_TE, mlp.config.top_k, mlp.config.norm_topk_prob)
    note("expert_ids", ids_TK.long()), note("routing_weights", weights_TK)
    return kernels.experts(x_TD, mlp.gate_up.weight, mlp.down.weight, weights_TK, ids_TK)
