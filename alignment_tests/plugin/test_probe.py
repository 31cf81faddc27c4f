"""The probe of a sync has room on both sides, or nothing is sent."""

import pytest

from alignment_tests.learner.tiny import tiny_model
from alignment_tests.plugin.fake import Fake
from alignment_tests.plugin.test_sync import refused
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang.stock import CUTS


@pytest.mark.parametrize(("tokens", "most", "scored"), [
    (3, None, 2), (4, None, 3), (9, None, 8), (10, None, 9), (56, None, 55), (1024, 3, 2), (1024, 20, 19),
])  # fmt: skip
def test_the_probe_is_as_long_as_there_is_room_for(tokens, most, scored):
    learner = Learner(tiny_model(1), max_tokens_per_pack=tokens)
    with Fake(tiny_model(0)) as server:
        server.told = {"max_req_input_len": most}
        assert learner.sync(server).probe.tokens == scored


def test_a_learner_without_room_for_a_probe_sends_nothing():
    with Fake(tiny_model(0)) as server:
        for tokens in (1, 2):
            said = f"max_tokens_per_pack of the learner is {tokens}, and the probe that proves a sync has 3 tokens"
            refused(Learner(tiny_model(1), max_tokens_per_pack=tokens), server, said)
        server.told = {"max_req_input_len": 2}
        refused(Learner(tiny_model(1)), server, "max_req_input_len of http://.* is 2, and the probe")
        server.told = {"enable_deterministic_inference": True, "chunked_prefill_size": 16}
        server.told["attention_backend"] = next(iter(CUTS))
        refused(Learner(tiny_model(1)), server, "deterministic server never begins a prompt of more than its chunk")
