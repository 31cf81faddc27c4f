"""attention/2 for few queries and few keys: attention_cluster.cu and its launch."""

from torch import Tensor

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import cuda, device

SOURCE, THREADS = "attention_cluster.cu", 128
ROWS, COLUMNS = 16, 16  # (token, query head) pairs of a piece of work; least columns of the values of a block
# Pieces of work (sequences times key/value heads, a segment each): with more, one a block is faster.
FEW, FEWER = 16, 8  # with more than the latter, by four blocks each


def defines(longest: int, group: int, H: int, blocks: int) -> tuple[tuple[str, int], ...]:
    values = {"GROUP": group, "WIDTH": H, "KEYS": KEY_TILE, "SEGMENT": SEGMENT, "CLUSTER": blocks}
    values |= {"ROWS": 8 if longest * group <= 8 else ROWS, "SHARED": shared(H, blocks)}
    return tuple(values.items())


def shared(H: int, blocks: int) -> int:
    """Bytes of shared memory: a share of the keys and values, two numbers a tile and row, two barriers."""
    return 4 * SEGMENT * H // blocks + 8 * SEGMENT // KEY_TILE * ROWS + 16


def blocks_for(H: int, pieces: int) -> int:
    """That share each of so many pieces, from times on an H200."""
    return min(H // COLUMNS, 8 if pieces <= FEWER else 4)


def fits(longest: int, group: int, H: int, blocks: int) -> bool:
    return longest * group <= ROWS and H in (64, 128) and blocks in (4, 8) and blocks <= H // COLUMNS


def launch(
    blocks: int, longest: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_rows: Tensor, bounds: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor | None], segments: int,
) -> None:  # fmt: skip
    """Fills outputs: o, m, l if segments is 1, else m, l and acc of each that has keys. blocks: of a cluster."""
    (T, N, H), G, (sequences, max_keys) = q.shape, k.shape[1], key_rows.shape
    q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v))  # keys are copied by 16 bytes
    size = shared(H, blocks)
    function = cuda.kernel(q.device, SOURCE, "together", defines(longest, N // G, H, blocks), size)
    sizes = N, max_keys, T * N, sequences, segments
    bounds = None if longest == 1 and T == sequences else bounds  # sequence s is token s
    arguments = q, k, v, positions, key_rows, bounds, *outputs, float(_scale(H)), *sizes
    clusters = min(G * sequences * segments, device.multiprocessors(q.device) * 3 // blocks)  # as many as run at once
    cuda.launch(function, clusters * blocks, THREADS, size, arguments, device.EARLY["launch_pdl"])
