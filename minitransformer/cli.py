"""The command `minitransformer`. Exit status: 0 done and nothing differs, 1 something differs or some requests
failed, 2 bad input, 70 a fault of this program (its traceback is on stderr), 130 and 143 ended by Ctrl-C or SIGTERM,
141 the reader of the output has gone (`| head`).

Nothing here or in `commands` imports torch before a command runs, so that --help answers at once.
"""

import argparse
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

from minitransformer.commands import align, compare, describe, doctor, generate, quantize, recipes, score, sync, trace
from minitransformer.errors import InputError, UnsupportedDevice
from minitransformer.files import tell

COMMANDS = (align, generate, score, trace, compare, sync, quantize, recipes, describe, doctor)
BAD_INPUT, FAULT, INTERRUPTED, UNREAD, TERMINATED = 2, 70, 130, 141, 143


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, as for every other bad input; argparse would print the usage too.
        self.exit(BAD_INPUT, f"error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="minitransformer",
        description="A Qwen3-MoE whose learner and sampler run the same operators, bit for bit.",
        epilog="example: minitransformer align --model demo/checkpoint --prompts examples/prompts.txt",
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rsplit(".", 1)[1]
        summary, example = module.__doc__.strip().split("\n\nExample:\n", 1)
        command = commands.add_parser(
            name,
            help=summary.split("\n", 1)[0],
            description=summary,
            epilog=f"example:\n{example.rstrip()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; bad input is one line on stderr."""
    try:
        return _status(argv)
    except Exception:  # Python's own status for it, 1, would say that something differs
        tell(traceback.format_exc().rstrip())
        return FAULT
    finally:
        for stream in (sys.stdout, sys.stderr):
            _leave(stream)


def _leave(stream: TextIO) -> None:
    """What it can't be rid of goes nowhere: at exit Python would try once more, complain, and end with 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _status(argv: Sequence[str] | None) -> int:
    for name in ("stdout", "stderr"):  # None if closed: print() would take the other one
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    args = parser().parse_args(argv)
    try:
        with _ending_on_sigterm():
            status = args.run(args)
            sys.stdout.flush()  # a reader that has gone is found here, not at exit
            return status
    except InputError as error:
        tell(f"error: {error}")
        return BAD_INPUT
    except UnsupportedDevice as error:  # some part of the model has no kernel there
        tell(f"error: {error}; use --device cpu")
        return BAD_INPUT
    except BrokenPipeError:
        return UNREAD
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        tell(f"error: {where}{error.strerror or error}")
        return BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError for memory that it cannot have; every other one is a fault of this program.
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        from minitransformer.devices import memory_needed

        advice = "use fewer or shorter prompts, fewer --stages or a smaller model"
        tell(f"error: not enough memory: {memory_needed(error)}; {advice}")
        return BAD_INPUT
    except KeyboardInterrupt:
        tell("interrupted")
        return INTERRUPTED


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """What was begun is cleared away, as after Ctrl-C: temporary files, a server that was started."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may ask for signals
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
