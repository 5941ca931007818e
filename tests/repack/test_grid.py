"""The recovery against exact fractions, against brute force, and on every known odd group."""

import contextlib
import itertools
import json

import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qatpack.checkpoint.errors import QatpackError
from qatpack.repack import grid, tiny
from qatpack.repack.grid import (
    BLOCK_GROUPS,
    GROUP,
    Counts,
    Status,
    describe_group,
    dispatch,
    recover,
    recover_block,
    share_certified,
)
from qatpack.repack.packing import SCALE_DTYPES, decode

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = tuple(SCALE_DTYPES)
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=250)
few = settings(slow, max_examples=25)


def decoded(step, levels):
    """bf16(f32(step * level)) as bits; step f32[groups], levels [groups, in]."""
    with np.errstate(over="ignore"):
        product = np.asarray(step, np.float32)[:, None] * np.asarray(levels, np.float32)
        return product.astype(BF16).view(np.uint16)


def gaussian(groups, seed=0):
    """QAT-like groups: Gaussian weights, a float32 step of signed extremum / -8, levels -8..7."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, (groups, GROUP)).astype(np.float32)
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(1)[:, None], 1)
    weights *= -np.sign(extreme)
    step = np.abs(extreme[:, 0]) / np.float32(8) * rng.uniform(0.9, 1.1, groups).astype(np.float32)
    return decoded(step, np.clip(np.rint(weights / step[:, None]), -8, 7) + 0.0), step


@st.composite
def steps(draw):
    """A positive step of one of the trained dtypes, from subnormal to the largest."""
    name = draw(st.sampled_from(DTYPES))
    low, high = (-24, 12) if name == "float16" else (-136, 124)
    exponent = draw(st.integers(low, high) | st.integers(-14, -4))
    step = np.float32((1 + draw(st.integers(0, 2**23 - 1)) / 2**23) * 2.0**exponent)
    return max(step.astype(SCALE_DTYPES[name]).astype(np.float32), np.float32(2.0**-136))


@st.composite
def groups(draw):
    """32 bf16 patterns: a grid of peak 1..8, then perhaps one or two values spoilt."""
    peak = draw(st.integers(1, 8))
    raw = np.frombuffer(draw(st.binary(min_size=GROUP, max_size=GROUP)), np.uint8).astype(int)
    levels = raw % (2 * peak + 1) - peak
    if draw(st.integers(0, 3)):  # mostly a legal grid; else +8 may appear
        levels = np.minimum(levels, 7)
    group = decoded([draw(steps())], [levels + 0.0])[0].copy()
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        index = draw(st.integers(0, GROUP - 1))
        spoilt = st.sampled_from([int(group[index]) + 1, int(group[index]) - 1, 0x8000, 0, 1])
        odd = st.sampled_from([0x7F80, 0xFF80, 0x7FC0, 0x8001, 0x0080, 0x7F7F])
        group[index] = draw(spoilt | odd | st.integers(0, 0xFFFF)) & 0xFFFF
    return group


def check_against_oracle(group, scale_dtype):
    """One group: the verdict, the interval, the step and the counts."""
    result = recover_block(group[None], scale_dtype)
    status = Status(result.status[0])
    assert status.name == oracle.verdict(group.tolist())
    scale = result.scale.astype(float)
    counts = result.counts
    if status not in (Status.CERTIFIED, Status.ZERO):
        assert counts.refused == 1
        assert counts.identical == counts.negative_zeros == counts.exact_f32 == 0
        return
    assert np.isfinite(scale).all()
    assert (scale > 0).all()
    packed = result.packed.view(np.int32)
    equal = decode(packed, result.step[:, None])[0] == group.view(BF16)
    assert equal.all()
    back = decode(packed, result.scale[:, None])[0].view(np.uint16)
    assert counts.identical == (back == group).sum()
    assert counts.negative_zeros == (group == 0x8000).sum()
    if status == Status.CERTIFIED:
        check_interval(group, result)


def check_interval(group, result):
    """The interval is one of the oracle's, and holds a bf16 number where the counts say so."""
    step = oracle.Fraction(float(result.step[0]))
    home = next(i for i in oracle.steps(group.tolist()) if i.lo <= step <= i.hi)
    assert result.lo[0] <= result.hi[0]
    for end, exact in ((result.lo[0], home.lo), (result.hi[0], home.hi)):
        # Denormals leave several intervals, of which the exact one may be a part of ours.
        if result.counts.tiny == 0:
            assert abs(oracle.Fraction(float(end)) / exact - 1) < 2.0**-17
    nearest = result.step.astype(BF16).astype(np.float32)
    levels = np.where(group & 0x7FFF, 1, 0)
    if levels.any() and result.counts.exact_bf16:
        assert nearest[0] == result.step[0]


