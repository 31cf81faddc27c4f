"""The client of an sglang.Engine against a stand-in of one: who answers, in which thread, and what is said if nobody
does. test_engine_in_process.py has the real one."""

import ast
import asyncio
import multiprocessing
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from alignment_tests.learner.tiny import tiny_model
from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang.client import Client, Refused
from minitransformer.plugins.sglang.in_process import POLL, InProcess, client_of
from minitransformer.plugins.sglang.launch import HERE


class Engine:
    """flushing: seconds until it has emptied its cache; fault: what it says then."""

    def __init__(self, flushing: float = 0, fault: str = "") -> None:
        self.loop, self.flushing, self.fault = asyncio.new_event_loop(), flushing, fault
        self.tokenizer_manager, self.pids, self.threads = self, [os.getpid()], []

    def get_all_child_pids(self) -> list[int]:
        return self.pids

    async def async_generate(self, **body) -> dict:
        raise ValueError(f"nothing of {sorted(body)}")

    async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
        self.threads.append(threading.current_thread())
        await asyncio.sleep(self.flushing)
        return SimpleNamespace(success=not self.fault, message=self.fault)


def test_whoever_serves_has_a_client():
    assert type(client_of("http://h:1", 3)) is Client and client_of("http://h:1", 3).timeout == 3
    assert client_of(SimpleNamespace(url="http://h:2"), 3).url == "http://h:2"
    own = client_of(Engine(), 3)
    assert type(own) is InProcess and own.timeout == 3 and own.url == "engine://localhost"
    assert client_of(own, 4).engine is own.engine and client_of(own, 4).timeout == 4 and own.timeout == 3
    with pytest.raises(InputError, match="timeout 0: give seconds"):
        own.within(0)
    for wrong in (None, 3, object(), Engine, SimpleNamespace(url=3)):
        with pytest.raises(InputError, match=r"no SGLang server; give .* an sglang\.Engine"):
            Learner(tiny_model(0)).sync(wrong)
    with pytest.raises(InputError, match="not the first node"):
        engine = Engine()
        engine.tokenizer_manager = None
        client_of(engine, 3)


def test_a_loop_that_stands_still_runs_here_and_one_that_runs_stays_where_it_is():
    engine = Engine()
    InProcess(engine).flush_cache()
    engine.loop.run_until_complete(asyncio.to_thread(InProcess(engine).flush_cache))
    assert engine.threads == [threading.main_thread()] * 2
    thread = threading.Thread(target=InProcess(engine).flush_cache)
    thread.start()
    thread.join()
    assert engine.threads[2:] == [thread]

    async def inside() -> None:
        InProcess(engine).flush_cache()

    for loop in (engine.loop, asyncio.new_event_loop()):
        with pytest.raises(InputError, match="an event loop runs here; use `await asyncio.to_thread"):
            loop.run_until_complete(inside())


def test_a_refusal_says_why():
    with pytest.raises(Refused, match="engine://localhost/flush_cache: the engine refuses: requests are running"):
        InProcess(Engine(fault="requests are running")).flush_cache()
    with pytest.raises(Refused, match="/generate: the engine refuses: ValueError: nothing of .*input_ids"):
        InProcess(Engine()).generate([[1]], {})


def test_a_late_request_goes_on():
    """And its answer is its own."""
    engine = Engine(flushing=0.2)
    with pytest.raises(InputError, match="no answer within 0.05 s; the engine may still be at it"):
        InProcess(engine, 0.05).flush_cache()
    engine.loop.run_until_complete(asyncio.sleep(0.3))
    assert not asyncio.all_tasks(engine.loop)


def test_an_engine_that_has_ended():
    """Found so though nobody has waited for the process, which till then exists."""
    engine, process = (
        Engine(flushing=3 * POLL),
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,)),
    )
    process.start()
    engine.pids = [os.getpid(), process.pid]
    threading.Timer(POLL / 2, os.kill, [process.pid, signal.SIGKILL]).start()
    with pytest.raises(InputError, match="no answer: its processes have ended"):
        InProcess(engine).flush_cache()
    with pytest.raises(InputError, match="no engine answers: its processes have ended"):
        InProcess(engine).flush_cache()
    engine.pids = []
    engine.loop.close()
    with pytest.raises(InputError, match="no engine answers"):
        InProcess(engine).flush_cache()


def test_a_loop_that_is_stopped():
    engine, told = Engine(flushing=60), []

    def ask() -> None:
        try:
            InProcess(engine, 0.5).flush_cache()
        except InputError as error:
            told.append(str(error))

    thread = threading.Thread(target=ask)
    engine.loop.call_soon(thread.start)
    engine.loop.run_until_complete(asyncio.sleep(0.2))
    thread.join()
    assert told == ["engine://localhost/flush_cache: the engine's event loop was stopped before the answer"]
    for task in asyncio.all_tasks(engine.loop):
        task.cancel()
    engine.loop.run_until_complete(asyncio.sleep(0))


def test_what_a_sync_says_is_true_of_an_engine_too():
    """Its messages say SGLang, not server; what is true of one of them alone is in client.py or in_process.py."""
    for name in ("sync", "probe", "weights", "identity", "group", "send"):
        tree = ast.parse((HERE / f"{name}.py").read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        said = [node.value for node in texts if id(node) not in docs]
        assert len(said) > 5
        assert not [words for words in said if re.search(r"\bserver\b", words)], name
