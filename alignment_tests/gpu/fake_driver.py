"""Triton's driver without a GPU: kernels are compiled for sm_90a, and a launch is noted instead of made."""

import contextlib
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

HOPPER = GPUTarget("cuda", 90, 32)


class Driver:
    """launches: (hash of all that the kernel was compiled from, what the launcher was given) of each, in order."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.launches: list[tuple[str, tuple]] = []
        self.maps = 0
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple:
        return object(), name, 32, 0, 1024

    def fill_tma_descriptor(self, *facts: Any) -> tuple:
        self.maps += 1
        return tuple(tuple(fact) if isinstance(fact, list) else fact for fact in facts)

    def launcher_cls(self, source: Any, metadata: Any) -> "Launcher":
        return Launcher(self, source, metadata)


class Launcher:
    """As triton.backends.nvidia.driver.CudaLauncher, around a function that notes."""

    def __init__(self, driver: Driver, source: Any, metadata: Any) -> None:
        def note(x, y, z, stream, function, cooperative, pdl, scratch, profile, packed, facts, enter, leave, *values):
            values = tuple(v.data_ptr() if hasattr(v, "data_ptr") else v for v in values)
            how = function, x, y, z, stream, cooperative, pdl, scratch, profile, packed
            driver.launches.append((metadata.hash, (*how, *values)))

        self.launch = nvidia.wrap_handle_tensordesc(note, dict(source.signature), metadata.tensordesc_meta)
        self.global_scratch_size, self.profile_scratch_size = metadata.global_scratch_size, 0
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *rest)


@contextlib.contextmanager
def installed(target: GPUTarget = HOPPER) -> Iterator[Driver]:
    fake, config = Driver(target), triton.runtime.driver
    before = config._active
    config.set_active(fake)
    try:
        yield fake
    finally:
        config._active = before
