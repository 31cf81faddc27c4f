"""attention/2 for many queries: attention_prefill.cu and its launch."""

from torch import Tensor

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import Window, cdiv

SOURCE = "attention_prefill.cu"
ROWS, THREADS, STAGES = 64, 384, 4  # (token, query head) pairs of a group of warps, of which a block has two


def shared(H: int) -> int:
    """Bytes of shared memory for head size H: the ring of tiles, what two groups keep, two items and the barriers."""
    return STAGES * (4 * KEY_TILE * H + 16) + 8 * ROWS * H + 2 * 24


def defines(group: int, H: int, early: int) -> tuple[tuple[str, int], ...]:
    values = {"GROUP": group, "WIDTH": H, "EARLY": early, "KEYS": KEY_TILE}
    values |= {"SEGMENT": SEGMENT // KEY_TILE, "STAGES": STAGES, "SHARED": shared(H)}
    return tuple(values.items())


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor, longest: int,
    outputs: tuple[Tensor, Tensor, Tensor], early: int,
) -> None:  # fmt: skip
    """Fills o, m, l. Position j of sequence s lies in row starts[s] + j of k and v; bounds [S + 1] are those of q."""
    (_, N, H), G, sequences = q.shape, k.shape[1], len(bounds) - 1
    blocks, pairs = cdiv(longest, ROWS // (N // G) * 2), sequences * G
    function = cuda.kernel(q.device, SOURCE, "prefill", defines(N // G, H, early), shared(H))
    maps = (Window(x.view(-1, G * H), (KEY_TILE, 64)) for x in (k, v))
    programs = min(device.multiprocessors(q.device), blocks * pairs)
    arguments = (*maps, q, positions, bounds, starts, *outputs, float(_scale(H)), N, pairs, blocks)
    cuda.launch(function, programs, THREADS, shared(H), arguments)
