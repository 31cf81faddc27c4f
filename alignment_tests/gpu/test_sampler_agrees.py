"""The sampler and the learner's scores on the GPU: the CPU's tokens and log-probs, from CUDA graphs and without."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu.test_model_agrees import DEMO
from alignment_tests.learner.tiny import tiny_model
from minitransformer.alignment.align import align
from minitransformer.cli import main
from minitransformer.errors import InputError, RowError
from minitransformer.learner.learner import Learner
from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM
from minitransformer.ops import gpu, logprob, sample
from minitransformer.sampler.graphs import padded
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import RequestError, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
QUANTISED = ["nvfp4_per_token", "nvfp4_per_row", "w4a16", "w4a8_mxfp8"]
SMALL = dict(page_size=4, num_pages=120, max_sequences=32)


def on_gpu(cpu: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    gpu_model = Qwen3MoeForCausalLM(cpu.config)
    gpu_model.load_state_dict(cpu.state_dict())
    return gpu_model.to("cuda")


@pytest.fixture(scope="module")
def pair():
    cpu = tiny_model()
    return cpu, on_gpu(cpu)


def requests(count: int, vocab: int = 96, new: int = 8) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 9 tokens, some equal; temperatures, top-k and top-p of every kind."""
    prompts = [inputs.integers(70 + i - i % 3, vocab, 1 + (i - i % 3) % 9).tolist() for i in range(count)]
    kinds = [(1.0, 0, 1.0), (0.7, 5, 1.0), (0.0, 0, 1.0), (1.3, 0, 0.8), (0.9, 20, 0.5)]
    params = [SamplingParams(new + i % 4, *kinds[i % 5], seed=(1 << 62) + i, ignore_eos=True) for i in range(count)]
    return prompts, params


