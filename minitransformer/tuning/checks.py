"""What `minitransformer doctor` finds out: each check says what was looked at and what came of it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from minitransformer.devices import unverified, unverified_allowed
from minitransformer.errors import InputError
from minitransformer.tuning import machine, proof, reverify, table

# ok: compared, and the bits are the spec's; or as tested, where nothing is compared. failed: they are not. warning: not
# the machine, or the SGLang, it was verified on.
# absent: this machine cannot do it, and why.
STATES = ("ok", "failed", "warning", "absent")


@dataclass(frozen=True)
class Check:
    name: str
    state: str
    text: str


def run(seed: int, say: Callable[[str], None] = lambda line: None) -> Iterator[Check]:
    """Every check that this machine allows, the cheap ones first. seed: of the operands of the proofs."""
    yield from _cpu(seed)
    yield _offline()
    yield _sglang()
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
        yield Check("gpu", "absent", f"{why}: every operator runs on the CPU, with the bits that an H200 has")
        return
    for index in range(torch.cuda.device_count()):
        yield from _gpu(torch.device("cuda", index), seed, say)


def _cpu(seed: int) -> Iterator[Check]:
    from minitransformer.ops import rounding
    from minitransformer.ops.cpu import bf16_bits
    from minitransformer.ops.mma import NO_ACCUMULATOR, chain_bits, chain_scalar

    facts = machine.cpu()
    text = f"{facts['processor']}, {facts['vectors']}, {facts['threads']} threads; numba {facts['numba']}"
    slow = "" if facts["vectors"] in ("avx512f", "avx2") else ": no AVX2, so about a third of the speed"
    yield Check("cpu", "ok", text + slow)
    x, w = proof.operands("mixed", 21, 40, 96, seed, "cpu")
    x, w = bf16_bits(x), bf16_bits(w)
    got = chain_bits(x, w, False, NO_ACCUMULATOR).view("uint32")
    zero = got.dtype.type(0)
    wrong = sum(int(got[m, n]) != int(chain_scalar(x[m], w[n], zero)) for m in range(21) for n in range(40))
    state = "failed" if wrong else "ok"
    yield Check("chain on the CPU", state, f"{wrong} of {got.size} outputs differ from the definition in integers")
    try:
        rounding.ex2_table()
        yield Check("exp2 table", "ok", f"sha256 {rounding.EX2_SHA256[:16]}")
    except (RuntimeError, ValueError) as error:
        yield Check("exp2 table", "failed", str(error))


def _offline() -> Check:
    """Whether Triton on this machine compiles a kernel for Hopper, GPU or not."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from minitransformer.ops.gpu import device, linear
    except ImportError:
        return Check("kernels compile", "absent", "Triton is not installed; it is needed for GPUs alone")
    kernel, tile = linear.linear_kernel, linear.REFERENCE
    types = ("*bf16", "*bf16", "*bf16", "i32", "i32", "i32")
    signature = {name: "constexpr" for name in kernel.arg_names} | dict(zip(kernel.arg_names, types, strict=False))
    constants = dict(zip(kernel.arg_names[6:], (tile.m, tile.n, tile.k, False, True, False), strict=True))
    hopper, version = GPUTarget("cuda", 90, 32), f"for sm_90a, Triton {triton.__version__}"
    try:
        options = {"num_warps": tile.warps, "num_stages": tile.stages, **device.STRICT}
        with _target(triton.runtime.driver, hopper):
            triton.compile(ASTSource(kernel, signature, constants), target=hopper, options=options)
    except Exception as error:  # whatever the compiler raises is the finding
        why = str(error.__cause__ or error).strip().partition("\n")[0]
        return Check("kernels compile", "failed", f"{version}: {type(error).__name__}: {why}")
    return Check("kernels compile", "ok", version)


def _sglang() -> Check:
    """Whether an SGLang that is started here can have our model inside; no bits are compared."""
    from minitransformer.plugins.sglang import plugin

    try:
        version = plugin.sglang_version()
    except InputError as error:
        return Check("sglang", "absent", str(error))
    why = plugin.missing()
    return Check("sglang", "warning" if why else "ok", why or f"SGLang {version}, as tested, and it finds our plugin")


@contextlib.contextmanager
def _target(drivers, target) -> Iterator[None]:
    """While a kernel is compiled it asks the driver for its target (tiles.in_turn), whatever GPU is here, or none."""
    before = drivers._active
    drivers.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        drivers._active = before


def _gpu(home: torch.device, seed: int, say: Callable[[str], None]) -> Iterator[Check]:
    facts, why = machine.facts(home), unverified(home)
    text = ", ".join(f"{name} {value}" for name, value in facts.items() if value and name not in ("gpu", "blas"))
    yield Check(str(home), "ok" if why is None else "absent", f"{facts['gpu']}: {text}" if why is None else why)
    if why is not None:
        if not unverified_allowed():
            return
        yield Check("unverified", "warning", f"what follows ran on {home} all the same, as asked")
    elif reverify.unlike(home):
        text = f"not those that were verified ({reverify.unlike(home)}): every operator is compared on first use"
        yield Check("versions", "warning", text)
    with reverify.unasked():
        yield from _operators(home)
        yield from _choices(home, facts, seed, say)


def _operators(home: torch.device) -> Iterator[Check]:
    """The self-checks; what they found is what the next first use goes by."""
    found = []
    for result in reverify.results(home):
        found.append(result)
        text = f"{result.outputs:,} outputs compared with the CPU's, none differs"
        yield Check(result.name, "failed" if result.wrong else "ok", result.wrong or text)
    if reverify.unlike(home):
        reverify.keep(home, found)


def _choices(home: torch.device, facts: dict, seed: int, say: Callable[[str], None]) -> Iterator[Check]:
    """The tables' candidates on fresh operands."""
    from minitransformer.tuning import tune

    for path in table.paths():
        try:
            one = table.read(path)
        except InputError as error:
            yield Check("table", "failed", str(error))
            continue
        unlike = machine.differences(facts | machine.specs(), one.machine | one.spec)
        if unlike:
            yield Check("table", "warning", f"{path} is of another machine: {'; '.join(unlike)}")
        wrong = []
        for row in one.rows:
            found = tune.verify(row, home, seed)
            say(f"{tune.line(row)}{'' if not found else '  WRONG'}")
            wrong += found
        again, of, found = tune.verify_proven(one, home, seed)
        wrong += found
        text = (
            f"{path}: {len(one.rows)} rows, the tile and the library of each compared on operands of seed {seed}; "
            f"libraries also at {again} of the {of:,} numbers of rows at which they run"
        )
        yield Check("table", "failed" if wrong else "ok", "; ".join(wrong) if wrong else text)


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")
