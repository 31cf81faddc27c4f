"""Faults put back into the NVFP4 quantiser and its layouts, each with the test that must notice.

A fault inside a kernel is a fault in one part of the NumPy oracle, which then stands in for nvfp4.quantize.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from alignment_tests import nvfp4_oracle
from alignment_tests.mutations import Mutation, patched
from alignment_tests.nvfp4_oracle import TIES, Oracle
from alignment_tests.ops import test_mxfp8, test_nvfp4, test_pack
from minitransformer.ops import mxfp8, nvfp4
from minitransformer.ops.gpu import pack
from minitransformer.ops.nvfp4 import Nvfp4

QUANTIZE, DECODE, SWIZZLE = nvfp4.quantize, nvfp4.decode, nvfp4.swizzle_128x4
MX_QUANTIZE = mxfp8.quantize
ONE = np.float32(1)


def in_the_kernel(**parts) -> Callable[[], None]:
    """nvfp4.quantize by an oracle with these parts exchanged; it takes what `outer` may be."""

    def quantize(x: Tensor, outer="row") -> Nvfp4:
        amax = nvfp4._amaxes(x, outer)
        rows = nvfp4.expand_rows(amax, tuple(x.shape[:-1])).reshape(-1).numpy()
        codes, scales, outer_scale = Oracle(**parts).quantize(x.float().reshape(-1, x.shape[-1]).numpy(), rows)
        packed = torch.from_numpy(nvfp4_oracle.pack(codes)).view(*x.shape[:-1], -1)
        kept = torch.from_numpy(outer_scale) if amax.numel() == rows.size else nvfp4.quantize(x, amax).outer
        return Nvfp4(packed, torch.from_numpy(scales).view(*x.shape[:-1], -1), kept.view(amax.shape))

    return patched(nvfp4, "quantize", quantize)


def after_the_kernel(change: Callable[[Nvfp4], Nvfp4]):
    return patched(nvfp4, "quantize", lambda x, outer="row": change(QUANTIZE(x, outer)))


def clamped_from_below(v: np.ndarray) -> np.ndarray:
    """A block scale never below the least normal E4M3, as some quantisers have it against zeros."""
    return nvfp4_oracle.e4m3(np.maximum(v, np.float32(2.0**-6)))


def scale_half_up(v: np.ndarray) -> np.ndarray:
    """E4M3 with ties away from zero: a number at a midpoint is nudged up before it rounds."""
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    at_tie = np.isin(v, (values[1:] + values[:-1]) / 2)
    return nvfp4_oracle.e4m3(np.where(at_tie, np.nextafter(v, np.float32(1e9)), v))


def code_half_up(y: np.ndarray) -> np.ndarray:
    """E2M1 with ties away from zero."""
    return nvfp4_oracle.e2m1(np.where(np.isin(np.abs(y), TIES), y * np.float32(1.01), y))


def without_sign_of_zero(q: Nvfp4) -> Nvfp4:
    codes = nvfp4.unpack(q.codes)
    return Nvfp4(nvfp4.pack(torch.where(codes == 8, 0, codes)), q.scales, q.outer)


def by_reciprocal(amax: np.ndarray):
    with np.errstate(all="ignore"):
        s_enc = np.minimum(np.float32(2688) * (ONE / amax), nvfp4.FLT_MAX)
        s_enc = np.where(amax == 0, ONE, s_enc)
        return s_enc, ONE / s_enc


def unclamped(amax: np.ndarray):
    with np.errstate(all="ignore"):
        s_enc = np.float32(2688) / amax
        return s_enc, ONE / s_enc


def one_run_of_rows(scales: Tensor) -> Tensor:
    """All experts' rows as one matrix, tiles of 128 running across their borders."""
    flat = SWIZZLE(scales.flatten(0, -2))
    size = SWIZZLE(scales[0]).numel() * scales.shape[0] if scales.dim() > 2 else flat.numel()
    return torch.nn.functional.pad(flat, (0, size - flat.numel())).view(*scales.shape[:-2], -1)


