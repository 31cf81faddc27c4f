"""Each fault in alignment_mutations.py is caught by the test of its law."""

import pytest

from alignment_tests.mutations import assert_caught
from alignment_tests.mutations.alignment_mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_caught(mutation):
    assert_caught(mutation)
