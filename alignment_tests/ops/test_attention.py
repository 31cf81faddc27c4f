"""attention: the H200's known answer, one definition for packed and paged keys, and its gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment_tests.bits import assert_bits_equal
from minitransformer.batch import Batch
from minitransformer.ops import attention as module
from minitransformer.ops.attention import attention
from minitransformer.ops.mma import chain_bits
from minitransformer.ops.rounding import ex2_table, exp2_hw, f32_to_bf16, quad_sum

GOLDENS = Path(__file__).parents[1] / "goldens"
SEGMENT = 1024


def qkv(tokens, heads=4, kv_heads=2, width=32, seed=0, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, width))
    return tuple((torch.randn(s, generator=gen) * scale).bfloat16() for s in shapes)


def paged(k, v, starts_of_queries, kv_len, page_size, seed=0):
    """One sequence's keys and values scattered over shuffled pages of a store that starts as NaN; and its batch."""
    pages = -(-kv_len // page_size)
    table = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(seed))[:pages].tolist()
    store_k, store_v = (torch.full(((pages + 3) * page_size, *x.shape[1:]), torch.nan).bfloat16() for x in (k, v))
    batch = Batch.paged([[0] * (kv_len - starts_of_queries)], [starts_of_queries], [table], page_size)
    rows = batch.key_rows_SL[0]
    store_k[rows], store_v[rows] = k[:kv_len], v[:kv_len]
    return store_k, store_v, batch


def test_known_answer_of_an_h200():
    with np.load(GOLDENS / "hopper_attention.npz") as z:
        q, k, v, o = (torch.from_numpy(np.ascontiguousarray(z[n][0])).view(torch.bfloat16) for n in "qkvo")
    assert_bits_equal(attention(q, k, v, Batch.packed([[0] * 256])), o, "against the H200")


@pytest.mark.parametrize("length", range(95, 131))
def test_decode_equals_prefill(length):
    q, k, v = qkv(length)
    whole = attention(q, k, v, Batch.packed([[0] * length]))
    store_k, store_v, batch = paged(k, v, length - 1, length, page_size=16)
    assert_bits_equal(attention(q[-1:], store_k, store_v, batch), whole[-1:], f"decode at length {length}")


@pytest.mark.parametrize("prefix", [1, 511, 2048, 4097])
def test_decode_after_a_long_prefix_equals_prefill(prefix):
    q, k, v = qkv(prefix + 2, heads=2, kv_heads=1, width=16)
    whole = attention(q, k, v, Batch.packed([[0] * (prefix + 2)]))
    store_k, store_v, batch = paged(k, v, prefix, prefix + 2, page_size=16)
    assert_bits_equal(attention(q[prefix:], store_k, store_v, batch), whole[prefix:], f"prefix of {prefix}")


def exp2(x):
    return np.float32(exp2_hw(np.float32(x), ex2_table()))


def segment(q, k, v, keys, start):
    """m, l, acc [H] of one query row over one segment's keys, start .., by the formula. q [H], k, v [n, H] bits."""
    m, l, acc = np.float32(-1e30), np.float32(0), np.zeros((1, len(q)), np.float32)
    for j0 in range(start, min(keys, start + SEGMENT), 64):
        k_tile, v_tile = np.zeros((2, 64, len(q)), np.uint16)
        k_tile[: len(k[j0 : j0 + 64])], v_tile[: len(v[j0 : j0 + 64])] = k[j0 : j0 + 64], v[j0 : j0 + 64]
        s = chain_bits(q[None], k_tile, False)[0] * module._scale(len(q))
        s[max(0, keys - j0) :] = -np.inf
        top = max(m, s.max())
        p = np.array([exp2(x - top) if x > -np.inf else 0 for x in s], np.float32)
        l = l * exp2(m - top) + quad_sum(p)
        p_bits = np.array([[f32_to_bf16(x) for x in p]], np.uint16)
        acc = chain_bits(p_bits, v_tile, True, acc * exp2(m - top))
        m = top
    return m, l, acc[0]


