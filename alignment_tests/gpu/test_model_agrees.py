"""Whole models on the GPU against the CPU's bits at every stage, packed (learner) and paged (sampler)."""

from functools import lru_cache
from unittest import mock

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.gpu.values import agree
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.test_bad_rows import BAD, GOOD, assert_same, exploding_model
from minitransformer.alignment.trace import Noter
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.ops import gpu as kernels
from minitransformer.ops import logprob
from minitransformer.recipe import RECIPES
from minitransformer.sampler.cache import KVCache
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import RequestError, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
PAGE = 16
# Qwen3-30B-A3B's widths in one layer, and the demo checkpoint's, with few ids.
LAYER = dict(
    vocab_size=512, hidden_size=2048, num_layers=1, num_heads=32, num_kv_heads=4, head_dim=128, intermediate_size=6144,
    expert_size=768, num_experts=128, top_k=8, sparse_layers=(True,), rope_theta=1e6, max_positions=512,
)  # fmt: skip
DEMO = dict(
    vocab_size=4096, hidden_size=576, num_layers=6, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
    expert_size=384, num_experts=16, top_k=4, sparse_layers=(True, False, True, True, True, True), max_positions=512,
    tie_word_embeddings=True,
)  # fmt: skip
MODELS = {"tiny": ({}, [1, 24, 2, 65, 90]), "demo's shape": (DEMO, [1, 64, 130, 7]), "a real layer": (LAYER, [33, 5])}
RUNS = {name: (name, "bf16") for name in MODELS} | {
    f"{name} {recipe}": (name, recipe)
    for name, recipes in (
        ("tiny", [name for name in RECIPES if name != "bf16"]),
        ("demo's shape", ["nvfp4_per_token"]),
        ("a real layer", ["nvfp4_per_token", "w4a16"]),
    )
    for recipe in recipes
}


class Stages(Noter):
    """Every stage's rows in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, torch.Tensor] = {}

    def take(self, stage, keys_R, rows) -> None:
        self.rows[stage] = rows


def compare(cpu: Qwen3MoeForCausalLM, gpu: Qwen3MoeForCausalLM, batch: Batch, caches=(None, None), what="") -> None:
    """One forward pass on both; the first stage that differs is named."""
    want, got = Stages(), Stages()
    with torch.no_grad():
        logits = cpu(batch, caches[0], want)
        on_gpu = gpu(batch.to("cuda"), caches[1], got)
    assert list(want.rows) == list(got.rows) and len(want.rows) > 10
    for stage, rows in want.rows.items():
        agree([got.rows[stage]], [rows], f"{what} {stage}")
    ids = inputs.integers(9, logits.shape[1], logits.shape[0])
    agree([logprob.logprob(on_gpu, ids.cuda(), 0.9)], [logprob.logprob(logits, ids, 0.9)], f"{what} log-probs")


@lru_cache(maxsize=1)
def pair(name: str) -> tuple[Qwen3MoeForCausalLM, Qwen3MoeForCausalLM]:
    cpu = tiny_model(**MODELS[name][0])
    gpu = Qwen3MoeForCausalLM(cpu.config)
    gpu.load_state_dict(cpu.state_dict())
    return cpu, gpu.to("cuda")


@pytest.fixture(scope="module", params=RUNS)
def models(request):
    name, recipe = RUNS[request.param]
    for model in pair(name):
        model.set_recipe(recipe)
    return *pair(name), MODELS[name][1]


def test_packed(models):
    cpu, gpu, lengths = models
    sequences = [inputs.integers(50 + i, cpu.config.vocab_size, n).tolist() for i, n in enumerate(lengths)]
    compare(cpu, gpu, Batch.packed(sequences), what="packed")
    if cpu.recipe.name != "bf16":
        with mock.patch.object(kernels.quantised_linear, "FEW", -1):
            compare(cpu, gpu, Batch.packed(sequences), what="packed, by the kernel of many rows")


def test_paged(models):
    """Prefill in chunks, then decode, all sequences in one batch."""
    cpu, gpu, lengths = models
    sequences = [inputs.integers(50 + i, cpu.config.vocab_size, n).tolist() for i, n in enumerate(lengths)]
    pages = [-(-n // PAGE) for n in lengths]
    free = inputs.integers(60, 1 << 40, sum(pages)).argsort().tolist()
    tables = [[free.pop() for _ in range(n)] for n in pages]
    caches = [KVCache(cpu.config, sum(pages), PAGE, device) for device in ("cpu", "cuda")]
    for cache in caches:  # what was never written must not be read
        for store in (*cache.k, *cache.v):
            store.fill_(torch.nan)
    done = [0] * len(lengths)
    for chunk in (64, 23, 1, 1, 1):
        live = [s for s, n in enumerate(lengths) if done[s] < n]
        if not live:
            break
        # The last tokens of each are left for the steps of one token.
        ends = [min(lengths[s], max(done[s] + 1, min(done[s] + chunk, lengths[s] - 3))) for s in live]
        new = [sequences[s][done[s] : end] for s, end in zip(live, ends, strict=True)]
        last = torch.tensor([len(ids) for ids in new]).cumsum(0) - 1
        batch = Batch.paged(new, [done[s] for s in live], [tables[s] for s in live], PAGE, last.tolist(), live)
        compare(cpu, gpu, batch, caches, f"chunk of {chunk}")
        for s, end in zip(live, ends, strict=True):
            done[s] = end
    assert all(torch.equal(a[~a.isnan()], b.cpu()[~a.isnan()]) for a, b in zip(caches[0].k, caches[1].k, strict=True))


def test_an_update_of_the_weights_is_seen(models):
    """No kernel keeps a copy of a weight."""
    cpu, gpu, _ = models
    with torch.no_grad():
        for model in (cpu, gpu):
            model.layers[0].attn.qkv.weight.mul_(-0.5)
            model.layers[0].mlp.gate_up.weight.mul_(-0.5)
    compare(cpu, gpu, Batch.packed([[1, 2, 3, 4, 5]]), what="after an update")


def test_a_bad_token_ends_its_own_request():
    """In the step that reads it, also where no logits are wanted; the others have the bits that they have alone."""
    model, bad = exploding_model("bf16", 0, "router").to("cuda"), [20, 21, 22, BAD, *range(30, 50)]
    params, options = SamplingParams(4, seed=3, ignore_eos=True), dict(page_size=4, chunk_size=8)
    want = Sampler(model, **options).generate(GOOD, params)
    with pytest.raises(RequestError, match="prompts.1.: request 1: position 3, layer 0, router") as error:
        Sampler(model, **options).generate([GOOD[0], bad, *GOOD[1:]], params)
    assert_same([error.value.completions[i] for i in (0, 2, 3)], want)
