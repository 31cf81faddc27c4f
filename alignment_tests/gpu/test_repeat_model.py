"""The model's own layers are repeated (ops/gpu/repeat.py), and launch what each would have launched itself; no GPU."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: nothing to launch")

import torch
import triton

from alignment_tests.gpu import fake_driver
from alignment_tests.learner.tiny import tiny_model
from minitransformer.batch import Batch
from minitransformer.models.qwen3_moe import layers, model
from minitransformer.ops import gpu
from minitransformer.ops.gpu import choice, device, launch, repeat
from minitransformer.sampler.cache import KVCache

pytestmark = pytest.mark.skipif(triton.__version__ not in launch.VERSIONS, reason="this Triton has no short way")
LAYERS, ADDRESS = 5, 1 << 20  # numbers from there on are addresses, of a heap that lies low too


def quick_kernels() -> list:
    """Of the modules that a forward pass uses; they remember launchers of the driver that was there."""
    names = ("attention_tiles", "copy", "dispatch", "grouped_linear", "linear", "qkv", "rms_norm", "router", "swiglu")
    found = [vars(getattr(gpu, name)).values() for name in names]
    return [k for kernels in found for k in kernels if isinstance(getattr(k, "run", None), launch.Quick)]


@pytest.fixture
def driver(monkeypatch):
    """Tensors of the CPU pass for the GPU's: nothing reads or writes them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(repeat, "ALIGNED", 64)  # what the CPU's memory has
    monkeypatch.setattr(repeat, "_prove", lambda *args: None)  # test_repeat_proof.py
    monkeypatch.setattr(device, "unverified", lambda home: None)
    monkeypatch.setattr(device, "multiprocessors", lambda home: 132)
    monkeypatch.setattr(choice, "of", lambda home, product, M: choice.NOTHING)
    with fake_driver.installed() as fake:
        for kernel in quick_kernels():
            kernel.run.known.clear(), kernel.device_caches.clear()
        yield fake
        for kernel in quick_kernels():
            kernel.run.known.clear(), kernel.device_caches.clear()


def launches(driver, net, batch, cache, monkeypatch) -> list[list[tuple]]:
    """Of each layer."""
    found, run_of = [], layers.runner

    def runner(*args):
        run = run_of(*args)

        def noted(layer, *args):
            driver.launches.clear()
            outputs = run(layer, *args)
            found.append(list(driver.launches))
            return outputs

        return noted

    monkeypatch.setattr(model, "runner", runner)
    with torch.no_grad():
        net.hidden(batch, cache)
    monkeypatch.setattr(model, "runner", run_of)
    return found


def differences(plain: list[list], repeated: list[list], known: set[int]) -> list[tuple[int, int]]:
    """(layer, launch): another kernel or number, another address of what is known, or two memories where it had one.

    Within a repeated layer each memory has an address of its own; in a plain one memory that is free serves again.
    """
    wrong = []
    for i, (own, again) in enumerate(zip(plain, repeated, strict=True)):
        if i == 0:  # without a residual: runs as it is
            continue
        same: dict[int, int] = {}
        for j, ((code, values), (code_again, values_again)) in enumerate(zip(own, again, strict=True)):
            equal = code == code_again and len(values) == len(values_again)
            for a, b in zip(values, values_again, strict=False):
                number = not isinstance(a, int) or a < ADDRESS
                equal &= a == b if number or a in known or b in known else same.setdefault(b, a) == a
            if not equal:
                wrong.append((i, j))
    return wrong


BATCHES = {
    "packed": (Batch.packed([[1, 2, 3], list(range(40))]), False),
    "prefill": (Batch.paged([[1] * 20, [2] * 5], [0, 3], [[0, 1], [2]], 16), True),
    "decode": (Batch.paged([[1], [2]], [20, 4], [[0, 1], [2]], 16), True),
}


