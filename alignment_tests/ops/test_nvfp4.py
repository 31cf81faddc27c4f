"""NVFP4: two foreign oracles on ten million values, known answers, row independence, exactness, layouts, refusals."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from alignment_tests import inputs, nvfp4_oracle
from alignment_tests.bits import assert_bits_equal
from alignment_tests.nvfp4_oracle import DISTRIBUTIONS, Oracle
from minitransformer.errors import InputError, UnsupportedDevice
from minitransformer.ops import dispatch, mma, nvfp4

M, K = 160, 2048
GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "nvfp4.json").read_text())["blocks"]
DTYPES = torch.float32, torch.bfloat16


def assert_same(got: nvfp4.Nvfp4, want: nvfp4.Nvfp4, what: str):
    for part in ("codes", "scales", "outer"):
        assert_bits_equal(getattr(got, part), getattr(want, part), f"{what}: {part}")


def oracle(x: torch.Tensor, g=None) -> nvfp4.Nvfp4:
    codes, scales, outer = Oracle().quantize(x.float().numpy(), g)
    return nvfp4.Nvfp4(*map(torch.from_numpy, (nvfp4_oracle.pack(codes), scales, outer)))


def test_ten_million_values_of_twelve_distributions_are_compared():
    assert len(DISTRIBUTIONS) >= 12 and len(DISTRIBUTIONS) * len(DTYPES) * M * K >= 10_000_000


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bits_of_the_numpy_oracle(name):
    x = DISTRIBUTIONS[name](M, K)
    for dtype in DTYPES:
        rows = x.to(dtype)
        assert_same(nvfp4.quantize(rows), oracle(rows), f"{name} {dtype}")
    whole = x[:8].contiguous()
    got = nvfp4.quantize(whole, "tensor")
    want = oracle(whole, np.full(8, np.abs(whole.numpy()).max()))
    assert got.outer.shape == () and got.outer == want.outer[0]
    assert_same(nvfp4.Nvfp4(got.codes, got.scales, want.outer), want, f"{name}, one scale for all")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bits_of_the_conversions_in_cudas_headers(name, cuda_quantize):
    x = DISTRIBUTIONS[name](M, K)
    for dtype in DTYPES:
        rows = x.to(dtype)
        assert_same(nvfp4.quantize(rows), cuda_quantize(rows.float()), f"{name} {dtype}")


def test_the_inputs_hold_what_their_names_say():
    """Real ties reach both roundings, and the odd rows of the spec are taken."""
    x = nvfp4_oracle.ties(M, K)
    y = x.abs().view(M, -1, 16) / nvfp4.quantize(x).scales_e4m3.float()[..., None]
    assert np.isin(y[:, 1:, 1:], nvfp4_oracle.TIES).all()
    top = nvfp4_oracle.midpoints(M, K).abs().view(M, -1, 16).amax(2)[:, 1:].numpy() * (np.float32(1) / np.float32(6))
    midpoints = (nvfp4.E4M3[1:126] + nvfp4.E4M3[2:127]) / 2
    assert np.isin(top, midpoints).all()
    tiny = torch.cat([DISTRIBUTIONS[n](M, K) for n in ("tiny", "subnormal")]).abs().amax(1)
    assert ((tiny > 0) & torch.isinf(torch.tensor(2688.0) / tiny)).sum() > 50
    assert (nvfp4.quantize(DISTRIBUTIONS["subnormal"](M, K)).scales == 0).any()


@pytest.mark.parametrize("block", GOLDENS, ids=lambda block: block["name"].replace(" ", "_"))
def test_known_answers(block):
    x = torch.tensor([[float.fromhex(v) if "0x" in v else float(v) for v in block["x"].split()]])
    q = nvfp4.quantize(x, torch.tensor([float(block["amax"])]) if "amax" in block else "row")
    assert nvfp4.unpack(q.codes)[0].tolist() == [int(c, 16) for c in block["codes"].split()]
    assert q.scales.tolist() == [[int(block["scale"], 16)]]
    assert q.outer.view(torch.int32).tolist() == [int(block["outer"], 16)]


def test_amax_of_the_producer_gives_the_bits_of_a_separate_pass():
    x = inputs.bf16(1, 24, 160)
    x[3], x[5] = 0.0, -1e-38
    plan = dispatch.plan(inputs.integers(2, 4, 24, 2), 4)
    rows, amax = dispatch.gather_amax(x, plan)
    assert_same(nvfp4.quantize(rows, amax), nvfp4.quantize(rows), "amax from dispatch")
    assert_bits_equal(nvfp4.row_amax(rows), rows.float().abs().amax(1), "row_amax")
    assert_bits_equal(amax, nvfp4.row_amax(rows), "amax")


def test_outer_scales_are_read_from_the_left():
    x = inputs.bf16(3, 3, 8, 32) * torch.tensor([1.0, 4.0, 64.0]).bfloat16()[:, None, None]
    each = x.float().abs().amax((1, 2))
    by_expert = nvfp4.quantize(x, "expert")
    assert by_expert.outer.shape == (3,)
    assert_same(nvfp4.quantize(x, each), by_expert, "an amax an expert")
    pair = nvfp4.quantize(x, each[:, None].expand(3, 2))
    assert pair.outer.shape == (3, 2) and torch.equal(pair.outer[:, 0], pair.outer[:, 1])
    assert_bits_equal(nvfp4.dequantize(pair), nvfp4.dequantize(by_expert), "gate and up with one amax")
    for e in range(3):
        alone = nvfp4.quantize(x[e], "tensor")
        assert_same(by_expert.expert(e), alone, f"expert {e} alone")
    halves = torch.stack([nvfp4.row_amax(x)[:, :4].amax(1), nvfp4.row_amax(x)[:, 4:].amax(1)], 1)
    two = nvfp4.quantize(x, halves)
    for half, rows in enumerate((slice(0, 4), slice(4, 8))):
        part = nvfp4.quantize(x[1, rows], "tensor")
        assert_bits_equal(two.row_outer()[1, rows], part.row_outer(), "each half has its own")
        assert_bits_equal(nvfp4.dequantize(two)[1, rows], nvfp4.dequantize(part), f"half {half}")
    for shape in ((2,), (3, 3), (8,), (3, 8, 1)):
        with pytest.raises(ValueError, match="nvfp4"):
            nvfp4.quantize(x, torch.full(shape, 1e4))


def test_zero_rows_and_rows_whose_scale_overflows():
    """Reported: NaN from 2688 / 0, infinity from 2688 / tiny."""
    x = torch.zeros(4, 32)
    x[1, 7], x[2, 7], x[3, 7] = 1e-40, 1e-38, 2.0**-133
    for rows in (x, x.bfloat16()):
        q = nvfp4.quantize(rows)
        assert q.outer[0] == 1 and not q.codes[[0, 1, 3]].any() and not q.scales[0].any()
        assert torch.isfinite(nvfp4.decode(q)).all() and torch.isfinite(nvfp4.dequantize(q)).all()
        assert (q.outer[1:].view(torch.int32) == 1 << 21).all()  # 1 / FLT_MAX is 2^-128 in FP32
    signed = nvfp4.quantize(torch.tensor([[-0.0, 0.0] * 8]))
    assert nvfp4.unpack(signed.codes).tolist() == [[8, 0] * 8]
    assert torch.signbit(nvfp4.decode(signed)).tolist() == [[True, False] * 8]


def test_every_number_of_rows_agrees_with_one_row():
    x = inputs.bf16(4, 257, 48)
    x[100], x[31] = x[100] * 1e4, 0.0
    single = [nvfp4.quantize(x[r : r + 1].contiguous()) for r in range(257)]
    one = nvfp4.Nvfp4(*(torch.cat([getattr(q, part) for q in single]) for part in ("codes", "scales", "outer")))
    decoded = torch.cat([nvfp4.decode(q) for q in single])
    for rows in range(1, 258):
        q = nvfp4.quantize(x[:rows].contiguous())
        assert_same(q, nvfp4.Nvfp4(one.codes[:rows], one.scales[:rows], one.outer[:rows]), f"{rows} rows")
        assert_bits_equal(nvfp4.decode(q), decoded[:rows], f"{rows} rows decoded")
    torch.set_num_threads(2)
    try:
        assert_same(nvfp4.quantize(x), one, "two threads")
    finally:
        torch.set_num_threads(1)


def test_every_code_times_every_scale_is_exact_in_bf16():
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    q = nvfp4.Nvfp4(nvfp4.pack(codes), torch.arange(256, dtype=torch.uint8)[:, None], torch.ones(256))
    want = torch.from_numpy(nvfp4_oracle.values(codes.numpy().copy(), q.scales.numpy()))
    got = nvfp4.decode(q)
    nan = torch.isnan(want)
    assert nan.sum() == 32 and torch.equal(torch.isnan(got), nan)
    assert torch.equal(got.double()[~nan], want[~nan])
    assert torch.equal(torch.signbit(got)[~nan], torch.signbit(want)[~nan])


def test_one_step_of_the_chain_is_the_exact_dot_product():
    """Sixteen products of codes lose nothing in one K = 16 step, whatever the codes and the scales."""
    codes = inputs.integers(5, 256, 64, 8).to(torch.uint8)
    scales = (inputs.integers(6, 126, 64, 1) + 1).to(torch.uint8)
    x = nvfp4.decode(nvfp4.Nvfp4(codes, scales, torch.ones(64)))
    got = mma.chain(x[:32].contiguous(), x[32:].t().contiguous())
    exact = [[Fraction(float(v)) for v in row] for row in x]
    for i in range(32):
        for j in range(32):
            assert Fraction(float(got[i, j])) == sum(a * b for a, b in zip(exact[i], exact[32 + j], strict=True))


def test_dequantize_rounds_once_and_comes_close():
    x = inputs.normal(7, 32, 256)
    q = nvfp4.quantize(x)
    want = nvfp4_oracle.values(nvfp4.unpack(q.codes).numpy(), q.scales.numpy()) * q.outer.double().numpy()[:, None]
    assert_bits_equal(nvfp4.dequantize(q), torch.from_numpy(want).float(), "one rounding")
    assert (nvfp4.dequantize(q) - x).norm() < 0.12 * x.norm()


def test_the_outer_scale_is_a_true_division():
    """Reported: torch computes 2688.0 / t as 2688 * (1 / t); dividing a tensor by a tensor is the division."""
    t = inputs.normal(8, 4096).abs() + 1
    s_enc, s_dec = nvfp4.outer_scales(t.numpy())
    exact = torch.from_numpy(2688.0 / t.double().numpy()).float()  # FP64 carries more than twice FP32's digits
    assert_bits_equal(torch.from_numpy(s_enc), exact, "2688 / g")
    assert_bits_equal(torch.full_like(t, 2688.0) / t, exact, "tensor by tensor")
    assert (2688.0 * (1.0 / t) != exact).float().mean() > 0.1
    assert_bits_equal(torch.from_numpy(s_dec), torch.from_numpy(1 / s_enc.astype(np.float64)).float(), "1 / s_enc")


def test_the_even_element_lies_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert nvfp4.pack(codes).tolist() == [[0x21, 0x0F]]
    every = inputs.integers(9, 16, 3, 5, 32).to(torch.uint8)
    assert torch.equal(nvfp4.unpack(nvfp4.pack(every)), every)
    q = nvfp4.quantize(torch.tensor([[6.0, 3.0] + [0.0] * 14]))
    assert q.codes[0, 0] == 0x57 and nvfp4.decode(q)[0, :2].tolist() == [2688.0, 1344.0]
    with pytest.raises(ValueError, match="0..15"):
        nvfp4.pack(codes + 3)


@pytest.mark.parametrize(
    "N,C", [(1, 1), (15, 4), (16, 3), (17, 8), (128, 4), (129, 4), (130, 5), (200, 10), (384, 128)]
)
def test_the_128x4_swizzle_restarts_for_each_expert(N, C):
    scales = (inputs.integers(10, 255, 3, N, C) + 1).to(torch.uint8)
    r, c = np.indices((N, C))
    place = (r // 128 * -(-C // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    got = nvfp4.swizzle_128x4(scales)
    size = -(-N // 128) * -(-C // 4) * 512
    assert got.shape == (3, size)
    for e in range(3):
        want = np.zeros(size, np.uint8)
        want[place] = scales[e].numpy()
        assert torch.equal(got[e], torch.from_numpy(want)), f"expert {e}"
    assert torch.equal(nvfp4.unswizzle_128x4(got, N, C), scales)
    with pytest.raises(ValueError, match="do not hold"):
        nvfp4.unswizzle_128x4(got[:, 1:], N, C)


def test_bad_input_is_refused_by_name():
    for k in (1, 8, 17, 24, 40):
        with pytest.raises(InputError, match=f"K is {k}, not a multiple of 16"):
            nvfp4.quantize(torch.ones(2, k))
    for value in ("nan", "inf", "-inf"):
        for dtype in DTYPES:
            x = inputs.normal(11, 2, 3, 32).to(dtype)
            x[1, 2, 17] = float(value)
            for outer in ("row", "expert", torch.tensor(1e4)):
                with pytest.raises(InputError, match=rf"row 2 \(index \[1, 2\]\) holds {value} at column 17"):
                    nvfp4.quantize(x, outer)
    for amax in (0.5, float("nan"), float("inf"), -1.0):
        with pytest.raises(InputError, match="row 1 reaches 1, but its amax is given as"):
            nvfp4.quantize(torch.ones(2, 16), torch.tensor([1.0, amax]))
    with pytest.raises(ValueError, match="give 'row'"):
        nvfp4.quantize(torch.ones(2, 16), "column")
    with pytest.raises(ValueError, match=r"needs \[E, N, K\]"):
        nvfp4.quantize(torch.ones(2, 16), "expert")
    with pytest.raises(TypeError, match="BF16 or FP32"):
        nvfp4.quantize(torch.ones(2, 16, dtype=torch.float16))
    with pytest.raises(UnsupportedDevice, match="meta"):
        nvfp4.quantize(torch.ones(2, 16, device="meta"))
    for bytes_a_row, scales in ((8, (2, 2)), (12, (2, 1)), (12, (2, 2)), (8, (2, 1, 1)), (8, (1, 1)), (8, ())):
        with pytest.raises(ValueError, match="scales are"):
            nvfp4.Nvfp4(torch.zeros(2, bytes_a_row).byte(), torch.zeros(scales).byte(), torch.ones(2))
    assert nvfp4.decode(nvfp4.quantize(torch.ones(0, 32))).shape == (0, 32)
