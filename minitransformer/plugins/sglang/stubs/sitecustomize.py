"""Start-up hook: replaces packages that SGLang imports but that this machine lacks. Its folder stands on PYTHONPATH.

SGLang spawns its workers, so only what Python itself runs at its start reaches them. On a machine without a GPU SGLang
imports sgl_kernel, triton and torchvision at its top but calls none of them while our model runs. Packages named in
MINITRANSFORMER_STUBS (launch.py sets it; "name?": only where it is not installed) become stubs of which every function
raises when it is called: a call is an error, never a wrong number.
"""

import enum
import importlib.abc
import importlib.machinery
import os
import sys
import types

NAMES = filter(None, os.environ.get("MINITRANSFORMER_STUBS", "").split(","))
FIND = importlib.machinery.PathFinder.find_spec
STUBS = [name.rstrip("?") for name in NAMES if not name.endswith("?") or FIND(name[:-1]) is None]


class Stub(types.ModuleType):
    """Any name can be imported from it: a class if it is capitalised, else a function that raises."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name[0].isupper():
            value = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None})
        elif full.startswith("triton."):
            value = importlib.import_module(full)
        else:
            value = _raising(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        """As a decorator, @triton.jit or @triton.jit(...), it leaves the function alone."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


def _raising(full: str):
    def function(*args, **kwargs):
        raise NotImplementedError(f"{full} was called, but here it is a stub")

    function.__name__ = full.rpartition(".")[2]
    return function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        # SGLang has its own replacement for sgl_kernel.scalar_type.
        if name.partition(".")[0] not in STUBS or name.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        module.__version__, module.__file__ = "99.0", __file__
        if module.__name__ == "triton":
            module.cdiv = lambda a, b: -(a // -b)
            module.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
        if module.__name__ == "torchvision.transforms":
            names = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
            module.InterpolationMode = enum.Enum("InterpolationMode", {n: n.lower().replace("_", "-") for n in names})


if STUBS:
    sys.meta_path.insert(0, Finder())
