"""The row-wise operators' kernels as compile_all.py wants them: types and constants of launches at real widths."""

from collections.abc import Iterator

from minitransformer.ops.attention import KEY_TILE
from minitransformer.ops.gpu import (
    adamw,
    attention_pages,
    copy,
    device,
    dispatch,
    embedding,
    logprob,
    mxfp8,
    nvfp4,
    qkv,
    quantised_linear,
    rms_norm,
    rope,
    router,
    sample,
    schedule,
    swiglu,
)
from minitransformer.ops.gpu.launch import next_power_of_2

FOUND = {name: device.slot(name) for name in device.FAULTS}


def _norms() -> Iterator[tuple]:
    for D in (64, 128, 192, 576, 768, 2048):
        for residual in (False, True):
            name = f"rms_norm {D}{' residual' if residual else ''}"
            for T in (16, 1024, 1 << 17):
                *how, warps = rms_norm.schedule_of(T, D, residual)
                types, constants = ("*bf16",) * 5 + ("fp32", "i32!"), (D, how[0], residual, how[1])
                yield f"{name} of {T}", rms_norm.forward_kernel, types, constants, warps
            types, constants = ("*bf16",) * 6 + ("*fp32", "fp32", "i32!"), (D, rms_norm.rows_of(1 << 14, 512), residual)
            yield f"{name} dx", rms_norm.dx_kernel, types, constants
        yield f"rms_norm {D} dw", rms_norm.dw_kernel, ("*fp32", "*bf16"), (D, 16)
    for heads, head in ((32, 128), (9, 64)):
        types = ("*bf16", "*bf16", "*bf16", "*i64", "*fp32", "*i64", "*bf16", "*bf16", "*bf16", "*i32", "fp32")
        constants = (heads, 3, head // 2, 1024 // head, FOUND["rope"], FOUND["kv_store"])
        yield f"qkv {head}", qkv.qkv_kernel, (*types, "i32!", "i32!", "i32!"), constants
        types = ("*bf16", "*i64", "*fp32", "*bf16", "*i32", "fp32", "i32!", "i32!")
        yield f"rope {head}", rope.rope_kernel, types, (heads, head // 2, head // 2, 4096 // head, FOUND["rope"])


def _routing() -> Iterator[tuple]:
    for E, K in ((128, 8), (8, 2), (256, 8)):
        for norm in (True, False):
            types = ("*bf16", "*fp32", "*i64", "*i32", "i32!")
            yield f"router {E} {norm}", router.router_kernel, types, (E, K, norm, E, K, 4, FOUND["router"])
            types = ("*fp32", "*bf16", "*fp32", "*i64", "*bf16", "i32!")
            yield f"router {E} {norm} backward", router.backward_kernel, types, (E, K, norm, 4)
    types = (*("*bf16",) * 4, "*i64", "*i32", "*i64", "*i32", "i32!", "i32")
    yield "gather", attention_pages.gather_kernel, types, (KEY_TILE, 256), 8
    yield "plan count", dispatch.count_kernel, ("*i64", "*i32", "i32!", "i32!"), (1024, 128)
    types = ("*i64", "*i32", "*i64", "*i64", "*i64", "*i32", "i32!", "i32!", "i32!")
    for block in (256, 1024):
        yield f"plan {block}", dispatch.place_kernel, types, (8, block, 128, FOUND["dispatch.plan"])
    types = ("*i64", "*i64", "*i64", "*i64", "*i32", "i32!", "i32!")
    for block in (128, 1024):
        yield f"plan of few {block}", dispatch.few_kernel, types, (8, block, FOUND["dispatch.plan"])
    for D in (576, 2048):
        rows, columns = copy.tile(D)
        for weighted in (False, True):
            types, constants = ("*bf16", "*i64", "*fp32", "*bf16", "i32!"), (D, 8, weighted, rows // 2, columns)
            yield f"{'combine_weighted' if weighted else 'combine'} {D}", dispatch.combine_kernel, types, constants
        types = ("*bf16", "*bf16", "*i64", "*fp32", "*bf16", "*fp32", "i32!")
        yield f"combine_weighted {D} backward", dispatch.weigh_backward_kernel, types, (D, 8, 4)
        types = ("*bf16", "*i64", "*bf16", "*i32", "i32!", "i32!")
        for scatter in (False, True):
            constants = (D, scatter, rows, columns, FOUND["kv_store" if scatter else "embedding"])
            yield f"copy {D} {scatter}", copy.copy_kernel, types, constants
        types = ("*bf16", "*i64", "*bf16", "*fp32", "i32!")
        for amax in (False, True):
            wide = min(4096, next_power_of_2(D)) if amax else columns
            yield f"spread {D} {amax}", dispatch.spread_kernel, types, (D, 8, amax, max(1, 1024 // wide), wide, 8)
        types = ("*bf16", "*i64", "*i64", "*bf16", "i32!", "i32!")
        yield f"embedding {D} backward", embedding.backward_kernel, types, (D, 512)


def _rest() -> Iterator[tuple]:
    yield "schedule", schedule.schedule_kernel, ("*i64", "*i32", "i32!", "i32!"), (128, 8, 128)
    for rows in (2, 8):
        yield f"swiglu {rows}", swiglu.swiglu_kernel, ("*bf16", "*bf16", "i32!", "i32"), (rows, 256)
    types = ("*fp32", "*bf16", "*fp32", "i32!", "i32")
    for rows, columns, warps in ((1, swiglu.WHOLE, 16), (1, swiglu.WHOLE, 8), (4, swiglu.COLUMNS, 4)):
        yield f"swiglu amax {rows} of {warps} warps", swiglu.amax_kernel, types, (rows, columns), warps
    for kind in ("*bf16", "*fp32"):
        yield f"swiglu {kind} backward", swiglu.backward_kernel, ("*bf16", kind, "*bf16", "i32!", "i32"), (8, 256)
    yield "logprob max", logprob.max_kernel, ("*fp32", "*fp32", "i32!"), (logprob.BLOCK, logprob.WIDE)
    types = ("*fp32", "*i64", "*fp32", "*fp32", "*fp32", "*fp32", "*i32", "i32!", "i32!")
    for slot in (FOUND["logprob"], -1):
        yield f"logprob sum {slot}", logprob.sum_kernel, types, (256, logprob.UNROLL, slot)
    for out in ("*fp32", "*bf16"):
        types = ("*fp32", "*fp32", "*i64", "*fp32", "*fp32", out, "i32", "i32")
        yield f"logprob backward to {out}", logprob.backward_kernel, types, (1024,)
    types = ("*fp32", "*i64", "*i64", "*fp32", "*i64", "*fp64", "*i32", "*fp32", "i32!")
    for cut, block in ((False, 1024), (True, 1024), (False, 8192)):  # few rows, many
        yield f"sample best {cut} {block}", sample.best_kernel, types, (block, cut, sample.WIDE)
    types = ("*fp64", "*i32", "*fp32", "*fp32", "*i64", "*i32", "i32!")
    for slot in (FOUND["sample"], -1):
        yield f"sample pick {slot}", sample.pick_kernel, types, (256, slot)
    for has_grad in (True, False):
        types = "*bf16", *("*fp32",) * 4, "i32", *("fp32",) * 9
        yield f"adamw {has_grad}", adamw.adamw_kernel, types, (has_grad, adamw.BLOCK)
    yield "adamw ragged", adamw.adamw_kernel, (*types[:5], "i32!", *types[6:]), (True, adamw.BLOCK)
    yield "sample keys", sample.keys_kernel, ("*fp32", "*fp32", "*fp32", "*i64", "*i64", "i32!"), (sample.BLOCK,)


def _quantised() -> Iterator[tuple]:
    for K in (576, 768, 2048):
        for kind in ("*bf16", "*fp32"):
            for decode in (False, True):
                name = f"{K} {kind}{' decoded' if decode else ''}"
                slots, rows = (8, 512) if decode else (0, 1 << 14)
                types = (kind, "*i64", "*u8", "*u8", "*bf16", "*i32", "i32!")
                constants = (K, *mxfp8.tile(K, rows), slots, decode, FOUND["mxfp8.quantize"])
                yield f"mxfp8 {name}", mxfp8.quantize_kernel, types, constants
    yield "mxfp8 round rows", mxfp8.round_rows_kernel, ("*bf16", "*bf16", "i32!", "i32"), (1, 2048)
    types = ("*bf16", "*bf16", "*i64", "i32!", "i32")
    yield "mxfp8 round columns", mxfp8.round_columns_kernel, types, (128, 128)
    yield "nvfp4 decode", nvfp4.decode_kernel, ("*u8", "*u8", "*bf16", "i32!"), (256,)
    yield "mxfp8 decode", mxfp8.decode_kernel, ("*u8", "*u8", "*bf16", "i32!"), (128,)
    for kind in ("*bf16", "*fp32"):
        yield f"nvfp4 {kind} amax", nvfp4.amax_kernel, (kind, "*fp32", "i32!", "i32"), (4, 512)
    types = ("*fp32", "*i64", "*i32", "i32!")
    yield "refuse", quantised_linear.refuse_kernel, types, (8, FOUND["experts.down"])


def rows() -> Iterator[tuple]:
    """(name, kernel, types, constants)."""
    yield from _norms()
    yield from _routing()
    yield from _rest()
    yield from _quantised()