def both(driver, net, batch, cache, monkeypatch) -> tuple[list, list, set[int], list]:
    """(launches of each layer run by itself, repeated, the addresses that are known, the recordings)."""
    for _ in range(2):  # the second time every key is known
        monkeypatch.setattr(repeat, "MAX_TOKENS", 0)
        plain = launches(driver, net, batch, cache, monkeypatch)
    monkeypatch.setattr(repeat, "MAX_TOKENS", 4096)
    recordings, finish = [], repeat.Recording.finish
    monkeypatch.setattr(repeat.Recording, "finish", lambda self, *a: (finish(self, *a), recordings.append(self)))
    repeated = launches(driver, net, batch, cache, monkeypatch)
    monkeypatch.setattr(repeat.Recording, "finish", finish)
    tensors = [*net.parameters(), *batch.__dict__.values(), *(net._table(), device._table(net.device))]
    tensors += [] if cache is None else [*cache.k, *cache.v]
    known = {t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    return plain, repeated, known | {device._of_layer(net.device, i).data_ptr() for i in range(LAYERS)}, recordings


@pytest.mark.parametrize("name", BATCHES)
def test_a_models_layers_launch_what_they_would_themselves(driver, monkeypatch, name):
    net = tiny_model(num_layers=LAYERS, sparse_layers=(True,) * LAYERS)
    batch, paged = BATCHES[name]
    cache = KVCache(net.config, 3, 16) if paged else None
    plain, repeated, known, recordings = both(driver, net, batch, cache, monkeypatch)
    assert [one.refused for one in recordings] == [None] and len(plain[2]) > 10
    assert differences(plain, repeated, known) == []
    other = [repeated[0], repeated[1], repeated[3], repeated[2], repeated[4]]  # layers with each other's tensors
    assert {i for i, _ in differences(plain, other, known)} == {2, 3}


def of_fewer_experts(layer):
    layer.mlp.config = replace(layer.mlp.config, top_k=1)


def of_another_epsilon(layer):
    layer.eps *= 2


def of_another_class(layer):
    class Half(type(layer.mlp)):
        def forward(self, x_TD, note):
            return super().forward(super().forward(x_TD, note), note)

    layer.mlp.__class__ = Half


@pytest.mark.parametrize("changes", [of_fewer_experts, of_another_epsilon, of_another_class])
def test_a_layer_that_computes_something_else_is_not_another_layers(driver, monkeypatch, changes):
    net = tiny_model(num_layers=LAYERS, sparse_layers=(True,) * LAYERS)
    changes(net.layers[3])
    plain, repeated, known, _ = both(driver, net, BATCHES["packed"][0], None, monkeypatch)
    assert [len(one) for one in repeated] == [len(one) for one in plain] and differences(plain, repeated, known) == []


def test_hooks_run_in_every_layer_that_has_them(driver, monkeypatch):
    net, seen = tiny_model(num_layers=LAYERS, sparse_layers=(True,) * LAYERS), []
    for layer in net.layers[2:4]:
        layer.mlp.register_forward_hook(lambda module, args, y: seen.append("after"))
        layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    own = net.layers[4].attn.forward
    net.layers[4].attn.forward = lambda *args: (seen.append("its own forward"), own(*args))[1]
    launches(driver, net, BATCHES["packed"][0], None, monkeypatch)
    assert seen == ["before", "after"] * 2 + ["its own forward"]
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(type(module))):
        launches(driver, net, BATCHES["packed"][0], None, monkeypatch)
    assert seen.count(model.Layer) == LAYERS


def test_a_kind_lives_longer_than_a_model():
    """What was proven stays so in a process: a later model's config may have the address of one that is gone."""
    changes = {}, {}, {"top_k": 3}
    one, same, other = (layers.kind_and_tensors(tiny_model(**c).layers[0])[0] for c in changes)
    assert one == same and hash(one) == hash(same) and one != other


def test_a_pass_with_gradients_or_a_trace_runs_every_layer():
    """A recording has no backward pass, and stops for no note."""
    assert not isinstance(layers.runner(recompute=False, repeat=True), repeat.Layers)
    with torch.no_grad():
        assert isinstance(layers.runner(recompute=False, repeat=True), repeat.Layers)
        assert not isinstance(layers.runner(recompute=False, repeat=False), repeat.Layers)
