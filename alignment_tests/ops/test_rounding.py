"""rounding.py: bits against plain NumPy, accuracy against FP64, the hardware exp2 against its definition and hash."""

import hashlib
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError

from alignment_tests import inputs, plain
from alignment_tests.bits import assert_bits_equal
from minitransformer.ops import rounding

F32 = np.float32
EDGES = np.array(
    [0.0, -0.0, 1, -1, 0.5, -0.5, 126, 127, 127.99999, 128, -126, -126.00001, -127, -149, -150, 159.9999, 160, -160,
     1e30, -1e30, 1e-30, -1e-30, 1e-40, -1e-40, 2.0**-23, -(2.0**-23), 2.0**-24, -(2.0**-24), 3.4e38, -3.4e38],
    F32,
)  # fmt: skip


def mapped(function, *tables):
    """The scalar function over a 1-D array."""

    @njit
    def loop(x, out, *tables):
        for i in range(x.size):
            out[i] = function(x[i], *tables)

    def run(x, dtype=None):
        out = np.empty(x.size, dtype or x.dtype)
        loop(x, out, *tables)
        return out

    return run


exp2_32, log_32, log_64 = mapped(rounding.exp2_32), mapped(rounding.log_32), mapped(rounding.log_64)
silu_32, sigmoid_32 = mapped(rounding.silu_32), mapped(rounding.sigmoid_32)
f32_to_bf16, bf16_to_f32 = mapped(rounding.f32_to_bf16), mapped(rounding.bf16_to_f32)


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert_bits_equal(torch.from_numpy(got), torch.from_numpy(np.asarray(want, got.dtype)), what)


def spread(seed: int, n: int, scale: float) -> np.ndarray:
    return inputs.normal(seed, n, scale=scale).numpy()


def ulps(got, want):
    return np.abs(got - want) / np.spacing(np.abs(want).astype(got.dtype))


def test_mixed_widths_do_not_compile():
    @njit
    def mixed(x):
        return rounding.fma32(x, 2.0, x)

    with pytest.raises(TypingError, match="implicit promotion"):
        mixed(F32(1))


def test_fma_rounds_once():
    a, b, c = (spread(i, 20_000, 1.0) for i in range(3))
    c[:10_000] = -(a * b)[:10_000]  # the rounding error of a product alone

    @njit
    def loop(a, b, c, out):
        for i in range(a.size):
            out[i] = rounding.fma32(a[i], b[i], c[i])

    out = np.empty_like(a)
    loop(a, b, c, out)
    same(out, plain.fma(a, b, c), "fma32")
    assert (out != (a * b + c)).any()


def test_bf16_to_fp32_and_back():
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    values = bf16_to_f32(every, F32)
    number = ~np.isnan(values)
    assert (f32_to_bf16(values, np.uint16)[number] == every[number]).all()
    # Midpoints between neighbours, and one FP32 step beside them.
    bits = (np.arange(2**15 - 129, dtype=np.uint32) << 16) + 0x8000
    x = np.concatenate([bits - 1, bits, bits + 1]).view(F32)
    x = np.concatenate([x, -x, inputs.f32_of_any_bits(1, 100_000).numpy()])
    x = x[~np.isnan(x)]
    same(f32_to_bf16(x, np.uint16).view(np.int16), plain.bf16(x).view(torch.int16).numpy(), "f32_to_bf16")
    assert torch.equal(torch.from_numpy(x).bfloat16(), plain.bf16(x))


def test_every_nan_becomes_the_same_quiet_nan():
    x = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(F32)
    assert f32_to_bf16(x, np.uint16).tolist() == [0x7FC0] * 5


def test_exp2_bits_and_accuracy():
    x = np.concatenate([EDGES, spread(2, 200_000, 40.0), spread(3, 100_000, 0.3), np.arange(-130, 131).astype(F32)])
    got = exp2_32(x)
    same(got, plain.exp2(x, rounding.EXP2), "exp2_32")
    ok = (x >= -126) & (x < 128)
    exact = np.exp2(x[ok].astype(np.float64))
    assert (np.abs(got[ok] / exact - 1)).max() < 1.0e-7
    whole = ok & (x == np.rint(x))
    assert (got[whole] == np.exp2(x[whole].astype(np.float64))).all()


def test_exp2_at_the_ends():
    got = exp2_32(np.array([np.inf, -np.inf, np.nan, 128, -126, -126.00001, -0.0], F32))
    assert got[:2].tolist() == [np.inf, 0] and np.isnan(got[2]) and got[3:].tolist() == [np.inf, 2.0**-126, 0, 1]


