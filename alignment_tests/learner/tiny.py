"""A tiny random model for the learner's tests, and the same network in plain FP64 torch without any rounding."""

from collections.abc import Mapping

import torch
from torch import Tensor

from minitransformer.learner.packing import Sample
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM


def tiny_config(**changes) -> Qwen3MoeConfig:
    """Two sparse layers around a dense one."""
    values = dict(
        vocab_size=96, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
        expert_size=32, num_experts=8, top_k=2, norm_topk_prob=True, sparse_layers=(True, False, True), rms_eps=1e-6,
        rope_theta=10000.0, max_positions=96, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeConfig(**(values | changes))


def tiny_model(seed: int = 0, **changes) -> Qwen3MoeForCausalLM:
    """Weights of the size 1 / sqrt(fan-in), norms around 1."""
    model = Qwen3MoeForCausalLM(tiny_config(**changes))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            p.copy_(1 + 0.1 * noise if "norm" in name else noise * p.shape[-1] ** -0.5)
    return model


def random_sequences(seed: int, count: int, longest: int = 24, vocab: int = 96) -> tuple[list[list[int]], list[int]]:
    """(sequences, prompt lengths)."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=rng).tolist()
    prompts = [int(torch.randint(1, n, (1,), generator=rng)) for n in lengths]
    return [torch.randint(0, vocab, (n,), generator=rng).tolist() for n in lengths], prompts


def random_samples(model, seed: int, count: int) -> list[Sample]:
    """Samples whose old log-probs lie near the model's own, with advantages of both signs."""
    from minitransformer.learner.learner import Learner

    sequences, prompts = random_sequences(seed, count, vocab=model.config.vocab_size)
    requires = {name: p.requires_grad for name, p in model.named_parameters()}
    scores = Learner(model).score(sequences, prompts)
    for name, p in model.named_parameters():
        p.requires_grad_(requires[name])
    rng = torch.Generator().manual_seed(seed + 1)
    return [
        Sample(ids, n, float(torch.randn((), generator=rng)), lp + 0.2 * torch.randn(lp.shape, generator=rng))
        for ids, n, lp in zip(sequences, prompts, scores, strict=True)
    ]


def reference_log_probs(
    config: Qwen3MoeConfig, weights: Mapping[str, Tensor], ids: list[int], experts: Mapping[int, Tensor]
) -> Tensor:
    """FP64 log-probs [len(ids) - 1] of tokens 1.., from FP64 weights by name. experts[i]: ids [T, K] chosen in layer i.

    The choice of experts is given, not computed: it is a step function, whose steps rounding moves.
    """
    N, G, H = config.num_heads, config.num_kv_heads, config.head_dim
    T = len(ids)

    def norm(x, w):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_eps).sqrt() * w

    def rotate(x_TNH):
        frequency = config.rope_theta ** (-torch.arange(0, H, 2, dtype=torch.float64) / H)
        angle = torch.arange(T, dtype=torch.float64)[:, None, None] * frequency
        a, b = x_TNH[..., : H // 2], x_TNH[..., H // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def swiglu(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    x = weights["embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config.num_layers):
        w = {n.split(".", 2)[2]: p for n, p in weights.items() if n.startswith(f"layers.{i}.")}
        qkv = (norm(x, w["input_norm.weight"]) @ w["attn.qkv.weight"].T).view(T, N + 2 * G, H)
        q, k, v = qkv.split([N, G, G], 1)
        q, k = rotate(norm(q, w["attn.q_norm.weight"])), rotate(norm(k, w["attn.k_norm.weight"]))
        k, v = (t.repeat_interleave(N // G, 1) for t in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) * H**-0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        x = x + torch.einsum("nts,snh->tnh", scores.softmax(-1), v).flatten(1) @ w["attn.o.weight"].T
        h = norm(x, w["post_norm.weight"])
        if not config.sparse_layers[i]:
            x = x + swiglu(h @ w["mlp.gate_up.weight"].T) @ w["mlp.down.weight"].T
            continue
        p = (h @ w["mlp.router.weight"].T).softmax(-1).gather(1, experts[i])
        p = p / p.sum(-1, keepdim=True) if config.norm_topk_prob else p
        gate_up = torch.einsum("td,tkfd->tkf", h, w["mlp.gate_up.weight"][experts[i]])
        x = x + torch.einsum("tkf,tkdf,tk->td", swiglu(gate_up), w["mlp.down.weight"][experts[i]], p)
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    logits = norm(x, weights["norm.weight"]) @ head.T
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
