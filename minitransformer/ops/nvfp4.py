"""Execution spec nvfp4/1: blocks of 16 four-bit numbers, an E4M3 scale a block, an FP32 outer scale a row or tensor.

A value is code * block scale * outer scale: code E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), blocks along K.

    g     = max |x| over the row, tensor or expert                         exact
    s_enc = min(fl(2688 / g), FLT_MAX); 1 where g is 0 or s_enc is 0       2688 = 448 * 6; true division
    s_dec = fl(1 / s_enc)                                                  the outer scale that is kept: a DECODE scale
    d     = E4M3(min(fl(amax_block * fl(s_enc * fl(1/6))), FLT_MAX))       may be 0: no lower clamp
    enc   = min(fl(1 / fl(d * s_dec)), FLT_MAX)                            d = 0 gives FLT_MAX through the clamp
    code  = E2M1(fl(x * enc))                                              the sign of x is kept, -0 and underflow too

fl is one FP32 operation rounded to nearest even, subnormals kept, nothing contracted; x is BF16 or FP32 (BF16 widens
exactly). E4M3: nearest even, saturating at 448, subnormals down to 2^-9. E2M1: nearest, saturating at 6, ties to the
even code: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.

Rows of zeros: s_dec 1, scales 0, codes 0 (8 for -0). Rows with g < 2688 / FLT_MAX: s_enc is FLT_MAX, everything stays
finite, the codes lose their top range (with g below about 7e-40 all are 0).
A trap for other implementations: torch computes `2688.0 / t` as 2688 * (1 / t), another number for a quarter of all t.

decode        bf16(code * block scale): at most 6 significant bits, exact for every code and scale; the chain's operand
dequantize    fl(code * block scale * outer), the FP32 of decode times the outer scale: one rounding
codes         two a byte, the even element in the low nibble
scales        linear [N, K/16]; swizzle_128x4 gives the order that Blackwell's GEMMs read: (r, c) at
              ((r//128) * ceil(C/4) + c//4) * 512 + (r%32) * 16 + ((r%128)//32) * 4 + c%4, restarting for each expert,
              padded with zeros to whole tiles of 128 x 4
outer         read from the left: shape [] is one for all; [E] one an expert; [E, N] one a row; [E, 2] two for the rows
              of an expert, first half and second (gate, up). The last dimension may divide the rows' dimension.
amax          may be given by whoever produced the rows, in any of these shapes; max is exact, so the bits are those of
              a separate pass
Refused: non-finite input (the row is named), an amax below the row's own, K that is not a multiple of 16, other dtypes,
devices without a kernel. No gradient: the recipe's backward goes straight through to the saved operands.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from minitransformer.errors import InputError
from minitransformer.ops import cpu, gpu
from minitransformer.ops.jit import jit
from minitransformer.ops.rounding import bf16_to_f32, bits_of_f32, f32_of_bits

SPEC = "nvfp4/1"
BLOCK = 16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FLT_MAX = np.float32(np.finfo(np.float32).max)
_TOP = np.float32(448 * 6)
_SIXTH = np.float32(1) / np.float32(6)
_ONE, _ZERO, _E4M3_MAX, _E4M3_NORMAL = np.float32(1), np.float32(0), np.float32(448), np.float32(2.0**-6)
_TIE0, _TIE1, _TIE2, _TIE3, _TIE4, _TIE5, _TIE6 = (np.float32(t) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5))
_SHIFT14 = np.float32(2.0**14)
ABS, EXPONENT = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def _e4m3_values() -> np.ndarray:
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[[0x7F, 0xFF]] = np.nan
    return np.where(bits < 128, value, -value).astype(np.float32)


E4M3 = _e4m3_values()


@dataclass(frozen=True, eq=False)
class Nvfp4:
    """A quantised tensor of logical shape [..., N, K].

    codes   uint8 [..., N, K/2], two E2M1 codes a byte, even element low
    scales  uint8 [..., N, K/16], the bits of E4M3 block scales
    outer   FP32 decode scales, [] or a prefix of [..., N] whose last dimension may divide (module docstring)
    Raises ValueError when shapes do not fit, TypeError on other dtypes.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor

    def __post_init__(self):
        if (self.codes.dtype, self.scales.dtype, self.outer.dtype) != (torch.uint8, torch.uint8, torch.float32):
            raise TypeError("Nvfp4: codes and scales must be uint8, outer FP32")
        shapes = [t.shape for t in (self.codes, self.scales)]
        if self.codes.dim() < 2 or shapes[0][:-1] != shapes[1][:-1] or shapes[0][-1] * 2 != shapes[1][-1] * BLOCK:
            raise ValueError(f"Nvfp4: scales are {tuple(self.scales.shape)}, codes {tuple(self.codes.shape)}")
        _groups(self.outer.shape, self.shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return *self.codes.shape[:-1], self.codes.shape[-1] * 2

    @property
    def scales_e4m3(self) -> Tensor:
        """The block scales as a float8_e4m3fn view."""
        return self.scales.view(torch.float8_e4m3fn)

    def row_outer(self) -> Tensor:
        """The outer scale of every row, FP32 [..., N]."""
        return expand_rows(self.outer, self.shape[:-1])

    def expert(self, e: int) -> "Nvfp4":
        """Expert e of [E, ..., N, K] as a tensor of its own (views)."""
        if self.codes.dim() < 3:
            raise ValueError(f"Nvfp4.expert: the tensor is {self.shape}, it has no experts")
        return Nvfp4(self.codes[e], self.scales[e], self.outer[e] if self.outer.dim() else self.outer)


def _groups(outer: tuple[int, ...], lead: tuple[int, ...]) -> int:
    """How many rows, in row-major order, share one entry of an outer tensor of this shape."""
    n = len(outer)
    if n and (n > len(lead) or outer[:-1] != lead[: n - 1] or outer[-1] == 0 != lead[n - 1]):
        raise ValueError(f"nvfp4: an outer scale or amax of shape {tuple(outer)} does not fit rows {tuple(lead)}")
    if n and outer[-1] and lead[n - 1] % outer[-1]:
        raise ValueError(f"nvfp4: {outer[-1]} outer scales or amaxes do not divide {lead[n - 1]} rows evenly")
    return prod(lead) // max(1, prod(outer))


def expand_rows(outer: Tensor, lead: tuple[int, ...]) -> Tensor:
    """An outer scale (or amax) read from the left -> one value a row, [..., N] = lead."""
    return outer.reshape(-1).repeat_interleave(_groups(outer.shape, lead)).reshape(lead)


def element(x):
    """A kernel's element as FP32; only its Numba overload exists."""
    raise NotImplementedError


@overload(element)
def _element_of(x):
    if x == types.uint16:
        return lambda x: bf16_to_f32(x)
    return lambda x: x


@jit
def e4m3_bits(v):
    """Non-negative FP32 -> E4M3 bits (uint8), nearest even, saturating at 448."""
    u = bits_of_f32(v)
    # The exponent's bias goes from 127 to 7: 120 exponents of 8 codes.
    nearest = u + np.uint32(0x7FFFF) + ((u >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32((nearest >> np.uint32(20)) - np.uint32(960))
    # An ulp of FP32 at 2^14 is 2^-9: the adder itself rounds to the subnormals of E4M3.
    subnormal = bits_of_f32(v + _SHIFT14) - bits_of_f32(_SHIFT14)
    code = subnormal if v < _E4M3_NORMAL else normal
    return np.uint8(np.uint32(0x7E) if v >= _E4M3_MAX else code)


@jit
def e2m1_code(y):
    """FP32 -> E2M1 code 0 .. 15, nearest, ties to the even code, saturating at 6; the sign of -0 is kept."""
    a = abs(y)
    # An even code keeps the tie on its upper side (>), an odd one loses it (>=).
    code = np.uint32(a > _TIE0) + np.uint32(a >= _TIE1) + np.uint32(a > _TIE2) + np.uint32(a >= _TIE3)
    code += np.uint32(a > _TIE4) + np.uint32(a >= _TIE5) + np.uint32(a > _TIE6)
    return np.uint8(code | ((bits_of_f32(y) >> np.uint32(28)) & np.uint32(8)))


@jit
def _amax_cpu(begin, end, x, out):
    for r in range(begin, end):
        top = np.uint32(0)
        # Integer order of magnitudes is their real order, with NaN above infinity: max needs no rounding, no NaN rule.
        for k in range(x.shape[1]):
            top = max(top, np.uint32(bits_of_f32(element(x[r, k])) & ABS))
        out[r] = f32_of_bits(top)


@jit
def _quantize_cpu(begin, end, x, s_enc, s_dec, amax, codes, scales, bad):
    y = np.empty(BLOCK, np.uint8)
    for r in range(begin, end):
        per_block = s_enc[r] * _SIXTH
        for b in range(scales.shape[1]):
            block, top = x[r, b * BLOCK : (b + 1) * BLOCK], np.uint32(0)
            for i in range(BLOCK):
                top = max(top, np.uint32(bits_of_f32(element(block[i])) & ABS))
            bad[r] |= np.uint8(top >= EXPONENT) | np.uint8(np.uint8(f32_of_bits(top) > amax[r]) << np.uint8(1))
            d = e4m3_bits(min(f32_of_bits(top) * per_block, FLT_MAX))
            scales[r, b] = d
            enc = min(_ONE / (E4M3[d] * s_dec[r]), FLT_MAX)
            for i in range(BLOCK):
                y[i] = e2m1_code(element(block[i]) * enc)
            for i in range(BLOCK // 2):
                codes[r, b * (BLOCK // 2) + i] = y[2 * i] | np.uint8(y[2 * i + 1] << np.uint8(4))


@jit
def _decode_cpu(begin, end, codes, scales, table, out):
    for r in range(begin, end):
        for b in range(scales.shape[1]):
            row = table[scales[r, b]]
            for i in range(b * (BLOCK // 2), (b + 1) * (BLOCK // 2)):
                out[r, 2 * i] = row[codes[r, i] & np.uint8(15)]
                out[r, 2 * i + 1] = row[codes[r, i] >> np.uint8(4)]


@jit
def _dequantize_cpu(begin, end, decoded, outer, out):
    for r in range(begin, end):
        for k in range(out.shape[1]):
            out[r, k] = bf16_to_f32(decoded[r, k]) * outer[r]


def _decode_table() -> np.ndarray:
    """BF16 bits of code * scale, [256 scales, 16 codes]; the products are exact in FP32 and in BF16."""
    values = np.ascontiguousarray(E4M3[:, None] * E2M1[None, :])
    return (values.view(np.uint32) >> 16).astype(np.uint16)


_TABLE = _decode_table()


def flat_rows(x: Tensor, op: str) -> np.ndarray:
    """The input as a kernel reads it: uint16 (BF16 bits) or float32, [rows, K]."""
    cpu.on_cpu(op, x)
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: x is {x.dtype}, expected BF16 or FP32")
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x is {tuple(x.shape)}, expected [..., N, K]")
    flat = (cpu.bf16_bits if x.dtype == torch.bfloat16 else cpu.f32)(x)
    return flat.reshape(-1, x.shape[-1])


def row_amax(x: Tensor) -> Tensor:
    """max |x| of each row: [..., N, K] BF16 or FP32 -> FP32 [..., N]; infinity or NaN where the row holds one."""
    if x.is_cuda:
        return gpu.nvfp4.row_amax(x)
    rows = flat_rows(x, "nvfp4.row_amax")
    out = np.empty(rows.shape[0], np.float32)
    cpu.parallel(_amax_cpu, rows.shape[0], rows, out, grain=16)
    return torch.from_numpy(out).reshape(x.shape[:-1])


def outer_scales(amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s_enc, s_dec) of FP32 amaxes, the spec's first lines; NumPy's FP32 `/` is the IEEE division."""
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        s_enc = np.minimum(_TOP / amax, FLT_MAX)
        s_enc = np.where((amax == 0) | (s_enc == 0), _ONE, s_enc)
        return s_enc, _ONE / s_enc


def _amaxes(x: Tensor, outer: str | Tensor) -> Tensor:
    if isinstance(outer, Tensor):
        if outer.dtype != torch.float32:
            raise TypeError(f"nvfp4.quantize: amax is {outer.dtype}, expected FP32")
        return outer.detach()
    if outer not in ("row", "tensor", "expert"):
        raise ValueError(f"nvfp4.quantize: outer is {outer!r}; give 'row', 'tensor', 'expert' or an amax tensor")
    if outer == "expert" and x.dim() < 3:
        raise ValueError(f"nvfp4.quantize: x is {tuple(x.shape)}; outer='expert' needs [E, N, K]")
    rows = row_amax(x)
    if outer == "row":
        return rows
    if rows.numel() == 0:
        return rows.new_zeros(x.shape[0] if outer == "expert" else ())
    return rows.flatten(1).amax(1) if outer == "expert" else rows.max()


def name_row(r: int, lead: tuple[int, ...]) -> str:
    """Row r of flattened rows in the words of a message: 'row 3', or 'row 3 (index [1, 3])' of more dimensions."""
    index = [int(i) for i in np.unravel_index(r, lead)]
    return f"row {r}" if len(index) == 1 else f"row {index[-1]} (index {index})"


def _values(row: np.ndarray) -> np.ndarray:
    return row if row.dtype == np.float32 else (row.astype(np.uint32) << 16).view(np.float32)


def refuse_non_finite(op: str, bad: np.ndarray, rows: np.ndarray, lead: tuple[int, ...]) -> None:
    """InputError that names the first row whose flag has bit 0, and where it is not finite."""
    for r in np.flatnonzero(bad & 1)[:1]:
        values = _values(rows[r])
        k = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(f"{op}: {name_row(r, lead)} holds {values[k]} at column {k}; only finite values have a code")


def _refuse_small_amax(bad: np.ndarray, rows: np.ndarray, amax: np.ndarray, lead: tuple[int, ...]) -> None:
    for r in np.flatnonzero(bad)[:1]:
        raise InputError(
            f"nvfp4.quantize: {name_row(r, lead)} reaches {np.abs(_values(rows[r])).max():g}, but its amax is given as "
            f"{amax[r]:g}; pass the amax of the values that are quantised"
        )


def quantize(x: Tensor, outer: str | Tensor = "row") -> Nvfp4:
    """x [..., N, K] BF16 or FP32 -> Nvfp4, bits as the module docstring says.

    outer: "row" (one outer scale a row), "tensor" (one for all), "expert" (one for each of the first dimension), or the
    amax FP32 itself, of a shape read from the left; the outer scales then have its shape.
    Raises InputError on non-finite values, an amax too small for its row or K not a multiple of 16, ValueError on
    shapes, TypeError on dtypes, UnsupportedDevice without a kernel. A GPU leaves bad values to its next check.
    """
    if x.is_cuda:
        return _quantize_gpu(x, outer)[0]
    rows = flat_rows(x, "nvfp4.quantize")
    lead = _lead(x)
    amax = _amaxes(x, outer)
    cpu.on_cpu("nvfp4.quantize", amax)
    amax_rows = cpu.f32(expand_rows(amax, lead)).reshape(-1)
    s_enc, s_dec = outer_scales(amax_rows)
    codes = np.empty((rows.shape[0], rows.shape[1] // 2), np.uint8)
    scales, bad = np.empty((rows.shape[0], rows.shape[1] // BLOCK), np.uint8), np.zeros(rows.shape[0], np.uint8)
    bad[~(amax_rows < np.inf)] = 2  # a NaN amax compares false with every value
    cpu.parallel(_quantize_cpu, rows.shape[0], rows, s_enc, s_dec, amax_rows, codes, scales, bad, grain=8)
    refuse_non_finite("nvfp4.quantize", bad, rows, lead)
    _refuse_small_amax(bad, rows, amax_rows, lead)
    kept = np.array(outer_scales(cpu.f32(amax))[1], np.float32).reshape(amax.shape)
    return Nvfp4(_tensor(codes, lead), _tensor(scales, lead), torch.from_numpy(kept))


def _lead(x: Tensor) -> tuple[int, ...]:
    if x.shape[-1] % BLOCK:
        K = x.shape[-1]
        raise InputError(f"nvfp4.quantize: K is {K}, not a multiple of {BLOCK}; a block scale covers {BLOCK} values")
    return tuple(x.shape[:-1])


def _quantize_gpu(x: Tensor, outer: str | Tensor, *how) -> tuple[Nvfp4, Tensor | None]:
    lead, amax = _lead(x), _amaxes(x, outer)
    *parts, decoded = gpu.nvfp4.quantize(x, amax, _groups(amax.shape, lead), *how)
    return Nvfp4(*parts), decoded


def quantize_decoded(x: Tensor, amax: Tensor, fault: str = "nvfp4.quantize", plan=None) -> tuple[Nvfp4, Tensor]:
    """(q, decode(q)) for a given amax, on a GPU by one kernel; fault and plan (of x's rows) then name a bad token."""
    if x.is_cuda:
        return _quantize_gpu(x, amax, True, fault, plan)
    q = quantize(x, amax)
    return q, decode(q)


def _tensor(x: np.ndarray, lead: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(x).reshape(*lead, x.shape[-1])


def decode(q: Nvfp4) -> Tensor:
    """Code * block scale, exact, BF16 [..., N, K]; the outer scale is left out (the chain's operand)."""
    if q.codes.is_cuda:
        return gpu.nvfp4.decode(q.codes, q.scales)
    cpu.on_cpu("nvfp4.decode", q.codes, q.scales)
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    codes, scales = (t.contiguous().numpy().reshape(-1, t.shape[-1]) for t in (q.codes, q.scales))
    bits = cpu.bf16_bits(out).reshape(-1, out.shape[-1])
    cpu.parallel(_decode_cpu, bits.shape[0], codes, scales, _TABLE, bits, grain=16)
    return out


def dequantize(q: Nvfp4) -> Tensor:
    """fl(code * block scale * outer), FP32 [..., N, K]: one rounding."""
    if q.codes.is_cuda:
        return decode(q).float() * q.row_outer()[..., None]
    decoded = cpu.bf16_bits(decode(q)).reshape(-1, q.shape[-1])
    out = torch.empty(q.shape, dtype=torch.float32)
    outer = cpu.f32(q.row_outer()).reshape(-1)
    cpu.parallel(_dequantize_cpu, decoded.shape[0], decoded, outer, out.numpy().reshape(decoded.shape), grain=16)
    return out


def pack(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [..., K], 0 .. 15 -> [..., K/2], the even element in the low nibble."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2 or bool((codes > 15).any()):
        raise ValueError(f"nvfp4.pack: {codes.dtype} {tuple(codes.shape)}; expected uint8 codes 0..15 with an even K")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> codes uint8 [..., K]; the inverse of pack."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def swizzle_128x4(scales: Tensor) -> Tensor:
    """Block scales uint8 [..., N, C] -> [..., ceil(N/128) * ceil(C/4) * 512] in the 128x4 order, restarting per expert.

    Padding is zero. The order is in the module docstring.
    """
    N, C = scales.shape[-2:]
    padded = torch.nn.functional.pad(scales, (0, -C % 4, 0, -N % 128))
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))  # [..., R, 4, 32, Q, 4]
    return tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).flatten(-5)


def unswizzle_128x4(swizzled: Tensor, N: int, C: int) -> Tensor:
    """The inverse: [..., ceil(N/128) * ceil(C/4) * 512] -> [..., N, C]. ValueError when the size does not fit."""
    R, Q = -(-N // 128), -(-C // 4)
    if swizzled.shape[-1] != R * Q * 512:
        raise ValueError(f"nvfp4.unswizzle_128x4: {swizzled.shape[-1]} bytes do not hold [{N}, {C}] ({R * Q * 512})")
    tiles = swizzled.unflatten(-1, (R, Q, 32, 4, 4)).movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return tiles.flatten(-2).flatten(-4, -2)[..., :N, :C].contiguous()