def swizzle_of_whole_warps(scales: Tensor) -> Tensor:
    """Rows after the last whole group of 16 are left out, as where a warp writes 16 rows or none."""
    kept = scales.clone()
    kept[..., scales.shape[-2] // 16 * 16 :, :] = 0
    return SWIZZLE(kept)


def zeros_for_some_rows(q: Nvfp4) -> Tensor:
    """A kernel whose grid is a row short for 17, 33, 49, ... rows."""
    out = DECODE(q)
    if out.dim() == 2 and len(out) % 16 == 1 < len(out):
        out[-1] = 0
    return out


def with_batch_amax(x: Tensor, outer="row") -> Nvfp4:
    amax = nvfp4.row_amax(x)
    return QUANTIZE(x, amax.max().expand_as(amax) if isinstance(outer, str) and outer == "row" else outer)


def without_the_tail(quantize: Callable, block: int):
    return lambda x, *args: quantize(x[..., : max(1, x.shape[-1] // block) * block], *args)


def masked(x: Tensor, outer="row") -> Nvfp4:
    return QUANTIZE(torch.nan_to_num(x), outer)


def largest_for_both(q: Nvfp4) -> Nvfp4:
    """Gate's and up's outer scales merged into the larger, block scales left as they were."""
    outer = q.outer.amax(-1, keepdim=True).expand_as(q.outer) if q.outer.dim() == 2 == q.codes.dim() - 1 else q.outer
    return Nvfp4(q.codes, q.scales, outer)


def mx_scale_rounded_up(x: Tensor) -> mxfp8.Mxfp8:
    """The scale with no saturation, which other MX quantisers choose: 2^ceil(log2(amax / 448))."""
    q = MX_QUANTIZE(x)
    saturates = x.float().abs().unflatten(-1, (-1, 32)).amax(-1) > 448 * torch.exp2(q.scales.float() - 127)
    shift = saturates.repeat_interleave(32, -1)
    return mxfp8.Mxfp8(MX_QUANTIZE(torch.where(shift, x / 2, x)).codes, q.scales + saturates.to(torch.uint8))


def law(check: Callable, *args) -> Callable[[], None]:
    return lambda: check(*args)


def refusal(check: Callable[[], None]) -> Callable[[], None]:
    """pytest.raises that sees nothing raised fails with an exception of pytest's own; as an AssertionError here."""

    def run() -> None:
        try:
            check()
        except pytest.fail.Exception as nothing_raised:
            raise AssertionError(str(nothing_raised)) from nothing_raised

    return run


def known_answer(name: str) -> Callable[[], None]:
    return law(test_nvfp4.test_known_answers, next(b for b in test_nvfp4.GOLDENS if b["name"] == name))


def outer_scales(replacement: Callable):
    return patched(nvfp4, "outer_scales", replacement)


def oracle_on(name: str) -> Callable[[], None]:
    return law(test_nvfp4.test_bits_of_the_numpy_oracle, name)


ORACLE, KNOWN = "the bits of the oracle", "the known answers"
SWAPPED = lambda q: Nvfp4(q.codes >> 4 | q.codes << 4, q.scales, q.outer)  # noqa: E731
ENCODED = lambda q: Nvfp4(q.codes, q.scales, 1 / q.outer)  # noqa: E731
UNIT = lambda amax: (np.ones_like(amax), np.ones_like(amax))  # noqa: E731
PACKED_HIGH = lambda codes: codes[..., 0::2] << 4 | codes[..., 1::2]  # noqa: E731

UNSHIFTED = pack.SCALE_BYTES.clone()
UNSHIFTED[1:8] = torch.arange(1, 8)  # E4M3's subnormal scales taken as they stand

MUTATIONS = [
    Mutation("packed: subnormal scales", "the packed weight reads back", patched(pack, "SCALE_BYTES", UNSHIFTED),
             test_pack.test_every_code_with_every_scale),
    Mutation("packed: two signs exchanged", "the packed weight reads back", patched(pack, "SIGN", (15, 12, 14, 13)),
             test_pack.test_every_code_with_every_scale),
    Mutation("encode scale kept", "dequantising gives the input back", after_the_kernel(ENCODED),
             test_nvfp4.test_dequantize_rounds_once_and_comes_close),
    Mutation("encode scale kept, known", KNOWN, after_the_kernel(ENCODED), known_answer("own amax")),
    Mutation("block scale clamped", ORACLE, in_the_kernel(e4m3=clamped_from_below), oracle_on("wide")),
    Mutation("block scale clamped, known", KNOWN, in_the_kernel(e4m3=clamped_from_below),
             known_answer("subnormal scale")),
    Mutation("codes: ties away from zero", KNOWN, in_the_kernel(e2m1=code_half_up), known_answer("ties")),
    Mutation("codes: ties away, oracle", ORACLE, in_the_kernel(e2m1=code_half_up), oracle_on("all ties")),
    Mutation("scales: ties away from zero", KNOWN, in_the_kernel(e4m3=scale_half_up), known_answer("midpoint down")),
    Mutation("scales: ties away, oracle", ORACLE, in_the_kernel(e4m3=scale_half_up), oracle_on("E4M3 midpoints")),
    Mutation("2688 times 1 over g", "true division", outer_scales(by_reciprocal),
             test_nvfp4.test_the_outer_scale_is_a_true_division),
    Mutation("2688 times 1 over g, oracle", ORACLE, outer_scales(by_reciprocal), oracle_on("normal")),
    Mutation("2688 over g not clamped", "rows of zeros and tiny rows stay finite", outer_scales(unclamped),
             test_nvfp4.test_zero_rows_and_rows_whose_scale_overflows),
    Mutation("nibbles swapped", "the even element lies low", after_the_kernel(SWAPPED),
             test_nvfp4.test_the_even_element_lies_in_the_low_nibble),
    Mutation("nibbles swapped in pack", "the even element lies low", patched(nvfp4, "pack", PACKED_HIGH),
             test_nvfp4.test_the_even_element_lies_in_the_low_nibble),
    Mutation("outer scale 1", ORACLE, outer_scales(UNIT), oracle_on("normal")),
    Mutation("outer scale 1, known", KNOWN, outer_scales(UNIT), known_answer("beside an outlier")),
    Mutation("sign of -0 lost", KNOWN, after_the_kernel(without_sign_of_zero), known_answer("negative zeros")),
    Mutation("sign of -0 lost, oracle", ORACLE, after_the_kernel(without_sign_of_zero), oracle_on("negative zeros")),
    Mutation("swizzle runs across experts", "the swizzle restarts for each expert",
             patched(nvfp4, "swizzle_128x4", one_run_of_rows),
             law(test_nvfp4.test_the_128x4_swizzle_restarts_for_each_expert, 130, 5)),
    *(Mutation(f"swizzle of whole groups of 16 rows, {N} rows", "every number of rows is swizzled",
               patched(nvfp4, "swizzle_128x4", swizzle_of_whole_warps),
               law(test_nvfp4.test_the_128x4_swizzle_restarts_for_each_expert, N, 4)) for N in (1, 15, 17, 129)),
    Mutation("zeros for some M", "every M agrees with M = 1", patched(nvfp4, "decode", zeros_for_some_rows),
             test_nvfp4.test_every_number_of_rows_agrees_with_one_row),
    Mutation("one amax for the batch", "every M agrees with M = 1", patched(nvfp4, "quantize", with_batch_amax),
             test_nvfp4.test_every_number_of_rows_agrees_with_one_row),
    Mutation("larger outer scale for both halves", "each half uses its own", after_the_kernel(largest_for_both),
             test_nvfp4.test_outer_scales_are_read_from_the_left),
    Mutation("tail of K dropped", "K is a multiple of 16", patched(nvfp4, "quantize", without_the_tail(QUANTIZE, 16)),
             refusal(test_nvfp4.test_bad_input_is_refused_by_name)),
    Mutation("NaN and infinity replaced", "non-finite input is refused", patched(nvfp4, "quantize", masked),
             refusal(test_nvfp4.test_bad_input_is_refused_by_name)),
    Mutation("MX scale without saturation", "the OCP scale", patched(mxfp8, "quantize", mx_scale_rounded_up),
             law(test_mxfp8.test_bits_of_the_oracle, "normal")),
    Mutation("MX tail of K dropped", "K is a multiple of 32",
             patched(mxfp8, "quantize", without_the_tail(MX_QUANTIZE, 32)),
             refusal(test_mxfp8.test_bad_input_is_refused_by_name)),
]  # fmt: skip
