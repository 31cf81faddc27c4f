"""What torch's AdamW needs of memory: all of it is there before the first master is written, so no update is half done.

An update ends with FP32 sums of gradients, masters and two moments, and AdamW makes two more tensors of a parameter's
size at a time.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from minitransformer.devices import require_room

FP32 = 4  # bytes
TEMPORARIES = 2  # the root of the second moment, and the quotient


def refuse_without_room(parameters: Mapping[str, Parameter], held: int) -> None:
    """InputError, with the numbers, before the first pass of an update whose end its GPU can't hold.

    held: of the four FP32 tensors a parameter those that are there already: masters, moments.
    """
    count = sum(p.numel() for p in parameters.values())
    what = f"the update of {count:,} parameters (gradients, masters and moments in FP32)"
    require_room(next(iter(parameters.values())).device, FP32 * count * (4 - held), what)


def complete(optimizer: torch.optim.AdamW, masters: Mapping[str, Tensor], totals: dict[str, Tensor]) -> None:
    """Every master's gradient, out of totals, and zero moments where it has none; after an error nothing is changed."""
    grads, moments = {}, {}
    for name, master in masters.items():
        # A parameter that no token reached has a zero gradient, not none: AdamW's moments must still decay.
        grads[name] = totals[name] if name in totals else torch.zeros_like(master)
        if master not in optimizer.state:
            # torch counts a parameter's steps in an FP32 tensor, which bias correction reads.
            moments[master] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
    largest = max(masters.values(), key=Tensor.numel)
    room = [torch.empty_like(largest) for _ in range(TEMPORARIES)]
    del room  # to torch's cache, where AdamW finds it
    optimizer.state.update(moments)
    for name, master in masters.items():
        master.grad = grads[name]
    totals.clear()
