"""The gradient of the whole model: against plain FP64, and with and without recomputation."""

import pytest
import torch

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import random_sequences, reference_log_probs, tiny_model
from minitransformer.alignment.trace import Trace
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample


def _gradients(model, samples, **settings):
    """FP32 gradients of one update's loss, taken just before clipping; the model stays as it is."""
    learner = Learner(model, lr=0.0, max_grad_norm=None, **settings)
    caught = {}
    learner._apply = lambda totals, clip: caught.update(totals)
    metrics = learner.update(samples, nll)
    return caught, metrics


def _reference(model, sequences, prompts):
    trace = Trace(stages=["layers.*.expert_ids"])
    Learner(model).score(sequences, prompts, trace=trace)
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    losses = []
    for s, (ids, start) in enumerate(zip(sequences, prompts, strict=True)):
        experts = {}
        for stage in trace.stages:
            rows = [trace.row(stage, s, p) for p in range(len(ids) - 1)]
            # The last token is never fed to the learner; any choice serves, for nothing depends on it.
            experts[int(stage.split(".")[1])] = torch.stack([*rows, rows[-1]])
        losses.append(-reference_log_probs(model.config, weights, ids, experts)[start - 1 :])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {n: w.grad for n, w in weights.items()}


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"norm_topk_prob": False}], ids=["plain", "tied", "not renormalised"]
)
def test_gradient_of_the_whole_model_against_fp64(changes):
    """Direction: cosine above 0.99; size: relative error (2-norm) below 0.06 a parameter.

    BF16 keeps 8 bits (2^-9 a rounding), and about ten roundings lie between a loss and the first layer.
    """
    model = tiny_model(**changes)
    sequences, prompts = random_sequences(3, 6)
    samples = [Sample(ids, n) for ids, n in zip(sequences, prompts, strict=True)]
    got, metrics = _gradients(model, samples, max_tokens_per_pack=40)
    loss, want = _reference(model, sequences, prompts)
    assert metrics.packs > 1 and metrics.loss == pytest.approx(loss, rel=0.01)
    assert got.keys() == want.keys()
    for name, reference in want.items():
        g, r = got[name].double().flatten(), reference.flatten()
        cosine = (g @ r) / (g.norm() * r.norm())
        error = (g - r).norm() / r.norm()
        assert cosine > 0.99 and error < 0.06, f"{name}: cosine {cosine:.4f}, relative error {error:.4f}"


def test_recomputing_a_layer_gives_the_bits_of_storing_it():
    model = tiny_model()
    samples = [Sample(ids, n) for ids, n in zip(*random_sequences(5, 5), strict=True)]
    stored, metrics = _gradients(model, samples, max_tokens_per_pack=50)
    recomputed, again = _gradients(model, samples, max_tokens_per_pack=50, recompute=True)
    assert metrics == again and stored.keys() == recomputed.keys() == dict(model.named_parameters()).keys()
    for name in stored:
        assert_bits_equal(recomputed[name], stored[name], name)


def test_packs_and_samples_do_not_change_a_tokens_weight():
    """The same update in one pack or many: the same loss bits, and gradients that differ by roundings only."""
    model = tiny_model()
    samples = [Sample(ids, n) for ids, n in zip(*random_sequences(7, 6), strict=True)]
    whole, one = _gradients(model, samples, max_tokens_per_pack=1024)
    parts, many = _gradients(model, samples, max_tokens_per_pack=24)
    assert one.packs == 1 and many.packs > 2 and one.loss == many.loss and one.tokens == many.tokens
    for name, g in whole.items():
        error = (parts[name] - g).norm() / g.norm()
        assert error < 0.01, f"{name}: {error:.4f}"


def test_an_update_repeats_bit_for_bit():
    samples = [Sample(ids, n) for ids, n in zip(*random_sequences(9, 5), strict=True)]
    runs = [_gradients(tiny_model(), samples, max_tokens_per_pack=40)[0] for _ in range(2)]
    for name, g in runs[0].items():
        assert_bits_equal(runs[1][name], g, name)