@slow
@given(groups(), st.sampled_from(DTYPES))
def test_agrees_with_fractions(group, scale_dtype):
    check_against_oracle(group, scale_dtype)


def test_agrees_with_fractions_in_bulk():
    rng = np.random.default_rng(5)
    bits, _ = gaussian(400, seed=5)
    bits[:200] ^= np.uint16(0x8000) * rng.integers(0, 2, (200, 1)).astype(np.uint16)
    bits[rng.integers(0, 400, 150), rng.integers(0, GROUP, 150)] += np.uint16(1)
    got = [Status(s).name for s in recover_block(bits).status]
    expected = [oracle.verdict(g) for g in bits.tolist()]
    assert got == expected
    assert {"CERTIFIED", "OFF_GRID", "NEEDS_NEGATIVE_STEP"} == set(expected)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("scaled", [0, -100])
def test_kernel_agrees_with_exhaustive_search(scale_dtype, scaled):
    bits, _ = gaussian(200, seed=6)
    bits[::7, 3] += np.uint16(1)
    bits[::11] ^= np.uint16(0x8000)
    bits = (bits.view(BF16).astype(np.float32) * np.float32(2.0**scaled)).astype(BF16)
    bits = bits.view(np.uint16)
    fast, exhaustive = recover_block(bits, scale_dtype), tiny.recover_tiny(bits, scale_dtype)
    assert fast.counts.tiny == 0
    np.testing.assert_array_equal(fast.status, exhaustive.status)
    good = fast.status == Status.CERTIFIED
    np.testing.assert_array_equal(fast.packed[good], exhaustive.packed[good])
    np.testing.assert_array_equal(fast.peak[good], exhaustive.peak[good])
    np.testing.assert_allclose(fast.step[good], exhaustive.step[good], rtol=2.0**-16)
    assert fast.counts.exact_bf16 == exhaustive.exact_bf16[good].sum()
    assert fast.counts.exact_f16 == exhaustive.exact_f16[good].sum()
    assert fast.counts.identical == exhaustive.identical[good].sum()
    if scale_dtype != "float32":
        scale = exhaustive.scale.view(SCALE_DTYPES[scale_dtype])
        np.testing.assert_array_equal(fast.scale[good], scale[good])


def test_rows_accepted_and_transpose_refused():
    bits, _ = gaussian(64, seed=7)
    accepted = recover(bits)
    assert accepted.counts.certified == 64
    assert recover(bits.T.copy()).counts.off_grid == accepted.counts.groups


def test_group_size_and_axis_are_measured():
    bits = gaussian(64 * 8, seed=8)[0].reshape(64, 8 * GROUP)
    shares = {size: share_certified(bits, size) for size in (8, 16, 32, 64)}
    assert shares[8] == shares[16] == shares[32] == 1.0
    assert shares[64] < 0.02
    assert share_certified(bits.T, 32) == 0.0
    assert share_certified(np.zeros((4, 64), np.uint16), 32) == 0.0
    with pytest.raises(ValueError, match="no multiple"):
        share_certified(bits, 48)


def test_share_agrees_with_the_kernel():
    rng = np.random.default_rng(9)
    bits, _ = gaussian(1500, seed=9)
    bits[np.arange(0, 1500, 2), rng.integers(0, GROUP, 750)] += np.uint16(1)
    bits[::5] ^= np.uint16(0x8000)
    bits[3, 4] = 0x7F80
    assert share_certified(bits, 32) == recover_block(bits).counts.certified / 1500


def test_other_grids_are_refused():
    rng = np.random.default_rng(10)
    noise = rng.normal(0, 0.02, (4000, GROUP)).astype(np.float32)
    assert recover(noise.astype(BF16)).counts.certified == 0
    for top in (15, 127):
        step = np.abs(noise).max(1) / np.float32(top)
        bits = decoded(step, np.rint(noise / step[:, None]))
        assert recover(bits).counts.certified == 0


