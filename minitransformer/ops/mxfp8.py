"""Execution spec mxfp8/1: blocks of 32 E4M3 numbers along K with a power of two each (OCP MX v1.0: MXFP8, E4M3, E8M0).

A value is element * 2^e; there is no outer scale.

    e    = max(floor(log2(amax_block)) - 8, -127); -127 for a block of zeros    8 is the exponent of E4M3's 448
    code = E4M3(x * 2^-e)                                 the product is exact wherever E4M3 can see it

Elements round to nearest even, saturating at 448 (x * 2^-e lies below 512, so that up to 1/8 of a block's largest value
may be cut: the specification's scale, not the smallest one without loss); subnormals down to 2^-9 are kept, and the
sign of -0 and of what underflows. floor(log2) reads the exponent, a subnormal amax gives e = -127.
Stored: codes uint8 (E4M3 bits) and scales uint8 (E8M0: e + 127; 255 is NaN and never written).

decode    bf16(code * 2^e), nearest even: exact for every block that came from BF16, whose values are multiples of
          2^-133. From FP32 it is exact when amax_block >= 2^-116; below that the elements may be finer than BF16 is
Refused: non-finite input (the row is named), K that is not a multiple of 32, other dtypes, devices without a kernel.
No gradient: the recipe's backward goes straight through to the saved operands.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu, nvfp4
from minitransformer.ops.jit import jit
from minitransformer.ops.nvfp4 import ABS, E4M3, EXPONENT, e4m3_bits, element
from minitransformer.ops.rounding import bits_of_f32, f32_of_bits, f32_to_bf16

SPEC = "mxfp8/1"
BLOCK = 32
# 2^-127 is subnormal in FP32; the products keep it.
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Mxfp8:
    """A quantised tensor [..., K].

    codes   uint8 [..., K], E4M3 bits
    scales  uint8 [..., K/32], E8M0: the exponent + 127
    Raises ValueError when shapes do not fit, TypeError on other dtypes.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self):
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.uint8:
            raise TypeError("Mxfp8: codes and scales must be uint8")
        if self.codes.shape != (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK):
            raise ValueError(f"Mxfp8: codes are {tuple(self.codes.shape)}, scales {tuple(self.scales.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [..., K]."""
        return tuple(self.codes.shape)


@jit
def _quantize_cpu(begin, end, x, codes, scales, bad):
    for r in range(begin, end):
        for b in range(scales.shape[1]):
            block, out = x[r, b * BLOCK : (b + 1) * BLOCK], codes[r, b * BLOCK : (b + 1) * BLOCK]
            top = np.uint32(0)
            for i in range(BLOCK):
                top = max(top, np.uint32(bits_of_f32(element(block[i])) & ABS))
            bad[r] |= np.uint8(top >= EXPONENT)
            # FP32's exponent field is floor(log2) + 127, the biased exponent that E8M0 stores, before the - 8.
            field = max(np.int64(top >> np.uint32(23)) - 8, 0)
            scales[r, b] = np.uint8(field)
            inverse = f32_of_bits(np.uint32(np.uint32(254 - field) << np.uint32(23)))
            for i in range(BLOCK):
                y = element(block[i]) * inverse
                out[i] = e4m3_bits(abs(y)) | np.uint8((bits_of_f32(y) >> np.uint32(24)) & np.uint32(0x80))


@jit
def _decode_cpu(begin, end, codes, scales, powers, out):
    for r in range(begin, end):
        for b in range(scales.shape[1]):
            for i in range(b * BLOCK, (b + 1) * BLOCK):
                out[r, i] = f32_to_bf16(E4M3[codes[r, i]] * powers[scales[r, b]])


def quantize(x: Tensor) -> Mxfp8:
    """x [..., N, K] BF16 or FP32 -> Mxfp8, blocks along K.

    Raises InputError on non-finite values or K not a multiple of 32, ValueError on shapes, TypeError on dtypes,
    UnsupportedDevice without a kernel. A GPU leaves bad values to its next check.
    """
    lead, K = _lead(x), x.shape[-1]
    if x.is_cuda:
        return Mxfp8(*gpu.mxfp8.quantize(x)[:2])
    rows = nvfp4.flat_rows(x, "mxfp8.quantize")
    codes, scales = np.empty(rows.shape, np.uint8), np.empty((rows.shape[0], K // BLOCK), np.uint8)
    bad = np.zeros(rows.shape[0], np.uint8)
    cpu.parallel(_quantize_cpu, rows.shape[0], rows, codes, scales, bad, grain=8)
    nvfp4.refuse_non_finite("mxfp8.quantize", bad, rows, lead)
    return Mxfp8(*(torch.from_numpy(t).reshape(*lead, t.shape[-1]) for t in (codes, scales)))


def _lead(x: Tensor) -> tuple[int, ...]:
    if x.dim() > 1 and x.shape[-1] % BLOCK:
        K = x.shape[-1]
        raise InputError(f"mxfp8.quantize: K is {K}, not a multiple of {BLOCK}; a block scale covers {BLOCK} values")
    return tuple(x.shape[:-1])


def quantize_decoded(x: Tensor, fault: str = "mxfp8.quantize", plan=None) -> tuple[Mxfp8, Tensor]:
    """(q, decode(q)), on a GPU by one kernel; fault and plan (of x's rows) then name a bad token."""
    if x.is_cuda:
        _lead(x)
        *parts, decoded = gpu.mxfp8.quantize(x, True, fault, plan)
        return Mxfp8(*parts), decoded
    q = quantize(x)
    return q, decode(q)


def decode(q: Mxfp8) -> Tensor:
    """Element * 2^e as BF16 [..., K]: exact for what came from BF16 (module docstring)."""
    if q.codes.is_cuda:
        return gpu.mxfp8.decode(q.codes, q.scales)
    cpu.on_cpu("mxfp8.decode", q.codes, q.scales)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    codes, scales = (t.contiguous().numpy().reshape(-1, t.shape[-1]) for t in (q.codes, q.scales))
    bits = cpu.bf16_bits(out).reshape(codes.shape)
    cpu.parallel(_decode_cpu, codes.shape[0], codes, scales, _POWERS, bits, grain=16)
    return out


def rounded_bits(x: Tensor) -> np.ndarray:
    """BF16 [..., K] rounded to MXFP8 along K, decoded, as BF16 bits; K is padded with zeros to a multiple of 32.

    The operands of the gradient products under the backward `mxfp8`. Raises FloatingPointError where one is not finite,
    as gradients that are not finite do everywhere.
    """
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    try:
        return cpu.bf16_bits(decode(quantize(x.contiguous())))
    except InputError as error:
        raise FloatingPointError(f"an operand of a gradient product is not finite: {error}") from None
