"""The route `distributed`: the tensors of one request, broadcast to the server over a process group made for it.

SGLang's request names every tensor. The server receives all of them into memory of its own, and our Receiver checks
all before it writes, so one request is one update, as on the other routes. A sender that dies in between is an error:
of gloo at once, of NCCL after TIMEOUT.
"""

import os
import secrets
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.identity import CUMEM, cumem
from minitransformer.plugins.sglang.launch import free_port
from minitransformer.plugins.sglang.send import Named, Request

TIMEOUT = timedelta(seconds=120)  # for two to meet, and for a broadcast, on both sides
LEAVE_TIMEOUT = 30  # seconds, of the group's end on either side: it may be what hangs
LEARNER, SERVER = 0, 1  # ranks
BACKENDS = ("nccl", "gloo")
WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # read when a group is made
_environment = Lock()


@contextmanager
def by_group(
    tensors: Named, client: Client, backend: str | None = None, server: Mapping[str, Any] | None = None
) -> Iterator[Request]:
    """A group of learner and server, and broadcasts that wait for the server's request in a thread.

    backend: 'nccl' (default on a GPU; the server on another GPU) or 'gloo' (over the network of the CPUs). server: what
    it says of itself; None: stock. InputError if the two don't meet, or their NCCL shares memory by different means.
    """
    on_gpu = any(t.is_cuda for _, t in tensors)
    backend = backend or ("nccl" if on_gpu else "gloo")
    if backend not in BACKENDS:
        raise InputError(f"backend {backend!r} is not supported; choose {' or '.join(BACKENDS)}")
    if backend == "nccl" and not on_gpu:
        raise InputError("backend 'nccl' needs the learner on a GPU (--device cuda); choose gloo")
    if backend == "nccl":
        require_same_means(client.url, server)
    name = f"minitransformer-{secrets.token_hex(4)}"
    # Of FP8, which these libraries don't send, SGLang takes the bytes of all tensors one after another.
    flat = any(t.dtype == torch.float8_e4m3fn for _, t in tensors)
    home = next((t.device for _, t in tensors if t.is_cuda), torch.device("cpu"))
    bits = [t.to(home).contiguous() for _, t in tensors]  # outer scales are made on the CPU
    bits = [torch.cat([t.view(-1).view(torch.uint8) for t in bits])] if flat else bits
    joined: Future = Future()
    sending = Thread(target=lambda: _broadcast(joined.result(), bits), daemon=True)
    try:
        _meet(client, name, backend, joined)
        sending.start()
        yield "/update_weights_from_distributed", {
            "names": [name for name, _ in tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
            "shapes": [list(t.shape) for _, t in tensors],
            "group_name": name, "load_format": "flattened_bucket" if flat else None,
        }  # fmt: skip
    finally:
        if sending.is_alive():
            sending.join(1)
        _leave(client, name, partial(_end_joined, joined, sending.is_alive()))


def _leave(client: Client, name: str, end: Callable[[], Any]) -> None:
    """Both at once: with cuMem on, NCCL of either side waits for the other's end. Whoever hangs is left behind."""
    ending = Thread(target=end, daemon=True)
    ending.start()
    with suppress(Exception):  # the server may be gone, or have no such group; an error before this is the one to tell
        leaving = client.within(min(client.timeout, LEAVE_TIMEOUT))
        leaving.call("/destroy_weights_update_group", {"group_name": name})
    ending.join(LEAVE_TIMEOUT)


def _end_joined(joined: Future, abort: bool) -> None:
    """The learner's group, if it is there; one that comes later finds nobody waiting, and is ended by its thread."""
    if not joined.cancel() and joined.exception() is None:
        end(joined.result(), abort)


def end(group: Any, abort: bool) -> None:
    """May hang. abort: first whatever it does is stopped; torch.distributed keeps a group that is not destroyed too."""
    with suppress(Exception):
        if abort:
            group.abort()
    with suppress(Exception):
        dist.destroy_process_group(group)


def drop(groups: dict[str, Any], name: str) -> None:
    """Takes out a server's group whose sender is gone, and ends it. One that hangs is left: the server goes on."""
    if (group := groups.pop(name, None)) is not None:
        ending = Thread(target=end, args=(group, True), daemon=True)
        ending.start()
        ending.join(1)  # not longer: NCCL may wait for the sender, which waits for the server's answer


def require_same_means(url: str, server: Mapping[str, Any] | None) -> None:
    """InputError if NCCL of one side shares memory by cuMem handles, which the other could not open."""
    theirs = False if server is None else server["cumem"]
    if theirs != cumem():
        on, off = ("SGLang", "the learner") if theirs else ("the learner", "SGLang")
        raise InputError(
            f"{url}: NCCL of {off} has {CUMEM}=0, that of {on} has not: one can't open memory of the other; "
            "start both with the same value (a stock SGLang has 0 by itself), or choose backend gloo"
        )


def _meet(client: Client, name: str, backend: str, joined: Future) -> None:
    """joined: the group, once both are in it. Each waits for the other, so the learner joins in a thread."""
    here, port = _address(client.url), free_port()

    def enter() -> None:
        try:
            group = join(f"tcp://{here}:{port}", LEARNER, name, backend)
        except Exception as error:
            with suppress(InvalidStateError):
                joined.set_exception(error)
            return
        try:
            joined.set_result(group)
        except InvalidStateError:  # too late: by_group is over
            end(group, abort=True)

    Thread(target=enter, daemon=True).start()
    said = {"master_address": here, "master_port": port, "rank_offset": SERVER, "world_size": 2}
    client.call("/init_weights_update_group", said | {"group_name": name, "backend": backend})
    try:
        joined.result(TIMEOUT.total_seconds())
    except Exception as error:
        why = str(error) or "no end of it"
        raise InputError(f"{client.url}: learner and SGLang did not meet at {here}:{port}: {why}") from None


def join(at: str, rank: int, name: str, backend: str) -> Any:
    """This process's part of a group of two, beside whatever groups it has; SGLang's keys in the store are these."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    store, _, size = next(dist.rendezvous(at, rank, 2, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    kind, store = dist.Backend(backend), dist.PrefixStore(name, store)
    with failing_where_waited(backend):
        group = _new_process_group_helper(size, rank, [], kind, store, group_name=name, timeout=TIMEOUT)[0]
    _world.pg_group_ranks[group] = {r: r for r in range(size)}  # destroy_process_group looks there
    return group


def of_server(original: Callable[..., Any], backend: str | None = None, *args: Any, **options: Any) -> Any:
    """SGLang's init_custom_process_group, whose groups wait half an hour."""
    with failing_where_waited(backend):
        return original(backend, *args, timeout=TIMEOUT, **options)


@contextmanager
def failing_where_waited(backend: str | None) -> Iterator[None]:
    """Groups made inside raise where a broadcast is waited for; torch's watchdog of NCCL would end the process.

    The variable is the whole process's: one group at a time, or the second would restore what the first has set.
    """
    if "nccl" not in (backend or "").lower():
        yield
        return
    with _environment:
        before = os.environ.get(WAIT)
        os.environ[WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(WAIT, None)
            else:
                os.environ[WAIT] = before


def _broadcast(group: Any, tensors: Sequence[Tensor]) -> None:
    """To the end, or to the error that the server's answer tells too."""
    with suppress(Exception):
        if tensors[0].is_cuda:
            torch.cuda.set_device(tensors[0].device)
            torch.cuda.synchronize()  # what another thread has begun
        for work in [group.broadcast(t, LEARNER) for t in tensors]:
            work.wait()


def _address(url: str) -> str:
    """This host's IPv4 address as the server sees it. InputError if the server has none."""
    there = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((there.hostname, there.port or 80))
        except OSError as error:
            raise InputError(f"{url}: no way there by IPv4 ({error}); give such a URL, or another route") from None
        return s.getsockname()[0]
