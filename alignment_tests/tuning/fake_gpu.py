"""A Hopper GPU that isn't there, for what asks it for its versions and compares its operators. Needs Triton."""

import warnings

import torch

from minitransformer import devices
from minitransformer.ops.gpu import device
from minitransformer.tuning import machine, reverify, selfcheck, table
from minitransformer.tuning.selfcheck import Pair

HOME = torch.device("cuda", 0)
GOOD = torch.tensor([[1.0, 2.0]])
NEW = {"torch": "2.99.0"}


class Gpu:
    """Its versions, and self-checks that say `got` of one operator."""

    def __init__(self, monkeypatch):
        self.versions, self.got, self.runs, self.capturing = dict(table.read(table.SHIPPED).machine), GOOD, 0, False
        monkeypatch.setattr(machine, "gpu", lambda home: self.versions)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda home=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(device, "check", lambda home: None)
        monkeypatch.setattr(reverify, "_all", lambda home: list(reverify.results(home)))
        monkeypatch.setattr(selfcheck, "CHECKS", {"rope": self.check, "router": lambda home: iter(())})

    def check(self, home):
        self.runs += 1
        before = home in device._verified
        device._admit("rope", home)  # the operator's own border
        assert (home in device._verified) == before
        yield Pair("first", [GOOD], [GOOD])
        if isinstance(self.got, Exception):
            raise self.got
        yield Pair("two rows", [self.got], [GOOD])

    def forget(self, **versions):
        """As a new process, in which other versions may be installed."""
        self.versions = self.versions | versions
        reverify._settled.clear(), device._verified.clear(), devices._refused.clear()
        reverify.unlike.cache_clear(), devices.unverified.cache_clear(), devices.allow_unverified(False)

    def use(self) -> list[str]:
        """Warnings of an operator's launch."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            device._admit("linear", HOME)
        return [str(w.message) for w in told]
