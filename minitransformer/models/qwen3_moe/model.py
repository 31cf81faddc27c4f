"""Qwen3-MoE, top to bottom. Each line of a forward is one arrow of the diagram (README.md beside this file).

T tokens of the batch, D hidden, N query heads, G key/value heads, H head size, E experts, K experts a token,
R = T * K routed rows in dispatch order, F expert hidden, V vocabulary, L rows whose logits are wanted.

The learner calls model(batch), the sampler model(batch, cache). State is passed, never looked up.

Backward: a tensor that two operators read (a residual, the norm before router and gather, tied embeddings) gets the sum
of two BF16 gradients, bf16(fl(a + b)), which commutes; everything else is in the operators' specs.
"""

import os

import torch
from torch import Tensor, nn

from minitransformer.batch import Batch
from minitransformer.devices import resolve
from minitransformer.errors import in_layer
from minitransformer.models.qwen3_moe import weights
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig, inverse_frequencies
from minitransformer.models.qwen3_moe.experts import Bf16Experts, QuantisedExperts, choose, experts_of, forget_copies
from minitransformer.models.qwen3_moe.layers import Note, no_trace, runner
from minitransformer.ops import dispatch, gpu, kv_store
from minitransformer.ops.attention import attention
from minitransformer.ops.embedding import embedding
from minitransformer.ops.linear import linear
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.ops.rms_norm import rms_norm, rms_norm_residual
from minitransformer.ops.rope import rope, rope_table
from minitransformer.ops.router import router
from minitransformer.ops.swiglu import swiglu
from minitransformer.recipe import Recipe, get


