"""Settings of the GPU's laws."""

import os

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _settings():
    """All cores for the CPU reference (bits do not depend on it), and NaN in every output before a kernel writes it."""
    if not torch.cuda.is_available():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
