"""The tiny model of the engine tests, and engines with it."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from alignment_tests.learner.tiny import tiny_model
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.launch import Server

VOCAB, CONTEXT, LONG_CONTEXT = 256, 512, 4096
LIVE = "miniTransformer is live"


def tiny(seed: int = 0, **changes):
    """Sparse, dense, sparse; a context long enough for prompts of several tiles."""
    return tiny_model(seed, **{"vocab_size": VOCAB, "max_positions": CONTEXT, **changes})


@contextmanager
def start(
    checkpoint: Path, arguments: Sequence[str] = (), stock: bool = False, environment: Mapping[str, str] | None = None
):
    """An engine on the CPU; .client talks to it. Which class is live is asserted, both ways."""
    server = Server(checkpoint, ["--random-seed", "1", *arguments], stock=stock, extra_environment=environment)
    with server:
        server.client = Client(server.url)
        assert (LIVE in server.log.read_text()) != stock, server.log
        yield server
    os.unlink(server.log)


def shared_memory(server: Server) -> list[str]:
    """The files of shared memory that a learner wrote and a process of the server still maps."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == server.process.pid:
                found += re.findall(r"/dev/shm/tmp\S+", (process / "maps").read_text())
        except OSError:  # it has ended
            pass
    return found