def test_segments_are_folded_in_order():
    q, k, v = qkv(2200, heads=1, kv_heads=1, width=16)
    o, m, l = module.forward(q, k, v, Batch.packed([[0] * 2200]))
    bits = [x[:, 0].view(torch.int16).numpy().view(np.uint16) for x in (q, k, v)]
    for t in (1023, 1024, 1100, 2199):
        m_all, l_all, acc_all = segment(bits[0][t], *bits[1:], t + 1, 0)
        for start in range(SEGMENT, t + 1, SEGMENT):
            m_s, l_s, acc_s = segment(bits[0][t], *bits[1:], t + 1, start)
            top = max(m_all, m_s)
            old, new = exp2(m_all - top), exp2(m_s - top)
            m_all, l_all, acc_all = top, l_all * old + l_s * new, acc_all * old + acc_s * new
        want = torch.from_numpy(acc_all / l_all).bfloat16()
        assert_bits_equal(o[t, 0], want, f"row {t}")
        assert m[t, 0].item() == m_all and l[t, 0].item() == l_all


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 150), chunk=st.integers(1, 70), page_size=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (6, 2), (3, 3), (8, 1)]), width=st.sampled_from([16, 48, 64]),
    scale=st.sampled_from([0.1, 1.0, 8.0]), seed=st.integers(0, 999),
)  # fmt: skip
def test_chunks_and_pages_do_not_matter(length, chunk, page_size, heads, width, scale, seed):
    q, k, v = qkv(length, *heads, width, seed, scale)
    whole = attention(q, k, v, Batch.packed([[0] * length]))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        store_k, store_v, batch = paged(k, v, start, end, page_size, seed)
        assert_bits_equal(attention(q[start:end], store_k, store_v, batch), whole[start:end], f"{start}..{end}")


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_packing_does_not_matter(lengths, seed):
    q, k, v = qkv(sum(lengths), seed=seed)
    packed = attention(q, k, v, Batch.packed([[0] * n for n in lengths]))
    start = 0
    for n in lengths:
        t = slice(start, start + n)
        assert_bits_equal(packed[t], attention(q[t], k[t], v[t], Batch.packed([[0] * n])), f"sequence of {n}")
        start += n


def test_a_one_token_prompt_beside_a_longer_one():
    q, k, v = qkv(71)
    got = attention(q, k, v, Batch.packed([[0], [0] * 70]))
    assert_bits_equal(got[:1], v[:1].repeat_interleave(2, dim=1), "one key: its value")


def test_each_head_reads_its_own_group():
    q, k, v = qkv(70, heads=6, kv_heads=3)
    batch = Batch.packed([[0] * 70])
    whole = attention(q, k, v, batch)
    for h in range(6):
        g = slice(h // 2, h // 2 + 1)
        alone = attention(q[:, h : h + 1].contiguous(), k[:, g].contiguous(), v[:, g].contiguous(), batch)
        assert_bits_equal(whole[:, h : h + 1].contiguous(), alone, f"head {h}")


def reference(q, k, v, lengths):
    """FP64 of the same formula."""
    outs, start = [], 0
    for n in lengths:
        t = slice(start, start + n)
        group = q.shape[1] // k.shape[1]
        keys, values = (x[t].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        s = q[t].transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        s = s.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        outs.append((s.softmax(-1) @ values).transpose(0, 1))
        start += n
    return torch.cat(outs)


def test_differentiates():
    """Against FP64 autograd: P, dS, O and the results are BF16, so 1 % of a gradient's norm."""
    lengths = [70, 1, 33, 128]
    q, k, v = (x.requires_grad_() for x in qkv(sum(lengths), width=64))
    out = attention(q, k, v, Batch.packed([[0] * n for n in lengths]))
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    out.backward(do)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = reference(*exact, lengths)
    want.backward(do.double())
    pairs = [("o", out, want), *((n, a.grad, b.grad) for n, a, b in zip("qkv", (q, k, v), exact, strict=True))]
    for name, got, exact_value in pairs:
        assert ((got.double() - exact_value).norm() / exact_value.norm()).item() < 0.01, name


def test_gradients_do_not_see_the_neighbours():
    """dQ, dK, dV of a sequence are the same alone and packed: its chains start and end with it."""
    lengths = [40, 17, 90]
    tensors = qkv(sum(lengths))
    do = torch.randn(sum(lengths), 4, 32, generator=torch.Generator().manual_seed(4)).bfloat16()

    def gradients(t, sizes):
        q, k, v = (x[t].clone().requires_grad_() for x in tensors)
        attention(q, k, v, Batch.packed([[0] * n for n in sizes])).backward(do[t])
        return q.grad, k.grad, v.grad

    whole = gradients(slice(0, None), lengths)
    start = 0
    for n in lengths:
        t = slice(start, start + n)
        for name, got, want in zip("qkv", gradients(t, [n]), whole, strict=True):
            assert_bits_equal(got, want[t], f"d{name} of {n} tokens")
        start += n


def test_no_gradient_through_pages():
    q, k, v = qkv(40)
    store_k, store_v, batch = paged(k, v, 30, 40, 8)
    out = attention(q[30:].clone().requires_grad_(), store_k, store_v, batch)
    with pytest.raises(ValueError, match="paged store"):
        out.sum().backward()


def test_refuses_fewer_rows_than_the_batch_reads():
    q, k, v = qkv(5)
    batch = Batch.packed([[0] * 5])
    for args in ((q[:3], k, v), (q, k[:3], v[:3]), (q[0], k, v), (q, k[:, 0], v[:, 0])):
        with pytest.raises(ValueError, match="attention: "):
            attention(*args, batch)


def test_heads_that_do_not_divide_are_refused():
    q, k, v = qkv(4, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="multiple"):
        attention(q, k, v, Batch.packed([[0] * 4]))
