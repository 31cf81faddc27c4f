"""Which kernel a product runs with: a row of the table (minitransformer/tuning), if this machine is the table's.

A lookup costs a dict access and asks the GPU nothing, so it may stand under graph capture. A table of another machine,
of other versions, or of other switches of PyTorch's is not trusted: the tiles it names have the bits all the same, a
library it names is proven for the very shape at its first use (never under capture), and a warning says so.
"""

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from minitransformer.ops.gpu.tiles import Tile
from minitransformer.tuning import machine, table
from minitransformer.tuning.table import Choice, Product

NOTHING = Choice()
_choices: dict[tuple, Choice] = {}


@lru_cache
def _tables() -> list[table.Table]:
    return table.tables()


@lru_cache
def _warn(path: str, unlike: str) -> None:
    warnings.warn(
        f"{path} was measured elsewhere ({unlike}); libraries it names are proven again at their first use. "
        "`minitransformer doctor --tune` makes a table for this machine.", RuntimeWarning, stacklevel=3,
    )  # fmt: skip


def forget() -> None:
    """After a new table was written."""
    _tables.cache_clear(), _choices.clear()


def _find(home: torch.device, product: Product, M: int) -> Choice:
    here = machine.facts(home) | machine.specs()
    unlike = [(machine.differences(here, one.machine | one.spec), one) for one in _tables()]
    for differences, one in sorted(unlike, key=lambda pair: bool(pair[0])):  # a table of this machine first
        found = one.choice(product, M)
        if found is None:
            continue
        if found.library is not None and found.library not in _libraries(product):  # of a version with others
            found = Choice(found.tile)
        if differences:
            _warn(str(one.path), "; ".join(differences))
            found = found._replace(proven=False)
        return found
    return NOTHING


def _libraries(product: Product) -> dict:
    from minitransformer.ops.gpu import library  # which builds on this file

    return library.GROUPED if product.op.startswith("grouped_linear") else library.DENSE


def of(home: torch.device, product: Product, M: int) -> Choice:
    """The choice for [M, K] x [N, K] on this GPU; its library, if it has one, is proven or not to be used yet."""
    key = home, product, M, machine.blas_settings()
    found = _choices.get(key)
    if found is None:
        found = _choices[key] = _find(home, product, M)
    if found.library is not None and not found.proven:
        if torch.cuda.is_current_stream_capturing():
            return Choice(found.tile)
        found = _choices[key] = _proven_here(home, product, M, found)
    return found


def _proven_here(home: torch.device, product: Product, M: int, found: Choice) -> Choice:
    from minitransformer.tuning import tune  # which builds on this file

    refused = tune.refusal(product, M, found.library, home)
    if refused is None:
        return Choice(found.tile, found.library, True)
    warnings.warn(f"{found.library} is not used for {product} with {M} rows: {refused}", RuntimeWarning, stacklevel=4)
    return Choice(found.tile)


def tile(found: Choice, *operands: Tensor) -> Tile | None:
    """The table's tile, unless the copy engine can't read these operands: each row begins at a multiple of 16 bytes."""
    if found.tile is None:
        return None
    tile = Tile(*found.tile)
    step = 16 if tile.whole else 8 if tile.tma or tile.pingpong else 0
    return None if step and any(x.data_ptr() % 16 or x.shape[-1] % step for x in operands) else tile
