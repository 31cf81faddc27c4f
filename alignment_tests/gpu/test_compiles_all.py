"""No kernel is forgotten: each one in minitransformer/ops/gpu is compiled for sm_90a by a test of this folder."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

import triton

from alignment_tests.gpu.compile_all import cases
from minitransformer.ops import gpu

KERNELS = Path(gpu.__file__).parent


def compiled_sources(folder: Path) -> set[str]:
    """Files that tests named test_compiles*.py give to sass() or cubin() for sm_90a, by their modules' constants."""
    found = set()
    for path in folder.glob("test_compiles*.py"):
        module = importlib.import_module(f"alignment_tests.gpu.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("sass", "cubin"):
                continue
            source, elsewhere = node.args[0], len(node.args) > 3
            if isinstance(source, ast.Attribute) and isinstance(source.value, ast.Name) and not elsewhere:
                found.add(getattr(getattr(module, source.value.id), source.attr))
    return found


def test_every_cuda_file_is_compiled():
    assert compiled_sources(Path(__file__).parent) == {path.name for path in KERNELS.glob("*.cu")}


def test_every_triton_kernel_is_compiled():
    """A kernel is a jitted function whose name ends so; others are parts of one."""
    kernels = {}
    for one in pkgutil.iter_modules([str(KERNELS)]):
        module = importlib.import_module(f"minitransformer.ops.gpu.{one.name}")
        for name, value in vars(module).items():
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"):
                kernels[value] = f"{value.fn.__module__}.{name}"
    assert len(kernels) > 40
    missing = kernels.keys() - {case.kernel for case in cases()}
    assert not missing, sorted(kernels[kernel] for kernel in missing)


def test_what_is_launched_is_called_a_kernel():
    """So that the test above sees it."""
    launches = 0
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = ast.unparse(node.func.value)
                launches += called.endswith("_kernel")
                module = importlib.import_module(f"minitransformer.ops.gpu.{path.stem}")
                assert called.endswith("_kernel") or not is_jitted(module, called), f"{path.name}: {called}"
    assert launches > 40


def is_jitted(module, called: str) -> bool:
    for name in called.split("."):
        module = getattr(module, name, None)
    return isinstance(module, triton.runtime.JITFunction)
