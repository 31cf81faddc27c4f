"""The learner's forward pass on SGLang's own kernels: its log-probs are those of an unmodified server's prefill.

The model is the learner's, its weights are used as they are; only the operators are SGLang's (stock_kernels.py).
Row-wise they do not depend on the batch, so one packed pass equals whatever batches and chunks the server made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.learner.scoring import CHUNK_BYTES
from minitransformer.models.qwen3_moe.layers import Note, no_trace
from minitransformer.plugins.sglang.plugin import check_version, sglang_version
from minitransformer.plugins.sglang.stock_kernels import ARGUMENTS, SglangKernels

# What /server_info says of a server whose prefill these kernels are.
SETTINGS = {
    "enable_deterministic_inference": True, "attention_backend": "triton", "moe_runner_backend": "triton",
    "tp_size": 1, "quantization": None, "rl_on_policy_target": None, "enable_fused_qk_norm_rope": False,
}  # fmt: skip
HEADS = (64, 128, 256)  # other sizes take another path in SGLang's RoPE
__all__ = ["SglangKernels", "hidden", "log_probs", "unable"]


def unable(model: Any, server: Mapping[str, Any]) -> str | None:
    """Why the learner can't call the kernels of this stock server; None if it can. server: its /server_info."""
    try:
        check_version()
        here, there = sglang_version(), server.get("version")
    except InputError as error:
        return str(error)
    if there != here:
        return f"the server runs SGLang {there}, the kernels here are those of {here}"
    config = model.config
    if model.device.type != "cuda":
        return f"SGLang's kernels need a GPU, the learner is on {model.device}"
    if model.recipe.name != "bf16" or model.recipe.overrides or any(x.mlp.gate_up is None for x in model.layers):
        return f"the learner's recipe is {model.recipe.name}, a stock server's experts are in BF16"
    if config.head_dim not in HEADS:
        return f"SGLang turns heads of {config.head_dim} by another kernel; supported are {HEADS}"
    if config.rope_scaling is not None:
        return "SGLang makes its own table for a scaled RoPE"
    wrong = [f"{name} is {server.get(name)!r}" for name, value in SETTINGS.items() if server.get(name, value) != value]
    return f"the server was started otherwise ({'; '.join(wrong)}); use {' '.join(ARGUMENTS)}" if wrong else None


@torch.no_grad()
def log_probs(
    model: Any,
    sequences: Sequence[Sequence[int]],
    kernels: Any,
    temperatures: Sequence[float] | None = None,
    trace: Any = None,
) -> list[Tensor]:
    """FP32 [len - 1] of each sequence, on the host: every token but the first, from one packed pass.

    kernels: SglangKernels(), or operators with its methods. temperatures: one a sequence, positive; None for 1.
    """
    batch = Batch.packed(sequences).to(model.device)
    h_TD = hidden(model, batch, kernels, no_trace if trace is None else trace.bind(batch))
    head = (model.lm_head or model.embed_tokens).weight
    most = max(1, CHUNK_BYTES // (4 * model.config.vocab_size))
    found = []
    for s, ids in enumerate(sequences):
        temperature = 1.0 if temperatures is None else temperatures[s]
        targets_L = torch.tensor(ids[1:], dtype=torch.int64, device=model.device)
        parts = []
        for a in range(0, len(targets_L), most):
            begin, b = batch.cu_seqlens[s] + a, min(a + most, len(targets_L))
            logits_LV = kernels.logits(h_TD[begin : begin + b - a], head)
            parts.append(kernels.logprob(logits_LV, targets_L[a:b], temperature).cpu())
        found.append(torch.cat(parts) if parts else torch.empty(0))
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
