"""Settings of the GPU's laws, and a table that says which hold."""

import os
from collections import Counter

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _settings():
    """The worker's share of the cores for the CPU reference, and NaN in every output before a kernel writes it."""
    if not torch.cuda.is_available():
        yield
        return
    threads = torch.get_num_threads()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(2, (os.cpu_count() or 1) // workers))
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter) -> None:
    """A line a law: how many cases have the CPU reference's bits, and the first that has not."""
    laws: dict[str, Counter] = {}
    first: dict[str, str] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            file, _, case = report.nodeid.partition("::")
            if "alignment_tests/gpu/" not in file or "/test_compiles" in file:
                continue
            law = f"{file.rsplit('/', 1)[1][5:-3]}: {case.partition('[')[0][5:].replace('_', ' ')}"
            laws.setdefault(law, Counter())[outcome] += 1
            if outcome != "passed":
                crash = getattr(report.longrepr, "reprcrash", None)
                first.setdefault(law, crash.message.splitlines()[0] if crash else str(report.longrepr)[:200])
    if not laws or not torch.cuda.is_available():
        return
    import triton

    name = torch.cuda.get_device_name()
    terminalreporter.section(f"{name}, torch {torch.__version__}, Triton {triton.__version__}: the CPU's bits")
    for law, count in sorted(laws.items()):
        total = sum(count.values())
        terminalreporter.write_line(f"{law:72} {count['passed']:4d} of {total}" + ("" if law not in first else "  <--"))
        if law in first:
            terminalreporter.write_line(f"    {first[law]}")


def pytest_configure(config) -> None:
    config.pluginmanager.register(_Tell(config), "gpu-failures-at-once")


class _Tell:
    """Names a failure when it happens: a run that is cut short has no summary."""

    def __init__(self, config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and not hasattr(self.config, "workerinput"):
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[0] if crash else str(report.longrepr)
            terminal.write_line(f"\nFAILED {report.nodeid}\n    {message[:300]}")
