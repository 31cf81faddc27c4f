"""The products' gradients have the committed hashes, which the kernels gave on an H200 too."""

import json

import pytest

from alignment_tests.goldens import digest, gradients

WANT = json.loads(gradients.FILE.read_text())


@pytest.mark.parametrize("name", gradients.CASES)
def test_known_answer(name):
    assert digest(gradients.CASES[name]("cpu")) == WANT[name]


def test_every_case_has_a_hash():
    assert set(WANT) == set(gradients.CASES)
