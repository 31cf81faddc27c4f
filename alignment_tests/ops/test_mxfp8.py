"""MXFP8: an independent oracle in FP64, the OCP scale, exact decoding, row independence, refusals."""

import ml_dtypes
import numpy as np
import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.nvfp4_oracle import DISTRIBUTIONS
from minitransformer.errors import InputError, UnsupportedDevice
from minitransformer.ops import mxfp8


def oracle(x: torch.Tensor):
    """Codes, scales and values: FP64 holds every scaled element exactly, so that its cast is the only rounding."""
    blocks = x.double().numpy().reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(-1)
    exponent = np.where(top == 0, -127, np.maximum(np.frexp(top)[1] - 1 - 8, -127))
    scaled = np.clip(np.ldexp(blocks, -exponent[..., None]), -448, 448)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn)
    scales = np.ldexp(1.0, exponent).astype(ml_dtypes.float8_e8m0fnu)
    value = codes.astype(np.float64) * scales.astype(np.float64)[..., None]
    return *(torch.from_numpy(a.view(np.uint8)) for a in (codes.reshape(x.shape), scales)), value.reshape(x.shape)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bits_of_the_oracle(name):
    for dtype in (torch.float32, torch.bfloat16):
        x = DISTRIBUTIONS[name](32, 1024).to(dtype)
        q = mxfp8.quantize(x)
        codes, scales, value = oracle(x)
        assert_bits_equal(q.codes, codes, f"{name} {dtype}: codes")
        assert_bits_equal(q.scales, scales, f"{name} {dtype}: scales")
        decoded = mxfp8.decode(q)
        assert_bits_equal(decoded, torch.from_numpy(value).bfloat16(), f"{name} {dtype}: decoded")
        if dtype == torch.bfloat16:
            assert np.array_equal(decoded.double().numpy(), value), f"{name}: decode is exact for BF16"


def test_a_block_by_hand():
    """amax 500: floor(log2) = 8, so the scale is 1 and 500 is cut to 448; 17 is a tie of 16 and 18, to even."""
    x = torch.zeros(1, 64)
    x[0, :6] = torch.tensor([500.0, -448.0, 17.0, 19.0, 2.0**-10, -0.0])
    x[0, 32] = 2.0**-3
    q = mxfp8.quantize(x)
    assert q.scales.tolist() == [[127, 127 - 11]]
    assert q.codes[0, :6].tolist() == [0x7E, 0xFE, 0x58, 0x5A, 0x00, 0x80] and q.codes[0, 32] == 0x78
    assert mxfp8.decode(q)[0, [0, 1, 2, 3, 4, 32]].tolist() == [448.0, -448.0, 16.0, 20.0, 0.0, 0.125]
    zeros = mxfp8.quantize(torch.zeros(1, 32))
    assert zeros.scales.item() == 0 and not zeros.codes.any() and not mxfp8.decode(zeros).any()


def test_every_finite_element_under_every_exact_scale_is_exact_in_bf16():
    codes = torch.arange(256, dtype=torch.uint8).expand(244, 256)
    exponent = torch.arange(-124, 120)
    scales = (exponent + 127).to(torch.uint8)[:, None].expand(244, 8).contiguous()
    want = torch.ldexp(codes.contiguous().view(torch.float8_e4m3fn).double(), exponent[:, None])
    got = mxfp8.decode(mxfp8.Mxfp8(codes, scales)).double()
    assert torch.equal(torch.nan_to_num(got, 7.0), torch.nan_to_num(want, 7.0))
    assert torch.isnan(got).sum() == 2 * 244
    broken = mxfp8.Mxfp8(torch.full((1, 32), 0x38, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))
    assert torch.isnan(mxfp8.decode(broken)).all()


def test_a_row_has_the_same_bits_in_any_batch():
    x = inputs.bf16(1, 65, 96)
    x[40] *= 1e4
    whole = mxfp8.quantize(x)
    for rows in (1, 15, 16, 17, 64):
        part = mxfp8.quantize(x[:rows].contiguous())
        assert torch.equal(part.codes, whole.codes[:rows]) and torch.equal(part.scales, whole.scales[:rows])
    torch.set_num_threads(2)
    try:
        again = mxfp8.quantize(x.view(5, 13, 96))
    finally:
        torch.set_num_threads(1)
    assert again.shape == (5, 13, 96) and torch.equal(again.codes.view(65, 96), whole.codes)


def test_bad_input_is_refused_by_name():
    for k in (16, 48, 33):
        with pytest.raises(InputError, match=f"K is {k}, not a multiple of 32"):
            mxfp8.quantize(torch.ones(2, k))
    x = torch.ones(3, 64)
    x[2, 40] = float("nan")
    with pytest.raises(InputError, match="mxfp8.quantize: row 2 holds nan at column 40"):
        mxfp8.quantize(x)
    with pytest.raises(TypeError, match="BF16 or FP32"):
        mxfp8.quantize(torch.ones(2, 32).half())
    with pytest.raises(UnsupportedDevice, match="meta"):
        mxfp8.quantize(torch.ones(2, 32, device="meta"))
    with pytest.raises(ValueError, match="scales"):
        mxfp8.Mxfp8(torch.zeros(2, 32).byte(), torch.zeros(2, 2).byte())
