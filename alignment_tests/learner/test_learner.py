"""The learner: scores, updates, freezing, metrics, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import random_samples, random_sequences, tiny_model
from minitransformer.batch import Batch
from minitransformer.errors import InputError
from minitransformer.learner import gradients
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import TokenLoss, nll, policy_gradient
from minitransformer.learner.packing import Sample
from minitransformer.ops.cpu import bf16_bits, f32
from minitransformer.ops.logprob import logprob
from minitransformer.ops.rounding import f32_to_bf16


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _snapshot(learner):
    return {n: m.clone() for n, m in learner.masters.items()} | {
        f"model.{n}": p.detach().clone() for n, p in learner.model.named_parameters()
    }


def _assert_same(learner, before):
    for name, tensor in _snapshot(learner).items():
        assert_bits_equal(tensor, before[name], name)


def test_score_is_the_models_log_prob_of_each_next_token(model):
    sequences, prompts = random_sequences(1, 4)
    found = Learner(model).score(sequences, prompts, temperature=0.6)
    for ids, start, scores in zip(sequences, prompts, found, strict=True):
        with torch.no_grad():
            logits = model(Batch.packed([ids]))
        # Token t is scored by the logits of t - 1; the first token has none.
        assert_bits_equal(scores, logprob(logits[start - 1 : -1], torch.tensor(ids[start:]), 0.6))


def test_score_ignores_the_packing(model):
    sequences, prompts = random_sequences(2, 9)
    whole = Learner(model).score(sequences, prompts)
    for budget in (24, 40, 64):
        for got, want in zip(Learner(model, max_tokens_per_pack=budget).score(sequences, prompts), whole, strict=True):
            assert_bits_equal(got, want, f"budget {budget}")
    order = [4, 8, 0, 2, 7, 1, 3, 6, 5]
    shuffled = Learner(model).score([sequences[i] for i in order], [prompts[i] for i in order])
    for i, got in zip(order, shuffled, strict=True):
        assert_bits_equal(got, whole[i], f"sequence {i}")


def test_each_sequence_has_its_temperature(model):
    sequences, prompts = random_sequences(4, 3)
    learner = Learner(model)
    mixed = learner.score(sequences, prompts, temperature=[0.6, 1.0, 0.0])
    for s, t in enumerate([0.6, 1.0, 1.0]):  # 0 is greedy, whose log-probs are those of temperature 1
        assert_bits_equal(mixed[s], learner.score([sequences[s]], [prompts[s]], temperature=t)[0])
    for bad in (-1.0, math.nan, math.inf, [1.0, 1.0]):
        with pytest.raises(InputError, match="temperature"):
            learner.score(sequences, prompts, temperature=bad)


def test_the_first_ratio_is_one_at_any_temperature(model):
    sequences, prompts = random_sequences(6, 4)
    learner = Learner(tiny_model(), lr=1e-4)
    old = learner.score(sequences, prompts, temperature=0.6)
    samples = [
        Sample(ids, n, 1.0, lp.tolist(), temperature=0.6) for ids, n, lp in zip(sequences, prompts, old, strict=True)
    ]
    metrics = learner.update(samples)
    assert metrics.max_log_prob_gap == 0.0 and metrics.clip_share == 0.0 and metrics.loss == -1.0


def test_update_writes_rounded_masters_into_the_same_storage():
    model = tiny_model()
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    before, version = {n: p.detach().clone() for n, p in model.named_parameters()}, model.weights_version
    learner = Learner(model, lr=1e-2)
    metrics = learner.update(random_samples(model, 11, 4))
    assert model.weights_version == version + 1 and metrics.step == learner.step == 1
    for name, p in model.named_parameters():
        assert p.data_ptr() == addresses[name] and p.grad is None
        assert not torch.equal(p, before[name]), name
        master = f32(learner.masters[name]).reshape(-1)
        nearest = np.array([f32_to_bf16(v) for v in master], dtype=np.uint16)
        assert np.array_equal(bf16_bits(p).reshape(-1), nearest), name


def test_masters_keep_what_bf16_would_lose():
    """Steps far below half a BF16 unit add up in the masters and reach the weights in the end."""
    model = tiny_model()
    samples = [Sample([1, 2, 3, 4], 1)]
    learner = Learner(model, lr=2e-5, betas=(0.0, 0.0))
    name = "layers.0.attn.o.weight"
    weight = dict(model.named_parameters())[name]
    start = weight.detach().clone()
    learner.update(samples, nll)
    moved_at_once = (weight != start).float().mean().item()
    for _ in range(30):
        learner.update(samples, nll)
    assert (weight != start).float().mean().item() > max(0.2, 3 * moved_at_once)


def test_adamw_by_hand():
    model = tiny_model()
    learner = Learner(model, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_grad_norm=None)
    expected = {n: m.double() for n, m in learner.masters.items()}
    moments = {n: (torch.zeros_like(m), torch.zeros_like(m)) for n, m in expected.items()}
    apply = learner._apply
    caught = {}

    def keep(totals, clip):
        caught.update({n: g.clone() for n, g in totals.items()})
        apply(totals, clip)

    learner._apply = keep
    for t in (1, 2):
        learner.update([Sample([5, 6, 7, 8, 9], 2)], nll)
        for name, w in expected.items():
            g, (m, v) = caught[name].double(), moments[name]
            m.mul_(0.8).add_(0.2 * g), v.mul_(0.9).add_(0.1 * g * g)
            w.mul_(1 - 1e-3 * 0.1)
            w.sub_(1e-3 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6))
    for name, w in expected.items():
        torch.testing.assert_close(learner.masters[name].double(), w, rtol=1e-6, atol=1e-7, msg=name)


def test_clipping_scales_all_gradients_by_one_factor():
    totals = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    for bound, clip in ((10.0, 1.0), (5.0, 1.0), (1.0, 0.2), (None, 1.0)):
        assert gradients.measure(totals, dict.fromkeys(["a", "none", "b"]), bound) == (5.0, clip)
    long = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    norm, _ = gradients.measure({"a": long}, {"a": None}, None)
    assert norm == pytest.approx(long.double().norm().item(), rel=1e-14)


def test_a_clipped_update_is_that_of_scaled_gradients():
    """One factor for all parameters, rounded to FP32, and each product too; a gradient of zeros is as none."""
    ends = []
    for scaled in (False, True):
        learner = Learner(tiny_model(), lr=1e-2)
        grads = {n: inputs.normal(i, *p.shape) for i, (n, p) in enumerate(learner.parameters.items())}
        _, clip = gradients.measure(grads, grads, 0.5)
        assert 0 < clip < 1e-2
        for untouched in (), ("norm.weight", "layers.1.mlp.down.weight"):
            totals = {n: g for n, g in grads.items() if n not in untouched}
            if scaled:
                totals = {n: g * torch.tensor(clip, dtype=torch.float32) for n, g in totals.items()}
                totals |= {n: torch.zeros_like(grads[n]) for n in untouched}
            learner._apply(totals, 1.0 if scaled else clip)
        ends.append(_snapshot(learner))
    for name, tensor in ends[0].items():
        assert_bits_equal(tensor, ends[1][name], name)


def test_a_few_dozen_steps_overfit():
    model = tiny_model()
    learner = Learner(model, lr=3e-3)
    samples = [Sample(ids, n) for ids, n in zip(*random_sequences(13, 4, longest=12), strict=True)]
    losses = [learner.update(samples, nll).loss for _ in range(25)]
    assert losses[-1] < 0.1 * losses[0], losses


def test_frozen_parameters_stay_and_get_no_gradient():
    model = tiny_model()
    frozen = ["layers.*.attn.qkv.weight", "*_norm.weight", "embed_tokens.weight"]
    learner = Learner(model, lr=1e-2, frozen=frozen)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.update([Sample([1, 2, 3, 4, 5], 2)], nll)
    assert "layers.1.attn.q_norm.weight" in learner.frozen and "norm.weight" in learner.parameters
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in learner.frozen) == (not p.requires_grad), name


def test_a_pattern_that_matches_nothing_is_refused(model):
    with pytest.raises(InputError, match=r"'layers.\*.attn.qvk.weight' matches no parameter.*attn.qkv.weight"):
        Learner(model, frozen=["norm.weight", "layers.*.attn.qvk.weight"])
    with pytest.raises(InputError, match="every parameter is frozen"):
        Learner(model, frozen=["*"])
    with pytest.raises(InputError, match="single string"):
        Learner(model, frozen="norm.weight")


def test_metrics_by_hand(model):
    learner = Learner(tiny_model(), lr=0.0)
    ids, start = [1, 2, 3, 4, 5, 6], 2
    (lp,) = learner.score([ids], [start])
    shift = torch.tensor([0.0, math.log(1.5), -math.log(2.0), 0.1])
    old = (lp - shift).tolist()
    metrics = learner.update([Sample(ids, start, [1.0, 1.0, -1.0, 2.0], old)])
    out = policy_gradient(lp, torch.tensor(old), torch.tensor([1.0, 1.0, -1.0, 2.0]))
    assert metrics.loss == math.fsum(out.loss_L.tolist()) / 4
    assert metrics.clip_share == 0.5 and metrics.tokens == 4 and metrics.kl is None
    assert metrics.max_log_prob_gap == pytest.approx(math.log(2.0), rel=1e-6)
    assert learner.update([Sample(ids, start)], nll).clip_share is None


def test_a_loss_that_is_not_finite_updates_nothing():
    model = tiny_model()
    learner = Learner(model, lr=1e-2, max_tokens_per_pack=8)

    def broken(log_probs_L, sample, where):
        value = math.nan if where == "sample 1" else 1.0
        return TokenLoss(torch.full_like(log_probs_L, value), -torch.ones_like(log_probs_L))

    before = _snapshot(learner)
    with pytest.raises(FloatingPointError, match="sample 1: loss of completion token 0 is not finite"):
        learner.update([Sample([1, 2, 3, 4, 5, 6, 7], 2)] * 2, broken)
    _assert_same(learner, before)
    assert learner.step == 0 and all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_names_the_first_parameter():
    model = tiny_model()
    learner = Learner(model, lr=1e-2)
    for name in ("layers.1.mlp.down.weight", "layers.2.attn.o.weight"):
        dict(model.named_parameters())[name].register_hook(lambda g: g * math.inf)
    before = _snapshot(learner)
    with pytest.raises(FloatingPointError, match="gradient of layers.1.mlp.down.weight is not finite"):
        learner.update([Sample([1, 2, 3], 1)], nll)
    _assert_same(learner, before)
    assert learner.step == 0 and not learner.optimizer.moments and all(p.grad is None for p in model.parameters())


def test_weights_written_by_someone_else_are_noticed():
    model = tiny_model()
    first, second = Learner(model, lr=1e-3), Learner(model, lr=1e-3)
    first.update([Sample([1, 2, 3], 1)], nll)
    with pytest.raises(InputError, match="embed_tokens.weight was written by someone else"):
        second.update([Sample([1, 2, 3], 1)], nll)


def test_bad_settings_and_samples(model):
    for settings, message in [
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_tokens_per_pack": 0}, "max_tokens_per_pack"),
        ({"lr": -1.0}, "optimizer settings"),
        ({"betas": (0.9, 1.0)}, "optimizer settings: betas"),
        ({"betas": 0.9}, "optimizer settings"),
        ({"eps": 0.0}, "optimizer settings: eps"),
        ({"weight_decay": math.nan}, "optimizer settings: weight_decay"),
    ]:
        with pytest.raises(InputError, match=message):
            Learner(model, **settings)
    learner = Learner(model)
    with pytest.raises(InputError, match="sequence 1: id 96 at position 0"):
        learner.score([[1, 2], [96, 1]], [1, 1])
    with pytest.raises(InputError, match="sample 0: the policy gradient needs old_log_probs"):
        learner.update([Sample([1, 2], 1)])
    with pytest.raises(InputError, match="no sequences"):
        learner.update([])
