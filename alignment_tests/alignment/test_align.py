"""align.py: the whole job on a tiny random model, and that it sees a learner that is not the sampler."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.sampler.test_bad_rows import BAD, exploding_model
from minitransformer.alignment import align as module
from minitransformer.alignment.align import align
from minitransformer.alignment.compare import first_divergence
from minitransformer.alignment.gap import Gap
from minitransformer.alignment.trace import Trace
from minitransformer.errors import InputError
from minitransformer.sampler import sampler as sampler_module
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import RequestError, SamplingParams

SHARED = list(range(1, 20))
PROMPTS = [SHARED + list(range(30, 30 + n)) for n in (1, 5, 30, 12, 7)]
PARAMS = [SamplingParams(max_new_tokens=12, seed=i) for i in range(len(PROMPTS))]
# Few pages and a small step, so that chunks, prefix-cache hits and preemptions all happen.
CROWDED = dict(page_size=4, chunk_size=8, max_batch_tokens=16, max_sequences=3, num_pages=18)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_sampler_and_learner_agree_under_chunks_hits_and_preemption(model):
    parts = []
    found = align(model, PROMPTS, PARAMS, CROWDED, on_step=parts.append)
    assert found.equal and found.gap == Gap(60, 0, 0.0, 0.0, 0.0, 0.0)
    assert sum(c.cached_tokens for c in found.completions) > 0 and sum(c.preemptions for c in found.completions) > 0
    assert sum(r.rows for r in found.recomputed) > 0
    assert found.contrast == "left out on request" and parts == ["sampler", "learner", "transformers"]
    assert {r.stage for r in found.stages} >= {"embedding", "layers.1.down", "layers.2.combine", "log_prob"}
    assert not replace(found, gap=replace(found.gap, tokens=59)).equal, "a token that nobody scored"


class Flipping(Trace):
    """Sees one bit of a stage flipped in rows that come a second time."""

    def take(self, stage, keys_R, rows):
        if stage == "layers.1.o":
            rows = rows.clone()
            rows.view(torch.int16)[self.find(stage, keys_R) >= 0, 3] ^= 1
        super().take(stage, keys_R, rows)


def test_a_row_with_other_bits_when_it_is_computed_again_is_a_difference(model, monkeypatch):
    """Even if the learner has the bits of the first time."""
    monkeypatch.setattr(module, "Trace", Flipping)
    found = align(model, PROMPTS, PARAMS, CROWDED)
    assert all(r.equal for r in found.stages) and not found.gap.differing and not found.equal
    assert [r.stage for r in found.recomputed if not r.equal] == ["layers.1.o"]


def test_a_request_that_fails_while_it_is_computed_again_is_no_conflict(monkeypatch):
    """Its earlier rows, good before, are then computed in one tile with the NaN (Batch.faults)."""
    bad_model = exploding_model("bf16", 0, "gate_up")
    right = sampler_module.draw

    def draw(sequences, logits_LV):
        bad = [s.request_id == 1 and len(s.ids) == len(PROMPTS[1]) + 2 for s in sequences]
        return [(BAD, drawn[1]) if b else drawn for b, drawn in zip(bad, right(sequences, logits_LV), strict=True)]

    def renew(token) -> None:
        bad_model.weights_version += token.token_id == BAD

    monkeypatch.setattr(sampler_module, "draw", draw)
    found = align(bad_model, PROMPTS[:2], PARAMS[:2], on_token=renew)
    assert [c.error is None for c in found.completions] == [True, False] and found.completions[1].token_ids[-1] == BAD
    assert found.equal and sum(r.rows for r in found.recomputed) > 0
    trace = Trace(strict=False)
    with pytest.raises(RequestError):
        Sampler(bad_model).generate(PROMPTS[:2], PARAMS[:2], trace, renew)
    assert any(not r.equal for r in trace.conflicts()) and all(r.equal for r in trace.conflicts({0}))


def test_a_learner_with_one_other_bit_is_found_at_the_right_stage(model, monkeypatch):
    class Other(module.Learner):
        def score(self, *args, **kwargs):
            weight = self.model.layers[1].post_norm.weight
            with torch.no_grad():
                weight.view(torch.int16)[7] ^= 1
                try:
                    return super().score(*args, **kwargs)
                finally:
                    weight.view(torch.int16)[7] ^= 1

    monkeypatch.setattr(module, "Learner", Other)
    found = align(model, PROMPTS[:2], PARAMS[:2])
    worst = first_divergence(found.stages)
    assert not found.equal and worst.stage == "layers.1.post_norm" and worst.first[2] == 7
    assert found.gap.differing > 0


def test_a_learner_that_leaves_a_stage_out_is_not_called_equal(model, monkeypatch):
    class Silent(module.ComparingTrace):
        def wants(self, stage):
            return stage != "layers.2.swiglu"

        def results(self):
            self.wants = lambda stage: True
            return super().results()

    monkeypatch.setattr(module, "ComparingTrace", Silent)
    found = align(model, PROMPTS[:2], PARAMS[:2])
    assert not found.gap.differing and first_divergence(found.stages) is None
    assert [r.stage for r in found.stages if not r.rows] == ["layers.2.swiglu"] and not found.equal


def test_a_recipe_that_changes_between_sampling_and_scoring_is_refused():
    model = tiny_model()

    def change(part):
        if part == "learner":
            model.set_recipe("nvfp4_per_token")

    with pytest.raises(InputError, match="sampler and learner follow different execution specs.*options.recipe: bf16"):
        align(model, PROMPTS[:1], PARAMS[:1], on_step=change)


def test_a_filter_of_stages(model):
    found = align(model, PROMPTS[:1], PARAMS[:1], stages=["layers.0.*", "log_prob"])
    assert found.equal and len(found.stages) == 17


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_contrast_is_close_but_not_equal(model, tmp_path, temperature):
    model.save_pretrained(tmp_path / "m")
    params = [replace(p, temperature=temperature) for p in PARAMS[:2]]
    found = align(model, PROMPTS[:2], params, checkpoint=tmp_path / "m")
    # Not a bit test: the same formula in another order of roundings, on random weights.
    assert found.contrast.tokens == 24 and 0 < found.contrast.differing and found.contrast.mean < 0.2


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("error, said", [(MemoryError(), "MemoryError"), (ValueError("\none\ntwo"), "ValueError: one")])
def test_whatever_transformers_raises_the_alignment_stands(model, tmp_path, monkeypatch, error, said):
    """Words or none: minutes of sampling and scoring are not lost for the contrast."""
    import transformers

    def fails(*args, **options):
        raise error

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails)
    found = align(model, PROMPTS[:1], PARAMS[:1], checkpoint=tmp_path)
    assert found.equal and found.contrast == f"transformers raised {said}"


def test_a_contrast_that_cannot_run_says_why(model, tmp_path):
    found = align(model, PROMPTS[:1], PARAMS[:1], checkpoint=tmp_path)
    assert isinstance(found.contrast, str) and "transformers" in found.contrast and found.equal