def same(got, want, what: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.token_ids == b.token_ids, f"{what}, request {i}"
        assert_bits_equal(torch.tensor(a.log_probs), torch.tensor(b.log_probs), f"{what}, request {i}")


@pytest.mark.parametrize("count", [*range(1, 18), 18, 33, 63, 64])
def test_graph_equals_eager_equals_cpu(pair, count):
    cpu, on = pair
    prompts, params = requests(count)
    options = SMALL if count <= SMALL["max_sequences"] else SMALL | dict(num_pages=400, max_sequences=count)
    want = Sampler(cpu, **options).generate(prompts, params)
    same(Sampler(on, cuda_graphs=False, **options).generate(prompts, params), want, "eager")
    sampler = Sampler(on, **options)
    same(sampler.generate(prompts, params), want, "graphs")
    assert max(key[0] for key in sampler.graphs._graphs) == padded(count)
    exact = Sampler(on, **options | dict(max_sequences=count))  # no page to spare beyond what padding needs
    same(exact.generate(prompts, params), want, "graphs, as many requests as fit")


def test_requests_come_and_go(pair):
    """Few pages: requests are preempted, pages are exchanged and taken, prompts are read beside decoding ones."""
    cpu, on = pair
    prompts, params = requests(17, new=40)
    options = dict(page_size=4, num_pages=60, max_sequences=12, chunk_size=3, max_batch_tokens=16)
    want = Sampler(cpu, **options).generate(prompts, params)
    assert sum(c.preemptions for c in want) > 0
    sampler = Sampler(on, **options)
    same(sampler.generate(prompts, params), want, "graphs")
    assert sampler.graphs.captures > 3


@pytest.mark.parametrize("recipe", QUANTISED)
def test_graphs_of_quantised_experts(recipe):
    """Against the CPU and the eager GPU, and a learner on the CPU at every stage."""
    cpu, on = tiny_model(4), on_gpu(tiny_model(4))
    for model in (cpu, on):
        model.set_recipe(recipe)
    prompts, params = requests(7)
    want, sampler = Sampler(cpu, **SMALL).generate(prompts, params), Sampler(on, **SMALL)
    same(Sampler(on, cuda_graphs=False, **SMALL).generate(prompts, params), want, "eager")
    same(sampler.generate(prompts, params), want, "graphs")
    assert sampler.graphs.captures > 0
    assert align(on, prompts, params, dict(page_size=4, num_pages=64, chunk_size=5), learner_model=cpu).equal


@pytest.mark.parametrize("recipe", ["bf16", *QUANTISED])
def test_graphs_see_updates_and_other_weights(recipe):
    cpu, on = (tiny_model(5), on_gpu(tiny_model(5)))
    for model in (cpu, on):
        model.set_recipe(recipe)
    prompts, params = requests(5)
    sampler = Sampler(on, **SMALL)
    sampler.generate(prompts, params)
    made = sampler.graphs.captures
    with torch.no_grad():
        for model in (cpu, on):
            model.layers[0].attn.qkv.weight.mul_(-0.5)
            model.layers[2].mlp.down.weight.add_(0.25)
    same(sampler.generate(prompts, params), Sampler(cpu, **SMALL).generate(prompts, params), "after an update in place")
    other = tiny_model(6)
    for model in (cpu, on):
        model.load_state_dict(other.state_dict())
    same(sampler.generate(prompts, params), Sampler(cpu, **SMALL).generate(prompts, params), "after a load in place")
    assert sampler.graphs.captures == made
    other = tiny_model(7).state_dict()
    for model in (cpu, on):
        for name, parameter in model.named_parameters():
            parameter.data = other[name].to(parameter.device)
        model.weights_version += 1
    same(sampler.generate(prompts, params), Sampler(cpu, **SMALL).generate(prompts, params), "in another storage")
    assert sampler.graphs.captures > made


def test_scores_equal_the_cpus(pair):
    cpu, on = pair
    prompts, params = requests(9)
    done = Sampler(on, **SMALL).generate(prompts, params)
    sequences, starts = [c.prompt_ids + c.token_ids for c in done], [len(c.prompt_ids) for c in done]
    temperatures = [p.log_prob_temperature for p in params]
    want = Learner(cpu, max_tokens_per_pack=64).score(sequences, starts, temperatures)
    got = Learner(on, max_tokens_per_pack=64).score(sequences, starts, temperatures)
    for a, b, c in zip(got, want, done, strict=True):
        assert_bits_equal(a.cpu(), b, "scores")
        assert a.tolist() == c.log_probs


@pytest.mark.parametrize("shape", ["tiny", "demo's widths, 30 layers"])
def test_sampler_on_the_gpu_learner_on_the_cpu(shape):
    """Every stage. Of the demo checkpoint its shape, with random weights: the file need not be there."""
    changes = {} if shape == "tiny" else DEMO | dict(num_layers=30, sparse_layers=(True,) * 30, expert_size=1536,
                                                    num_experts=4, top_k=2)  # fmt: skip
    cpu = tiny_model(3, **changes)
    prompts, params = requests(4, cpu.config.vocab_size, 6)
    options = dict(page_size=16, num_pages=64, chunk_size=5)
    found = align(on_gpu(cpu), prompts, params, options, learner_model=cpu)
    assert found.equal, [r for r in found.stages if not r.equal][:1]
    graphs = align(on_gpu(cpu), prompts, params, options, stages=["log_prob"], learner_model=cpu)  # nothing else traced
    assert graphs.equal and [c.token_ids for c in graphs.completions] == [c.token_ids for c in found.completions]
    assert align(cpu, prompts, params, options, learner_model=on_gpu(cpu)).equal


def test_commands_take_a_device(tmp_path, capsys):
    """generate, score and trace write what they write on a CPU; align compares both."""
    tiny_model().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").write_text('{"ids": [1, 2, 3, 4, 5]}\n{"ids": [9]}\n')

    def run(line: str) -> None:
        assert main([*line.replace("@", f"{tmp_path}/").split()]) == 0, capsys.readouterr()

    for device in ("cpu", "cuda"):
        run(f"generate --model @model --prompts @prompts --json @{device}.jsonl --device {device}")
        run(f"score --model @model --input @cpu.jsonl --json @{device}.scores --device {device}")
        run(f"trace --model @model --prompts @prompts --out @{device}.trace --device {device}")
    for kind in ("jsonl", "scores"):
        assert (tmp_path / f"cuda.{kind}").read_text() == (tmp_path / f"cpu.{kind}").read_text()
    run("compare @cuda.trace @cpu.trace")
    for devices in ("--device cuda", "--device cuda --learner-device cpu", "--learner-device cuda"):
        run(f"align --model @model --prompts @prompts --no-contrast {devices}")
        assert "EQUAL: 0 of" in capsys.readouterr().out


def test_draws_of_many_rows():
    for V in (1, 96, 5003, 151936):
        kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (1.3, 0, 0.9), (0.8, 200, 0.95), (1.0, 1, 0.01)]
        x = inputs.normal(80, 40, V, scale=4.0)
        x[::7] = x[::7].round()  # many equal logits
        if V > 1:
            x[3, V // 2 :] = -torch.inf
        draws = [gpu.sample.Draw((1 << 63) + i, 3 * i, *(k := kinds[i % 6]), k[0] or 1.0) for i in range(40)]
        for d, row, got in zip(draws, x, gpu.sample.draw(x.cuda(), draws), strict=True):
            token = sample.sample(row, d.seed, d.position, d.temperature, d.top_k, d.top_p)
            want = logprob.logprob(row[None], torch.tensor([token]), d.log_prob_temperature)
            assert got == (token, want.item()), d


def test_draws_that_nothing_waits_for():
    """What SGLang's steps call: the tokens and log-probs of draw, and a bad row told afterwards."""
    x, home = inputs.normal(82, 40, 5003, scale=4.0).cuda(), torch.device("cuda", 0)
    draws = [
        gpu.sample.Draw((1 << 63) - i, 3 * i, *(0.0, 0, 1.0, 0.7) if i % 3 else (0.6, 0, 1.0, 0.6)) for i in range(39)
    ]
    for n in (39, 8, 1):
        rows = gpu.sample._rows(x, draws[:n])
        ids, scores = gpu.sample.draw_rows(x[:n], rows)
        assert gpu.device.watch(home)(True)
        assert list(zip(ids.tolist(), scores.tolist(), strict=True)) == gpu.sample.draw(x[:n], draws[:n])
    x[2] = torch.nan
    gpu.sample.draw_rows(x[:8], gpu.sample._rows(x, draws[:8]))
    with pytest.raises(RowError, match="sample: row 2: the logits have a NaN"):
        gpu.device.watch(home)(True)


def test_a_bad_row_fails_alone():
    x = inputs.normal(81, 4, 1000)
    x[0, 7], x[1], x[2] = torch.nan, -torch.inf, x[2] * 1e36
    draws = [gpu.sample.Draw(i, 5, 1e-4, 0, 1.0, 1e-4) for i in range(4)]
    *bad, good = gpu.sample.draw(x.cuda(), draws)
    for row, d, error in zip(x, draws, bad, strict=False):
        with pytest.raises(InputError) as want:
            sample.sample(row, d.seed, d.position, d.temperature)
        assert str(error) == str(want.value)
    assert good[0] == sample.sample(x[3], 3, 5, 1e-4)
    gpu.device.check(torch.device("cuda", 0))


def test_a_request_with_a_refused_value_ends_alone(pair):
    """Its neighbours go on with their bits, in graphs too; what padding holds is not reported."""
    cpu, on = tiny_model(8), on_gpu(tiny_model(8))
    with torch.no_grad():
        for model in (cpu, on):
            model.embed_tokens.weight[7] = torch.nan
            model.embed_tokens.weight[0] = torch.nan  # the token of padding
    prompts, params = [[1, 2, 3], [4], [7, 5], [6, 2]], [SamplingParams(6, seed=i, ignore_eos=True) for i in range(4)]
    with pytest.raises(RequestError) as want:
        Sampler(cpu, **SMALL).generate(prompts, params)
    with pytest.raises(RequestError, match="router") as got:
        Sampler(on, **SMALL).generate(prompts, params)
    same(got.value.completions, want.value.completions, "beside a bad one")
    assert [c.finish_reason for c in got.value.completions] == [c.finish_reason for c in want.value.completions]


def test_too_many_pages_are_refused_beforehand(pair):
    with pytest.raises(InputError, match=r"num_pages: .* need [\d,.]+ GiB for keys and values.*lower num_pages"):
        Sampler(pair[1], num_pages=1 << 40)
