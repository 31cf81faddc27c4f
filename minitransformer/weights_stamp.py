"""Has anyone changed these weights? An answer without reading them, for what is kept from one use to the next."""

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module


class WeightsStamp:
    """The state of some tensors at one moment; two stamps are equal if nothing that can be seen changed in between.

    tensors    compared by identity (a weak reference: whatever takes over a freed address is another tensor), by
               address (`.data = x` keeps the identity) and by torch's count of in-place writes
    objects    compared by identity alone
    facts      compared by value

    Seen: a tensor replaced, copy_, load_state_dict, torch's optimisers. Not seen: a write through `.data`, NumPy or
    another view that torch does not count, and `.data = x` where x has the old address. Tensors made under
    torch.inference_mode() have no count, so in-place writes to them are not seen either; nothing is raised.
    """

    def __init__(self, tensors: Iterable[Tensor], objects: Iterable[Any] = (), facts: tuple = ()) -> None:
        tensors = list(tensors)
        # A whole list at a time: a sampler asks at every step, while its GPU waits.
        self._refs, self._at = [*map(ref, tensors), *map(ref, objects)], list(map(Tensor.data_ptr, tensors))
        try:
            self._writes = list(map(attrgetter("_version"), tensors))
        except RuntimeError:  # one of them has no count
            self._writes = [None if t.is_inference() else t._version for t in tensors]
        self._facts = facts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightsStamp) or self._facts != other._facts or self._writes != other._writes:
            return False
        return self.same_storage(other)

    def same_storage(self, other: "WeightsStamp") -> bool:
        """Whether the same tensors lie at the same addresses beside the same objects, whatever was written there."""
        if self._at != other._at or len(self._refs) != len(other._refs):
            return False
        # An object that lives has one weak reference. Not ==: that asks the referents, and tensors answer by element.
        return all(map(is_, self._refs, other._refs)) and not any(one() is None for one in self._refs)

    __hash__ = None

    def __reduce__(self) -> tuple:
        # A weak reference can't be pickled; a copy belongs to other tensors, so it must equal no stamp of theirs.
        return WeightsStamp, ((), (), (object(),))


def modules_of(module: Module) -> list[Module]:
    """As module.modules(), which takes six times as long: a sampler asks at every step."""
    level, modules = [module], [module]
    while level:
        level = [m for one in level for m in one._modules.values() if m is not None]
        modules += level
    return modules


def parts(module: Module | list[Module]) -> tuple[list[Tensor], list[Any]]:
    """Its parameters, and its layers' number formats (`experts`), each an object of its own that a change replaces;
    of a module, or of modules_of it."""
    modules = module if isinstance(module, list) else modules_of(module)
    tensors = [p for one in modules for p in one._parameters.values() if p is not None]
    return tensors, [f for one in modules if (f := one.__dict__.get("experts")) is not None]
