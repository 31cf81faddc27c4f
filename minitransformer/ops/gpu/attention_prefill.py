"""attention/2 for many queries: attention_prefill.cu and its launch."""

from torch import Tensor

from minitransformer.ops.attention import KEY_TILE, SEGMENT, _scale
from minitransformer.ops.gpu import cuda, device
from minitransformer.ops.gpu.launch import Window, cdiv

SOURCE = "attention_prefill.cu"
ROWS = 64  # (token, query head) pairs of a group of four warps
BOXES = {KEY_TILE: 0, 32: 7, 16: 36, 8: 132}  # keys that a load brings -> what that costs, ns a tile
SLOTS = 2  # tiles of keys, and of values, that lie in shared memory


def shared(H: int, groups: int) -> int:
    """Bytes of shared memory for head size H: the tiles, queries and what is kept a group, two items, the barriers."""
    return SLOTS * (4 * KEY_TILE * H + 32) + groups * ROWS * H * 6 + 2 * 24 + 16


def box(page_size: int) -> int:
    """How many keys that lie together one load brings; 0 if fewer than 8 do."""
    return next((n for n in BOXES if page_size % n == 0), 0)


def from_pages(together: int, tiles: int, rows: int, columns: int) -> bool:
    """Whether loads out of pages cost less than a copy of them, from times on an H200: some ns more for each of a
    program's tiles, or 3 us and 1 ns a row of 512 columns. rows: of all sequences."""
    return together > 0 and tiles * BOXES[together] < 3000 + rows * columns / 512


def defines(group: int, H: int, groups: int, keys: int = KEY_TILE) -> tuple[tuple[str, int], ...]:
    """keys: that lie together."""
    values = {"GROUP": group, "WIDTH": H, "GROUPS": groups, "KEYS": KEY_TILE, "BOX": keys}
    values |= {"SEGMENT": SEGMENT // KEY_TILE, "SLOTS": SLOTS, "SHARED": shared(H, groups)}
    return tuple(values.items())


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, bounds: Tensor, starts: Tensor | None,
    pages: tuple[Tensor, int] | None, longest: int, outputs: tuple[Tensor, Tensor, Tensor], groups: int,
) -> None:  # fmt: skip
    """Fills o, m, l. Position j of sequence s lies in row starts[s] + j of k and v or, with pages, in the row that a
    table [S, keys] names; pages: the table, and how many keys lie together, one of BOXES. bounds [S + 1] are of q."""
    (_, N, H), G, sequences = q.shape, k.shape[1], len(bounds) - 1
    key_rows, together = pages or (None, KEY_TILE)
    blocks, pairs = cdiv(longest, ROWS // (N // G) * groups), sequences * G
    function = cuda.kernel(q.device, SOURCE, "prefill", defines(N // G, H, groups, together), shared(H, groups))
    maps = Window(q, (ROWS // (N // G), N // G, 64)), *(Window(x.view(-1, G * H), (together, 64)) for x in (k, v))
    programs = min(device.multiprocessors(q.device), blocks * pairs)
    sizes = N, pairs, blocks, key_rows.shape[1] if pages else 0
    arguments = (*maps, positions, key_rows, bounds, starts, *outputs, float(_scale(H)), *sizes)
    cuda.launch(function, programs, 128 * (groups + 1), shared(H, groups), arguments)
