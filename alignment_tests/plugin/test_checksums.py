"""Checksums of tensors: what they are of, and the GPU's kernel for them, compiled for the CPU."""

import hashlib
import shutil

import pytest
import torch

from minitransformer.plugins.sglang.checksums import PIECE, checksum

SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 17)


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", SIZES)
def test_is_the_sha256_of_the_pieces(n):
    bits = noise(n)
    data = bits.numpy().tobytes()
    pieces = [hashlib.sha256(data[i : i + PIECE]).digest() for i in range(0, n, PIECE)]
    assert checksum(bits) == hashlib.sha256(f"torch.uint8 [{n}] ".encode() + b"".join(pieces)).hexdigest()


def test_every_byte_the_type_and_the_shape_count():
    bits = noise(2 * PIECE + 64)
    seen = {checksum(bits), checksum(bits.view(2, -1)), checksum(bits.view(torch.bfloat16)), checksum(bits.flip(0))}
    for at in (0, PIECE - 1, PIECE, 2 * PIECE, 2 * PIECE + 63):
        bits[at] ^= 1
        seen.add(checksum(bits))
        bits[at] ^= 1
    swapped = torch.cat([bits[PIECE : 2 * PIECE], bits[:PIECE], bits[2 * PIECE :]])
    assert len(seen | {checksum(swapped)}) == 10
    assert checksum(bits.view(-1, 8).t()) == checksum(bits.view(-1, 8).t().contiguous())


def digests(bits: torch.Tensor, piece: int, text: str | None = None) -> torch.Tensor:
    """As gpu.sha256.digests, by the kernel's own text on the CPU."""
    from alignment_tests.gpu import cuda_host
    from minitransformer.ops.gpu import sha256

    pieces, text = len(bits) // piece, text or cuda_host.source(sha256.SOURCE)
    out = torch.zeros(pieces, 32, dtype=torch.uint8)
    how, blocks = sha256.defines(piece), -(-pieces // sha256.THREADS)
    cuda_host.run(text, "digests", how, blocks, sha256.THREADS, bits, out, pieces)
    return out


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the kernel with")
def test_the_kernel_is_hashlib(monkeypatch):
    """For more pieces than a block has threads. A wrong turn in its text is seen."""
    pytest.importorskip("triton", reason="Triton is not installed: the modules of the kernels do not import")
    from alignment_tests.gpu import cuda_host
    from minitransformer.ops.gpu import sha256

    for piece, pieces in ((64, 150), (PIECE, 3)):
        bits = noise(piece * pieces, 1)
        want = [hashlib.sha256(bits[i * piece : (i + 1) * piece].numpy()).digest() for i in range(pieces)]
        assert [bytes(row.tolist()) for row in digests(bits, piece)] == want
    wrong = cuda_host.faulty(cuda_host.source(sha256.SOURCE), "turned(e, 11)", "turned(e, 12)")
    assert not torch.equal(digests(noise(64), 64, wrong), digests(noise(64), 64))
