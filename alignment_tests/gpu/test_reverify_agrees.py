"""The self-checks on a GPU, and its first use under versions that are told to be others."""

import warnings

import pytest
import torch

from minitransformer import devices
from minitransformer.errors import UnsupportedDevice
from minitransformer.ops import linear
from minitransformer.tuning import machine, reverify, selfcheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
HOME = torch.device("cuda", 0)


@pytest.mark.parametrize("name", selfcheck.CHECKS)
def test_self_check(name, monkeypatch):
    monkeypatch.setattr(selfcheck, "CHECKS", {name: selfcheck.CHECKS[name]})
    (found,) = reverify.results(HOME)
    assert found.wrong is None and found.outputs > 30, found.wrong


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Other versions in name, and a short list of checks."""
    from minitransformer.ops.gpu import device

    def forget():
        reverify._settled.clear(), device._verified.clear(), devices._refused.clear()
        reverify.unlike.cache_clear(), devices.unverified.cache_clear(), devices.allow_unverified(False)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = machine.gpu(HOME) | {"torch": "2.99.0"}
    monkeypatch.setattr(machine, "gpu", lambda home: facts)
    monkeypatch.setattr(selfcheck, "CHECKS", {name: selfcheck.CHECKS[name] for name in ("linear", "rope")})
    forget()
    yield forget
    forget()


def use() -> torch.Tensor:
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=HOME)
    return linear.forward(x, x)


def test_first_use_under_other_versions(elsewhere):
    with pytest.warns(RuntimeWarning, match="torch 2.99.0.*compared with the CPU now"):
        assert bool((use() == 64).all())
    elsewhere()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reverify.first_use(HOME), "the stamp is not honoured"


def test_a_wrong_operator_is_refused_and_let_in_on_purpose(elsewhere, monkeypatch):
    from minitransformer.ops.gpu import rope

    real = rope.rotate
    monkeypatch.setattr(rope, "rotate", lambda x, at, table, sign: real(x, at, table, -sign))
    with pytest.warns(RuntimeWarning), pytest.raises(UnsupportedDevice, match="rope, heads of 128: row .*unverified"):
        use()
    devices.allow_unverified()
    assert bool((use() == 64).all())
