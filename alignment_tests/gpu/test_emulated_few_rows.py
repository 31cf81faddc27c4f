"""few_rows.cu's own text on a CPU: the bits of linear, and faults in its text that are seen."""

import shutil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no schedules to read")
if shutil.which("g++") is None:
    pytest.skip("no g++ to compile the emulation with", allow_module_level=True)

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from alignment_tests.gpu import cuda_host
from minitransformer.ops import linear
from minitransformer.ops.gpu import few_rows
from minitransformer.ops.gpu.tiles import Tile

CALLS = {
    "mbarrier.init": "barrier_at(barriers + 8 * c) = SENDER;",
    "mbarrier.arrive.expect_tx": "barrier_at(barrier) += bytes - SENDER;",
    "{.reg .pred p; mbarrier.try_wait": "done = arrived(barrier);",
    "fence.proxy.async": ";",
    "cp.async.bulk": "copied(to, from, bytes, barrier);",
    "ldmatrix": "v = load_matrices(at);",
    "mma.sync.aligned.m16n8k16": "mma_m16n8k16(acc, &a[j].x, {first, second});",
    "cvt.rn.bf16": "bits = nearest_bf16(value);",
}
ENTRY = """
extern "C" void run(int blocks, int threads, int shared, const u16 *x, const u16 *w, void *y, int M, int N, int K) {
    launch(blocks, threads, shared, [=] { few_rows(x, w, y, M, N, K); });
}
"""
TILES = (Tile(8, 16, 256, 3, 1, whole=True), Tile(8, 16, 1024, 3, 1, whole=True))


def product(x, w, tile: Tile, out_dtype, text: str) -> torch.Tensor:
    (M, K), N = x.shape, w.shape[0]
    y = torch.full((M, N), torch.nan, dtype=out_dtype)
    host = cuda_host.translated(text, CALLS, ENTRY)
    run = cuda_host.compiled(host, few_rows.defines(tile, out_dtype == torch.float32)).run
    blocks = -(-N // 16) * -(-M // tile.m)
    run(blocks, 32 * tile.warps, few_rows.shared(tile, M, K), *map(cuda_host.pointer, (x, w, y)), M, N, K)
    return y


def check(tile, M, N, K, out_dtype=torch.bfloat16, text=None) -> None:
    x, w = inputs.bf16(1, M, K), inputs.bf16(2, N, K)
    got = product(x, w, tile, out_dtype, text or cuda_host.source(few_rows.SOURCE))
    assert_bits_equal(got, linear.forward(x, w, out_dtype), f"{tile}, {M} x {N} x {K}")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_has_the_bits_of_the_spec(tile):
    """Ragged rows and columns; a last chunk that is not full, with steps left over by the groups of 16."""
    for M, N, K in ((1, 20, 576), (8, 16, 48), (11, 8, 272), (17, 24, 528)):
        check(tile, M, N, K)
    check(tile, 3, 16, 288, torch.float32)


FAULTS = {
    "a step of the weight with another step of x": ("load_blocks(low + 32 * i)", "load_blocks(low + 32 * (i ^ 1))"),
    "the weight's blocks in another order": ("(lane >> 4) * 16;", "(lane >> 3 & 1) * 16;"),
    "the second step of a pair takes the first's x": ("j % 2 ? b[j / 2].w : b[j / 2].y", "b[j / 2].y"),
    "a row of x taken for its neighbour": ("min(lane & 7,", "min(lane & 6,"),
    "the last steps left out": ("for (; left > 0; left--", "for (; left > 1; left--"),
}  # fmt: skip


@pytest.mark.slow  # a compilation each
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    text = cuda_host.faulty(cuda_host.source(few_rows.SOURCE), *FAULTS[fault])
    with pytest.raises(AssertionError, match="differ"):
        check(TILES[0], 8, 16, 304, text=text)
