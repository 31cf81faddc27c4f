"""The law of the GPU for packed 4-bit weights and products with them, in every form and schedule."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.gpu.test_agrees import COUNTS, plan_of
from alignment_tests.gpu.test_quantised_agrees import quiet_blocks
from alignment_tests.gpu.values import BF16, VALUES, agree
from minitransformer.ops import gpu, mxfp8, nvfp4
from minitransformer.ops import quantised_linear as op

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing to compare with the CPU"),
]
FP32 = torch.float32


def weights(seed: int, E: int, N: int, K: int) -> nvfp4.Nvfp4:
    """Every code with every scale that a quantiser gives, an outer scale a row."""
    codes = inputs.integers(seed, 256, E, N, K // 2).to(torch.uint8)
    scales = inputs.integers(seed + 1, 0x7F, E, N, K // 16).to(torch.uint8)
    return nvfp4.Nvfp4(codes, scales, inputs.normal(seed + 2, E, N).abs() + 0.01)


@pytest.mark.parametrize(("N", "K"), [(1, 16), (40, 96), (192, 576), (128, 2048)])
def test_pack(N, K):
    q = weights(5, 3, N, K)
    packed = gpu.pack.pack(nvfp4.Nvfp4(q.codes.cuda(), q.scales.cuda(), q.outer.cuda()))
    agree([packed], [gpu.pack.pack(q)], "packed")


def activations(kind: str, R: int, K: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if kind == "nvfp4":
        q = weights(8, 1, R, K)
        return nvfp4.decode(q)[0], q.outer[0]
    if kind == "mxfp8":
        return mxfp8.decode(mxfp8.quantize(quiet_blocks(9, R, K))), None
    return VALUES[kind](9, R, K), None


def packed_schedules(K: int) -> list[tuple]:
    """(product, schedule) of every way to multiply by a packed weight."""
    forms = gpu.quantised_linear
    few = [(forms.packed_product, schedule) for schedule in forms.PACKED_CANDIDATES if schedule.fits(K)]
    return [*few, *((forms.many_product, tile) for tile in gpu.many_rows.CANDIDATES)]


ACTIVATIONS = ["nvfp4", "mxfp8", "normal", "wide", "tiny", "special"]


@pytest.mark.parametrize(
    ("N", "K", "counts", "kind"),
    [(192, 576, counts, kind) for counts in COUNTS for kind in ACTIVATIONS]
    + [(72, 768, "uneven", "nvfp4"), (30, 96, "uneven", "nvfp4"), (30, 96, "empty first and last", "wide")],
)
def test_quantised_linear(N, K, counts, kind):
    """Packed and decoded, FP32 and BF16 out, by the choice of schedule and by every schedule."""
    counts = COUNTS[counts]
    plan = plan_of(counts, 2 if sum(counts) % 2 == 0 else 1, seed=5)
    (x, scale), q = activations(kind, sum(counts), K), weights(6, len(counts), N, K)
    decoded, on = nvfp4.decode(q), plan.to("cuda")
    packed, outer = gpu.pack.pack(q).cuda(), q.outer.cuda()
    on_gpu = x.cuda(), None if scale is None else scale.cuda()
    for out_dtype in (FP32, BF16):
        want = op.forward(x, scale, decoded, q.outer, plan, out_dtype)
        for weight in (packed, decoded.cuda()):
            agree([op.forward(*on_gpu, weight, outer, on, out_dtype)], [want], f"{out_dtype} {weight.dtype}")
        if counts != COUNTS["uneven"] or N == 30 or kind not in ("nvfp4", "wide"):  # a compilation each
            continue
        for tile in {gpu.grouped_linear.choose(4 * average, 4, N) for average in (1, 16, 64, 512)}:
            got = gpu.quantised_linear.many_product(*on_gpu, decoded.cuda(), outer, on, out_dtype, tile)
            agree([got], [want], f"{out_dtype} {tile}")
        for product, schedule in packed_schedules(K):
            agree([product(*on_gpu, packed, outer, on, out_dtype, schedule)], [want], f"{out_dtype} {schedule}")


@pytest.mark.parametrize("kind", ["nvfp4", "wide"])
def test_every_width_of_the_instruction(kind):
    """Experts of 1 to 270 rows, each 8 more than the one before: an instruction as wide as they need, and two tiles."""
    counts, N, K = list(range(1, 271, 8)), 72, 96
    plan, q = plan_of(counts, 1, seed=5), weights(6, len(counts), N, K)
    (x, scale), packed = activations(kind, sum(counts), K), gpu.pack.pack(q).cuda()
    want = op.forward(x, scale, nvfp4.decode(q), q.outer, plan, BF16)
    on_gpu = x.cuda(), None if scale is None else scale.cuda(), packed, q.outer.cuda(), plan.to("cuda"), BF16
    for schedule in gpu.many_rows.CANDIDATES:
        agree([gpu.quantised_linear.many_product(*on_gpu, schedule)], [want], f"{schedule}")


def test_millions_of_outputs():
    """A regrouped K moves 8 of 200,000 outputs; FC1 of 30B's widths, wide scales, packed against decoded."""
    E, N, K, T = 32, 1536, 2048, 96
    q, plan = weights(10, E, N, K), plan_of([T] * E, 8, seed=11).to("cuda")
    packed, outer = gpu.pack.pack(q).cuda(), q.outer.cuda()
    x, scale = activations("nvfp4", T * E, K)
    x, scale = x.cuda(), scale.cuda()
    w = nvfp4.decode(q).cuda()
    want = gpu.quantised_linear.many_product(x, scale, w, outer, plan, FP32, gpu.grouped_linear.choose(T * E, E, N))
    for product, schedule in packed_schedules(K):
        got = product(x, scale, packed, outer, plan, FP32, schedule)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32)), schedule
    rows = torch.arange(0, T * E, T)
    small = plan_of([1] * E, 1, seed=11)
    small = type(small)(torch.arange(E), torch.arange(E)[:, None], torch.arange(E + 1))
    want_rows = op.forward(x.cpu()[rows], scale.cpu()[rows], w.cpu(), q.outer, small, FP32)
    agree([want[rows.cuda()]], [want_rows], "decoded against the CPU")