def test_one_wrong_value_is_flagged():
    rng = np.random.default_rng(11)
    rows = np.arange(4000)
    columns = rng.integers(0, GROUP, 4000)
    noise = rng.normal(0, 0.02, 4000).astype(np.float32).astype(BF16).view(np.uint16)
    good, _ = gaussian(4000, seed=11)
    for wrong, least in ((good[rows, columns] + np.uint16(1), 0.99), (noise, 0.97)):
        bits = good.copy()
        bits[rows, columns] = wrong
        assert recover(bits).counts.refused / 4000 > least


def test_signed_step_grid_needs_a_negative_step():
    bits, _ = gaussian(4000, seed=12)
    grid_of_eights = bits[recover(bits).peak[:, 0] == 8]
    flipped = grid_of_eights ^ np.uint16(0x8000)
    counts = recover(flipped).counts
    assert counts.certified < len(flipped) == counts.certified + counts.needs_negative_step
    assert counts.needs_negative_step > 0.9 * len(flipped)
    assert recover(grid_of_eights).counts.certified == len(flipped)


def best_of_neighbours(bits, result, scale_dtype):
    """Identical values of the best scale among 9 of the dtype around the step: int[groups]."""
    dtype = SCALE_DTYPES[scale_dtype]
    base = result.step.astype(dtype).view(np.uint16)
    packed = result.packed.view(np.int32)
    counts = [
        (decode(packed, (base + np.uint16(move % 2**16)).view(dtype)[:, None]) == bits.view(BF16))
        for move in range(-4, 5)
    ]
    return np.max([c.sum(1) for c in counts], axis=0)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_scale_is_the_best_of_its_dtype(scale_dtype):
    bits, _ = gaussian(4000, seed=13)
    result = recover_block(bits, scale_dtype)
    back = decode(result.packed.view(np.int32), result.scale[:, None]) == bits.view(BF16)
    np.testing.assert_array_equal(back.sum(1), best_of_neighbours(bits, result, scale_dtype))


def test_equal_counts_are_settled_by_squared_error():
    bits, _ = gaussian(60000, seed=14)
    result = recover_block(bits, "bfloat16")
    packed = result.packed.view(np.int32)
    levels = grid.unpack(packed)
    values = bits.view(BF16).astype(float)
    count, error = [], []
    for move in (0, -1, 1):
        scale = (result.scale.view(np.uint16) + np.uint16(move % 2**16)).view(BF16)[:, None]
        count.append((decode(packed, scale) == bits.view(BF16)).sum(1))
        error.append(((scale.astype(float) * levels - values) ** 2).sum(1))
    tied = (count[0] < GROUP) & ((count[0] == count[1]) | (count[0] == count[2]))
    assert tied.sum() > 20
    for other in (1, 2):
        same = tied & (count[0] == count[other])
        assert (error[0][same] <= error[other][same]).all()


def test_ceilings():
    bits, _ = gaussian(20000, seed=15)
    share = {}
    for name in DTYPES:
        counts = recover_block(bits, name).counts
        assert counts.certified == 20000
        share[name] = counts.identical / counts.values
    result = recover_block(bits, "float32")
    values = bits.view(BF16).astype(np.float32)
    amax = (np.abs(values).max(1) / np.float32(7.5)).astype(BF16).astype(np.float32)
    levels = np.clip(np.rint(values / amax[:, None]), -8, 7)
    export = (decoded(amax, levels) == bits).mean()
    assert share["float32"] == 1.0
    assert share["float16"] == pytest.approx(0.9983, abs=0.0005)
    assert share["bfloat16"] == pytest.approx(0.9051, abs=0.005)
    assert export == pytest.approx(0.116, abs=0.01)
    assert result.counts.exact_bf16 / 20000 == pytest.approx(0.42, abs=0.03)
    assert result.counts.exact_f16 / 20000 == pytest.approx(0.97, abs=0.01)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_a_step_of_the_scale_dtype_is_found(scale_dtype):
    bits, step = gaussian(3000, seed=16)
    step = step.astype(SCALE_DTYPES[scale_dtype]).astype(np.float32)
    levels = grid.unpack(recover_block(bits).packed.view(np.int32))
    counts = recover_block(decoded(step, levels), scale_dtype).counts
    assert counts.identical == counts.values
    exact = counts.exact_bf16 if scale_dtype == "bfloat16" else counts.exact_f16
    assert exact == 3000


