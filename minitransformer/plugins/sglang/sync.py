"""A learner's weights into a running SGLang server, and the proof that they are there.

    quantise   the experts of the layers that the server keeps in NVFP4, once, as a BF16 checkpoint is quantised
    send       tensor: into memory that the server maps (same host);  disk: a checkpoint directory that it reads;
               distributed: nothing yet, a process group is made, and the tensors go while the server loads
    load       the server checks all of it, then writes it and drops its keys and values
    prove      a checksum of every tensor on both sides, and a probe prompt: log-probs with equal bits

Everything goes in one message. After an error the server is asked for its state, which the error names; a sync sends
everything, so it can always be repeated.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minitransformer.alignment.align import timed
from minitransformer.alignment.gap import Gap
from minitransformer.checkpoint_files import first_few
from minitransformer.devices import unverified
from minitransformer.errors import InputError
from minitransformer.models.qwen3_moe.layout import pieces
from minitransformer.models.qwen3_moe.nvfp4_layout import FORMATS, PROJECTIONS, Format
from minitransformer.models.qwen3_moe.quantise import expert_tensors
from minitransformer.ops.nvfp4 import Nvfp4
from minitransformer.plugins.sglang import send
from minitransformer.plugins.sglang.checksums import hashed, unlike
from minitransformer.plugins.sglang.client import Client
from minitransformer.plugins.sglang.group import by_group
from minitransformer.plugins.sglang.identity import gpu, refuse_for_stock, require_same
from minitransformer.plugins.sglang.in_process import client_of
from minitransformer.plugins.sglang.probe import compare, request

if TYPE_CHECKING:
    from minitransformer.learner.learner import Learner

STATE_TIMEOUT = 10  # seconds, of the questions after an update that failed
TAKEN = "SGLang has said that the new weights are in, which is not proven; sync again"
Packed = dict[str, Nvfp4]  # by our parameter's name without ".weight": layers.3.mlp.gate_up


@dataclass(frozen=True)
class SyncReport:
    """What was sent, and what was proven.

    tensors, bytes   sent;  packed  of how many layers in NVFP4;  seconds  of quantise, send, load, prove
    checked          tensors whose checksums were compared: 0 with a stock server, which has none
    differing        names of those that differ
    probe            of the probe prompt: the learner's log-probs against the server's
    unverified       why the bits of the learner's GPU are not known to be the spec's, if they are not
    """

    url: str
    route: str
    stock: bool
    tensors: int
    bytes: int
    packed: int
    seconds: dict[str, float]
    checked: int
    differing: list[str]
    probe: Gap
    unverified: str | None = None

    @property
    def equal(self) -> bool:
        """Every tensor was compared and is equal, and so is every bit of the probe's log-probs."""
        return self.checked > 0 and not self.differing and self.probe.tokens > 0 and not self.probe.differing

    def require_equal(self) -> "SyncReport":
        """Itself, or an InputError that says what the server has after all."""
        if not self.equal:
            raise InputError(f"{self.url}: {self.verdict()}")
        return self

    def verdict(self) -> str:
        p = self.probe
        probe = f"{p.differing} of {p.tokens} log-probs of the probe prompt differ, by up to {p.max:.3g} nats"
        if self.equal:
            return f"EQUAL: {self.checked} tensors by checksum, {p.tokens} log-probs of a probe prompt by bits"
        if self.stock:
            return f"NOT PROVEN: a stock SGLang has no checksums of our tensors; {probe}"
        names = f" ({first_few(self.differing)})" if self.differing else ""
        return f"DIFFERENT: {len(self.differing)} of {self.checked} tensors differ{names}; {probe}"


def sync(
    learner: "Learner",
    to: Any,
    route: str | None = None,
    directory: str | Path | None = None,
    timeout: float = 600,
    on_step: Callable[[str], None] = lambda part: None,
    backend: str | None = None,
) -> SyncReport:
    """Sends the weights of learner.model to a server and compares; the report says whether they arrived.

    to: 'http://host:port', a Client, a launch.Server or an sglang.Engine of this process. route: of send.ROUTES; None:
    tensor for a server on this host, but distributed if it is on another GPU; disk for another host, or if a directory
    is given. directory: where the disk route may write, readable by the server (default: the temporary directory).
    backend: of the distributed route's group, 'nccl' or 'gloo' (group.py).
    InputError, with the server's state, if it refuses, does not answer within `timeout` seconds or runs another model.
    """
    client = client_of(to, timeout)
    send.require_route(route, backend)
    about = client.about()
    model, seconds, before = learner.model, dict[str, float](), client.identity()
    here, there = gpu(model.device), None if before is None else before.get("gpu")
    route = route or send.default_route(client.url, directory, here, there)
    if before is None:
        refuse_for_stock(model.config)
    else:
        require_same(model, before, client.url)
    probed = request(learner, about, client.url)
    on_step("quantise")
    with timed(seconds, "quantise"):
        packed = _quantise(model, before)
    form = FORMATS[before["format"]] if packed else None
    tensors = list(_named(model, packed, form))
    with ExitStack() as held:
        on_step("send")
        with timed(seconds, "send"):
            if route == "distributed":
                sending = by_group(tensors, client, backend, before)
            elif route == "disk":
                sending = send.by_disk(tensors, model.config, directory)
            else:
                sending = send.by_tensor(tensors, here == there)  # a stock server does not tell its GPU
            path, body = held.enter_context(sending)
        on_step("load")
        with timed(seconds, "load"):
            _load(client, path, body, before, lambda: _expected(model, packed))
    on_step("prove")
    with timed(seconds, "prove"), _not_proven():
        expected, differing = {}, []
        if before is not None:
            with ThreadPoolExecutor(1) as asking:
                theirs = asking.submit(client.checksums)
                expected = _expected(model, packed)
                differing = unlike(expected, theirs.result())
        probe = compare(learner, client, *probed)
    size, layers = sum(tensor.nbytes for _, tensor in tensors), len(packed) // len(PROJECTIONS)
    return SyncReport(
        client.url, route, before is None, len(tensors), size, layers, seconds, len(expected), differing, probe,
        unverified(model.device),
    )  # fmt: skip


