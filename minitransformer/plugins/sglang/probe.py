"""The probe of a sync: one short prompt, whose log-probs learner and SGLang must give with the same bits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from minitransformer.alignment.gap import Gap, log_prob_gap
from minitransformer.errors import InputError
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.stock import stalls

if TYPE_CHECKING:
    from minitransformer.learner.learner import Learner

PROMPT, NEW, LEAST = 48, 8, 3  # tokens: as many as there is room for, and no fewer than LEAST in all


def request(learner: "Learner", about: Mapping[str, Any], url: str) -> tuple[list[int], int]:
    """The prompt, ids from all over the vocabulary, and how many tokens follow it. about: what Client.about tells.

    InputError, before anything is sent, if learner or SGLang has no room for it.
    """
    config = learner.model.config
    rooms = {
        "max_tokens_per_pack of the learner": learner.max_tokens_per_pack,
        "max_positions of the model, less one": config.max_positions - 1,
        f"max_req_input_len of {url}": about.get("max_req_input_len"),
    }
    what, most = min(((k, n) for k, n in rooms.items() if isinstance(n, int)), key=lambda room: room[1])
    if most < LEAST:
        raise InputError(f"{what} is {most}, and the probe that proves a sync has {LEAST} tokens; raise it")
    new = min(NEW, most // 2)
    n = min(PROMPT, most - new)
    if why := stalls(about, n + new):
        raise InputError(f"{url}: {why}")
    return [(97 * i * i + 31 * i + 5) % config.vocab_size for i in range(n)], new


def compare(learner: "Learner", client: Client, ids: list[int], new: int) -> Gap:
    """The prompt and the tokens that SGLang samples after it, scored on both sides."""
    params = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True, "sampling_seed": 0}
    (out,) = client.generate([ids], params)
    theirs = torch.tensor(out.prompt_log_probs + out.log_probs, dtype=torch.float32)
    (ours,) = learner.score([ids + out.token_ids], [1])
    if len(ours) != len(theirs):
        raise InputError(f"{client.url}: {len(theirs)} log-probs for a probe of {len(ours)}; is the context so short?")
    return log_prob_gap(theirs, ours.cpu())
