"""A client of an `sglang.Engine` of this process: the requests of a server, to the engine's own functions.

Not its update_weights_from_* and their like: they have no time-out, and that of tensors moves the learner's parameters
to shared memory of torch's. What they call, of its tokenizer_manager, takes the requests that a server takes.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

from minitransformer.errors import InputError
from minitransformer.plugins.sglang.client import Client, Refused

URL = "engine://localhost"  # what messages say; the engine is on this host
FLUSH = 30  # seconds, as Client's
POLL = 0.5  # seconds between looks at the engine's processes
GONE = "its processes have ended (it was shut down, or they crashed); make a new engine"
# A server's path -> the function of the tokenizer manager and its argument's type, of io_struct.
REQUESTS = {
    "/weights_checker": ("check_weights", "CheckWeightsReqInput"),
    "/init_weights_update_group": ("init_weights_update_group", "InitWeightsUpdateGroupReqInput"),
    "/destroy_weights_update_group": ("destroy_weights_update_group", "DestroyWeightsUpdateGroupReqInput"),
    "/update_weights_from_tensor": ("update_weights_from_tensor", "UpdateWeightsFromTensorReqInput"),
    "/update_weights_from_disk": ("update_weights_from_disk", "UpdateWeightFromDiskReqInput"),
    "/update_weights_from_distributed": ("update_weights_from_distributed", "UpdateWeightsFromDistributedReqInput"),
}


def client_of(to: Any, timeout: float) -> Client:
    """to: 'http://host:port', a Client, a launch.Server or an sglang.Engine of this process; InputError for others."""
    if isinstance(to, Client):
        return to.within(timeout)
    if isinstance(to, str) or isinstance(getattr(to, "url", None), str):
        return Client(to if isinstance(to, str) else to.url, timeout)
    if all(hasattr(to, name) for name in ("async_generate", "tokenizer_manager", "loop", "get_all_child_pids")):
        return InProcess(to, timeout)
    raise InputError(f"{type(to).__name__} is no SGLang server; give 'http://host:port', a Server or an sglang.Engine")


class InProcess(Client):
    """engine: an sglang.Engine; unless its event loop runs in another thread, nobody else may call it meanwhile."""

    def __init__(self, engine: Any, timeout: float = 600) -> None:
        super().__init__("http://localhost", timeout)
        self.engine, self.url = engine, URL
        if engine.tokenizer_manager is None:
            raise InputError(f"{URL}: this is not the first node of the engine, which takes the requests")

    def about(self) -> dict[str, Any]:
        most = getattr(self.engine.tokenizer_manager, "max_req_input_len", None)
        arguments = self.engine.server_args
        return vars(arguments) | {"version": version("sglang"), "max_req_input_len": most}

    def flush_cache(self) -> None:
        answer = self._run("/flush_cache", self.engine.tokenizer_manager.flush_cache(timeout_s=FLUSH))
        self._accepted("/flush_cache", answer.success, answer.message)

    def call(self, path: str, body: Any = None) -> Any:
        """The answer, as of a server. InputError names the engine's state."""
        if path == "/generate":
            return self._run(path, self.engine.async_generate(**body))
        from sglang.srt.managers import io_struct

        function, kind = REQUESTS[path]
        request = getattr(io_struct, kind)(**body)
        # Of an update from disk a third is how many requests were paused, of the checker the checksums.
        success, message, *more = self._run(path, getattr(self.engine.tokenizer_manager, function)(request, None))
        self._accepted(path, success, message)
        return {"success": success, "message": message, "ranks": more[0] if more else None}

    def _accepted(self, path: str, success: bool, message: str) -> None:
        if not success:
            raise Refused(400, f"{self.url}{path}: the engine refuses: {message or 'it does not say why':.500}")

    def _run(self, path: str, asked: Coroutine) -> Any:
        """On the engine's event loop: here if it stands still, else in the thread where it runs."""
        where, loop = f"{self.url}{path}", self.engine.loop
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            asked.close()
            raise InputError(f"{where}: an event loop runs here; use `await asyncio.to_thread(learner.sync, engine)`")
        if loop.is_closed() or self._gone():
            asked.close()
            raise InputError(f"{where}: no engine answers: {GONE}")
        watched = self._watched(where, asked)
        if not loop.is_running():
            return loop.run_until_complete(watched)
        try:
            return asyncio.run_coroutine_threadsafe(watched, loop).result(self.timeout + 2 * POLL)
        except TimeoutError:
            raise InputError(f"{where}: the engine's event loop was stopped before the answer") from None

    async def _watched(self, where: str, asked: Coroutine) -> Any:
        """A late request is not cancelled: the engine may be at it, and would take its answer for the next one's."""
        task, end = asyncio.ensure_future(asked), time.monotonic() + self.timeout
        while not task.done():
            await asyncio.wait({task}, timeout=max(0, min(POLL, end - time.monotonic())))
            if not task.done() and self._gone():
                raise InputError(f"{where}: no answer: {GONE}")
            if not task.done() and time.monotonic() >= end:
                raise InputError(f"{where}: no answer within {self.timeout:g} s; the engine may still be at it")
        try:
            return task.result()
        except Exception as error:
            raise Refused(400, f"{where}: the engine refuses: {type(error).__name__}: {error!s:.500}") from error

    def _gone(self) -> bool:
        multiprocessing.active_children()  # an ended child exists until somebody has asked
        try:
            for pid in self.engine.get_all_child_pids():
                os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False
