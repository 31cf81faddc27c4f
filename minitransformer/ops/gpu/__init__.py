"""Triton kernels for NVIDIA Hopper with the CPU references' bits: one module an operator, each with `forward`.

They stand beside the operators and not in their files because an install without a GPU has no Triton to import. So a
module here is imported on the first CUDA tensor: `gpu.linear.forward(...)` finds it.
"""

import importlib
from types import ModuleType

from torch import Tensor

from minitransformer.errors import UnsupportedDevice


def takes(name: str, tensor: Tensor) -> bool:
    """Whether a kernel that joins several operators is there for this tensor; never off a GPU."""
    return tensor.is_cuda and __getattr__(name).takes(tensor)


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            raise UnsupportedDevice(f"{name}: the CUDA kernels need Triton; pip install triton") from error
        raise AttributeError(f"{__name__} has no kernel {name!r}") from error
