"""What holds of `learner.sync(engine)` with an sglang.Engine of the same process: python -m ... CHECKPOINT [RECIPE].

A process of its own, as SGLang's Engine changes the one that it is in.
"""

import asyncio
import os
import signal
import sys
import threading
from unittest.mock import patch

import pytest
import sglang
import torch

from alignment_tests.plugin import engines, laws
from alignment_tests.plugin.test_engine import P, zero
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang import sync as sync_module
from minitransformer.plugins.sglang.in_process import InProcess
from minitransformer.plugins.sglang.send import ROUTES
from minitransformer.plugins.sglang.sync import sync


def weights_arrive(engine, client: InProcess, recipe: str = "bf16") -> None:
    for seed, route in enumerate(ROUTES, 1):
        learner = Learner(engines.tiny(seed))
        learner.model.set_recipe(recipe)
        assert laws.learner_equals_engine(learner.model, client, P[:4]).differing, "already there"
        report = learner.sync(engine, route=route)
        assert report.route == route and report.checked and report.probe.tokens
        assert (report.packed > 0) == (recipe != "bf16")
        zero(laws.learner_equals_engine(learner.model, client, P, 0.6))
        before = laws.run(client, P)
        learner.sync(engine, route=route)
        zero(laws.same(before, laws.run(client, P)))
    assert learner.sync(engine).route == "tensor"
    zero(laws.decode_equals_rescoring(client, P))


def sent(change):
    """As if the learner had sent something else."""
    named = sync_module._named
    return patch.object(sync_module, "_named", lambda *rest: [(name, change(name, t)) for name, t in named(*rest)])


def failures_are_told(engine, client: InProcess) -> None:
    sums, learner = client.checksums(), Learner(engines.tiny(9))
    for route in ROUTES:
        with sent(lambda name, t: t * torch.nan if name.endswith("3.up_proj.weight") else t):
            with pytest.raises(InputError, match="no finite BF16 number.*State: .* had, nothing was written$"):
                learner.sync(engine, route=route)
        assert client.checksums() == sums
    with sent(lambda name, t: t * 2 if name == "model.norm.weight" else t):
        assert sync(learner, engine).differing == ["norm.weight"]
        with pytest.raises(InputError, match="DIFFERENT: 1 of .* tensors differ"):
            learner.sync(engine)
    with pytest.raises(InputError, match="engine://localhost: SGLang's model is not the learner's"):
        Learner(engines.tiny(vocab_size=engines.VOCAB + 16)).sync(engine)
    with pytest.raises(InputError, match="no answer within 1e-06 s.*still be at it"):
        learner.sync(engine, timeout=1e-6)
    assert learner.sync(engine).equal


def loops(engine, client: InProcess) -> None:
    """An engine that is used through await: its loop runs, here in this thread."""

    async def here() -> None:
        Learner(engines.tiny()).sync(engine)

    with pytest.raises(InputError, match="use `await asyncio.to_thread"):
        engine.loop.run_until_complete(here())
    for route in ROUTES:
        learner = Learner(engines.tiny(4))
        assert engine.loop.run_until_complete(asyncio.to_thread(learner.sync, engine, route=route)).equal
    zero(laws.learner_equals_engine(learner.model, client, P))


def a_dead_engine(engine, client: InProcess) -> None:
    learner, told = Learner(engines.tiny()), sync_module.require_same
    engine.tokenizer_manager._subprocess_watchdog.stop()  # it would end this process

    def kill_then(*rest) -> None:
        told(*rest)
        scheduler = engine.get_all_child_pids()[0]
        os.kill(scheduler, signal.SIGSTOP)
        threading.Timer(1, os.kill, [scheduler, signal.SIGKILL]).start()

    with patch.object(sync_module, "require_same", kill_then):
        with pytest.raises(
            InputError, match="no answer: its processes have ended.*State: unknown, SGLang does not"
        ):
            learner.sync(engine)
    engine.shutdown()
    with pytest.raises(InputError, match="no engine answers: its processes have ended"):
        learner.sync(engine)


def main(checkpoint: str, *recipe: str) -> None:
    engine = sglang.Engine(
        model_path=checkpoint, device="cpu", disable_overlap_schedule=True, sleep_on_idle=True, max_total_tokens=4096,
        skip_tokenizer_init=True, random_seed=1,
    )  # fmt: skip
    weights_arrive(engine, InProcess(engine), *recipe)
    for check in () if recipe else (failures_are_told, loops, a_dead_engine):
        check(engine, InProcess(engine))
    print("all held", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
