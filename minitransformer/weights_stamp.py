"""Has anyone changed these weights? An answer without reading them, for what is kept from one use to the next."""

from collections.abc import Iterable
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
        self._tensors = [(ref(t), t.data_ptr(), None if t.is_inference() else t._version) for t in tensors]
        self._objects = [ref(o) for o in objects]
        self._facts = facts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightsStamp) or self._facts != other._facts:
            return False
        if len(self._tensors) != len(other._tensors) or len(self._objects) != len(other._objects):
            return False
        return all(map(_same, self._objects, other._objects)) and all(
            _same(a, b) and then == now for (a, *then), (b, *now) in zip(self._tensors, other._tensors, strict=True)
        )

    def same_storage(self, other: "WeightsStamp") -> bool:
        """Whether the same tensors lie at the same addresses beside the same objects, whatever was written there."""
        return self._unwritten() == other._unwritten()

    def _unwritten(self) -> "WeightsStamp":
        stamp = WeightsStamp(())
        stamp._tensors, stamp._objects = [(t, at, None) for t, at, _ in self._tensors], self._objects
        return stamp

    __hash__ = None

    def __reduce__(self) -> tuple:
        # A weak reference can't be pickled; a copy belongs to other tensors, so it must equal no stamp of theirs.
        return WeightsStamp, ((), (), (object(),))


def parts(module: Module) -> tuple[list[Tensor], list[Any]]:
    """Its parameters, and its layers' number formats (`experts`), each an object of its own that a change replaces.

    module.parameters() and module.modules() visit the same, six times as slowly, and a sampler asks at every step.
    """
    tensors, formats, rest = [], [], [module]
    while rest:
        one = rest.pop()
        tensors += [p for p in one._parameters.values() if p is not None]
        formats += [f for f in (one.__dict__.get("experts"),) if f is not None]
        rest += [m for m in one._modules.values() if m is not None]
    return tensors, formats


def _same(a: ref, b: ref) -> bool:
    # Not a == b: that asks the referents, and tensors compare elementwise.
    return a() is b() is not None
