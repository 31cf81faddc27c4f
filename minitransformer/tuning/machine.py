"""What a machine is made of, as far as the choice of a kernel or a library's bits may follow it."""

import os
import platform
import re
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

HOPPER = (9, 0)
# What cuBLAS and PyTorch read when they choose a product's kernel. None may change bits here: under settings other than
# the table's own a library is proven again before it is used.
ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_BLAS_PREFER_CUBLASLT")


def version(*packages: str) -> str:
    """The version of the first of these packages that is installed, or 'none'."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _driver() -> str:
    try:
        found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


@lru_cache
def gpu(device: torch.device) -> dict[str, str]:
    """Everything that a proof on this GPU may depend on; two machines with equal values may share a table."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cublas": version("nvidia-cublas", f"nvidia-cublas-cu{str(torch.version.cuda).split('.')[0]}"),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ),
    }


def blas_settings() -> tuple:
    """PyTorch's switches for a BF16 product, which a program may turn at any time: cheap enough for every call.

    Where deterministic algorithms are asked for, torch.mm may refuse to run, so that switch is among them.
    """
    return (
        torch._C._get_blas_preferred_backend(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_sm_carveout_experimental(),
        torch.are_deterministic_algorithms_enabled(),
    )


def facts(device: torch.device) -> dict[str, str]:
    """`gpu` and the switches as they stand now: what a table is keyed by."""
    return gpu(device) | {"blas": str(blas_settings())}


def specs() -> dict[str, str]:
    """Versions of the specs that a product's bits follow."""
    from minitransformer.ops import grouped_linear, linear, mma

    return {"chain": mma.SPEC, "linear": linear.SPEC, "grouped_linear": grouped_linear.SPEC}


def differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """'torch 2.12.0, the table has 2.11.0' for each entry that is not the same."""
    names = dict.fromkeys((*here, *there))
    pairs = ((name, here.get(name, "none"), there.get(name, "none")) for name in names)
    return [f"{name} {a or 'unset'}, the table has {b or 'unset'}" for name, a, b in pairs if a != b]


def cpu() -> dict[str, str]:
    """Processor, the widest vector unit that the CPU kernels are compiled for, cores, and the versions under them."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    units = ("avx512f", "avx2", "avx", "sse2", "neon")
    return {
        "processor": f"{platform.machine()} {binding.get_host_cpu_name()}",
        "vectors": next((unit for unit in units if features.get(unit)), "none known"),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": version("numba"),
        "triton": version("triton"),
    }
