"""Graphs of prefills (plugins/sglang/prefill_graphs.py) on a GPU: the eager pass's bits, keys and values too."""

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin import laws
from minitransformer.batch import Batch
from minitransformer.errors import RowError
from minitransformer.ops import gpu
from minitransformer.plugins.sglang.prefill_graphs import PrefillGraphs
from minitransformer.sampler.cache import KVCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
DEVICE, PAGE, PAGES, SIZES = "cuda", 16, 640, (128, 256, 1024)
# New tokens of each sequence, and how many lie before them.
BATCHES = [
    ([90], [0]), ([1], [0]), ([33], [1500]), ([128], [0]), ([129], [3]), ([40, 1, 64], [0, 77, 1016]),
    ([9] * 8, [5] * 8), ([1000], [100]), ([1024], [0]), ([3, 1000], [1021, 0]), ([64], [64]),
    ([16] * 8, [1000] * 8), ([15] * 8, [1001] * 7 + [945]),  # as many keys as a graph takes: KEYS
]  # fmt: skip


def model_of(num_heads: int, num_kv_heads: int, head_dim: int):
    return tiny_model(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, hidden_size=128, max_positions=2048,
        num_layers=4, sparse_layers=(True,) * 4,  # of which two are repeated before a capture
    ).to(DEVICE)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_per_token"])
@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 1, 128)])
def test_a_replay_has_the_bits_of_the_eager_pass(recipe, heads):
    model = model_of(*heads)
    model.set_recipe(recipe)
    ours, theirs = (KVCache(model.config, PAGES, PAGE, DEVICE) for _ in range(2))
    graphs = PrefillGraphs(model, ours, PAGE * PAGES, SIZES)
    rng = torch.Generator(DEVICE).manual_seed(0)
    for a, b in zip(ours.k + ours.v, theirs.k + theirs.v, strict=True):
        a.normal_(generator=rng)
        b.copy_(a)
    assert graphs.sizes == list(SIZES)
    order = 1 + torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(1))
    for new, starts in BATCHES * 2:  # the second time each finds what others have left
        counts = [-(-(n + start) // PAGE) for n, start in zip(new, starts, strict=True)]
        tables = [t.tolist() for t in order[: sum(counts)].split(counts)]
        batch = Batch.paged(laws.prompts(new, model.config.vocab_size), starts, tables, PAGE).to(DEVICE)
        got, want = graphs.run(batch), model.hidden(batch, theirs)
        assert got is not None, f"{new} {starts}: no graph takes it"
        assert_bits_equal(got, want, f"{new} {starts}")
        for i, (a, b) in enumerate(zip(ours.k + ours.v, theirs.k + theirs.v, strict=True)):
            assert_bits_equal(a[1:], b[1:], f"{new} {starts}: cache {i}")  # row 0 is padding's
        gpu.device.check(got.device)


@torch.no_grad()
def test_a_bad_value_is_named_and_padding_has_none():
    model = model_of(4, 2, 64)
    cache, home = KVCache(model.config, PAGES, PAGE, DEVICE), torch.device(DEVICE, 0)
    model.embed_tokens.weight[5] = torch.nan
    graphs = PrefillGraphs(model, cache, PAGE * PAGES, (128,))
    gpu.device.check(home)  # what its own tokens met is forgotten
    for tensor in (*cache.k, *cache.v):
        tensor.zero_()
    good, bad = (Batch.paged([ids], [0], [[3, 4, 5, 6]], PAGE).to(DEVICE) for ids in ([7] * 50, [7] * 50 + [5]))
    graphs.run(good)
    gpu.device.check(home)
    said = []
    for run in (graphs.run, lambda batch: model.hidden(batch, cache)):
        run(bad)
        with pytest.raises(RowError, match="a logit is NaN or infinite") as caught:
            gpu.device.check(home)
        said.append((str(caught.value), caught.value.layer))
    assert said[0] == said[1] and said[0][1] == 0
    cache.k[0].zero_(), cache.v[0].zero_()
    graphs.run(good)
    gpu.device.check(home)
