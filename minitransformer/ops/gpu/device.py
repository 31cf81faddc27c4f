"""The border between torch tensors and the Triton kernels: what is refused, and how every kernel is compiled."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from minitransformer.devices import unverified, unverified_allowed
from minitransformer.errors import LAYER, RowError, UnsupportedDevice

# No contraction of a product and a sum into an FMA that nobody wrote. The reflection decides that tl.exp2 becomes
# ex2.approx.ftz, the instruction of exp2_hw; add, mul, fma, div_rn and sqrt_rn keep subnormals either way.
STRICT = {"enable_fp_fusion": False, "enable_reflect_ftz": True}
# Without tl.exp2 nothing may flush.
ROWS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}

# Launched before the kernel in front has ended (`early` of cuda.launch): only kernels that call tiles.in_turn first.
EARLY = {"launch_pdl": True}

# What a kernel can only find by looking at values. It leaves the first bad row in its op's slot of its layer; the host
# reads the slots where it waits for the GPU anyway (`check`), so a bad row is refused, but later than on the CPU.
FAULTS = {
    "embedding": "the id is outside the vocabulary; check the tokenizer",
    "rope": "the position is outside the table; shorten the prompt or the completion",
    "router": "a logit is NaN or infinite; check the weights",
    "dispatch.plan": "an expert id is outside the experts",
    "kv_store": "its row is outside the store",
    "experts.gate_up": "the input is not finite; check the weights",
    "experts.down": "the input is not finite; check the weights",
    "nvfp4.quantize": "a value is not finite, which has no code",
    "nvfp4.amax": "a value lies beyond the amax given for it",
    "mxfp8.quantize": "a value is not finite, which has no code",
    "logprob": "the logits have a NaN or no finite maximum, or the id is outside the vocabulary",
    "sample": "the logits have a NaN or no finite maximum, or overflow at their temperature; check the weights",
}
_SLOT_OF = {op: i for i, op in enumerate(FAULTS)}
_NO_ROW = 2**31 - 1
_verified: set[torch.device] = set()
_LAYERS, _SLOTS = 1024, 16  # a layer's slots begin at a multiple of 64 bytes, so that one compiled kernel serves all


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many CTAs of a persistent kernel run at once (one each)."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def take(op: str, home: torch.device, dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """The tensors, detached and contiguous. UnsupportedDevice off `home` or off Hopper, TypeError on another dtype."""
    for tensor in tensors:
        if tensor.device != home:
            raise UnsupportedDevice(f"{op}: one tensor is on {home}, another on {tensor.device}; move them together")
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: expected a {dtype} tensor, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    if home not in _verified:
        _admit(op, home)
    if torch.is_grad_enabled():
        return [tensor.detach().contiguous() for tensor in tensors]
    return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]


def _admit(op: str, home: torch.device) -> None:
    """UnsupportedDevice where a GPU's bits are not the spec's, or are not known to be, unless that is allowed."""
    from minitransformer.tuning import reverify  # which builds on the operators

    settled = reverify.first_use(home)
    if unverified(home):
        if not unverified_allowed():
            raise UnsupportedDevice(f"{op}: {home}: {unverified(home)}; --allow-unverified runs it all the same")
    elif settled and home.type == "cuda":
        _verified.add(home)


def slot(op: str) -> int:
    return _SLOT_OF[op]


@lru_cache
def _table(home: torch.device) -> Tensor:
    """int32 [layers + 1, slots], the last for what stands outside of layers."""
    return torch.full((_LAYERS + 1, _SLOTS), _NO_ROW, dtype=torch.int32, device=home)


@lru_cache
def _of_layer(home: torch.device, layer: int) -> Tensor:
    return _table(home)[layer]


@lru_cache
def meeting(home: torch.device) -> tuple[Tensor, Tensor]:
    """Where the blocks of a launch find each other: int64, zeros at first; 16-bit cells, 0xffff at first (32 MiB)."""
    made = (torch.zeros(1 << 12, dtype=torch.int64, device=home),
            torch.full((1 << 24,), -1, dtype=torch.int16, device=home))  # fmt: skip
    if home.type == "cuda":  # another stream may be the first to use them
        torch.cuda.current_stream(home).synchronize()
    return made


def faults(home: torch.device) -> Tensor:
    """int32 [slots]: the least bad row that a kernel of each op has met since the last check, in the layer whose
    operators run now (errors.in_layer)."""
    layer = LAYER.get()
    return _of_layer(home, _LAYERS if layer is None else min(layer, _LAYERS - 1))


def clear(home: torch.device) -> None:
    """Forgets what kernels have left since the last check."""
    _table(home).fill_(_NO_ROW)


def met_bad_row(home: torch.device) -> bool:
    """Waits for the GPU. Whether a kernel has left a row since the last check."""
    return int(_table(home).min()) != _NO_ROW


def check(home: torch.device, rows: int = _NO_ROW) -> None:
    """Waits for the GPU and raises RowError if a kernel met a value that its spec refuses. Nothing under capture.

    rows: of the batch; those that follow are padding, which may hold anything.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    if not met_bad_row(home):
        return
    found = _table(home).tolist()
    _table(home).fill_(_NO_ROW)
    # The first layer: a bad row spoils those after it, and later layers' earlier rows too (Batch.faults).
    for layer, slots in enumerate(found):
        for (op, text), row in zip(FAULTS.items(), slots, strict=False):
            if row < rows:
                raise RowError(op, [row], text, None if layer == _LAYERS else layer)


def watch(home: torch.device) -> Callable[[bool], bool]:
    """`check` without the wait: what is asked later, with whether to wait until the GPU has done all up to here.

    It answers whether that is done; then it has raised as `check` does if a kernel met a bad value.
    """
    least = torch.empty((), dtype=torch.int32, pin_memory=home.type == "cuda")
    least.copy_(_table(home).amin(), non_blocking=True)
    here = torch.cuda.Event()
    here.record()

    def ask(wait: bool) -> bool:
        if wait:
            here.synchronize()
        done = here.query()
        if done and least != _NO_ROW:
            check(home)
        return done

    return ask
