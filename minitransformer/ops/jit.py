"""How every CPU kernel is compiled: no fast-math, NumPy's division, the GIL released, and a cache that cannot be stale.

Numba's own cache looks only at the file of the function itself: after an edit of rounding.py it would go on serving
kernels with the old rounding compiled in. Here the folder of the cache carries a hash of all the operators' sources.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numba

_HERE = Path(__file__).resolve().parent


def _cache_folder() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(_HERE.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    if numba.config.CACHE_DIR:
        base = Path(numba.config.CACHE_DIR)
    elif os.access(_HERE, os.W_OK):
        base = _HERE / "__pycache__"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minitransformer"
    try:
        folder = base / f"kernels-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # nothing writable: compile once a process
        folder = Path(tempfile.mkdtemp(prefix="minitransformer-"))
    return str(folder)


_FOLDER = _cache_folder()


def jit(function: Callable) -> Callable:
    """njit(nogil, cached) for operators; no optimisation that may move a bit is on."""
    theirs = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER  # read when the cache is set up, that is here; other people's kernels keep theirs
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = theirs
