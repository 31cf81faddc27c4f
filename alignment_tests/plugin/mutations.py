"""Faults of an engine, put back one by one inside its workers; each is caught by the law it belongs to.

`plugin` runs in every process of the engine, as an SGLang plugin of its own, after ours has put its parts into SGLang.
"""

import os
from collections.abc import Callable

VARIABLE = "MINITRANSFORMER_TEST_FAULT"


def stock_head() -> None:
    """The lm_head by torch, in BF16: the engine agrees with itself, and not with the learner."""
    from minitransformer.plugins.sglang.logits import LogitsProcessor

    def head(self, hidden_states, lm_head, embedding_bias=None):
        return (hidden_states @ self.model.lm_head.weight.T).float()

    LogitsProcessor._compute_lm_head = head


def stock_log_softmax() -> None:
    """Prompt tokens scored by torch's log_softmax, sampled ones by ours."""
    import torch

    from minitransformer.plugins.sglang import logits

    ours, wanted = logits.logprob, logits.Wanted.score

    def score(self, logits_LV, ids_L, first):
        logits.logprob = lambda x, ids, t=1.0: torch.log_softmax(x, -1).gather(-1, ids[:, None])[:, 0]
        wanted(self, logits_LV, ids_L, first)
        logits.logprob = ours

    logits.Wanted.score = score


def seed_by_row() -> None:
    """The noise follows the row of the batch, as one block of noise for the batch does."""
    from minitransformer.plugins.sglang import logits

    ours = logits.sample

    def sample(row_V, seed, *rest):
        return ours(row_V, seed + row_V.storage_offset() // row_V.numel(), *rest)

    logits.sample = sample


def seed_by_clock() -> None:
    """The noise is new in every run."""
    import time

    from minitransformer.plugins.sglang import logits

    ours = logits.sample
    logits.sample = lambda row_V, seed, *rest: ours(row_V, time.time_ns() % (1 << 62), *rest)


def temperature_one() -> None:
    """Sampled tokens scored at temperature 1, whatever the request's is."""
    from minitransformer.plugins.sglang import logits

    ours = logits.logprob
    logits.logprob = lambda x, ids, t=1.0: ours(x, ids, 1.0)


def neighbours_leak() -> None:
    """The final norm's rows shifted by the batch mean's last bit: a stand-in for any sum over the batch."""
    from minitransformer.models.qwen3_moe.model import Qwen3MoeForCausalLM

    ours = Qwen3MoeForCausalLM.hidden
    Qwen3MoeForCausalLM.hidden = lambda self, *rest: (h := ours(self, *rest)) + h.float().mean().bfloat16()


def chunk_restarts() -> None:
    """A later chunk of a prompt attends to itself and not to what came before it."""
    _only_new_keys(lambda extend, prefix: extend and prefix)


def prefix_rows_shifted() -> None:
    """The rows of a prompt's cached prefix are taken one place off."""
    from minitransformer.plugins.sglang import batch

    ours = batch.translate

    def translate(forward_batch, *rest):
        made = ours(forward_batch, *rest)
        if not forward_batch.forward_mode.is_decode():
            for s, n in enumerate(forward_batch.extend_prefix_lens_cpu):
                made.key_rows_SL[s, :n] = made.key_rows_SL[s, :n].roll(1)
        return made

    batch.translate = translate


def _only_new_keys(applies: Callable) -> None:
    from minitransformer.plugins.sglang import batch

    ours = batch.translate

    def translate(forward_batch, *rest):
        made = ours(forward_batch, *rest)
        if not forward_batch.forward_mode.is_decode():
            for s, n in enumerate(forward_batch.extend_prefix_lens_cpu):
                if applies(True, n):
                    made.key_rows_SL[s, :n] = made.key_rows_SL[s, n]
        return made

    batch.translate = translate


def resumed_without_keys() -> None:
    """A retracted request goes on from its prompt as if the keys of what it had generated were still there."""
    from minitransformer.plugins.sglang import batch

    ours, longest = batch.translate, 44  # prompts of the test's requests are shorter

    def translate(forward_batch, *rest):
        made = ours(forward_batch, *rest)
        if not forward_batch.forward_mode.is_decode():
            for s, (prefix, n) in enumerate(
                zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
            ):
                if prefix + n > longest:
                    made.key_rows_SL[s, longest : prefix + n] = made.key_rows_SL[s, 0]
        return made

    batch.translate = translate


def old_quantised_copies() -> None:
    """Experts quantised once and for all: an update does not reach them."""
    from minitransformer.models.qwen3_moe.experts import QuantisedExperts

    ours = QuantisedExperts.weight_operand
    kept: dict = {}

    def weight_operand(self, name, *rest):
        made = ours(self, name, *rest)
        return kept.setdefault((id(self), name), tuple(tensor.clone() for tensor in made))

    QuantisedExperts.weight_operand = weight_operand


def update_leaves_the_head() -> None:
    """An update that forgets one tensor."""
    from minitransformer.plugins.sglang.weights import Receiver

    ours = Receiver.load

    def load(self, tensors, update):
        ours(self, [(n, t) for n, t in tensors if not update or n != "lm_head.weight"], update)

    Receiver.load = load


def _one_segment(applies: Callable) -> None:
    """Attention of a batch that `applies` runs over all its keys as one segment: attention/1, the same up to 1,024."""
    import types

    from numba import njit

    from minitransformer.ops import attention

    def with_globals(kernel, **changes):
        code = kernel.py_func.__code__
        return njit(nogil=True, error_model="numpy")(types.FunctionType(code, kernel.py_func.__globals__ | changes))

    block = with_globals(attention._attend_block, SEGMENT=1 << 40)
    ours, folding, unfolded = attention.forward, attention._attend, with_globals(attention._attend, _attend_block=block)

    def forward(q, k, v, batch):
        attention._attend = unfolded if applies(batch) else folding
        try:
            return ours(q, k, v, batch)
        finally:
            attention._attend = folding

    attention.forward = forward


def decode_in_one_segment() -> None:
    """A decode step folds nothing at position 1,024."""
    _one_segment(lambda batch: batch.cu_seqlens[-1] == batch.num_sequences)


def later_chunk_in_one_segment() -> None:
    """Nor does a prompt's part that follows others, a chunk or what follows a cached prefix."""
    _one_segment(
        lambda batch: any(
            1 < b - a < n for a, b, n in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.kv_lens, strict=False)
        )
    )


def one_segment() -> None:
    """Nor does anything in the engine, which so agrees with itself."""
    _one_segment(lambda batch: True)


def experts_sorted() -> None:
    """Captured expert ids in another order than the router's."""
    from sglang.srt.state_capturer.base import BaseTopkCapturer

    ours = BaseTopkCapturer.capture
    BaseTopkCapturer.capture = lambda self, layer, ids: ours(self, layer, ids.sort().values)


FAULTS = {
    f.__name__: f
    for f in (
        stock_head, stock_log_softmax, seed_by_row, seed_by_clock, temperature_one, neighbours_leak, chunk_restarts,
        prefix_rows_shifted, resumed_without_keys, old_quantised_copies, update_leaves_the_head, experts_sorted,
        decode_in_one_segment, later_chunk_in_one_segment, one_segment,
    )
}  # fmt: skip


def plugin() -> None:
    """An entry point like ours: SGLang calls it in each process, after ours, by the order of its name."""
    name = os.environ.get(VARIABLE)
    if name:
        from minitransformer.plugins.sglang.plugin import plugin as ours

        ours()
        FAULTS[name]()
