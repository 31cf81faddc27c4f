"""Each fault of a row-wise operator is caught by the test of its law."""

import pytest

from alignment_tests.mutations import assert_caught
from alignment_tests.mutations.row_op_mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_is_caught(mutation):
    assert_caught(mutation)
