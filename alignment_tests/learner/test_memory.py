"""An update that its GPU can't hold: what was needed for what, and nothing is half updated."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alignment_tests.bits import assert_bits_equal
from alignment_tests.learner.tiny import tiny_model
from minitransformer import devices, ops
from minitransformer.errors import InputError
from minitransformer.learner import optimizer
from minitransformer.learner.learner import Learner
from minitransformer.learner.losses import nll
from minitransformer.learner.packing import Sample
from minitransformer.ops import linear

SAMPLES = [Sample(list(range(12)), 3), Sample([5, 4, 3, 2, 1], 2)]


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.25 GiB. GPU 0 has a total capacity of")


def full_at(function, nth: int):
    """function, but its nth call finds no memory."""
    calls = []

    def call(*args, **options):
        calls.append(None)
        return full() if len(calls) == nth else function(*args, **options)

    return call


def trained(steps: int) -> Learner:
    learner = Learner(tiny_model(), lr=1e-2, max_tokens_per_pack=16)
    for _ in range(steps):
        learner.update(SAMPLES, nll)
    return learner


def state(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights, masters and what AdamW keeps of each; zeros where it keeps nothing yet, as in a saved run."""
    found = {f"model.{name}": p.detach().clone() for name, p in learner.model.named_parameters()}
    for name, master in learner.masters.items():
        found[f"masters.{name}"] = master.clone()
        kept = learner.optimizer.moments.get(name, (torch.zeros_like(master),) * 2)
        found |= {f"{kind}.{name}": x.clone() for kind, x in zip(("exp_avg", "exp_avg_sq"), kept, strict=True)}
    return found | {"step": torch.tensor(learner.step)}


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert_bits_equal(tensor, want[name], name)


def _in_the_forward_pass(monkeypatch, learner):
    monkeypatch.setattr(linear, "chain_bits", full_at(linear.chain_bits, 3))


def _in_the_backward_pass(monkeypatch, learner):
    monkeypatch.setattr(linear, "backward", full_at(linear.backward, 6))


def _in_the_gradients_sums(monkeypatch, learner):
    monkeypatch.setattr("minitransformer.learner.gradients.measure", full)


class Torch:
    """torch as one module sees it, with another function."""

    def __init__(self, **functions):
        self.__dict__.update(functions)

    def __getattr__(self, name):
        return getattr(torch, name)


def _in_the_moments(monkeypatch, learner):
    monkeypatch.setattr(optimizer, "torch", Torch(zeros_like=full_at(torch.zeros_like, 4)))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (_in_the_forward_pass, "passes of packs of 16 tokens, with gradients: 20.25 GiB more were needed in linear"),
        (_in_the_backward_pass, "passes of packs of 16 tokens, with gradients: 20.25 GiB more were needed"),
        (_in_the_gradients_sums, "passes of packs of 16 tokens, with gradients: 20.25 GiB more were needed"),
        (_in_the_moments, "making masters and moments in FP32: 20.25 GiB more were needed"),
    ],
    ids=lambda value: getattr(value, "__name__", "")[1:],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_nothing_is_updated_and_the_next_update_is_as_without_it(where, words, steps):
    if where is _in_the_moments and steps:
        pytest.skip("they are there")
    check_unchanged(where, words, steps)


def check_unchanged(where=_in_the_moments, words="making masters and moments", steps=0) -> None:
    learner = trained(steps)
    with pytest.MonkeyPatch.context() as patch:
        where(patch, learner)
        before = state(learner)
        with pytest.raises(InputError, match=f"out of GPU memory in {words}.*; nothing was updated; lower max_tok"):
            learner.update(SAMPLES, nll)
    assert_same(state(learner), before)
    assert learner.step == steps and all(p.grad is None for p in learner.model.parameters())
    learner.update(SAMPLES, nll)
    assert_same(state(learner), state(trained(steps + 1)))


def test_the_numbers_are_told_before_the_first_pass(monkeypatch):
    """Four FP32 tensors a parameter: gradients, masters and two moments; those that are there need no more room."""
    learner, asked = Learner(tiny_model()), []
    count = sum(p.numel() for p in learner.model.parameters())
    monkeypatch.setattr(devices, "free_bytes", lambda device: 16 * count - 1)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_log_probs", lambda *args: pytest.fail("a pass"))
        with pytest.raises(InputError, match=rf"update of {count:,} parameters \(gradients, .* GiB are needed on cpu"):
            learner.update(SAMPLES, nll)
    monkeypatch.setattr(optimizer, "require_room", lambda device, needed, what: asked.append(needed // count))
    learner.update(SAMPLES, nll)
    learner.update(SAMPLES, nll)
    other = Learner(tiny_model())
    assert other.masters
    other.update(SAMPLES, nll)
    assert asked == [16, 4, 12]


def test_an_update_makes_no_tensor_once_it_writes(monkeypatch):
    """So there is nothing that memory could be short of."""
    learner = trained(1)
    apply, made = learner.optimizer.apply, []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made.append(function)
            return function(*args, **(kwargs or {}))

    def watched(*args):
        with Seen():
            apply(*args)

    monkeypatch.setattr(learner.optimizer, "apply", watched)
    learner.update(SAMPLES, nll)
    assert {str(f) for f in made} <= {"aten.detach.default", "aten.view.dtype"}, made  # views
    assert len(made) > len(learner.parameters)


def test_an_update_that_broke_off_in_adamw_is_told_until_a_run_is_loaded(monkeypatch, tmp_path):
    """A signal, or a GPU that fails: some masters and weights are new, which caches of the old ones must see."""
    learner = trained(1)
    learner.save(tmp_path / "run")
    before, version, left = state(learner), learner.model.weights_version, [5]

    def adamw(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return ops.adamw.adamw(*args)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "adamw", adamw)
        with pytest.raises(KeyboardInterrupt):
            learner.update(SAMPLES, nll)
    assert learner.model.weights_version == version + 1 and learner.step == 1
    for call in (lambda: learner.update(SAMPLES, nll), lambda: learner.save(tmp_path / "torn")):
        with pytest.raises(InputError, match="an update or a load broke off: .*; load a saved run"):
            call()
    assert not (tmp_path / "torn").exists()
    learner.load(tmp_path / "run")
    assert_same(state(learner), before)
    learner.update(SAMPLES, nll)
    assert_same(state(learner), state(trained(2)))
