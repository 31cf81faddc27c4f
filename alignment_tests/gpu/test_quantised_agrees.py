"""The law of the GPU for the quantisers of 4-bit and 8-bit experts (products: test_quantised_products_agree.py)."""

import json

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.goldens import digest, quantised
from alignment_tests.gpu.test_agrees import plan_of
from alignment_tests.gpu.values import VALUES, agree, exponents
from minitransformer.errors import InputError
from minitransformer.ops import dispatch, gpu, mxfp8, nvfp4, swiglu

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
FP32 = torch.float32


def finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(x), x, torch.ones_like(x))


def quiet_blocks(seed: int, *shape: int) -> torch.Tensor:
    """Blocks of every size below the row's: scales normal, subnormal and 0; zeros of both signs; rows of zeros."""
    x = inputs.bf16(seed, *shape).float().unflatten(-1, (-1, 16))
    x = x * torch.exp2(-inputs.integers(seed + 1, 26, *x.shape[:-1], 1).float())
    x = torch.where(inputs.integers(seed + 2, 9, *x.shape[:-1], 1) == 0, -0.0, x).flatten(-2)
    return torch.where(inputs.integers(seed + 3, 11, *shape[:-1], 1) == 0, 0.0, x).bfloat16()


def ties(seed: int, *shape: int) -> torch.Tensor:
    """Values that lie on the ties of E2M1 once a row's and a block's largest value is 6."""
    x = inputs.integers(seed, 25, *shape).float() / 4 * (1 - 2 * inputs.integers(seed + 1, 2, *shape).float())
    x[..., 0::16] = 6.0
    return (x * 448 / 2**inputs.integers(seed + 2, 8, *shape[:-1], 1).float()).bfloat16()


def subnormals(seed: int, *shape: int) -> torch.Tensor:
    """Rows with one normal value: the other blocks have the scale 0 and elements that FLT_MAX does not take to 6."""
    return torch.nn.functional.pad(exponents(seed, 0, 3, *shape)[..., 1:], (1, 0), value=1.0)


KINDS = {kind: lambda *a, make=make: finite(make(*a)) for kind, make in VALUES.items()} | {
    "quiet blocks": quiet_blocks, "ties": ties, "subnormals": subnormals,
}  # fmt: skip