def test_float16_scale_is_clamped_and_counted():
    levels = np.tile(np.arange(-8, 8), 2)
    bits = decoded(np.float32([2.0**-30, 2.0**-24 * 1.4, 2.0**20, 65504, 3e-5]), levels + 0.0)
    result = recover_block(np.tile(bits[:, None], 1).reshape(-1, GROUP), "float16")
    assert result.counts.certified == 5
    assert result.scale[[0, 1, 2, 3]].tolist() == [2.0**-24, 2.0**-24, 65504, 65504]
    back = decode(result.packed.view(np.int32), result.scale[:, None]).view(np.uint16)
    assert result.counts.identical == (back == bits).sum() < result.counts.values


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_zeros_of_either_sign(scale_dtype):
    bits = np.zeros((3, GROUP), np.uint16)
    bits[1, 5:9] = 0x8000
    bits[2] = decoded([0.1], [np.tile([-8.0, 3.0, 0.0, -0.0], 8)])[0]
    result = recover_block(bits, scale_dtype)
    assert result.status.tolist() == [Status.ZERO, Status.ZERO, Status.CERTIFIED]
    assert result.scale[:2].tolist() == [1.0, 1.0]
    assert (result.packed[:2] == 0x88).all()
    assert (result.counts.zero, result.counts.negative_zeros) == (2, 4 + 8)
    back = decode(result.packed.view(np.int32), result.scale[:, None]).view(np.uint16)
    assert result.counts.identical == (back == bits).sum()


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_non_finite_groups_are_refused(value):
    bits, _ = gaussian(8, seed=17)
    bits[3, 31] = value
    result = recover_block(bits)
    assert result.status.tolist() == [1, 1, 1, Status.NON_FINITE, 1, 1, 1, 1]
    assert result.counts.non_finite == 1
    assert "value 31" in describe_group(bits[3])


def test_a_denormal_beside_normal_values_is_off_the_grid():
    bits, _ = gaussian(4, seed=18)
    bits[:, 0] = [0x0001, 0x8001, 0x007F, 0x0080]
    assert recover_block(bits).counts.off_grid == 4


def test_tiny_and_huge_steps():
    levels = np.tile(np.arange(-8, 8), 2) + 0.0
    exponents = np.arange(-136, 125)
    bits = decoded(np.float32(1.371) * np.float32(2.0) ** exponents, np.tile(levels, (261, 1)))
    result = recover_block(bits, "float32")
    assert result.counts.certified == 261
    assert result.counts.identical + result.counts.negative_zeros == result.counts.values
    assert result.counts.tiny == (bits.max(1) < 0x8000 + 0x0880).sum() == 23
    result = recover_block(bits, "bfloat16")
    assert (result.scale.astype(float) > 0).all()
    back = decode(result.packed.view(np.int32), result.scale[:, None]).view(np.uint16)
    assert result.counts.identical == (back == bits).sum()


@few
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=6), st.sampled_from(DTYPES))
def test_any_split_gives_the_same_bytes(sizes, scale_dtype):
    bits = MIXED[: sum(sizes)]
    whole = recover(bits, scale_dtype)
    ends = np.cumsum([0, *sizes])
    pending = [dispatch(bits[a:b], scale_dtype) for a, b in itertools.pairwise(ends)]
    parts = [p.result() for p in pending]
    assert sum((p.counts for p in parts), Counts()) == whole.counts
    for name in ("packed", "scale", "status"):
        joined = np.concatenate([getattr(p, name) for p in parts]).tobytes()
        assert joined == getattr(whole, name).tobytes()


def mixed_groups():
    bits, _ = gaussian(54000, seed=19)
    bits[::97, 1] += np.uint16(1)
    bits[5::1000] = 0
    bits[6::1000, 2] = 0x7FC0
    bits[7::20000] &= np.uint16(0x83FF)
    return bits


MIXED = mixed_groups()


def test_a_large_block_and_its_small_pieces_agree():
    bits = MIXED[: BLOCK_GROUPS + 5000]
    large = recover_block(bits)
    small = [recover_block(bits[i : i + 4096]) for i in range(0, len(bits), 4096)]
    assert sum((s.counts for s in small), Counts()) == large.counts
    for name in ("packed", "scale", "status"):
        parts = np.concatenate([getattr(s, name) for s in small])
        assert parts.tobytes() == getattr(large, name).tobytes()


