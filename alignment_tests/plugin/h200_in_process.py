"""`learner.sync(engine)` with an sglang.Engine of the learner's process, on a GPU: what `h200 engine` runs.

A process of its own, as SGLang's Engine changes the one that it is in. In it: the engine without weights, a first sync;
then by each route an update of the learner, a sync, which must change the outputs, and one more, which must not. After
each, log-probs of the learner against the engine's and of its decode against its own prefill, all bits.
"""

import argparse
import os
import sys

import torch

from alignment_tests.plugin import laws
from alignment_tests.plugin.h200 import parsed
from alignment_tests.plugin.h200_engines import add_row, arguments, learners
from alignment_tests.plugin.h200_laws import prefills, same_gpu, shows_nothing
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.learner.packing import Sample
from minitransformer.plugins.sglang import MODEL_PACKAGE, MODEL_PACKAGE_VARIABLE
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.in_process import InProcess
from minitransformer.plugins.sglang.launch import ARGUMENTS, CPU_ARGUMENTS

LENGTHS, VOCAB, LR = (5, 37, 64, 200), 1024, 1e-3  # a step of AdamW then moves most BF16 weights


def made(args: argparse.Namespace, name: str):
    """An sglang.Engine, of the arguments that a server of this name gets."""
    os.environ[MODEL_PACKAGE_VARIABLE] = MODEL_PACKAGE  # before SGLang is imported
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    size, more, _ = arguments(args, name)
    where = CPU_ARGUMENTS if args.cpu else ("--base-gpu-id", str(args.gpu))
    load_plugins()  # the plugin reads the arguments too
    words = ["--model-path", str(args.directory / size), *ARGUMENTS, *where, *more]
    return sglang.Engine(server_args=prepare_server_args(words))


def update(learner: Learner, client: Client) -> None:
    """A step of RL on what the engine sampled: every second completion is to become likelier, the others less so."""
    prompts = laws.prompts(LENGTHS, VOCAB, 3)
    outs = laws.run(client, prompts, 0.6)
    samples = [
        Sample(p + o.token_ids, len(p), 1.0 - 2 * (i % 2), o.log_probs, temperature=0.6)
        for i, (p, o) in enumerate(zip(prompts, outs, strict=True))
    ]
    gap = learner.update(samples).max_log_prob_gap
    if gap:
        raise AssertionError(f"the engine's log-probs were {gap:.3g} nats from the learner's before the update")


def sent(args: argparse.Namespace, name: str, learner: Learner, engine, route: str | None, weights: str) -> int:
    """One sync, a row of it. weights: 'other' must change the outputs, 'equal' must not. -> what was wrong."""
    client, ids = InProcess(engine, args.timeout), laws.prompts(LENGTHS, VOCAB)
    before = laws.run(client, ids)
    backend = args.backend if route == "distributed" else None
    report = learner.sync(engine, route=route, backend=backend, timeout=args.timeout)
    moved = laws.same(before, laws.run(client, ids)).differing
    found = laws.total([laws.learner_equals_engine(learner.model, client, ids, t) for t in (0.6, 1.0)])
    decode = laws.decode_equals_rescoring(client, ids)
    wrong = found.differing + decode.differing + ((moved > 0) == (weights == "equal"))
    parts = ", ".join(f"{part} {x:.3f}" for part, x in report.seconds.items())
    print(f"{name}: {weights} weights by {report.route}, {report.bytes / 2**20:.1f} MiB; {parts}; {report.verdict()}")
    print(f"  outputs moved {moved}; learner against engine {found}; decode against rescoring {decode}", flush=True)
    add_row(
        args, engine=name, in_process=True, route=report.route, backend=backend, weights=weights, bytes=report.bytes,
        seconds=report.seconds, verdict=report.verdict(), same_gpu=same_gpu(learner.model, client), moved=moved,
        learner_differing=found.differing, learner_of=found.of, decode_differing=decode.differing, decode_of=decode.of,
    )  # fmt: skip
    return wrong


def syncs(args: argparse.Namespace, name: str) -> int:
    size, kind, *_ = name.split("-")
    engine = made(args, name)
    model = learners(args, size)
    model.set_recipe("bf16" if kind == "bf16" else "nvfp4_per_token")
    learner = Learner(model, lr=LR)
    wrong = sent(args, name, learner, engine, None, "other")
    for route in args.routes:
        for weights in ("other", "equal"):
            try:
                if weights == "other":
                    update(learner, InProcess(engine, args.timeout))
                wrong += sent(args, name, learner, engine, None if route == "default" else route, weights)
            except (AssertionError, InputError) as error:  # one route that fails must not take the others along
                print(f"{name}: {route}, {weights} weights: {error}", flush=True)
                wrong += 1
    replayed = prefills(InProcess(engine, args.timeout))
    print(f"{name}: prefills from graphs {replayed}", flush=True)
    add_row(args, engine=name, in_process=True, prefills_from_graphs=replayed)
    engine.shutdown()
    return wrong + shows_nothing(args, name, replayed)


if __name__ == "__main__":
    given = parsed()
    torch.manual_seed(0)
    failed = syncs(given, given.names[0])
    print(f"{given.names[0]}: {'all held' if not failed else f'{failed} wrong'}", flush=True)
    sys.exit(1 if failed else 0)
