"""The start-up hook: which packages become stubs, and that a stub's function is an error when it is called."""

import os
import subprocess
import sys
from pathlib import Path

from minitransformer.plugins.sglang import launch

SCRIPT = """
import json, no_such_package, wave
from no_such_package.deep import some_function, SomeClass
print(type(json).__name__, type(no_such_package).__name__, type(wave).__name__, SomeClass.__name__)
some_function()
"""


def test_stands_in_for_what_is_missing_and_for_what_it_must():
    """json is there, so it stays; wave is replaced although it is there, as sgl_kernel is on a CPU."""
    stubs = Path(launch.__file__).parent / "stubs"
    env = dict(os.environ, PYTHONPATH=str(stubs), MINITRANSFORMER_STUBS="json?,no_such_package?,wave")
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.stdout == "module Stub Stub SomeClass\n"
    assert "NotImplementedError: no_such_package.deep.some_function was called, but here it is a stub" in done.stderr
