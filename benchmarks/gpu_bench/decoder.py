"""One decoder layer at the widths of Qwen3-30B-A3B, ours and transformers', with the same weights."""

from collections.abc import Callable

import torch

from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.model import Layer, no_trace
from minitransformer.ops.rope import rope_table

BF16 = torch.bfloat16
WIDTHS = dict(
    vocab_size=151936, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144,
    expert_size=768, num_experts=128, top_k=8, rope_theta=1e6, max_positions=16384, norm_topk_prob=True, rms_eps=1e-6,
    tie_word_embeddings=False,
)  # fmt: skip


def config(num_layers: int = 1) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(num_layers=num_layers, sparse_layers=(True,) * num_layers, **WIDTHS)


@torch.no_grad()
def fill(module: torch.nn.Module, seed: int) -> None:
    """Weights of size 1 / sqrt(fan-in), norms around 1, made on the module's device."""
    gen = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    for name, p in module.named_parameters():
        p.normal_(generator=gen)
        p.mul_(0.1).add_(1) if "norm" in name else p.mul_(p.shape[-1] ** -0.5)


class Ours:
    """call(): (MLP output, residual), which together are the layer's output; leaves: what takes gradients."""

    def __init__(self, sequences: int, length: int, device: str = "cuda", layer: Layer | None = None):
        c = config()
        if layer is None:
            with torch.device(device):
                layer = Layer(c, 0)
            fill(layer, 0)
        self.layer = layer
        self.batch = Batch.packed([[0] * length] * sequences).to(device)
        self.table = rope_table(c.head_dim, c.rope_theta, length).to(device)
        gen = torch.Generator("cpu").manual_seed(1)
        shape = (sequences * length, c.hidden_size)
        self.x, self.residual, self.dy = (torch.randn(shape, generator=gen).to(BF16).to(device) for _ in range(3))
        self.leaves = {"x": self.x.requires_grad_(), "residual": self.residual.requires_grad_()}
        self.leaves |= dict(layer.named_parameters())

    def call(self):
        return self.layer(self.x, self.residual, self.batch, self.table, None, no_trace)

    def outputs(self) -> tuple:
        """What adds up to the layer's output."""
        return self.call()

    def train(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None
        torch.autograd.backward(self.call(), (self.dy, self.dy))


def hf_config(c: Qwen3MoeConfig, max_positions: int, experts: str = "grouped_mm"):
    """transformers' configuration of one such layer; experts: its form of the experts."""
    from transformers import Qwen3MoeConfig as Config

    names = dict(moe_intermediate_size=c.expert_size, num_experts_per_tok=c.top_k, num_hidden_layers=1)
    names |= dict(num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, rms_norm_eps=c.rms_eps)
    same = ("vocab_size", "hidden_size", "head_dim", "num_experts", "norm_topk_prob", "rope_theta")
    made = Config(**names, **{key: getattr(c, key) for key in same}, max_position_embeddings=max_positions)
    made._attn_implementation, made._experts_implementation = "sdpa", experts
    return made


class Theirs:
    """transformers' layer with our weights; its input is the sum that ours makes of x and residual."""

    def __init__(self, ours: Ours, sequences: int, length: int):
        from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

        c, w = ours.layer.attn.config, ours.layer
        theirs = hf_config(c, length)
        with torch.device(ours.x.device):
            self.layer = hf.Qwen3MoeDecoderLayer(theirs, 0).to(BF16)
            self.rope = hf.Qwen3MoeRotaryEmbedding(theirs)
        self._copy(w, c)
        with torch.no_grad():
            self.x = (ours.x + ours.residual).view(sequences, length, -1)
        self.x.requires_grad_()
        self.positions = torch.arange(length, device=ours.x.device)[None]
        self.dy = ours.dy.view_as(self.x)

    @torch.no_grad()
    def _copy(self, w: Layer, c: Qwen3MoeConfig) -> None:
        a, m = self.layer.self_attn, self.layer.mlp
        pairs = {a.q_norm: w.attn.q_norm, a.k_norm: w.attn.k_norm, a.o_proj: w.attn.o, m.gate: w.mlp.router}
        pairs |= {self.layer.input_layernorm: w.input_norm, self.layer.post_attention_layernorm: w.post_norm}
        for theirs, mine in pairs.items():
            theirs.weight.copy_(mine.weight)
        sizes = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        for theirs, mine in zip((a.q_proj, a.k_proj, a.v_proj), w.attn.qkv.weight.split(sizes), strict=True):
            theirs.weight.copy_(mine)
        m.experts.gate_up_proj.copy_(w.mlp.gate_up.weight)
        m.experts.down_proj.copy_(w.mlp.down.weight)

    def call(self):
        cos_sin = self.rope(self.x, self.positions)
        out = self.layer(self.x, position_ids=self.positions, position_embeddings=cos_sin)
        return out[0] if isinstance(out, tuple) else out

    def outputs(self) -> tuple:
        return (self.call(),)

    def train(self) -> None:
        self.x.grad = None
        for p in self.layer.parameters():
            p.grad = None
        self.call().backward(self.dy)


def peak_gib(call: Callable) -> tuple[float, float]:
    """(GiB before, most GiB during) one call."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return before / 2**30, torch.cuda.max_memory_allocated() / 2**30
