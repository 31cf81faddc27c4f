"""Bad input: one line that says what, where and what to do, before anything has changed."""

import math

import numpy as np
import pytest
import torch

from alignment_tests.sampler.fake import FakeModel
from minitransformer.errors import InputError
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams


def refuses(words: str, call, *args, **options) -> None:
    with pytest.raises(InputError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", x) for x in (0, -1, 1.5, True, "3")]
    + [("temperature", x) for x in (-0.1, math.nan, math.inf, 1e-50, 1e39, "hot", None)]
    + [("top_p", x) for x in (0, -0.5, 1.01, math.nan, None)]
    + [("top_k", x) for x in (-1, 2.0)]
    + [("seed", x) for x in (-1, 2**63, 0.5)]
    + [("stop_token_ids", x) for x in ((-1,), ("a",), "a", 5)],
)
def test_bad_params_are_refused(name: str, value: object) -> None:
    refuses(name, SamplingParams, **{name: value})


@pytest.mark.parametrize("name", ["page_size", "num_pages", "max_batch_tokens", "chunk_size", "max_sequences"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_bad_sizes_are_refused(name: str, value: object) -> None:
    refuses(name, Sampler, FakeModel(), **{name: value})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "is empty"),
        (torch.tensor([], dtype=torch.int64), "is empty"),
        ([4, 24], "24 at index 1 is not a token id: give integers from 0 to 23"),
        ([-1], "-1 at index 0"),
        ([4, 5.0], "5.0 at index 1"),
        (torch.tensor([[4, 5]]), "[4, 5] at index 0"),
        ("text", "no tokenizer"),
        (7, "is 7"),
        ({4, 5}, "is {4, 5}"),
        (b"ab", "is b'ab'"),
        (np.array([4.0, 5.0]), "4.0 at index 0"),
        ([4, True], "True at index 1"),
        ([4] * 96, "has 96 tokens, the context is 96: shorten it to 95"),
        ([4] * 30, "takes 12 pages of 4 and there are 10"),
    ],
)
def test_bad_prompts_are_refused(prompt: object, words: str) -> None:
    """Refused by add() and by generate(), where the good prompts before it leave no trace either."""
    sampler = Sampler(FakeModel(), page_size=4, num_pages=10)
    refuses(words, sampler.add, prompt, SamplingParams(16))
    refuses(words, sampler.generate, [[4, 5], prompt], SamplingParams(16))
    refuses("prompts[1]", sampler.generate, [[4, 5], prompt], SamplingParams(16))
    assert not sampler.scheduler.waiting and sampler.add([4]) == 0


def test_the_longest_prompt_and_the_fullest_store_are_served() -> None:
    (got,) = Sampler(FakeModel(), page_size=4).generate([[4] * 95], SamplingParams(16))
    assert len(got.token_ids) == 1 and got.finish_reason in ("length", "stop")
    (got,) = Sampler(FakeModel(), page_size=4, num_pages=10).generate([[4] * 30], SamplingParams(11, ignore_eos=True))
    assert len(got.token_ids) == 11


def test_bad_calls_of_generate_are_refused() -> None:
    sampler = Sampler(FakeModel())
    refuses("single prompt", sampler.generate, "text")
    refuses("single prompt", sampler.generate, [4, 5])
    refuses("single prompt", sampler.generate, torch.tensor([4, 5]))
    refuses("params has 1 entries for 2 prompts", sampler.generate, [[4], [5]], [SamplingParams()])
    refuses("outside the vocabulary of 24", sampler.generate, [[4]], SamplingParams(stop_token_ids=(24,)))
    refuses("prompts is 7", sampler.generate, 7)
    refuses("prompts is {", sampler.generate, {4: 5})
    refuses("params[0] is 'hot'", sampler.generate, [[4]], ["hot"])
    refuses("params is 7", sampler.generate, [[4]], 7)
    refuses("params is 7", sampler.add, [4], 7)
    assert sampler.generate([]) == []
    request = sampler.add([4, 5])
    refuses("in flight", sampler.generate, [[4]])
    refuses("request 7 is not in flight", sampler.abort, 7)
    assert sampler.abort(request).token_ids == []


def test_numbers_of_numpy_are_numbers() -> None:
    """Seeds come from generators of NumPy; what is kept are Python's, so that nothing wraps or warns later."""
    got = SamplingParams(np.int64(3), np.float32(0.5), np.uint8(2), np.float64(0.9), np.int64(2**62), np.array([4, 5]))
    want = SamplingParams(3, 0.5, 2, 0.9, 2**62, (4, 5))
    assert got == want and repr(got) == repr(want)
    assert SamplingParams(stop_token_ids=torch.tensor([4])).stop_token_ids == (4,)
    sampler = Sampler(FakeModel(), np.int64(4), np.int32(50), np.int64(8), torch.tensor(3), True, np.uint8(2))
    plain = Sampler(FakeModel(), 4, 50, 8, 3, True, 2)
    assert sampler.generate([[4, 5]], got) == plain.generate([[4, 5]], want)
    refuses("seed is np.float64(3.0)", SamplingParams, seed=np.float64(3))
    refuses("top_p is np.True_", SamplingParams, top_p=np.bool_(True))


def test_any_list_of_integers_is_a_prompt() -> None:
    """Tensors, arrays, tuples, ranges and generators of ids, and generators of prompts and parameters."""
    params = SamplingParams(3, ignore_eos=True)
    want = Sampler(FakeModel()).generate([[4, 5, 6]], params)[0]
    ids = [torch.tensor([4, 5, 6]), np.array([4, 5, 6], np.uint16), (4, 5, 6), range(4, 7), iter([4, 5, 6])]
    ids += [[np.int32(4), torch.tensor(5), 6]]
    for got in Sampler(FakeModel()).generate((p for p in ids), iter([params] * len(ids))):
        assert (got.prompt_ids, got.token_ids, got.log_probs) == ([4, 5, 6], want.token_ids, want.log_probs)
        assert all(type(i) is int for i in got.prompt_ids)
    (got,) = Sampler(FakeModel()).generate(np.array([[4, 5, 6]]), [None])
    assert got.token_ids == Sampler(FakeModel()).generate([[4, 5, 6]])[0].token_ids
