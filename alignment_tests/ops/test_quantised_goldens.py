"""The known answers of the 4-bit and 8-bit operators, which an H200 gave too (alignment_tests/gpu)."""

import json

import pytest

from alignment_tests.goldens import digest, quantised

WANT = json.loads(quantised.FILE.read_text())


@pytest.mark.parametrize("name", quantised.CASES)
def test_known_answer(name):
    assert digest(quantised.CASES[name]("cpu")) == WANT[name]


def test_every_answer_has_a_case():
    assert set(WANT) == set(quantised.CASES)
