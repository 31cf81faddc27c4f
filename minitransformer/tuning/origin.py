"""What a measured number is of: the day, the sources that ran and the machine."""

from datetime import UTC, datetime

import torch

from minitransformer.tuning import machine, reverify


def origin() -> dict[str, str]:
    """For a row of results. sources: of operators, kernels and self-checks, where equal numbers are of equal code."""
    gpu = machine.facts(torch.device("cuda", 0))["gpu"] if torch.cuda.is_available() else "CPU"
    text = f"{gpu}, torch {torch.__version__}, Triton {machine.version('triton')}"
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "sources": reverify.sources()[:12], "machine": text}
