"""Packed products: exact against the dense weights bit for bit, fast against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qatpack.evaluate.gemma4.lanes import CUTS, PIECE, piece_width, times_lanes, to_lanes
from qatpack.evaluate.gemma4.linear import product, rows
from qatpack.evaluate.gemma4.packed import Words, decode, to_levels
from qatpack.repack import packing

BF16 = ml_dtypes.bfloat16
SCALES = [BF16, np.float16, np.float32]


def random_words(
    out: int, width: int, scale_dtype: np.dtype = np.float32
) -> tuple[Words, np.ndarray]:
    """Random packed words, and what numpy decodes them to."""
    rng = np.random.default_rng(out * width)
    words = packing.pack(rng.integers(-8, 8, (out, width), np.int8))
    scale = np.exp(rng.uniform(-7, -4, (out, width // 32))).astype(scale_dtype)
    ours = Words(jnp.asarray(words.view(np.uint32)), jnp.asarray(scale))
    return ours, packing.decode(words, scale)


def inputs(count: int, width: int) -> jax.Array:
    x = np.random.default_rng(count).standard_normal((count, width))
    return jnp.asarray(x).astype(jnp.bfloat16)


@pytest.mark.parametrize("scale_dtype", SCALES)
def test_decode_is_what_numpy_and_readers_decode(scale_dtype: np.dtype) -> None:
    words, expected = random_words(24, 192, scale_dtype)
    found = np.asarray(jax.jit(decode)(words))
    assert found.dtype == BF16
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_exact_product_is_the_dense_one_bit_for_bit(count: int, scale_dtype: np.dtype) -> None:
    words, dense = random_words(512, 256, scale_dtype)
    x, run = inputs(count, 256), jax.jit(product)
    np.testing.assert_array_equal(
        np.asarray(run(x, words)).view(np.uint16),
        np.asarray(run(x, jnp.asarray(dense))).view(np.uint16),
    )


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("shape", [(512, 768), (96, 1344)])
@pytest.mark.parametrize("layout", [to_levels, to_lanes])
def test_group_sums_are_the_float64_product(
    layout: Any, shape: tuple[int, int], scale_dtype: np.dtype
) -> None:
    """Float32 sums of exact products: far below the rounding of the result to bfloat16."""
    words, _ = random_words(*shape, scale_dtype)
    levels = packing.unpack(np.asarray(words.words).view(np.int32)).astype(np.float64)
    exact = levels * np.repeat(np.asarray(words.scale, np.float64), 32, axis=1)
    laid, run = layout(words), jax.jit(product, static_argnames="dtype")
    for count in (1, 2, 3, 8):
        x = inputs(count, shape[1])
        found = np.asarray(run(x, laid, dtype=jnp.float32))
        expected = np.asarray(x, np.float64) @ exact.T
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_lanes_keep_one_loop_over_packed_words() -> None:
    """No nibble is written out: the temporaries are far below the weights as float32."""
    words, _ = random_words(512, 1536)
    program = jax.jit(times_lanes).lower(inputs(1, 1536), to_lanes(words)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * 4 * 512 * 1536


def test_lanes_do_not_hide_a_damaged_weight() -> None:
    words, _ = random_words(16, 64)
    broken = Words(words.words, words.scale.at[3, 1].set(jnp.nan))
    found = np.asarray(times_lanes(inputs(1, 64), to_lanes(broken)))
    np.testing.assert_array_equal(np.isnan(found[0]), np.arange(16) == 3)


@pytest.mark.parametrize("out", [6144, 1536, 8960, 256, 97, 24])
def test_pieces_of_lanes_fit_a_cache_and_a_mesh(out: int) -> None:
    wide = piece_width(out, 192)
    assert out % wide == 0
    assert 4 * 192 * wide <= PIECE
    assert out % CUTS or out // wide % CUTS == 0


@pytest.mark.parametrize("layout", [to_levels, to_lanes])
def test_many_rows_scale_the_weights_first(layout: Any) -> None:
    words, dense = random_words(96, 512)
    x = inputs(40, 512)
    found = np.asarray(product(x, layout(words)), np.float32)
    expected = np.asarray(x, np.float32) @ dense.astype(np.float32).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * np.abs(expected).max())


def test_tiles_fit_the_shards_of_the_input() -> None:
    words, _ = random_words(32, 21504 // 4)
    assert to_levels(words).levels.shape == (21, 256, 32)
    laid = to_levels(words, shards=2)
    assert laid.levels.shape == (42, 128, 32)
    assert laid.levels.dtype == jnp.int4


def test_rows_of_dense_and_packed_tables() -> None:
    words, dense = random_words(64, 96)
    ids = jnp.array([[0, 63, 5], [5, 1, 2]])
    for table in (words, jnp.asarray(dense)):
        found = np.asarray(jax.jit(rows, static_argnames="dtype")(table, ids, dtype=jnp.bfloat16))
        np.testing.assert_array_equal(found, dense[np.asarray(ids)])


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA of JAX 0.7 copies it for the sum")
def test_a_tied_table_is_not_copied() -> None:
    """Rows of it and a product with it in one program, as in a step."""
    table = jnp.ones((2048, 256), jnp.bfloat16)

    def step(table: jax.Array, ids: jax.Array) -> jax.Array:
        return product(rows(table, ids, jnp.bfloat16), table)

    program = jax.jit(step).lower(table, jnp.array([3])).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * table.nbytes
