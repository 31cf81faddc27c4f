"""The packed 4-bit weight: read back as nvfp4.cuh reads it, in NumPy, every code with every scale."""

import numpy as np
import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from minitransformer.ops import nvfp4
from minitransformer.ops.gpu import pack

TRIPLE, SIGN = np.uint32(0x01C001C0), np.uint32(0x80008000)


def bf16(bits: np.ndarray) -> np.ndarray:
    """[..., 2] FP32 values of the BF16 halves of words, the low one first."""
    return (np.stack([bits & 0xFFFF, bits >> 16], -1).astype(np.uint32) << 16).view(np.float32)


def unpack(packed: torch.Tensor) -> np.ndarray:
    """The masks, shifts and products of the kernel's `decode` and `scales_of`, and the places of its lanes."""
    words = packed.numpy().view(np.uint32)
    E, tiles, units, _ = words.shape
    out = np.empty((E, tiles, 2, 8, units, 4, 2, 4, 2), np.float32)  # half, g, unit, step, pair, t, element
    codes, scales = words[..., :128].reshape(E, tiles, units, 8, 4, 4), words[..., 128:].reshape(E, tiles, units, 8, 2)
    for step in range(4):
        word, scale = codes[..., step], scales[..., step // 2]
        if step & 1:  # the bytes of each half exchanged
            scale = (scale >> np.uint32(8)) & np.uint32(0x00FF00FF) | (scale & np.uint32(0x00FF00FF)) << np.uint32(8)
        factor = bf16((scale & np.uint32(0x0FF00FF0)) | np.uint32(0x70007000))  # [E, tile, unit, g, half]
        pairs = (
            word & (TRIPLE | SIGN),
            (word << np.uint32(3)) & (TRIPLE | SIGN),
            ((word << np.uint32(6)) & TRIPLE) | ((word << np.uint32(2)) & SIGN),
            ((word >> np.uint32(3)) & TRIPLE) | ((word << np.uint32(1)) & SIGN),
        )
        for place, pair in enumerate(pairs):
            value = bf16(pair) * factor[..., place % 2, None, None] * np.float32(2**19)
            out[:, :, place % 2, :, :, step, place // 2] = value.transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(E, tiles * 16, units * 64)


@pytest.mark.parametrize(("N", "K"), [(16, 64), (1, 16), (40, 96), (33, 208)])
def test_what_is_packed_reads_back(N, K):
    codes = inputs.integers(1, 256, 3, N, K // 2).to(torch.uint8)
    scales = inputs.integers(2, 0x7F, 3, N, K // 16).to(torch.uint8)
    q = nvfp4.Nvfp4(codes, scales, torch.ones(()))
    packed = pack.pack(q)
    assert packed.shape == pack.packed_shape(3, N, K)
    got, want = unpack(packed), nvfp4.decode(q).float() + 0.0  # + 0: the zeros of a block whose scale is 0 lose a sign
    assert_bits_equal(torch.from_numpy(got[:, :N, :K] + 0.0), want, "packed")
    assert not got[:, N:].any() and not got[:, :, K:].any()


def test_every_code_with_every_scale():
    codes = torch.arange(16, dtype=torch.uint8).expand(1, 127, 16)
    scales = torch.arange(127, dtype=torch.uint8)[None, :, None].contiguous()
    q = nvfp4.Nvfp4(nvfp4.pack(codes), scales, torch.ones(()))
    got = unpack(pack.pack(q))[0, :127, :16]
    np.testing.assert_array_equal(got, nvfp4.decode(q)[0].float().numpy())


def test_a_scale_is_normal_in_bf16_and_so_is_every_product():
    """What the proof in nvfp4.cuh needs: no operand of the tensor core is subnormal."""
    codes, scales = np.meshgrid(np.arange(16), np.arange(127))
    value = np.abs(nvfp4.E2M1[codes] * nvfp4.E4M3[scales]).astype(np.float64) * 2.0**-19
    assert value[value > 0].min() >= 2.0**-29 and value.max() < 2.0**-7
