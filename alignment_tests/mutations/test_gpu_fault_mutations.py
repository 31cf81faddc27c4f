"""Each fault in gpu_fault_mutations.py is caught by the test of its law."""

import pytest

from alignment_tests.mutations import Mutation, assert_caught
from alignment_tests.mutations.gpu_fault_mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_is_caught(mutation: Mutation):
    assert_caught(mutation)
