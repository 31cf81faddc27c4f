"""The border between torch tensors and the Triton kernels: what is refused, and how every kernel is compiled."""

from functools import lru_cache

import torch
from torch import Tensor

from minitransformer.errors import UnsupportedDevice

# No contraction of a product and a sum into an FMA that nobody wrote. The reflection decides that tl.exp2 becomes
# ex2.approx.ftz, the instruction of exp2_hw; add, mul, fma, div_rn and sqrt_rn keep subnormals either way.
STRICT = {"enable_fp_fusion": False, "enable_reflect_ftz": True}


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
    if _capability(home) != (9, 0):
        major, minor = _capability(home)
        raise UnsupportedDevice(
            f"{op}: {home} has compute capability {major}.{minor}; the spec's accumulator, hopper-k16-f25, is 9.0's"
        )
    return [tensor.detach().contiguous() for tensor in tensors]
