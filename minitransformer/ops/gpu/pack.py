"""The 4-bit weight in the order in which the tensor core reads it (nvfp4.cuh): once per update, 4.5 bits a value.

W [E, N, K] lies in units of 16 rows x 64 columns, [E, ceil(N/16), ceil(K/64), 144] int32: 128 words of codes, then 16
of block scales. Rows and columns that fill up a unit are zeros.

    code word 4 (4g + t) + s  g 0..7, t 0..3, s 0..3; low half: columns 16s + 2t + 0 and + 8, high half: + 1 and + 9
        bits 6..8, 15    row g,     columns + 0, + 1       exponent and mantissa of E2M1, then the sign
        bits 3..5, 12    row g + 8, columns + 0, + 1
        bits 0..2, 13    row g,     columns + 8, + 9
        bits 9..11, 14   row g + 8, columns + 8, + 9
    scale word 128 + 2g + q   low half: row g, high half: row g + 8
        bits 4..11             block 2q
        bits 12..15, 0..3      block 2q + 1, its low and its high half byte: in place once the bytes are exchanged

A scale byte is (1 + m/8) * 2^(e - 10) with e = byte >> 3 (1 .. 18), m = byte & 7: E4M3's subnormals normalised. A
block whose scale is 0 becomes zero codes with the smallest scale. Plain tensor operations: it is tested on any machine.
"""

import torch
from torch import Tensor

from minitransformer.ops.nvfp4 import BLOCK, Nvfp4

UNIT_ROWS, UNIT_COLUMNS, UNIT_WORDS = 16, 64, 144
# Of the four pairs in a word: the lowest bit of exponent and mantissa, and the sign's bit.
TRIPLE, SIGN = (6, 3, 0, 9), (15, 12, 13, 14)


def _normalised() -> Tensor:
    """E4M3 byte 0 .. 0x7e -> scale byte with 5 exponent bits."""
    table = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent:
            table.append((exponent + 3) << 3 | mantissa)
            continue
        shift = 3 if mantissa == 0 else 4 - mantissa.bit_length()  # a leading one in bit 3
        table.append(1 << 3 if mantissa == 0 else (4 - shift) << 3 | ((mantissa << shift) & 7))
    return torch.tensor(table, dtype=torch.uint8)


SCALE_BYTES = _normalised()


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))


def _spread(pair: Tensor, place: int) -> Tensor:
    """Bytes of two codes as int32 -> their bits at one of the four places of a word."""
    triples, signs = pair & 7 | (pair & 0x70) << 12, pair >> 3 & 1 | (pair & 0x80) << 9
    return triples << TRIPLE[place] | signs << SIGN[place]


def packed_shape(E: int, N: int, K: int) -> tuple[int, int, int, int]:
    return E, -(-N // UNIT_ROWS), -(-K // UNIT_COLUMNS), UNIT_WORDS


def pack(q: Nvfp4) -> Tensor:
    """int32 [E, ceil(N/16), ceil(K/64), 144] of q [E, N, K], whose block scales are finite and have no sign."""
    E, N, K = q.shape
    out = torch.empty(packed_shape(E, N, K), dtype=torch.int32, device=q.codes.device)
    some = max(1, (1 << 24) // max(1, N * K))  # experts at once: the intermediates stay small
    for e in range(0, E, some):
        _pack(q.codes[e : e + some], q.scales[e : e + some], out[e : e + some])
    return out


def _pack(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    kept = torch.where((scales == 0).repeat_interleave(BLOCK // 2, -1), torch.zeros_like(codes), codes)
    E, tiles, units, _ = out.shape
    # [E, tile, half, g, unit, s, pair, t] -> [half, pair, E, tile, unit, g, t, s]
    kept = _padded(kept, UNIT_ROWS, UNIT_COLUMNS // 2).view(E, tiles, 2, 8, units, 4, 2, 4)
    low, high = kept.permute(2, 6, 0, 1, 4, 3, 7, 5).int()
    words = _spread(low[0], 0) | _spread(high[0], 1) | _spread(low[1], 2) | _spread(high[1], 3)
    out[..., :128] = words.flatten(-3)
    table = SCALE_BYTES.to(scales.device)
    padded = _padded(table[scales.int()], UNIT_ROWS, UNIT_COLUMNS // BLOCK)
    padded = torch.where(padded == 0, table[0], padded)
    # [E, tile, half, g, unit, q, byte] -> [byte, half, E, tile, unit, g, q]
    even, odd = padded.view(E, tiles, 2, 8, units, 2, 2).permute(6, 2, 0, 1, 4, 3, 5).int()
    halves = even << 4 | odd >> 4 | (odd & 15) << 12
    out[..., 128:] = (halves[0] | halves[1] << 16).flatten(-2)