def both_types(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16, and FP32 that is no BF16."""
    return x, finite(x.float() * 1.0009765625)


def parts(q) -> list[torch.Tensor]:
    return [q.codes, q.scales, *([q.outer] if isinstance(q, nvfp4.Nvfp4) else [])]


@pytest.mark.parametrize("name", quantised.CASES)
def test_known_answer(name):
    assert digest(quantised.CASES[name]("cuda")) == json.loads(quantised.FILE.read_text())[name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [16, 48, 576, 768, 2048, 4112])
def test_nvfp4(K, kind):
    for x in both_types(KINDS[kind](1, 3, 64, K)):
        for outer in ("row", "tensor", "expert"):
            want, got = nvfp4.quantize(x, outer), nvfp4.quantize(x.cuda(), outer)
            agree(parts(got), parts(want), f"{outer} {x.dtype}")
            agree([nvfp4.decode(got), nvfp4.dequantize(got)], [nvfp4.decode(want), nvfp4.dequantize(want)], outer)
        amax = nvfp4.row_amax(x)
        agree([nvfp4.row_amax(x.cuda())], [amax], "row_amax")
        amax = torch.maximum(amax[:, ::32], amax[:, 1::32]).amax(1, keepdim=True) * 1.5  # one an expert, above its own
        if bool(torch.isfinite(amax).all()) and bool((amax >= nvfp4.row_amax(x)).all()):
            agree(parts(nvfp4.quantize(x.cuda(), amax.cuda())), parts(nvfp4.quantize(x, amax)), "given amax")
        for T in (1, 5, 64):
            rows = x[0, :T].contiguous()
            q, decoded = nvfp4.quantize_decoded(rows.cuda(), nvfp4.row_amax(rows).cuda())
            want, wanted = nvfp4.quantize_decoded(rows, nvfp4.row_amax(rows))
            agree([*parts(q), decoded], [*parts(want), wanted], f"{T} rows")
    gpu.device.check(torch.device("cuda", 0))


def test_nvfp4_decodes_every_code_and_scale():
    codes = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, 256, 8).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].expand(256, 256, 1).contiguous()
    q = nvfp4.Nvfp4(codes, scales, torch.ones(()))
    got = nvfp4.decode(nvfp4.Nvfp4(codes.cuda(), scales.cuda(), torch.ones(()).cuda())).cpu()
    want = nvfp4.decode(q)
    number = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[number], want.view(torch.int16)[number])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [32, 96, 576, 2048, 4128])
def test_mxfp8(K, kind):
    for x in both_types(KINDS[kind](2, 3, 65, K)):
        want, (got, decoded) = mxfp8.quantize(x), mxfp8.quantize_decoded(x.cuda())
        agree([*parts(got), *parts(mxfp8.quantize(x.cuda()))], [*parts(want), *parts(want)], f"{x.dtype}")
        wanted = mxfp8.decode(want)
        agree([mxfp8.decode(got), decoded], [wanted, wanted], f"decode {x.dtype}")


def e4m3_of(v: torch.Tensor) -> torch.Tensor:
    """e4m3_bits of ops/nvfp4.py in torch's integers."""
    u = v.view(torch.int32)
    normal, subnormal = ((u + 0x7FFFF + (u >> 20 & 1)) >> 20) - 960, (v + 16384.0).view(torch.int32) - 0x46800000
    return torch.where(v >= 448, 0x7E, torch.where(v < 2.0**-6, subnormal, normal)).to(torch.uint8)


def check_e4m3(begin: int, end: int, home: str) -> None:
    """Every magnitude of bits begin .. end - 1 below 512, beside a 256.0 that makes the scale 1; both signs."""
    v = torch.arange(begin, end, dtype=torch.int32, device=home).view(FP32)
    v = torch.nn.functional.pad(v, (0, -len(v) % 31))
    for sign in (0, 0x80):
        x = torch.nn.functional.pad((-v if sign else v).view(-1, 31), (1, 0), value=256.0)
        q = mxfp8.quantize(x)
        assert bool((q.scales == 127).all()) and torch.equal(q.codes[:, 1:].flatten(), e4m3_of(v) | sign)


def test_every_float_has_its_e4m3():
    """The hardware's conversion against the spec's: all 1,140,850,688 magnitudes that a block can hold."""
    for begin in range(0, 0x44000000, 1 << 27):
        check_e4m3(begin, min(begin + (1 << 27), 0x44000000), "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [16, 96, 384, 576, 768, 2048])
def test_rows_quantised_as_they_are_produced(K, kind):
    """Gather, and SwiGLU, with the row's NVFP4 by the same kernel; the gradients are the producer's."""
    for T in (1, 33):
        plan = dispatch.plan(inputs.integers(13, 8, T, 4), 8)
        on, x, wide = plan.to("cuda"), KINDS[kind](14, T, K), KINDS[kind](15, 4 * T, 2 * K).float() * 1.0009765625
        wide = torch.where(wide.abs() < 1e15, wide, 1.0)  # the product of gate and up is finite
        cases = (
            (dispatch.gather_amax, gpu.quantised_rows.gather, x, (plan,)),
            (swiglu.swiglu_amax, gpu.quantised_rows.swiglu, wide, ()),
        )
        for plain, fused, x, more in cases:
            leaves = x.clone().requires_grad_(), x.cuda().requires_grad_()
            want, amax = plain(leaves[0], *more)
            got, q, decoded = fused(leaves[1], on)
            wanted, wanted_decoded = nvfp4.quantize_decoded(want.detach(), amax)
            agree([got, *parts(q), decoded], [want, *parts(wanted), wanted_decoded], f"{fused.__name__} {T}")
            rows = gpu.quantised_rows
            own = rows.GATHER if plain is dispatch.gather_amax else rows.SWIGLU
            for source, y in ((own, leaves[1]), (rows.ROWS, got)):
                agree(rows.operand(y, on, source), [wanted_decoded, wanted.outer], f"{fused.__name__} {T} {source}")
            dy = inputs.bf16(16, *want.shape)
            want.backward(dy), got.backward(dy.cuda())
            if kind not in ("finite", "tiny", "subnormals"):
                agree([leaves[1].grad], [leaves[0].grad], f"{fused.__name__} {T} back")
    gpu.device.check(torch.device("cuda", 0))


def test_bad_values_are_named_at_the_next_check():
    home, x = torch.device("cuda", 0), inputs.bf16(3, 12, 64)
    bad, plan = x.clone(), plan_of([5, 0, 7], 2, seed=4)
    bad[7, 3], bad[9, 1] = torch.inf, torch.nan
    token = min(int(plan.order_R[r]) // 2 for r in (7, 9))
    tokens = inputs.bf16(4, 6, 64)
    tokens[token, 5], both = torch.nan, torch.cat([bad, bad], 1).cuda().float()
    amax, plan = nvfp4.row_amax(bad).cuda(), plan.to(home)
    cases = {
        "nvfp4.quantize: row 7": lambda: nvfp4.quantize(bad.cuda()),
        "nvfp4.amax: row 0": lambda: nvfp4.quantize(x.cuda(), torch.full((12,), 1e-3).cuda()),
        "mxfp8.quantize: row 7": lambda: mxfp8.quantize(bad.cuda()),
        f"experts.gate_up: row {token}: ": lambda: nvfp4.quantize_decoded(
            bad.cuda(), amax, "experts.gate_up", plan),
        f"experts.down: row {token}: the": lambda: mxfp8.quantize_decoded(bad.cuda(), "experts.down", plan),
        f"experts.gate_up: row {token}: t": lambda: gpu.quantised_rows.gather(tokens.cuda(), plan),
        f"experts.down: row {token}: t": lambda: gpu.quantised_rows.swiglu(both, plan),
        f"experts.down: row {token}: ": lambda: gpu.quantised_linear.refuse_non_finite(
            amax, plan, "experts.down"),
    }  # fmt: skip
    for message, call in cases.items():
        with pytest.raises(InputError, match=message):
            call()
            gpu.device.check(home)
        gpu.device.faults(home).fill_(2**31 - 1)
