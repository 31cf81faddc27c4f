"""attention/2 for few queries and many keys: attention_warp.cu and its launch."""

from torch import Tensor

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import cuda, device

SOURCE = "attention_warp.cu"
ROWS = 16  # (token, query head) pairs of a piece of work
EARLY = 2  # half tiles of keys, and of values, that each of the first blocks brings to the L2 cache early
MEMORY, BLOCK = 228 << 10, 1 << 10  # bytes of shared memory of a multiprocessor; what a block takes beside its own


def defines(longest: int, group: int, H: int, slots: int) -> tuple[tuple[str, int], ...]:
    values = {"GROUP": group, "WIDTH": H, "KEYS": KEY_TILE, "SEGMENT": SEGMENT, "SLOTS": slots, "EARLY": EARLY}
    return tuple((values | {"ROWS": 8 if longest * group <= 8 else ROWS}).items())


def shared(H: int, slots: int) -> int:
    """Bytes of shared memory: half tiles."""
    return slots * KEY_TILE * H


def resident(H: int, slots: int) -> int:
    """Blocks that a multiprocessor runs at once."""
    return MEMORY // (shared(H, slots) + BLOCK)


def launch(
    slots: int, longest: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_rows: Tensor, bounds: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor, Tensor | None], segments: int, together: int,
) -> None:  # fmt: skip
    """Fills outputs: o, m, l if segments is 1, else m, l and acc of each that has keys. together: so many keys lie in
    neighbouring rows, a power of two that divides KEY_TILE."""
    (T, N, H), G, (sequences, max_keys) = q.shape, k.shape[1], key_rows.shape
    q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (q, k, v))  # they are copied by 16 bytes
    size = shared(H, slots)
    function = cuda.kernel(q.device, SOURCE, "alone", defines(longest, N // G, H, slots), size)
    bounds = None if longest == 1 and T == sequences else bounds  # sequence s is token s
    pieces = G * sequences * segments
    fetching = min(pieces, device.multiprocessors(q.device) * resident(H, slots))  # those that begin at once
    sizes = N, max_keys, T * N, sequences, segments, k.shape[0], together - 1, fetching
    arguments = q, k, v, positions, key_rows, bounds, *outputs, float(_scale(H)), *sizes
    cuda.launch(function, pieces, 32, size, arguments, device.EARLY["launch_pdl"])
