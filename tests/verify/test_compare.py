"""The jitted comparison against its definition in numpy, and that against hand-made groups."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from qatpack.repack.grid import recover_block
from qatpack.repack.packing import SCALE_DTYPES, decode, pack
from qatpack.verify.compare import Block, block_groups
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


BLOCKS = {}


def compare(bits, packed, scale, *, certify=True):
    """One block, holding the groups from some place on and rubbish elsewhere."""
    key = bits.shape[1], {v: k for k, v in SCALE_DTYPES.items()}[scale.dtype]
    if key not in BLOCKS:
        BLOCKS[key] = Block(*key)
        BLOCKS[key].bits[:] = 0x7FC1
        BLOCKS[key].scale[:] = np.nan
    block, first = BLOCKS[key], 32
    part = slice(first, first + len(bits))
    for array, values in zip(
        (block.bits, block.packed, block.scale), (bits, packed, scale), strict=True
    ):
        array[part] = values
    (found,) = block.compare([part], certify=certify)
    return found


def both(bits, packed, scale, *, certify=True):
    """The tally of the kernel, which proves by the stored levels what it can, after holding it
    against the definition with the grid that the full recovery finds."""
    found = compare(bits, packed, scale, certify=certify)
    grid = certified(bits) if certify and bits.shape[1] == 32 else None
    slow, slow_wrong = tally_numpy(bits, packed, scale, grid)
    if grid is not None:
        proved = int(grid.proved.sum())
        slow = replace(slow, compared=proved, uncertified=len(bits) - proved)
    elif certify:
        proved = int(certified(bits.reshape(-1, 32)).proved.sum())
        slow = replace(slow, uncertified=bits.size // 32 - proved)
    same(found.tally, slow)
    assert found.wrong.tolist() == np.flatnonzero(slow_wrong).tolist()
    return found.tally


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
    tally = both(bits, result.packed, result.scale)
    assert tally.identical == result.counts.identical
    assert (tally.levels_differ, tally.step_off, tally.negative_scales) == (0, 0, 0)
    assert tally.peak_levels[8] == tally.groups == 600


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 16, 32, 64, 96])
def test_damaged_groups_of_any_size_agree_with_the_definition(dtype, size):
    rng = np.random.default_rng(size)
    bits = grid_bits(2, 1800)
    result = recover_block(bits, dtype)
    bits = bits.reshape(-1, size)
    packed = result.packed.reshape(-1, size // 2)
    scale = np.resize(result.scale, len(bits))
    tally = both(*damage(bits, packed, scale, rng))
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
    both(bits, packed, scale)


def test_identical_is_what_decode_gives():
    bits = grid_bits(3)
    for dtype in DTYPES:
        result = recover_block(bits, dtype)
        words, scale = result.packed.view("<i4"), result.scale[:, None]
        tally = compare(bits, result.packed, result.scale).tally
        assert tally.identical == (decode(words, scale).view(np.uint16) == bits).sum()
        cast = decode(words, scale, scale_as_bf16=True).view(np.uint16)
        assert tally.cast == (cast == bits).sum()


def one(levels, step, stored_levels, stored_step, dtype="float32"):
    """One group by hand: trained levels and step, stored ones."""
    bits = (np.array([levels], np.float32) * np.float32(step)).astype(tiny.BF16).view(np.uint16)
    packed = pack(np.array([stored_levels], np.int8)).view(np.uint8)
    scale = np.array([stored_step], np.float32).astype(SCALE_DTYPES[dtype])
    return both(bits, packed, scale)


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


@pytest.mark.parametrize(
    ("dtype", "factor", "off", "rounded"),
    [
        ("bfloat16", 1, 0, 0),
        ("bfloat16", 1 + 2**-7, 0, 0),
        ("bfloat16", 1 + 2**-6, 1, 0),
        ("bfloat16", 2, 1, 0),
        ("float16", 1, 0, 0),
        ("float16", 1 + 2**-9, 1, 0),
        ("float32", 1, 0, 0),
        ("float32", 1.003, 1, 0),
        ("float32", 1 + 2**-7, 0, 1),
    ],
)
def test_a_step_is_off_beyond_one_and_a_half_ulps_of_what_holds_it(dtype, factor, off, rounded):
    step = 1.0078125 * 2**-7 if factor in (1 + 2**-7, 1 + 2**-6) else 0.01
    stored = float(np.float32(step * factor).astype(tiny.BF16)) if rounded else step * factor
    tally = one(LEVELS, step, LEVELS, stored, dtype)
    assert (tally.step_off, tally.rounded_steps) == (off, rounded)


def test_subnormal_float16_steps_are_held_to_their_unit():
    step = 2.6 * 2**-24
    assert one(LEVELS, step, LEVELS, 3 * 2.0**-24, "float16").step_off == 0
    assert one(LEVELS, step, LEVELS, 5 * 2.0**-24, "float16").step_off == 1


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
    tally = both(bits, packed, scale)
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


def awkward(rng, count):
    """Groups on grids of few levels, of one sign, off the grid, tied, of extreme size or zeros,
    and the levels somebody might store for them: the trained ones, multiples, neighbours."""
    top = rng.integers(0, 9, (count, 1))
    levels = rng.integers(-8, 8, (count, 32)).clip(-top, np.minimum(top, 7))
    sparse = rng.integers(0, 4, (count, 1)) == 0
    levels = np.where(
        sparse, np.where(rng.random((count, 32)) < 0.5, 0, np.sign(levels) * top), levels
    )
    plus_8 = rng.random((count, 1)) < 0.1
    levels = np.where(plus_8 & (levels == 7), 8, levels)
    step = np.exp2(rng.uniform(-12, -2, (count, 1)))
    # Steps of few bits put products on the midpoints of bf16.
    step = np.where(
        rng.random((count, 1)) < 0.5, np.float32(step).astype(tiny.BF16) * 1.00390625, step
    )
    step = np.where(
        rng.random((count, 1)) < 0.05, step * 2.0 ** rng.choice([-120, -45, 50], (count, 1)), step
    )
    value = (levels.astype(np.float32) * step.astype(np.float32)).astype(tiny.BF16)
    bits = value.view(np.uint16)
    nudged = rng.random(count) < 0.2
    bits[nudged, rng.integers(0, 32, nudged.sum())] ^= 1
    signed = rng.random((count, 32)) < 0.02
    bits ^= np.where(signed, 0x8000, 0).astype(np.uint16)
    choice = rng.integers(0, 6, (count, 1))
    stored = np.select(
        [choice == 0, choice == 1, choice == 2, choice == 3],
        [levels * 2, -levels, levels // 2, levels + (rng.random((count, 32)) < 0.05)],
        levels,
    ).clip(-8, 7)
    factor = np.select([choice == 0, choice == 1, choice == 2], [0.5, -1, 2], 1.0)
    scale = step * factor * rng.choice([1, 1, 1, 1.003, 1.02, 1.5], (count, 1))
    return bits, pack(stored.astype(np.int8)).view(np.uint8), scale[:, 0].astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_that_prove_themselves_are_those_of_the_recovery(dtype):
    """The kernel may take the stored levels for the grid only where the full recovery finds the
    same: all figures and all wrong groups agree, on groups made to be awkward."""
    rng = np.random.default_rng(7)
    bits, packed, scale = awkward(rng, 6000)
    with np.errstate(over="ignore"):
        tally = both(bits, packed, scale.astype(SCALE_DTYPES[dtype]))
    assert min(tally.compared, tally.uncertified, tally.levels_differ, tally.step_off) > 100
    assert tally.zero_groups > 100


def test_a_peak_that_fits_several_levels_is_held_to_the_recovered_step():
    """Zeros, peaks and halves alone: stored on 7, 6 or 5, recovered on 8, whose bf16 step is
    another; every mantissa with every bf16 scale near it."""
    bits, levels, scales = [], [], []
    for top in (5, 6, 7):
        for peak in range(0x3C00, 0x3C80):
            near = int(np.float32(_value(peak) / top).view(np.uint32)) >> 16
            for scale in range(near - 2, near + 4):
                half = top == 6 and scale % 2
                bits.append([peak, 0, peak | 0x8000, (peak - 0x80) * half] * 8)
                levels.append([top, 0, -top, 3 * half] * 8)
                scales.append(_value(scale))
    packed = pack(np.array(levels, np.int8)).view(np.uint8)
    tally = both(np.array(bits, np.uint16), packed, np.array(scales, np.float32).astype(tiny.BF16))
    assert tally.compared == tally.groups
    assert 0 < tally.step_off < tally.groups


def _value(bits):
    return np.uint32(bits << 16).view(np.float32)


def test_sound_groups_need_no_recovery(monkeypatch):
    bits = grid_bits(5)
    result = recover_block(bits, "bfloat16")
    monkeypatch.setattr("qatpack.verify.compare.recovered_words", None)
    assert compare(bits, result.packed, result.scale).tally.compared == 600


def test_parts_are_summed_on_their_own():
    bits = grid_bits(6)
    result = recover_block(bits, "float32")
    block = Block(32, "float32")
    block.bits[:600], block.packed[:600], block.scale[:600] = bits, result.packed, result.scale
    block.packed[450] = 0x88
    parts = [slice(0, 400), slice(400, 600)]
    first, second = block.compare(parts, certify=True)
    assert (first.tally.groups, second.tally.groups) == (400, 200)
    assert (first.wrong.tolist(), second.wrong.tolist()) == ([], [50])
    assert first.tally.exact
