"""The jitted comparison against its definition in numpy, and that against hand-made groups."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from qatpack.repack.grid import recover_block
from qatpack.repack.packing import SCALE_DTYPES, decode, pack
from qatpack.verify.compare import block_groups, dispatch
from qatpack.verify.exact import Certified, tally_numpy
from qatpack.verify.tally import BETWEEN, Tally

DTYPES = tuple(SCALE_DTYPES)


def grid_bits(seed, groups=600):
    return tiny.grid(np.random.default_rng(seed), groups, 32).view(np.uint16)


def certified(bits):
    result = recover_block(bits, "float32")
    return Certified(result.packed, result.peak, result.step, result.status < 2)


def same(fast, slow):
    """Counts equal; sums of squares to float32's rounding within a row."""
    a, b = asdict(fast), asdict(slow)
    for name in ("error", "norm", "largest"):
        x, y = a.pop(name), b.pop(name)
        assert math.isclose(x, y, rel_tol=3e-6, abs_tol=1e-30), name
    assert a == b


def both(bits, packed, scale, grid=None):
    fast, wrong = dispatch(bits, packed, scale, grid).result()
    slow, slow_wrong = tally_numpy(bits, packed, scale, grid)
    same(fast, slow)
    assert wrong.tolist() == np.flatnonzero(slow_wrong).tolist()
    return fast


def damage(bits, packed, scale, rng):
    """Every kind of odd group, each once, and some random ones."""
    bits, packed, scale = bits.copy(), packed.copy(), scale.copy()
    scale[0], scale[1], scale[2], scale[3] = np.nan, 0, np.inf, -scale[3]
    scale[4] *= 2
    scale[5] = np.finfo(np.float16).tiny
    packed[6] ^= 0x30
    packed[7] = 0x88
    bits[8] = 0
    bits[9], packed[9] = 0, 0x88
    bits[10, 3], bits[11, 3] = 0x7F80, 0x7FC1
    bits[12, 4] = 0x8000
    bits[13] = rng.integers(0, 0x10000, bits.shape[1])
    bits[14] &= 0x8FFF
    bits[15] = 0x0001
    packed[16:60] = rng.integers(0, 256, packed[16:60].shape)
    return bits, packed, scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_groups_agree_with_the_definition(dtype):
    bits = grid_bits(1)
    result = recover_block(bits, dtype)
    tally = both(bits, result.packed, result.scale, certified(bits))
    assert tally.identical == result.counts.identical
    assert (tally.levels_differ, tally.step_off, tally.negative_scales) == (0, 0, 0)
    assert tally.peak_levels[8] == tally.groups == 600


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 16, 32, 64, 96])
def test_damaged_groups_of_any_size_agree_with_the_definition(dtype, size):
    rng = np.random.default_rng(size)
    bits = grid_bits(2, 1800)
    result = recover_block(bits, dtype)
    grid = certified(bits) if size == 32 else None
    bits = bits.reshape(-1, size)
    packed = result.packed.reshape(-1, size // 2)
    scale = np.resize(result.scale, len(bits))
    tally = both(*damage(bits, packed, scale, rng), grid)
    assert tally.non_finite_scales == 2
    assert tally.zero_scales == 1
    assert tally.negative_scales == 1
    assert tally.zero_groups == 2
    assert tally.reference_non_finite >= 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_any_bytes_agree_with_the_definition(seed, dtype):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 0x10000, (40, 32), np.uint16)
    bits[::2] = grid_bits(seed, 20)
    packed = rng.integers(0, 256, (40, 16), np.uint8)
    width = SCALE_DTYPES[dtype].itemsize
    scale = rng.integers(0, 256, 40 * width, np.uint8).view(SCALE_DTYPES[dtype])
    both(bits, packed, scale, certified(bits))


def test_identical_is_what_decode_gives():
    bits = grid_bits(3)
    for dtype in DTYPES:
        result = recover_block(bits, dtype)
        words, scale = result.packed.view("<i4"), result.scale[:, None]
        tally, _ = dispatch(bits, result.packed, result.scale, None).result()
        assert tally.identical == (decode(words, scale).view(np.uint16) == bits).sum()
        cast = decode(words, scale, scale_as_bf16=True).view(np.uint16)
        assert tally.cast == (cast == bits).sum()


def one(levels, step, stored_levels, stored_step):
    """One group by hand: trained levels and step, stored ones."""
    bits = (np.array([levels], np.float32) * np.float32(step)).astype(tiny.BF16).view(np.uint16)
    packed = pack(np.array([stored_levels], np.int8)).view(np.uint8)
    scale = np.array([stored_step], np.float32)
    return both(bits, packed, scale, certified(bits))


LEVELS = [-8, 7, 5, 3, 1, 0, -1, -6] * 4


def test_equivalent_levels_are_not_wrong():
    half = [-4, 3, 2, 1, 0, 0, -1, -3] * 4
    double = [2 * q for q in half]
    assert one(half, 0.02, double, 0.01).wrong == 0
    assert one(half, 0.02, half, 0.02).wrong == 0
    assert one(LEVELS, 0.01, [min(7, -q) for q in LEVELS], -0.01).levels_differ == 1


def test_a_negative_step_with_negated_levels_is_the_trained_grid():
    levels = [-7, 7, 5, 3, 1, 0, -1, -6] * 4
    tally = one(levels, 0.01, [-q for q in levels], -0.01)
    assert (tally.wrong, tally.negative_scales) == (0, 1)


@pytest.mark.parametrize(("factor", "off"), [(1, 0), (1 + 2**-8, 0), (1 + 2**-6, 1), (2, 1)])
def test_a_step_is_off_beyond_one_and_a_half_ulps(factor, off):
    assert one(LEVELS, 0.01, LEVELS, 0.01 * factor).step_off == off


def test_a_flipped_nibble_is_one_group():
    tally = one(LEVELS, 0.01, [*LEVELS[:5], 4, *LEVELS[6:]], 0.01)
    assert (tally.levels_differ, tally.identical) == (1, 31)
    assert tally.largest == pytest.approx(0.5)  # 4 steps off, where 8 are the largest


def test_max_7_5_falls_on_no_level():
    tally = one(LEVELS, 0.01, LEVELS, 0.08 / 7.5)
    assert (tally.max_7_5, tally.on_level, tally.peak_levels[BETWEEN]) == (1, 0, 1)
    assert tally.relative_error == pytest.approx(1 / 15, rel=0.02)


def test_a_group_of_zeros_that_decodes_to_something():
    tally = one([0] * 32, 0.01, LEVELS, 0.01)
    assert tally.largest == 1
    assert tally.relative_error is None
    assert tally.levels_differ == 1
    assert tally.to_json()["relative_error"] is None


def test_negative_zero_is_equal_but_not_identical():
    bits = np.full((1, 32), 0x8000, np.uint16)
    packed, scale = np.full((1, 16), 0x88, np.uint8), np.ones(1, np.float32)
    tally = both(bits, packed, scale, certified(bits))
    assert (tally.identical, tally.negative_zeros, tally.exact) == (0, 32, True)


def test_tallies_add():
    a, b = one(LEVELS, 0.01, LEVELS, 0.01), one(LEVELS, 0.01, LEVELS, 0.02)
    both_ = a + b
    assert both_.values == 64
    assert both_.largest == max(a.largest, b.largest)
    assert both_.error == a.error + b.error
    assert a + Tally() == a


@pytest.mark.parametrize("size", [8, 24, 32, 48, 96, 1536, 1 << 21])
def test_blocks_begin_at_whole_groups_of_32(size):
    assert block_groups(size) * size % 32 == 0
    assert block_groups(size) > 0
