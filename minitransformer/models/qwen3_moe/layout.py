"""Which parameters a config has, and which tensors of a Hugging Face checkpoint each of them is made of.

D hidden, H head size, E experts, F expert hidden, I hidden of a dense layer, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Piece(NamedTuple):
    """Checkpoint tensor `key` is `parameter[index]`."""

    parameter: str
    index: tuple[int | slice, ...]
    key: str


def parameter_shapes(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter (all BF16), in the order of the forward pass."""
    c = config
    V, D, H, E, F, I = c.vocab_size, c.hidden_size, c.head_dim, c.num_experts, c.expert_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (V, D)}
    for i, sparse in enumerate(c.sparse_layers):
        layer = {
            "input_norm": (D,),
            "attn.qkv": ((c.num_heads + 2 * c.num_kv_heads) * H, D),
            "attn.q_norm": (H,),
            "attn.k_norm": (H,),
            "attn.o": (D, c.num_heads * H),
            "post_norm": (D,),
        }
        if sparse:
            layer |= {"mlp.router": (E, D), "mlp.gate_up": (E, 2 * F, D), "mlp.down": (E, D, F)}
        else:
            layer |= {"mlp.gate_up": (2 * I, D), "mlp.down": (D, I)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (D,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def parameter_bytes(config: Qwen3MoeConfig) -> int:
    """Of all parameters, in BF16."""
    return 2 * sum(math.prod(shape) for shape in parameter_shapes(config).values())


def pieces(config: Qwen3MoeConfig, fused: frozenset[int] = frozenset()) -> Iterator[Piece]:
    """The checkpoint tensors of every parameter, each parameter's in ascending rows.

    The layers in `fused` keep their experts in two fused tensors, the others in three tensors an expert.
    """
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield Piece("embed_tokens.weight", (), EMBEDDING)
    for i, sparse in enumerate(c.sparse_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        yield Piece(ours + "input_norm.weight", (), theirs + "input_layernorm.weight")
        for name, begin, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            rows_of = (slice(begin, begin + rows),)
            yield Piece(ours + "attn.qkv.weight", rows_of, f"{theirs}self_attn.{name}_proj.weight")
        for name, key in (("q_norm", "q_norm"), ("k_norm", "k_norm"), ("o", "o_proj")):
            yield Piece(f"{ours}attn.{name}.weight", (), f"{theirs}self_attn.{key}.weight")
        yield Piece(ours + "post_norm.weight", (), theirs + "post_attention_layernorm.weight")
        if sparse:
            yield Piece(ours + "mlp.router.weight", (), theirs + "mlp.gate.weight")
            yield from _expert_pieces(c, ours, theirs + "mlp.experts.", i in fused)
        else:
            yield from _mlp_pieces(ours, theirs + "mlp.", c.intermediate_size, ())
    yield Piece("norm.weight", (), "model.norm.weight")
    if not c.tie_word_embeddings:
        yield Piece("lm_head.weight", (), HEAD)


def _expert_pieces(c: Qwen3MoeConfig, ours: str, theirs: str, fused: bool) -> Iterator[Piece]:
    if fused:
        yield Piece(ours + "mlp.gate_up.weight", (), theirs + "gate_up_proj")
        yield Piece(ours + "mlp.down.weight", (), theirs + "down_proj")
        return
    for e in range(c.num_experts):
        yield from _mlp_pieces(ours, f"{theirs}{e}.", c.expert_size, (e,))


def _mlp_pieces(ours: str, theirs: str, F: int, expert: tuple[int, ...]) -> Iterator[Piece]:
    yield Piece(ours + "mlp.gate_up.weight", (*expert, slice(0, F)), theirs + "gate_proj.weight")
    yield Piece(ours + "mlp.gate_up.weight", (*expert, slice(F, 2 * F)), theirs + "up_proj.weight")
    yield Piece(ours + "mlp.down.weight", expert, theirs + "down_proj.weight")


def piece_shape(shape: tuple[int, ...], index: tuple[int | slice, ...]) -> tuple[int, ...]:
    """The shape of parameter[index] for a parameter of this shape."""
    sliced = [i.stop - i.start for i in index if isinstance(i, slice)]
    return (*sliced, *shape[len(index) :])
