"""Starts `sglang.launch_server` with our model in it (or without: stock) as a process of its own, and stops it."""

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from minitransformer.errors import InputError
from minitransformer.plugins.sglang import MODEL_PACKAGE, MODEL_PACKAGE_VARIABLE

HERE = Path(__file__).resolve().parent
# The CPU has no kernels of SGLang's, and a scheduler that waits would take a core of it. HTTP clients never ask for a
# tokenizer, ids go in and come out.
CPU_ARGUMENTS = ("--device", "cpu", "--disable-overlap-schedule", "--sleep-on-idle", "--max-total-tokens", "4096")
CPU_STUBS = "sgl_kernel,triton?,torchvision?,soundfile?"
ARGUMENTS = ("--skip-tokenizer-init", "--skip-server-warmup")
# Words in the server's log -> what it does from there on; the last one that is there counts.
PHASES = {
    "Load weight begin": "loading weights", "Load weight end": "making room for keys and values",
    "Capture target prefill CUDA graph begin": "capturing prefill graphs",
    "Capture target decode CUDA graph begin": "capturing decode graphs",
    "Capture target decode CUDA graph end": "opening its port",
}  # fmt: skip


def environment(cpu: bool, stock: bool = False, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: our model unless stock, and on a CPU the start-up hook of the folder stubs/."""
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    env.pop(MODEL_PACKAGE_VARIABLE, None)
    if not stock:
        env[MODEL_PACKAGE_VARIABLE] = MODEL_PACKAGE
    env |= more or {}
    if cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "MINITRANSFORMER_STUBS": CPU_STUBS}
        env.setdefault("OMP_NUM_THREADS", "1")
        env["PYTHONPATH"] = os.pathsep.join([str(HERE / "stubs"), *filter(None, [env.get("PYTHONPATH")])])
    return env


_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: the kernel ends the server when the thread that started it is gone, even by SIGKILL."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """Not one that the system gives out: when a server binds it, seconds later, a connection may have it."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port
    raise InputError("no free port was found between 20000 and 32000")


class Server:
    """A running server, a context manager. `url` to talk to it, `log` is the file that it writes.

    model      checkpoint directory;  arguments  more of launch_server's, such as ["--chunked-prefill-size", "64"]
    python     the interpreter of the environment that has SGLang;  timeout  seconds until it must answer
    meanwhile  called once while it starts;  on_phase  called again and again with what its log says that it does

    InputError, with the end of its log, if it does not come up.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        arguments: Sequence[str] = (),
        *,
        cpu: bool = True,
        stock: bool = False,
        python: str = sys.executable,
        extra_environment: Mapping[str, str] | None = None,
        timeout: float = 300,
        meanwhile: Callable[[], None] = lambda: None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        handle, name = tempfile.mkstemp(prefix="sglang-", suffix=".log")
        self.log = Path(name)
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        command += ["--nccl-port", str(free_port()), *ARGUMENTS, *(CPU_ARGUMENTS if cpu else ()), *arguments]
        env = environment(cpu, stock, extra_environment)
        with os.fdopen(handle, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True, preexec_fn=_end_with_parent
            )
        try:
            meanwhile()
            self._wait(timeout, on_phase)
        except BaseException:
            self.stop()
            raise

    def _wait(self, timeout: float, on_phase: Callable[[str], None]) -> None:
        from minitransformer.plugins.sglang.client import Client

        client, end = Client(self.url, timeout=5), time.monotonic() + timeout
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise InputError(f"the SGLang server stopped with status {self.process.returncode}: {self.reason()}")
            if client.is_up():
                return
            on_phase(self.phase())
            time.sleep(0.25)
        phase, why = self.phase(), self.reason()
        raise InputError(f"the SGLang server did not answer within {timeout:g} s (it was at: {phase}): {why}")

    def phase(self) -> str:
        """What its log says that it does."""
        log = self.log.read_text("utf-8", "replace")
        last = max(PHASES, key=log.rfind)
        return PHASES[last] if last in log else "Python's imports"

    def reason(self) -> str:
        """What the log says of the end: our own sentence, else its last error, else its last lines."""
        lines = [line for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip()]
        ours = [line for line in lines if "miniTransformer is not live" in line]
        errors = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception)(: |$)|[\w. ]+: error: ", line)]
        return (ours or errors or [" / ".join(lines[-3:])])[-1]

    def stop(self) -> None:
        """Ends the server and its workers, which share its process group."""
        # Not SIGTERM: SGLang takes the end of its own workers for a crash and waits to diagnose it.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
