"""The fold of attention/2 where segments of keys were pieces of work of their own: attention_fold.cu, or Triton's."""

from torch import Tensor

from minitransformer.ops.attention import SEGMENT
from minitransformer.ops.gpu import attention_tiles, cuda, device
from minitransformer.ops.gpu.launch import next_power_of_2

SOURCE, WIDTHS = "attention_fold.cu", (64, 128)


def defines(H: int) -> tuple[tuple[str, int], ...]:
    return ("WIDTH", H), ("SEGMENT", SEGMENT)


def fold(
    parts: tuple[Tensor, Tensor, Tensor], positions: Tensor, outputs: tuple[Tensor, Tensor, Tensor]
) -> None:  # fmt: skip
    """m, l and acc of every segment, whose acc is lost -> outputs: o [T, N, H], m, l."""
    T, N, H = outputs[0].shape
    if H in WIDTHS:
        function = cuda.kernel(positions.device, SOURCE, "fold", defines(H))
        cuda.launch(function, T * N, 32, 0, (*parts, positions, *outputs, N, T * N), device.EARLY["launch_pdl"])
    else:
        attention_tiles.fold_kernel[(T * N,)](
            *parts, positions, *outputs, N, T * N, H, next_power_of_2(H), SEGMENT, 16,
            num_warps=1, **device.STRICT, **device.EARLY,
        )  # fmt: skip