def hardware_exp2(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """numerics: ex2.approx.ftz.f32 by cases, in FP64."""
    size = np.where(np.abs(x) < 2.0**-126, 0, np.abs(x).astype(np.float64))
    t = np.trunc(np.where(size < 160, size, 0) * 2**23).astype(np.int64)
    whole, part = t >> 23, t & (2**23 - 1)
    up = np.ldexp(table[part].astype(np.float64), whole)
    down = np.ldexp(table[2**23 - 1 - part].astype(np.float64), -whole - 1)
    y = np.where(x >= 0, up, np.where(part == 0, np.ldexp(1.0, -whole), down))
    y = np.where(y < 2.0**-126, 0, np.where(y >= 2.0**128, np.inf, y))
    return np.where(size >= 160, np.where(x > 0, np.inf, 0), y).astype(F32)


def test_hardware_exp2_is_its_definition():
    table = rounding.ex2_table()
    run = mapped(rounding.exp2_hw, table)
    x = inputs.f32_of_any_bits(4, 400_000).numpy()
    x = np.concatenate([EDGES, x[np.isfinite(x)], spread(5, 400_000, 50.0), np.arange(-130, 131).astype(F32)])
    same(run(x), hardware_exp2(x, table), "exp2_hw")
    ends = run(np.array([np.inf, -np.inf, np.nan], F32))
    assert ends[0] == np.inf and ends[1] == 0 and np.isnan(ends[2])


def test_the_table_is_the_hardwares():
    table = rounding.ex2_table()
    mantissas = table.view(np.int32) & 0x7FFFFF
    assert hashlib.sha256(mantissas.astype("<i4").tobytes()).hexdigest() == rounding.EX2_SHA256
    assert table[0] == 1 and table.min() == 1 and table.max() < 2
    exact = np.exp2(np.arange(2**23) / 2**23)
    assert (np.abs(table - exact) < 2.0**-22).all()
    assert not table.flags.writeable


def test_the_table_is_made_once_whoever_asks(monkeypatch):
    monkeypatch.setattr(rounding, "_ex2", [])
    tables, made = [], rounding.ex2_base
    monkeypatch.setattr(rounding, "ex2_base", lambda: tables.append(0) or made())
    got = []
    threads = [threading.Thread(target=lambda: got.append(rounding.ex2_table())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tables) == 1 and all(t is got[0] for t in got)


def test_a_damaged_table_is_refused(monkeypatch, tmp_path):
    with np.load(rounding._EX2_FILE) as file:
        delta = file["delta"].copy()
    delta[12345] += 1
    np.savez_compressed(tmp_path / "bad.npz", delta=delta)
    monkeypatch.setattr(rounding, "_ex2", [])
    monkeypatch.setattr(rounding, "_EX2_FILE", tmp_path / "bad.npz")
    with pytest.raises(RuntimeError, match="sha256"):
        rounding.ex2_table()


def test_log_bits_and_accuracy():
    x = np.abs(inputs.f32_of_any_bits(6, 200_000).numpy())
    x = np.concatenate([x[np.isfinite(x) & (x > 0)], 1 + spread(7, 100_000, 0.1), np.array([1, 2, 0.5, 1e-45], F32)])
    got = log_32(x)
    same(got, plain.log(x, rounding.LOG), "log_32")
    exact = np.log(x.astype(np.float64))
    assert ulps(got, exact)[x != 1].max() < 1.0
    assert got[x == 1].max() == got[x == 1].min() == 0


def test_log_64_accuracy():
    x = np.concatenate([np.exp(spread(8, 200_000, 200.0).astype(np.float64)), 1 + spread(9, 100_000, 0.1) / 1.0])
    exact = np.log(x.astype(np.longdouble))
    assert ulps(log_64(x), exact.astype(np.float64)).max() < 2.0
    assert log_64(np.array([5e-324]))[0] == pytest.approx(np.log(5e-324), rel=1e-15)


@pytest.mark.parametrize(("log", "dtype"), [(log_32, F32), (log_64, np.float64)])
def test_logs_at_the_ends(log, dtype):
    got = log(np.array([0, -0.0, -1, -np.inf, np.nan, np.inf], dtype))
    assert got[0] == got[1] == -np.inf and np.isnan(got[2:5]).all() and got[5] == np.inf


def test_silu_bits_accuracy_and_ends():
    x = np.concatenate([EDGES, spread(10, 200_000, 6.0), spread(11, 50_000, 60.0)])
    same(silu_32(x), plain.silu(x, rounding.EXP2), "silu_32")
    same(sigmoid_32(x), plain.sigmoid(x, rounding.EXP2), "sigmoid_32")
    x = x[np.abs(x) < 80]
    exact = x / (1 + np.exp(-x.astype(np.float64)))
    # The product with log2 e is rounded, so the exponential's relative error grows with |x|.
    assert (np.abs(silu_32(x) - exact) <= (3e-7 + np.abs(x) * 2.0**-23) * np.abs(exact)).all()
    got = silu_32(np.array([np.inf, -np.inf, np.nan, -100, 1e30], F32))
    assert got[0] == np.inf and np.isnan(got[1:3]).all() and got[3] == 0 and np.signbit(got[3]) and got[4] == F32(1e30)


@given(n=st.integers(0, 700), seed=st.integers(0, 2**20))
def test_lane_sum_is_the_plain_one(n, seed):
    x = inputs.normal(seed, n + 1).numpy()[:n]
    same(np.array([rounding.lane_sum(x)], F32), [plain.lane_sum(x)], f"lane sum of {n}")


def test_lane_sum_is_an_order_of_its_own():
    x = spread(12, 5000, 1.0)
    sequential = plain.slot_sum(x, 0)
    assert rounding.lane_sum(x) != sequential and abs(rounding.lane_sum(x) - x.astype(np.float64).sum()) < 1e-3
    zeros = np.full(3, -0.0, F32)
    assert not np.signbit(rounding.lane_sum(zeros))


@given(groups=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_quad_sum_is_the_plain_one(groups, seed):
    p = inputs.normal(seed, 8 * groups).numpy()
    lanes = []
    for t in range(4):
        columns = [8 * j + 2 * t + i for j in range(groups) for i in range(2)]
        total = p[columns[0]]
        for c in columns[1:]:
            total = F32(total + p[c])
        lanes.append(total)
    want = F32(F32(lanes[0] + lanes[2]) + F32(lanes[1] + lanes[3]))
    same(np.array([rounding.quad_sum(p)], F32), [want], "quad sum")
