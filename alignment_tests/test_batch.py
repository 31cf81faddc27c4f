"""What one forward pass computes: the fields of a packed and of a paged batch, by hand."""

import pytest

from minitransformer.batch import Batch
from minitransformer.errors import InputError


def fields(batch: Batch) -> dict:
    names = ("ids_T", "positions_T", "key_rows_SL", "store_rows_T")
    return {name: getattr(batch, name).tolist() for name in names} | {
        "cu_seqlens": batch.cu_seqlens,
        "kv_lens": batch.kv_lens,
        "num_store_rows": batch.num_store_rows,
        "request_ids": batch.request_ids,
    }


def test_a_paged_batch():
    """Pages of 3 rows: two tokens that continue a sequence over a page's end, and a new one whose table is longer."""
    batch = Batch.paged([[5, 6], [7]], [2, 0], [[3, 1], [2, 9, 9]], 3, logit_rows=[1], request_ids=[8, 4])
    assert fields(batch) == {
        "ids_T": [5, 6, 7],
        "positions_T": [2, 3, 0],
        "key_rows_SL": [[9, 10, 11, 3], [6, -1, -1, -1]],
        "store_rows_T": [11, 3, 6],
        "cu_seqlens": (0, 2, 3),
        "kv_lens": (4, 1),
        "num_store_rows": 12,
        "request_ids": (8, 4),
    }
    assert batch.logit_rows_L.tolist() == [1]


def test_a_packed_batch_is_its_own_store():
    batch = Batch.packed([[5, 6, 7], [8]])
    assert fields(batch) == {
        "ids_T": [5, 6, 7, 8],
        "positions_T": [0, 1, 2, 0],
        "key_rows_SL": [[0, 1, 2], [3, -1, -1]],
        "store_rows_T": [0, 1, 2, 3],
        "cu_seqlens": (0, 3, 4),
        "kv_lens": (3, 1),
        "num_store_rows": 4,
        "request_ids": (0, 1),
    }
    assert batch.logit_rows_L is None


def test_what_is_no_batch_is_refused():
    for sequences in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one"):
            Batch.packed(sequences)
    with pytest.raises(InputError, match="1 request ids for 2 sequences"):
        Batch.packed([[1], [2]], [0])
