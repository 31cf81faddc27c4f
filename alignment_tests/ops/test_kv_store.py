"""kv_store: rows land where they should, nothing else moves, lost writes are refused."""

import pytest
import torch

from alignment_tests import inputs
from alignment_tests.bits import assert_bits_equal
from minitransformer.ops.kv_store import store

G, H, R = 3, 8, 40


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.full((R, G, H), float("nan"), dtype=torch.bfloat16) for _ in range(2))


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_land_and_the_rest_stays(threads):
    k, v = inputs.bf16(1, 30, G, H), inputs.bf16(2, 30, G, H)
    rows = inputs.integers(3, 1 << 30, R).argsort()[:30]
    k_cache, v_cache = caches()
    torch.set_num_threads(threads)
    store(k, v, k_cache, v_cache, rows)
    torch.set_num_threads(1)
    assert_bits_equal(k_cache[rows], k, "k")
    assert_bits_equal(v_cache[rows], v, "v")
    untouched = torch.ones(R, dtype=torch.bool).index_fill_(0, rows, False)
    assert k_cache[untouched].isnan().all() and v_cache[untouched].isnan().all()


def test_views_of_a_fused_product_are_stored_whole():
    qkv = inputs.bf16(4, 5, 4 * G, H)
    k_cache, v_cache = caches()
    store(qkv[:, 2 * G : 3 * G], qkv[:, 3 * G :], k_cache, v_cache, torch.arange(5))
    assert_bits_equal(k_cache[:5], qkv[:, 2 * G : 3 * G], "k")
    assert_bits_equal(v_cache[:5], qkv[:, 3 * G :], "v")


def test_no_gradient_is_recorded():
    k = inputs.bf16(5, 2, G, H).requires_grad_()
    k_cache, v_cache = caches()
    store(k, k, k_cache, v_cache, torch.arange(2))
    assert not k_cache.requires_grad


@pytest.mark.parametrize(("rows", "message"), [([0, R], "outside"), ([-1, 0], "outside"), ([7, 7], "same row")])
def test_bad_rows_are_refused(rows, message):
    k = inputs.bf16(6, 2, G, H)
    with pytest.raises(ValueError, match=message):
        store(k, k, *caches(), torch.tensor(rows))


def test_layouts_shapes_and_dtypes_are_refused():
    k, rows = inputs.bf16(7, 2, G, H), torch.arange(2)
    k_cache, v_cache = caches()
    with pytest.raises(ValueError, match="contiguous"):
        store(k, k, torch.zeros(G, R, H, dtype=torch.bfloat16).transpose(0, 1), v_cache, rows)
    with pytest.raises(ValueError, match="do not take"):
        store(k, k, k_cache[:, :2], v_cache, rows)
    with pytest.raises(ValueError, match="store_rows"):
        store(k, k, k_cache, v_cache, torch.arange(3))
    with pytest.raises(TypeError, match="BF16"):
        store(k, k, k_cache.float(), v_cache, rows)
