"""Each fault in checkpoint_mutations.py is caught by the test of its law."""

import pytest

pytest.importorskip("transformers", reason="needs transformers, the independent oracle")

from alignment_tests.mutations import Mutation, assert_caught
from alignment_tests.mutations.checkpoint_mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_is_caught(mutation: Mutation):
    assert_caught(mutation)
