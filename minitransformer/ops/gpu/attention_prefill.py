"""attention/2 for many queries: attention_prefill.cu and its launch."""

from torch import Tensor

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import Window, cdiv

SOURCE = "attention_prefill.cu"
ROWS = 64  # (token, query head) pairs of a group of four warps
SLOTS = 2  # tiles of keys, and of values, that lie in shared memory


def shared(H: int, groups: int) -> int:
    """Bytes of shared memory for head size H: the tiles, queries and what is kept a group, two items, the barriers."""
    return SLOTS * (4 * KEY_TILE * H + 32) + groups * ROWS * H * 6 + 2 * 24


def defines(group: int, H: int, groups: int) -> tuple[tuple[str, int], ...]:
    values = {"GROUP": group, "WIDTH": H, "GROUPS": groups, "KEYS": KEY_TILE}
    values |= {"SEGMENT": SEGMENT // KEY_TILE, "SLOTS": SLOTS, "SHARED": shared(H, groups)}
    return tuple(values.items())


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor, longest: int,
    outputs: tuple[Tensor, Tensor, Tensor], groups: int,
) -> None:  # fmt: skip
    """Fills o, m, l. Position j of sequence s lies in row starts[s] + j of k and v; bounds [S + 1] are those of q."""
    (_, N, H), G, sequences = q.shape, k.shape[1], len(bounds) - 1
    blocks, pairs = cdiv(longest, ROWS // (N // G) * groups), sequences * G
    function = cuda.kernel(q.device, SOURCE, "prefill", defines(N // G, H, groups), shared(H, groups))
    maps = (Window(x.view(-1, G * H), (KEY_TILE, 64)) for x in (k, v))
    programs = min(device.multiprocessors(q.device), blocks * pairs)
    arguments = (*maps, q, positions, bounds, starts, *outputs, float(_scale(H)), N, pairs, blocks)
    cuda.launch(function, programs, 128 * (groups + 1), shared(H, groups), arguments)
