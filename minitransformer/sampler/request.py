"""Prompt and parameters in, a Sequence out. A request is looked at whole: what is queued can be finished."""

from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.integers import integer, listed
from minitransformer.sampler.pages import PagePool
from minitransformer.sampler.sequence import SamplingParams, Sequence

Prompt = SequenceOf[int] | Tensor | str


def prompt_list(prompts: Any) -> list[Prompt]:
    """The prompts of a list, a generator, a two-dimensional array, ...; InputError for a single prompt."""
    found = None if isinstance(prompts, str) else listed(prompts)
    if isinstance(prompts, str) or (found and integer(found[0]) is not None):
        raise InputError("prompts is a single prompt: give a list of prompts")
    if found is None:
        raise InputError(f"prompts is {prompts!r}: give a list of prompts")
    return found


def params_list(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams a prompt; None stands for the defaults, for all prompts or for one."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    found = listed(params)
    if found is None:
        raise InputError(f"params is {params!r}: give SamplingParams, or a list of them")
    if len(found) != count:
        raise InputError(f"params has {len(found)} entries for {count} prompts: give one, or one a prompt")
    return [checked_params(p, f"params[{i}]") for i, p in enumerate(found)]


def checked_params(params: Any, where: str) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise InputError(f"{where} is {params!r}: give SamplingParams, or None for the defaults")
    return params or SamplingParams()


def make(request_id: int, prompt: Prompt, params: SamplingParams, where: str, model: Any, pool: PagePool) -> Sequence:
    """The request as a Sequence; InputError, beginning with `where`, if it could not be served to its end."""
    config = model.config
    ids = _prompt_ids(prompt, where, model)
    for token_id in params.stop_token_ids:
        if token_id >= config.vocab_size:
            raise InputError(f"{where}: stop token {token_id} is outside the vocabulary of {config.vocab_size}")
    if len(ids) >= config.max_positions:
        raise InputError(
            f"{where} has {len(ids)} tokens, the context is {config.max_positions}: "
            f"shorten it to {config.max_positions - 1} or fewer, so that a new token fits"
        )
    max_len = min(len(ids) + params.max_new_tokens, config.max_positions)
    # The last token of all is never an input, so it needs no row.
    pages = pool.pages_for(max_len - 1)
    if pages > pool.num_pages:
        raise InputError(
            f"{where} with its new tokens takes {pages} pages of {pool.page_size} and there are "
            f"{pool.num_pages}: give the sampler more pages, or shorten the prompt or max_new_tokens"
        )
    eos = () if params.ignore_eos else config.eos_token_ids
    return Sequence(request_id, len(ids), ids, params, frozenset(params.stop_token_ids) | frozenset(eos), max_len)


def _prompt_ids(prompt: Prompt, where: str, model: Any) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError(f"{where} is text and the model has no tokenizer: give token ids")
        prompt = model.tokenizer.encode(prompt)
    values = listed(prompt)
    if values is None:
        raise InputError(f"{where} is {prompt!r}: give a list of token ids, or text")
    if not values:
        raise InputError(f"{where} is empty: give at least one token")
    ids = [integer(value) for value in values]
    for index, token_id in enumerate(ids):
        if token_id is None or not 0 <= token_id < model.config.vocab_size:
            raise InputError(
                f"{where}: {values[index]!r} at index {index} is not a token id: "
                f"give integers from 0 to {model.config.vocab_size - 1}"
            )
    return ids
