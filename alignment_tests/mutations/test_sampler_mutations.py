"""Each fault in sampler_mutations.py and failure_mutations.py is caught by the test of its law."""

import pytest

from alignment_tests.mutations import Mutation, assert_caught, failure_mutations, sampler_mutations

MUTATIONS = sampler_mutations.MUTATIONS + failure_mutations.MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert_caught(mutation)


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