def test_only_two_shapes_are_compiled():
    for groups in (1, 4095, 4096, 12288, 30000, BLOCK_GROUPS, BLOCK_GROUPS + 1, 100_000):
        pieces = list(grid._pieces(np.zeros((groups, GROUP // 2), np.uint32)))
        assert {len(p) for p in pieces} <= {BLOCK_GROUPS, grid.TAIL_GROUPS}
        assert groups <= sum(map(len, pieces)) < groups + grid.TAIL_GROUPS


def test_grid_of_a_whole_array():
    bits, step = gaussian(24, seed=20)
    bits[5, 1] += np.uint16(1)
    w = bits.reshape(2, 3, 4 * GROUP).view(BF16)
    result = recover(w, "float16")
    assert result.levels.shape == w.shape
    assert result.levels.dtype == np.int8
    assert result.packed.shape == (2, 3, 16)
    for small in (result.scale, result.status, result.peak, result.lo, result.hi, result.step):
        assert small.shape == (2, 3, 4)
    good = (result.status == Status.CERTIFIED).ravel()
    assert good.tolist() == [i != 5 for i in range(24)]
    lo, hi, mid = (x.ravel() for x in (result.lo, result.hi, result.step))
    assert ((lo <= mid) & (mid <= hi))[good].all()
    assert np.isnan([lo[5], hi[5], mid[5]]).all()
    # The step it was made with, or half of it where the levels are stored as their doubles.
    ratio = np.rint(step[good] / mid[good])
    assert np.isin(ratio, (1, 2, 4, 8)).all()
    assert (
        (lo[good] * (1 - 2**-17) <= step[good] / ratio)
        & (step[good] / ratio <= hi[good] * (1 + 2**-17))
    ).all()
    assert recover(np.zeros((0, 64), BF16)).counts == Counts()


def test_counts_add_and_travel_through_json():
    bits, _ = gaussian(100, seed=21)
    bits[3] = 0
    bits[4, 0] = 0x7F80
    counts = recover_block(bits).counts
    assert Counts.from_json(json.loads(json.dumps(counts.to_json()))) == counts
    assert counts + Counts() == counts
    double = counts + counts
    assert (double.groups, double.values, double.zero) == (200, 6400, 2)
    assert sum(counts.peaks) == counts.certified == counts.exact_f32 == 98
    assert counts.groups == counts.zero + counts.certified + counts.refused
    assert all(type(n) is int for n in (*counts.peaks, counts.identical, counts.groups))


def test_descriptions():
    levels = np.tile(np.arange(-8, 8), 2) + 0.0
    bits = decoded([0.1], [levels])[0]
    assert "is on the grid" in describe_group(bits)
    assert "peak 0.800781 lies on level +8" in describe_group(bits ^ np.uint16(0x8000))
    both = bits.copy()
    both[1] = bits[0] ^ 0x8000
    assert "both signs" in describe_group(both)
    off = bits.copy()
    off[1] = np.uint16(0x3E00)
    assert "value 1 (0.125) lies on 1.249" in describe_group(off)
    near = bits.copy()
    near[6] += np.uint16(1)
    assert "no one step" in describe_group(near)


@pytest.mark.parametrize(
    ("bits", "scale_dtype", "message"),
    [
        (np.zeros((2, 31), np.uint16), "bfloat16", "need uint16"),
        (np.zeros((2, 32), np.int16), "bfloat16", "need uint16"),
        (np.zeros(32, np.uint16), "bfloat16", "need uint16"),
        (np.zeros((2, 32), np.uint16), "float64", "float64"),
    ],
)
def test_dispatch_refuses(bits, scale_dtype, message):
    with pytest.raises(ValueError, match=message):
        dispatch(bits, scale_dtype)


@pytest.mark.parametrize("w", [np.zeros((2, 48), BF16), np.zeros((2, 64), np.float32)])
def test_recover_refuses(w):
    with pytest.raises(ValueError, match=r"multiple of 32|need bfloat16"):
        recover(w)


def test_strict_promotion_and_x64():
    bits, _ = gaussian(50, seed=22)
    expected = recover_block(bits)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        jax.config.update("jax_enable_x64", True)
        stack.callback(jax.config.update, "jax_enable_x64", False)
        result = recover_block(bits)
    assert result.counts == expected.counts
    assert result.packed.tobytes() == expected.packed.tobytes()
    assert result.scale.tobytes() == expected.scale.tobytes()


def test_a_hidden_cpu_backend_is_named(monkeypatch):
    def missing(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    grid.cpu.cache_clear()
    monkeypatch.setattr(jax, "local_devices", missing)
    with pytest.raises(QatpackError, match="JAX_PLATFORMS=tpu,cpu"):
        recover_block(np.zeros((1, GROUP), np.uint16))
    monkeypatch.undo()
    grid.cpu.cache_clear()
