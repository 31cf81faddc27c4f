"""Each fault in update_mutations.py is caught by the test of its law."""

import pytest

from alignment_tests.mutations import assert_caught
from alignment_tests.mutations.update_mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_caught(mutation):
    assert_caught(mutation)


def test_names_are_unique():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
