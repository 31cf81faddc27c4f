"""SGLang's own operators for Qwen3-MoE in BF16, called as its deterministic server calls them in a prefill.

Nothing is computed here but what SGLang itself leaves to torch (residual additions, the table of RoPE). The weights are
the learner's own tensors. T tokens, L scored rows, D hidden, N and G query and key heads, H head size, E experts,
K experts a token, F expert hidden, V vocabulary.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minitransformer.errors import InputError

# DeepGEMM is another product than the Triton kernel; server and learner must choose the same one. Read at the import.
ENVIRONMENT = {"SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0"}
# Of the server whose prefill these operators are. By itself it would serve a checkpoint in FP32 as FP16.
ARGUMENTS = (
    "--enable-deterministic-inference", "--attention-backend", "triton", "--sampling-backend", "pytorch",
    "--moe-runner-backend", "triton", "--dtype", "bfloat16",
)  # fmt: skip
# How SGLang's fused MoE is launched under --enable-deterministic-inference.
TILES = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
NOT_QUANTISED = dict.fromkeys(
    ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
)


@contextmanager
def _environment() -> Iterator[None]:
    """ENVIRONMENT, until the block ends; the rest of the process keeps its own."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class SglangKernels:
    """The operators of one forward pass. InputError where SGLang's can't be imported; they need a CUDA device."""

    def __init__(self) -> None:
        try:
            with _environment():
                from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified
                from sglang.kernels.ops.attention.rope import apply_rope_inplace_with_kvcache
                from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate
                from sglang.srt.batch_invariant_ops import batch_invariant_ops as dense
                from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
                from triton import language as tl
        except (ImportError, OSError) as error:
            raise InputError(f"SGLang's kernels can't be loaded: {error}; is its GPU install complete?") from error

        if dense._ENABLE_MM_DEEPGEMM and dense.ENABLE_JIT_DEEPGEMM:
            said = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
            raise InputError(f"SGLang was imported here before, with DeepGEMM; start this process with {said}")
        self.dense: Any = dense
        self.moe: Any = fused_moe
        self.gate, self.turn = moe_fused_gate, apply_rope_inplace_with_kvcache
        self.attend, self.bf16 = extend_attention_fwd_unified, tl.bfloat16

    def linear(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """BF16 [T, N]."""
        return self.dense.matmul_persistent(x_TK, weight_NK.t())

    def logits(self, h_LD: Tensor, weight_VD: Tensor) -> Tensor:
        """FP32 [L, V], rounded to BF16 on the way: SGLang's head writes BF16."""
        return self.linear(h_LD, weight_VD).float()

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self.dense.rms_norm_batch_invariant(x, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """-> (the norm of the unrounded sum, the new residual): torch's operators around mean_dim."""
        s_TD = x_TD.float() + residual_TD.float()
        mean_T1 = self.dense.mean_dim(s_TD.pow(2), -1, keepdim=True)
        return (s_TD * torch.rsqrt(mean_T1 + eps) * weight_D).to(x_TD.dtype), s_TD.to(x_TD.dtype)

    def rope_table(self, model: Any) -> Tensor:
        """FP32 [positions, H], cos then sin, by the GPU's own pow, cos and sin: SGLang makes it there."""
        H, to = model.config.head_dim, dict(dtype=torch.float32, device=model.device)
        frequencies = 1.0 / model.config.rope_theta ** (torch.arange(0, H, 2, **to) / H)
        angles = torch.arange(model.config.max_positions, **to)[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def rope(self, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, positions_T: Tensor, table_PH: Tensor) -> list[Tensor]:
        """-> [q turned, the keys' store, the values' store]: row t of a store is token t's."""
        stores = [torch.empty_like(k_TGH, memory_format=torch.contiguous_format).flatten(1) for _ in range(2)]
        rows_T = torch.arange(len(positions_T), device=positions_T.device)
        self.turn(q_TNH, k_TGH, v_TGH, *stores, table_PH, positions_T, rows_T, is_neox=True)
        return [q_TNH, *(store.view(k_TGH.shape) for store in stores)]

    def attention(self, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, bounds: Sequence[int]) -> Tensor:
        """Causal within each sequence; bounds: S + 1 bounds of the sequences in T."""
        to, o_TNH = dict(device=q_TNH.device), torch.empty_like(q_TNH)
        bounds_S1 = torch.tensor(bounds, dtype=torch.int64, **to)
        longest = max(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
        rows_T = torch.arange(bounds[-1], **to)
        no_prefix_S = torch.zeros(len(bounds) - 1, dtype=torch.int32, **to)
        self.attend(
            q_TNH, o_TNH, k_TGH, v_TGH, 1.0, 1.0, bounds_S1, bounds_S1, rows_T, no_prefix_S, longest,
            sm_scale=q_TNH.shape[-1] ** -0.5,
        )  # fmt: skip
        return o_TNH

    def router(self, logits_TE: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
        """-> (weights FP32 [T, K], expert ids int32 [T, K])."""
        no_bias_E = torch.zeros(logits_TE.shape[1], dtype=torch.float32, device=logits_TE.device)
        return self.gate(logits_TE, no_bias_E, top_k, scoring_func="softmax", renormalize=norm_topk_prob)

    def experts(self, x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, weights_TK: Tensor, ids_TK: Tensor):
        """BF16 [T, D]; gate rows first."""
        (T, D), (E, _, F), K = x_TD.shape, down_EDF.shape, ids_TK.shape[1]
        routing = self.routing(weights_TK, ids_TK, E)
        gate_up = self.grouped(x_TD, gate_up_E2FD, x_TD.new_empty(T * K, 2 * F), routing, False)
        h = self.swiglu(gate_up)
        del gate_up  # the largest tensor of a pass
        return self.combine(self.grouped(h, down_EDF, x_TD.new_empty(T, K, D), routing, True))

    def routing(self, weights_TK: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        """What `grouped` needs of the router: the two, and the tiles of each expert's rows."""
        return weights_TK, ids_TK, *self.moe.moe_align_block_size(ids_TK, TILES["BLOCK_SIZE_M"], num_experts)

    def swiglu(self, gate_up_R2F: Tensor) -> Tensor:
        h_RF = gate_up_R2F.new_empty(len(gate_up_R2F), gate_up_R2F.shape[1] // 2)
        self.moe.silu_and_mul(gate_up_R2F, h_RF)
        return h_RF

    def grouped(self, x: Tensor, weight_ENK: Tensor, out: Tensor, routing: Sequence[Tensor], weighted: bool) -> Tensor:
        """Fills out, a row for each (token, slot). weighted: x has such rows too, and each product takes its weight."""
        weights_TK, ids_TK, *blocks = routing
        K = ids_TK.shape[1]
        self.moe.invoke_fused_moe_kernel(
            x, weight_ENK, None, out, None, None, None, weights_TK, ids_TK, *blocks, weighted, 1 if weighted else K,
            TILES, compute_type=self.bf16, **NOT_QUANTISED, filter_expert=False, router_topk=K if weighted else 1,
        )  # fmt: skip
        return out

    def combine(self, y_TKD: Tensor) -> Tensor:
        """[T, D]: SGLang adds two slots with torch, more with its kernel."""
        if y_TKD.shape[1] == 1:
            return y_TKD[:, 0]
        if y_TKD.shape[1] == 2:
            return torch.add(y_TKD[:, 0], y_TKD[:, 1])
        y_TD = torch.empty_like(y_TKD[:, 0])
        self.moe.moe_sum_reduce(y_TKD, y_TD, 1.0)
        return y_TD

    def logprob(self, logits_LV: Tensor, ids_L: Tensor, temperature: float) -> Tensor:
        """FP32 [L]."""
        scaled_LV = logits_LV if temperature == 1 else logits_LV / temperature
        return self.dense.log_softmax(scaled_LV).gather(1, ids_L[:, None])[:, 0]
