"""Each fault of mutations.py, in a real engine, is seen by the law it belongs to."""

import os

import pytest

from alignment_tests.plugin import engines, laws, mutations
from alignment_tests.plugin.engines import VOCAB
from alignment_tests.plugin.test_engine import P
from alignment_tests.plugin.test_engine_long import ROOM
from alignment_tests.plugin.test_engine_long import P as LONG
from alignment_tests.plugin.test_engine_long import model as long_model
from alignment_tests.plugin.test_engines import updated

pytestmark = [pytest.mark.sglang, pytest.mark.slow]  # an engine each
RECIPE = ["--json-model-override-args", '{"minitransformer_recipe": "nvfp4_per_token"}']
CROWD = laws.prompts([20 + i for i in range(24)], VOCAB, seed=5)


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory):
    """Package metadata with the entry point of mutations.py, for the engine's path."""
    folder = tmp_path_factory.mktemp("faults")
    info = folder / "minitransformer_test_faults-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: minitransformer-test-faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaults = alignment_tests.plugin.mutations:plugin\n")
    return folder


@pytest.fixture
def faulty(checkpoint, plugin_folder):
    def start(fault: str, arguments=(), checkpoint=checkpoint):
        path = os.pathsep.join([os.environ.get("PYTHONPATH", os.getcwd()), str(plugin_folder)])
        environment = {mutations.VARIABLE: fault, "PYTHONPATH": path}
        return engines.start(checkpoint, arguments, environment=environment)

    return start


def learner(server, temperature=1.0):
    return laws.learner_equals_engine(engines.tiny(), server.client, P, temperature)


LAWS = {
    "stock_head": lambda s, _: learner(s),
    "stock_log_softmax": lambda s, _: laws.decode_equals_rescoring(s.client, P),
    "seed_by_row": lambda s, _: laws.alone_equals_batch(s.client, P, 1.0, 8),
    "seed_by_clock": lambda s, _: laws.two_runs(s.client, P),
    "temperature_one": lambda s, _: learner(s, 0.6),
    "neighbours_leak": lambda s, _: laws.alone_equals_batch(s.client, P, 1.0, 8),
    "chunk_restarts": lambda s, clean: laws.engines_agree(s.client, clean.client, P),
    "prefix_rows_shifted": lambda s, _: laws.hit_equals_miss(s.client, P[7][:100], P[2], 100),
    "resumed_without_keys": lambda s, clean: laws.squeezed(s.client, clean.client, CROWD, 32)[0],
    "experts_sorted": lambda s, _: laws.experts_agree(engines.tiny(), s.client, P),
}
ARGUMENTS = {
    "chunk_restarts": ["--chunked-prefill-size", "16"],
    "resumed_without_keys": ["--max-total-tokens", "300", "--schedule-conservativeness", "0.1"],
    "experts_sorted": ["--enable-return-routed-experts"],
}


@pytest.mark.parametrize("fault", list(LAWS))
def test_fault_is_caught(faulty, engine, fault):
    with faulty(fault, ARGUMENTS.get(fault, ())) as server:
        assert LAWS[fault](server, engine).differing, f"{fault} was not noticed"


@pytest.mark.parametrize("fault, arguments", [("update_leaves_the_head", []), ("old_quantised_copies", RECIPE)])
def test_fault_of_an_update_is_caught(faulty, tmp_path, fault, arguments):
    after = updated(2)
    after.save_pretrained(tmp_path / "after")
    if arguments:
        after.set_recipe("nvfp4_per_token")
    with faulty(fault, arguments) as server:
        laws.update_from_disk(server.client, tmp_path / "after")
        assert laws.learner_equals_engine(after, server.client, P).differing, f"{fault} was not noticed"


BORDER = {
    "decode_in_one_segment": lambda s, ids: laws.decode_equals_rescoring(s.client, ids, 1.0, 6),
    "later_chunk_in_one_segment": lambda s, ids: laws.hit_equals_miss(
        s.client, ids[-1][:-20], ids[-1][-20:], len(ids[-1]) - 20, 6),
    "one_segment": lambda s, ids: laws.learner_equals_engine(long_model(), s.client, ids, 1.0, 6),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(BORDER))
def test_fault_at_the_border_of_a_segment_is_caught(faulty, long_checkpoint, fault):
    """By prompts that reach it, and by no other: nothing else would be seen before 1,024."""
    with faulty(fault, ROOM, long_checkpoint) as server:
        assert BORDER[fault](server, LONG).differing, f"{fault} was not noticed"
        assert not BORDER[fault](server, P[2:]).differing


def test_every_fault_has_a_law():
    assert set(mutations.FAULTS) == set(LAWS) | set(BORDER) | {"update_leaves_the_head", "old_quantised_copies"}
