"""Every fault of the NVFP4 and MXFP8 quantisers is caught by its law."""

import pytest

from alignment_tests.mutations import Mutation, assert_caught
from alignment_tests.mutations.nvfp4_mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_is_caught(mutation: Mutation):
    assert_caught(mutation)


def test_names_are_unique():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
