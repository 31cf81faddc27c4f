"""Each forward pass -> one file in $STOCK_DUMP: the tokens, and the stages under the learner's names (trace.py)."""

import itertools
import os
from pathlib import Path

import torch
from sglang.srt.models import qwen3_moe

MODULES = {
    "input_layernorm": ("input_norm",), "self_attn.qkv_proj": ("qkv",), "self_attn.q_norm": ("q_norm",),
    "self_attn.k_norm": ("k_norm",), "self_attn.attn": ("attention",), "self_attn.o_proj": ("o",),
    "post_attention_layernorm": ("post_norm",), "mlp.gate": ("router_logits",),
    "mlp.topk": ("routing_weights", "expert_ids"), "mlp": ("combine",),
}  # fmt: skip


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    """The same forward pass: the hooks only copy."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept, self.numbers, self.layer = {}, itertools.count(), 0
        self.model.embed_tokens.register_forward_hook(self.keep("embedding"))
        for i, layer in enumerate(self.model.layers):
            for path, stages in MODULES.items():
                layer.get_submodule(path).register_forward_hook(self.keep(*(f"layers.{i}.{s}" for s in stages)))
            layer.register_forward_pre_hook(lambda *_, i=i: setattr(self, "layer", i))
        self.model.layers[0].self_attn.rotary_emb.register_forward_hook(self.keep_rope)  # the layers share one
        self.model.norm.register_forward_hook(self.keep("final_norm"))
        self.logits_processor.register_forward_hook(self.write)

    def keep(self, *stages):
        def hook(module, args, output):
            for stage, x in zip(stages, output if isinstance(output, tuple) else (output,), strict=False):
                self.kept[stage] = x.clone()

        return hook

    def keep_rope(self, module, args, output):
        for stage, x in zip(("q_rope", "k_rope"), output, strict=True):
            self.kept[f"layers.{self.layer}.{stage}"] = x.clone()

    def write(self, module, args, output):
        stages = {name: x.cpu() for name, x in self.kept.items()}
        path = Path(os.environ["STOCK_DUMP"]) / f"{next(self.numbers):04d}.pt"
        torch.save({"ids": args[0].cpu(), "stages": stages}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        self.kept.clear()


EntryClass = Qwen3MoeForCausalLM
