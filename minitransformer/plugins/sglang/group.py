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
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Thread
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
    group = _meet(client, name, backend)
    sending = Thread(target=_broadcast, args=(group, bits), daemon=True)
    sending.start()
    try:
        yield "/update_weights_from_distributed", {
            "names": [name for name, _ in tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
            "shapes": [list(t.shape) for _, t in tensors],
            "group_name": name, "load_format": "flattened_bucket" if flat else None,
        }  # fmt: skip
    finally:
        sending.join(1)
        _leave(client, name, group.abort if sending.is_alive() else partial(dist.destroy_process_group, group))


def _leave(client: Client, name: str, end: Callable[[], Any]) -> None:
    """Both at once: with cuMem on, NCCL of either side waits for the other's end. Whoever hangs is left behind."""
    ending = Thread(target=end, daemon=True)
    ending.start()
    with suppress(InputError):  # the server may be gone
        leaving = Client(client.url, min(client.timeout, LEAVE_TIMEOUT))
        leaving.call("/destroy_weights_update_group", {"group_name": name})
    ending.join(LEAVE_TIMEOUT)


def require_same_means(url: str, server: Mapping[str, Any] | None) -> None:
    """InputError if NCCL of one side shares memory by cuMem handles, which the other could not open."""
    theirs = False if server is None else server["cumem"]
    if theirs != cumem():
        on, off = ("server", "learner") if theirs else ("learner", "server")
        raise InputError(
            f"{url}: NCCL of the {off} has {CUMEM}=0, that of the {on} has not: one can't open memory of the other; "
            "start both with the same value (a stock SGLang has 0 by itself), or choose backend gloo"
        )


def _meet(client: Client, name: str, backend: str) -> Any:
    """The group, once both have joined. Each waits for the other, so the learner joins in a thread."""
    here, port, found = _address(client.url), free_port(), []

    def enter() -> None:
        try:
            found.append(join(f"tcp://{here}:{port}", LEARNER, name, backend))
        except Exception as error:
            found.append(error)

    entering = Thread(target=enter, daemon=True)
    entering.start()
    said = {"master_address": here, "master_port": port, "rank_offset": SERVER, "world_size": 2}
    client.call("/init_weights_update_group", said | {"group_name": name, "backend": backend})
    entering.join(TIMEOUT.total_seconds())
    if not found or isinstance(found[0], Exception):
        why = found[0] if found else "no end of it"
        raise InputError(f"{client.url}: learner and server did not meet at {here}:{port}: {why}")
    return found[0]


def join(at: str, rank: int, name: str, backend: str) -> Any:
    """This process's part of a group of two, beside whatever groups it has; SGLang's keys in the store are these."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    store, _, size = next(dist.rendezvous(at, rank, 2, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    kind, store = dist.Backend(backend), dist.PrefixStore(name, store)
    with failing_where_waited():
        group = _new_process_group_helper(size, rank, [], kind, store, group_name=name, timeout=TIMEOUT)[0]
    _world.pg_group_ranks[group] = {r: r for r in range(size)}  # destroy_process_group looks there
    return group


def of_server(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """SGLang's init_custom_process_group, whose groups wait half an hour."""
    with failing_where_waited():
        return original(*args, timeout=TIMEOUT, **options)


@contextmanager
def failing_where_waited() -> Iterator[None]:
    """Groups made inside raise where a broadcast is waited for; torch's watchdog of NCCL would end the process."""
    before = os.environ.get(WAIT)
    os.environ[WAIT] = "1"
    try:
        yield
    finally:
        os.environ.pop(WAIT) if before is None else os.environ.update({WAIT: before})


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
