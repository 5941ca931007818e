"""Packing is lossless, laid out as compressed-tensors lays it out, and decodes as readers do."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qatpack.repack.packing import decode, pack, unpack

BF16 = ml_dtypes.bfloat16

levels_arrays = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5).flatmap(
    lambda shape: hnp.arrays(np.int8, (*shape[:-1], 8 * shape[-1]), elements=st.integers(-8, 7))
)


@given(levels_arrays)
def test_round_trip(levels):
    packed = pack(levels)
    assert packed.dtype == np.int32
    assert packed.shape == (*levels.shape[:-1], levels.shape[-1] // 8)
    np.testing.assert_array_equal(unpack(packed), levels)


@given(hnp.arrays(np.int32, (3, 4)))
def test_any_word_survives(words):
    # Words above 2^24 lose bits in float32: every one of the 32 must come back.
    np.testing.assert_array_equal(pack(unpack(words)), words)


def test_pinned_bytes():
    packed = pack(np.array([-8, -7, -1, 0, 1, 2, 6, 7], np.int8))
    assert packed.astype("<i4").tobytes() == bytes([0x10, 0x87, 0xA9, 0xFE])
    assert packed.tolist() == [0xFEA98710 - 2**32]


def test_word_beyond_float32():
    word = 0x7FFFFFFF
    assert int(np.float32(word)) != word
    assert unpack(np.array([word], np.int32)).tolist() == [7] * 7 + [-1]


def test_agrees_with_compressed_tensors():
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors.pack_quantized import helpers

    levels = np.random.default_rng(0).integers(-8, 8, (64, 96)).astype(np.int8)
    theirs = helpers.pack_to_int32(torch.from_numpy(levels), 4)
    np.testing.assert_array_equal(pack(levels), theirs.numpy())
    back = helpers.unpack_from_int32(torch.from_numpy(pack(levels)), 4, torch.Size(levels.shape))
    np.testing.assert_array_equal(back.numpy(), levels)


def test_non_contiguous_input():
    levels = np.random.default_rng(1).integers(-8, 8, (16, 32)).astype(np.int8)
    np.testing.assert_array_equal(pack(levels.T), pack(np.ascontiguousarray(levels.T)))
    np.testing.assert_array_equal(unpack(pack(levels)[::2]), levels[::2])


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (np.full(8, 8, np.int8), "4 bits hold -8..7"),
        (np.full(8, -9, np.int8), "4 bits hold -8..7"),
        (np.zeros(12, np.int8), "multiple of 8"),
        (np.zeros((), np.int8), "multiple of 8"),
        (np.zeros(8, np.int32), "must be int8"),
        (np.zeros(8, np.float32), "must be int8"),
    ],
)
def test_pack_refuses(levels, message):
    with pytest.raises(ValueError, match=message):
        pack(levels)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint32])
def test_unpack_refuses(dtype):
    with pytest.raises(ValueError, match="must be int32"):
        unpack(np.zeros(4, dtype))


def rounded(value):
    """bf16 of one float64 that float32 holds, nearest even, by integers."""
    bits = int(np.float32(value).view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@settings(max_examples=60)
@given(
    hnp.arrays(np.int8, (2, 64), elements=st.integers(-8, 7)),
    st.sampled_from([np.dtype(BF16), np.dtype(np.float16), np.dtype(np.float32)]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_decode_rounds_once_to_nearest_even(levels, dtype, seed, scale_as_bf16):
    scale = np.random.default_rng(seed).lognormal(-4, 3, (2, 2)).astype(dtype)
    values = decode(pack(levels), scale, scale_as_bf16=scale_as_bf16)
    assert values.dtype == BF16
    step = (scale.astype(BF16) if scale_as_bf16 else scale).astype(np.float32)
    products = np.repeat(step, 32, axis=-1) * levels
    expected = [rounded(p) for p in products.ravel()]
    assert values.view(np.uint16).ravel().tolist() == expected


def test_decode_as_transformers_does():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    levels = rng.integers(-8, 8, (16, 64)).astype(np.int8)
    scale = rng.lognormal(-4, 1, (16, 2)).astype(np.float32)
    step = torch.from_numpy(scale).to(torch.bfloat16).repeat_interleave(32, 1)
    theirs = (step * torch.from_numpy(levels).to(torch.bfloat16)).view(torch.int16).numpy()
    ours = decode(pack(levels), scale, scale_as_bf16=True).view(np.int16)
    np.testing.assert_array_equal(ours, theirs)
    assert (decode(pack(levels), scale).view(np.int16) != theirs).any()


def test_decode_ties_subnormals_and_overflow():
    # bfloat16 has 256 and 258 but not 257, 512 and 516 but not 514: a tie goes to even.
    levels = np.array([1, 2, 3, -1, 0, 0, 0, 7], np.int8)
    for scale, expected in ((257.0, [256, 512, 772, -256]), (2.0**-133, [2.0**-133, 2.0**-132])):
        values = decode(pack(levels), np.array([scale], np.float32), 8).astype(float)
        assert values[: len(expected)].tolist() == expected
    assert np.isinf(decode(pack(levels), np.array([2.0**127], np.float32), 8)[7])


@pytest.mark.parametrize(
    ("scale", "group_size", "message"),
    [
        (np.ones((1, 2), np.float64), 32, "dtype float64"),
        (np.ones((1, 3), np.float32), 32, "does not match"),
        (np.ones((2, 2), np.float32), 32, "does not match"),
        (np.ones((1, 2), np.float32), 16, "does not match"),
    ],
)
def test_decode_refuses(scale, group_size, message):
    with pytest.raises(ValueError, match=message):
        decode(np.zeros((1, 8), np.int32), scale, group_size)