class Weight(nn.Module):
    """One BF16 parameter; the operators are functions that take it."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))


class Attention(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.config = config
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Weight(heads * config.head_dim, config.hidden_size)
        self.q_norm, self.k_norm = Weight(config.head_dim), Weight(config.head_dim)
        self.o = Weight(config.hidden_size, config.num_heads * config.head_dim)

    def forward(self, x_TD: Tensor, batch: Batch, rope_table_PH: Tensor, store, note: Note) -> Tensor:
        N, G, eps = self.config.num_heads, self.config.num_kv_heads, self.config.rms_eps
        qkv_THH = linear(x_TD, self.qkv.weight).view(x_TD.shape[0], N + 2 * G, self.config.head_dim)
        if (store or not torch.is_grad_enabled()) and note is no_trace and gpu.takes("qkv", qkv_THH):
            # All up to attention at once; a packed batch is its own store.
            store = store or torch.empty_like(qkv_THH[:, : 2 * G]).view(2, -1, G, self.config.head_dim).unbind()
            norms = self.q_norm.weight, self.k_norm.weight, eps
            q_TNH = gpu.qkv.forward(qkv_THH, *norms, batch.positions_T, rope_table_PH, *store, batch.store_rows_T)
            return linear(attention(q_TNH, *store, batch).flatten(1), self.o.weight)
        note("qkv", qkv_THH)
        q_TNH, k_TGH, v_TGH = (x.contiguous() for x in qkv_THH.split([N, G, G], dim=1))
        q_TNH, k_TGH = rms_norm(q_TNH, self.q_norm.weight, eps), rms_norm(k_TGH, self.k_norm.weight, eps)
        note("q_norm", q_TNH), note("k_norm", k_TGH)
        q_TNH, k_TGH = rope(q_TNH, k_TGH, batch.positions_T, rope_table_PH)
        note("q_rope", q_TNH), note("k_rope", k_TGH)
        if store is not None:  # the sampler: keys and values live in pages
            kv_store.store(k_TGH, v_TGH, *store, batch.store_rows_T)
            k_TGH, v_TGH = store
        o_TNH = attention(q_TNH, k_TGH, v_TGH, batch)
        note("attention", o_TNH)
        return linear(o_TNH.flatten(1), self.o.weight)


class DenseMlp(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.gate_up = Weight(2 * config.intermediate_size, config.hidden_size)  # gate rows first
        self.down = Weight(config.hidden_size, config.intermediate_size)

    def forward(self, x_TD: Tensor, note: Note) -> Tensor:
        gate_up_T2I = linear(x_TD, self.gate_up.weight)
        note("gate_up", gate_up_T2I)
        h_TI = swiglu(gate_up_T2I)
        note("swiglu", h_TI)
        y_TD = linear(h_TI, self.down.weight)
        note("down", y_TD)
        return y_TD


class SparseMlp(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.config = config
        E, D, F = config.num_experts, config.hidden_size, config.expert_size
        self.router = Weight(E, D)
        self.gate_up = Weight(E, 2 * F, D)  # gate rows first
        self.down = Weight(E, D, F)
        self.experts = Bf16Experts()

    def set_recipe(self, recipe: Recipe) -> None:
        if self.gate_up is None:
            self.experts = QuantisedExperts(recipe, self.experts.fixed)
        else:
            self.experts = experts_of(recipe)

    def set_quantised(self, recipe: Recipe, gate_up: Nvfp4, down: Nvfp4) -> None:
        """Experts of a checkpoint that holds them only quantised: no BF16 weights, and so no gradients of them."""
        self.gate_up = self.down = None
        self.experts = QuantisedExperts(recipe, {"gate_up": gate_up, "down": down})

    def forward(self, x_TD: Tensor, note: Note) -> Tensor:
        """router -> experts (experts.py: gather -> gate_up -> swiglu -> down) -> combine"""
        logits_TE = linear(x_TD, self.router.weight)
        note("router_logits", logits_TE)
        weights_TK, expert_ids_TK = router(logits_TE, self.config.top_k, self.config.norm_topk_prob)
        note("expert_ids", expert_ids_TK), note("routing_weights", weights_TK)
        plan = dispatch.plan(expert_ids_TK, self.config.num_experts)
        y_TD = self.experts(self, x_TD, plan, weights_TK, note)
        note("combine", y_TD)
        return y_TD


class Layer(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, index: int):
        super().__init__()
        self.index, self.eps = index, config.rms_eps
        self.input_norm = Weight(config.hidden_size)
        self.attn = Attention(config)
        self.post_norm = Weight(config.hidden_size)
        self.mlp = SparseMlp(config) if config.sparse_layers[index] else DenseMlp(config)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch, rope_table_PH: Tensor, store, note: Note):
        """-> (the MLP's output, the residual before it is added): the next norm adds the two."""

        def noted(stage: str, tensor: Tensor, plan: dispatch.Plan | None = None) -> None:
            note(f"layers.{self.index}.{stage}", tensor if plan is None else dispatch.slots(tensor, plan))

        here = no_trace if note is no_trace else noted
        if residual_TD is None:
            h_TD, residual_TD = rms_norm(x_TD, self.input_norm.weight, self.eps), x_TD
        else:
            h_TD, residual_TD = rms_norm_residual(x_TD, residual_TD, self.input_norm.weight, self.eps)
        here("input_norm", h_TD)
        o_TD = self.attn(h_TD, batch, rope_table_PH, store, here)
        here("o", o_TD)
        h_TD, residual_TD = rms_norm_residual(o_TD, residual_TD, self.post_norm.weight, self.eps)
        here("post_norm", h_TD)
        return self.mlp(h_TD, here), residual_TD


class Qwen3MoeForCausalLM(nn.Module):
    """The whole network. Parameters are BF16 and uninitialised until weights are loaded or set.

    config: shapes and options; tokenizer: of the checkpoint, or None; weights_version: raised by whoever changes the
    weights, so that caches of old keys and values and quantised copies of old weights are dropped.
    """

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.config = config
        self.tokenizer, self._weights_version = None, 0
        self.recipe = get("bf16")
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = Weight(config.hidden_size)
        self.lm_head = None if config.tie_word_embeddings else Weight(config.vocab_size, config.hidden_size)
        # On the CPU, wherever the parameters are made. A plain attribute: no cast of the module casts it.
        yarn = inverse_frequencies(config)
        self.rope_table = rope_table(config.head_dim, config.rope_theta, config.max_positions, *yarn)
        self._tables: dict[torch.device, Tensor] = {}

    def forward(self, batch: Batch, cache=None, trace=None, recompute: bool = False) -> Tensor:
        """Logits [L, V] FP32 of the batch's rows (all of them unless batch.logit_rows_L is set).

        cache: sampler.cache.KVCache, or None to attend within the batch. trace: alignment.trace.Trace or None.
        recompute: keep only each layer's input for the backward pass and run the layer again there; the same bits.
        Raises RowError for tokens whose values an operator refuses; the other tokens' rows do not depend on them.
        """
        note = trace.bind(batch) if trace is not None else no_trace
        h_TD = self.hidden(batch, cache, note, recompute)
        logits_LV = self.logits(h_TD if batch.logit_rows_L is None else h_TD[batch.logit_rows_L])
        note("logits", logits_LV)
        return logits_LV

    def hidden(self, batch: Batch, cache=None, note: Note = no_trace, recompute: bool = False) -> Tensor:
        """The last norm's output [T, D] BF16 of every token; arguments as forward's."""
        x_TD, residual_TD, table = embedding(batch.ids_T, self.embed_tokens.weight), None, self._table()
        note("embedding", x_TD)
        run = runner(recompute, x_TD.is_cuda and note is no_trace)
        for i, layer in enumerate(self.layers):
            args = (x_TD, residual_TD, batch, table, cache and (cache.k[i], cache.v[i]), note)
            with in_layer(i):
                x_TD, residual_TD = run(layer, *args)
        h_TD, _ = rms_norm_residual(x_TD, residual_TD, self.norm.weight, self.config.rms_eps)
        note("final_norm", h_TD)
        return h_TD

    def logits(self, h_LD: Tensor) -> Tensor:
        """[L, D] BF16 of `hidden` -> [L, V] FP32."""
        return linear(h_LD, self.head, torch.float32)

    @property
    def head(self) -> Tensor:
        """[V, D] of the logits; the embedding where they are tied."""
        return (self.lm_head or self.embed_tokens).weight

    def set_recipe(self, recipe: Recipe | str) -> None:
        """Chooses the experts' number format. BF16 weights stay and are quantised when they are used.

        Layers that exist only in NVFP4 keep their codes and scales and take the recipe's activations; the layers that
        such a checkpoint leaves in BF16 stay so unless the recipe names them.
        """
        self.recipe = choose(self.layers, self.config, recipe if isinstance(recipe, Recipe) else get(recipe))

    def _table(self) -> Tensor:
        """The rope table beside the weights: module.to() does not move a plain attribute."""
        if self.device == self.rope_table.device:
            return self.rope_table
        if self.device not in self._tables:
            self._tables[self.device] = self.rope_table.to(self.device)
        return self._tables[self.device]

    @property
    def weights_version(self) -> int:
        return self._weights_version

    @weights_version.setter
    def weights_version(self, value: int) -> None:
        self._weights_version = value
        forget_copies(self.layers)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def spec(self):
        """ExecutionSpec: what decides this model's bits; learner and sampler compare it first."""
        from minitransformer.spec import ExecutionSpec  # spec.py reads the ops, which import nothing of it

        return ExecutionSpec.of(self)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike, recipe: Recipe | str | None = None, device="cpu"):
        """Loads a Hugging Face checkpoint (safetensors only), complete or not at all; InputError says what is wrong.

        recipe: number format of the experts (recipe.py), which beats the checkpoint's own; None keeps that.
        device: where the parameters are made and filled, one tensor of the files at a time.
        """
        chosen = get(recipe) if isinstance(recipe, str) else recipe  # a wrong name is refused before anything is read
        model = weights.load(cls, directory, resolve(device))
        model.set_recipe(chosen or model.recipe)
        return model

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Writes a checkpoint that transformers loads, under a temporary name first."""
        weights.save(self, directory)
