"""The checksums of `sync` on an H200: its kernel gives hashlib's, wherever a tensor begins and ends."""

import pytest
import torch

from alignment_tests.plugin.test_checksums import SIZES, noise
from minitransformer.plugins.sglang.checksums import checksum, hashed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("n", [*SIZES, 1 << 24])
def test_a_gpu_gives_the_cpus(n):
    bits = noise(n + 8, n)
    there = bits.cuda()
    for first in (0, 1, 8):
        assert checksum(there[first : first + n]) == checksum(bits[first : first + n])


def test_many_tensors_at_once():
    many = {str(i): noise(i * 9999, i) for i in range(40)}
    assert hashed({name: t.cuda() for name, t in many.items()}) == hashed(many)