def _quantise(model: Any, server: Mapping[str, Any] | None) -> Packed:
    """The experts of the layers that the server keeps packed, by parameter; other layers need the BF16 weights."""
    layers = server["packed_layers"] if server else []
    packed: Packed = {}
    for i, layer in enumerate(model.layers):
        if i not in layers and getattr(layer.mlp, "gate_up", 0) is None:
            raise InputError(f"layer {i}: SGLang keeps its experts in BF16, the learner has them only in NVFP4; "
                             "start SGLang from an NVFP4 checkpoint of these layers")  # fmt: skip
        for projection in PROJECTIONS if i in layers else ():
            held = getattr(layer.mlp, projection)
            q = layer.mlp.experts.quantised(projection, None if held is None else held.weight)
            packed[f"layers.{i}.mlp.{projection}"] = q
    return packed


def _named(model: Any, packed: Packed, form: Format | None) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's names and the tensors, views where nothing is quantised."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for piece in pieces(model.config):
        if piece.parameter.removesuffix(".weight") not in packed:
            yield piece.key, parameters[piece.parameter][piece.index]
    for name, q in packed.items():
        _, layer, _, projection = name.split(".")
        on_cpu = Nvfp4(q.codes, q.scales, q.outer.cpu())
        unused = [0.0] * model.config.num_experts  # static activation scales, which no recipe here reads
        for key, tensor in expert_tensors(model.config, int(layer), projection, on_cpu, form, unused):
            if not key.endswith(form.activation):
                yield key, tensor


def _expected(model: Any, packed: Packed) -> dict[str, str]:
    """What checksums.checksums must give on the server: of the learner's parameters, and of what was quantised."""
    named = model.named_parameters()
    tensors = {name: p.detach() for name, p in named if name.removesuffix(".weight") not in packed}
    for name, q in packed.items():
        E = q.outer.shape[0]
        # A server has the outer scales of gate and up, which share one, in two columns.
        outer = q.outer.view(E, -1).expand(E, 2) if name.endswith("gate_up") else q.outer.view(E)
        tensors |= {f"{name}.codes": q.codes, f"{name}.scales": q.scales, f"{name}.outer": outer}
    return hashed(tensors)


def _load(client: Client, path: str, body: Any, before: Mapping | None, expected: Callable[[], dict]) -> None:
    """The update. InputError names why it failed and what the server holds now."""
    try:
        client.flush_cache()  # waits for requests: SGLang ends if one is in flight when it flushes after an update
        answer = client.call(path, body)
    except InputError as error:
        said, answered = str(error), "refuses" in str(error)
    else:
        told = answer if isinstance(answer, dict) else {"message": f"no answer of SGLang's: {answer!r:.200}"}
        if told.get("success"):
            return
        said, answered = f"{client.url}{path}: {told.get('message')}", isinstance(answer, dict)
    raise InputError(f"{said}. State: {_state(client, before, expected, answered)}")


def _state(client: Client, before: Mapping | None, expected: Callable[[], dict[str, str]], answered: bool) -> str:
    """answered: the update is over; else it may still be on its way to the scheduler."""
    again = "don't sample from it; sync again, which sends everything, or restart it"
    if before is None:
        return f"unknown, a stock SGLang can't say what it holds; {again}"
    asking = client.within(STATE_TIMEOUT)
    try:
        now = asking.identity()
        if now is None:
            return f"another SGLang answers there now, without miniTransformer; {again}"
        if now["weights_version"] == before["weights_version"]:
            held = "SGLang has the weights it had, nothing was written"
            return held if answered else f"{held} so far, but the update may still come; {again}"
        wrong = unlike(expected(), asking.checksums())
    except InputError:
        return f"unknown, SGLang does not answer now either; {again}"
    if wrong:
        return f"{len(wrong)} tensors are not the learner's ({first_few(wrong)}); {again}"
    return "the new weights are in, though SGLang did not say so"


@contextmanager
def _not_proven() -> Iterator[None]:
    """An error of the proof comes after the update: it says so."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}. State: {TAKEN}") from None
