"""The matrix unit's form: its product at real widths, and the model that runs on it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qatpack.checkpoint.source import resolve_source
from qatpack.evaluate.gemma4 import generate, model
from qatpack.evaluate.gemma4.linear import BLOCK_ROWS, prepare, product, rows
from qatpack.evaluate.gemma4.load import Model, load
from qatpack.evaluate.gemma4.packed import Levels, Words, decode, narrowed, to_levels
from qatpack.repack import packing
from qatpack.repack.job import repack
from qatpack.repack.plan import Options

DEMO = Path(__file__).parents[3] / "demo" / "checkpoint"
# Inputs of the linears of E2B, E4B and 31B: hidden, MLP, heads, per-layer width.
WIDTHS = [256, 1536, 2560, 5376, 12288, 21504]
SCALES = [ml_dtypes.bfloat16, np.float16, np.float32]
run = jax.jit(product, static_argnames="dtype")


@pytest.mark.parametrize(
    ("width", "scale_dtype"), [*((w, SCALES[0]) for w in WIDTHS), *((1536, s) for s in SCALES[1:])]
)
def test_products_are_the_float64_ones(width: int, scale_dtype: np.dtype) -> None:
    """Group sums to float32; many rows, whose weights are rounded first, to bfloat16."""
    rng = np.random.default_rng(width)
    levels = rng.integers(-8, 8, (8, width), np.int8)
    scale = np.exp(rng.uniform(-7, -4, (8, width // 32))).astype(scale_dtype)
    words = jnp.asarray(packing.pack(levels).view(np.uint32))
    laid = to_levels(Words(words, jnp.asarray(scale)))
    exact = levels * np.repeat(scale.astype(np.float64), 32, axis=1)
    for count in (1, 2, 3, 8, 16, 600):
        x = jnp.asarray(rng.standard_normal((count, width))).astype(jnp.bfloat16)
        expected = np.asarray(x, np.float64) @ exact.T
        tolerance = 3e-6 if count <= BLOCK_ROWS else 4e-3
        found = np.asarray(run(x, laid, dtype=jnp.float32))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("smallest", "dtype"), [(2.0**-13, jnp.float16), (0.0, jnp.float16), (1e-6, jnp.float32)]
)
def test_a_product_takes_narrow_scales_where_float16_holds_them(
    smallest: float, dtype: jnp.dtype
) -> None:
    rng = np.random.default_rng(3)
    levels = rng.integers(-8, 8, (8, 256), np.int8)
    scale = np.exp(rng.uniform(-7, -4, (8, 8))).astype(np.float32)
    scale[0, 0] = smallest
    words = jnp.asarray(packing.pack(levels).view(np.uint32))
    laid = narrowed(to_levels(Words(words, jnp.asarray(scale))))
    assert laid.scale.dtype == dtype
    x = jnp.asarray(rng.standard_normal((2, 256))).astype(jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ (levels * np.repeat(scale, 32, axis=1)).T
    found = np.asarray(run(x, laid, dtype=jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-11 * np.abs(expected).max())
    kept = decode(Words(words, jnp.asarray(scale)))
    assert (np.asarray(rows(laid, jnp.arange(8), jnp.bfloat16)) == np.asarray(kept)).all()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("builds") / "bfloat16"
    repack(resolve_source(DEMO), out, Options(scale_dtype="bfloat16"))
    return out


@pytest.fixture(scope="module")
def exact(build: Path) -> Model:
    return load(build)


@pytest.fixture(scope="module")
def fast(build: Path) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "tpu")
        loaded = load(build, decode="fast", head="int4")
    assert isinstance(loaded.weights["layers"][0]["q_proj"], Levels)
    assert isinstance(loaded.weights["embed_tokens"], Levels)
    return loaded


def logits(loaded: Model, tokens: np.ndarray) -> np.ndarray:
    """Of one prompt: float32[T, V]."""
    positions = jnp.arange(len(tokens))[None]
    hidden, _ = model.forward(loaded.weights, jnp.asarray(tokens)[None], positions,
                              config=loaded.config)  # fmt: skip
    return np.asarray(model.logits(loaded.weights, hidden[0], config=loaded.config))


def test_logits_are_the_exact_ones_but_for_noise(fast: Model, exact: Model) -> None:
    tokens = np.r_[2, 300 : 299 + BLOCK_ROWS]
    a, b = (jax.nn.log_softmax(logits(m, tokens)) for m in (exact, fast))
    kl = np.asarray(jnp.sum(jnp.exp(a) * (a - b), axis=-1))
    assert kl.mean() < 1e-4
    assert np.abs(a - b).max() > 0  # it is another path


def test_greedy_text_is_the_exact_one_where_the_margin_exceeds_the_noise(
    fast: Model, exact: Model
) -> None:
    prompt = [2, *range(300, 307)]  # all tokens together take group sums, as decoding does
    text, _ = generate.generate(exact.weights, [prompt], config=exact.config, max_tokens=24)
    ours, _ = generate.generate(fast.weights, [prompt], config=fast.config, max_tokens=24)
    tokens = np.array(prompt + text[0][:-1])
    assert len(tokens) <= BLOCK_ROWS
    a, b = (logits(m, tokens)[len(prompt) - 1 :] for m in (exact, fast))
    top = np.sort(a, axis=-1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > 2 * np.abs(a - b).max(axis=-1)
    assert clear.mean() > 0.5
    # After a token that the noise decides the two may part; up to it they may not.
    until = len(text[0]) if clear.all() else int(np.argmin(clear))
    assert until > 4
    assert ours[0][:until] == text[0][:until]


def test_groups_that_tiles_cut_stay_words():
    words = jnp.zeros((8, 96 // 8), jnp.uint32)
    whole, cut = Words(words, jnp.ones((8, 3))), Words(words, jnp.ones((8, 1)))
    assert isinstance(prepare(whole, "fast", platform="tpu"), Levels)
    assert prepare(cut, "fast", platform="tpu") is cut
    assert product(jnp.ones((2, 96)), cut).shape == (2, 8)
