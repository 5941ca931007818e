"""Divergences against an independent computation in float64, and their statistics."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from qatpack.checkpoint.errors import ModelError
from qatpack.evaluate import divergence, fidelity
from qatpack.evaluate.divergence import Positions

CAP = 30.0
CLOSE = {"rtol": 1e-6, "atol": 1e-13}  # a millionth, of 1e-7 nats where it is less


def exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """KL(softmax(x) || softmax(y)) of float32 logits by the plain sum, in extended precision."""
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    logs = []
    for logits in (x, y):
        shifted = logits - logits.max(-1, keepdims=True)
        logs.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).astype(np.float64)


def measured(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    targets = jnp.arange(len(x), dtype=jnp.int32)
    a, b = jnp.asarray(x), jnp.asarray(y)
    found = divergence.compare(a, b, divergence.normalizer(a), divergence.normalizer(b), targets)
    return {name: np.asarray(value) for name, value in found.items()}


def logits(rng: np.random.Generator, width: float, vocab: int, rows: int = 8) -> np.ndarray:
    return (rng.standard_normal((rows, vocab)) * width).astype(np.float32)


def capped(x: np.ndarray) -> np.ndarray:
    return (np.tanh(x / CAP) * CAP).astype(np.float32)


@pytest.mark.parametrize(("rows", "vocab"), [(8, 7), (8, 1536), (1, 262_144)])
@pytest.mark.parametrize("noise", [3e-4, 1e-2, 0.3, 3.0])
def test_it_agrees_with_float64_to_a_millionth(rows: int, vocab: int, noise: float) -> None:
    rng = np.random.default_rng(0)
    raw = logits(rng, 6.0, vocab, rows)
    x, y = capped(raw), capped(raw + noise * logits(rng, 1.0, vocab, rows))
    np.testing.assert_allclose(measured(x, y)["kl"], exact(x, y), **CLOSE)


def test_logits_far_above_the_cap() -> None:
    rng = np.random.default_rng(1)
    raw = logits(rng, 400.0, 4096)
    x, y = capped(raw), capped(raw + logits(rng, 30.0, 4096))
    assert np.abs(raw).max() > 40 * CAP
    assert np.abs(x).max() <= CAP
    np.testing.assert_allclose(measured(x, y)["kl"], exact(x, y), **CLOSE)


def test_without_a_cap_far_apart() -> None:
    rng = np.random.default_rng(2)
    x, y = logits(rng, 60.0, 512), logits(rng, 60.0, 512)
    np.testing.assert_allclose(measured(x, y)["kl"], exact(x, y), **CLOSE)


def test_a_ten_millionth_of_a_nat_is_resolved() -> None:
    rng = np.random.default_rng(3)
    x = capped(logits(rng, 5.0, 1536))
    y = (x + 4.5e-4 * rng.standard_normal(x.shape)).astype(np.float32)
    truth = exact(x, y)
    assert 1e-8 < truth.min() < truth.max() < 1e-6
    np.testing.assert_allclose(measured(x, y)["kl"], truth, **CLOSE)


def test_one_ulp_of_one_logit_shows_and_equal_logits_give_zero() -> None:
    rng = np.random.default_rng(4)
    x = capped(logits(rng, 5.0, 1536))
    y = x.copy()
    y[0, x[0].argmax()] = np.nextafter(x[0].max(), np.float32(np.inf))
    found = measured(x, y)
    assert found["kl"][0] > 0
    assert (found["kl"][1:] == 0).all()
    np.testing.assert_allclose(found["kl"][0], exact(x, y)[0], rtol=0.1)
    assert (measured(x, x)["kl"] == 0).all()


def test_a_shift_of_all_logits_is_no_divergence() -> None:
    x = capped(logits(np.random.default_rng(5), 5.0, 1536))
    assert measured(x, x + np.float32(0.5))["kl"].max() < 1e-12


def test_true_tokens_and_tops() -> None:
    x = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], np.float32))
    y = np.log(np.array([[0.6, 0.3, 0.1], [0.3, 0.5, 0.2]], np.float32))
    found = measured(x, y)
    np.testing.assert_array_equal(found["same_top"], [1, 0])
    np.testing.assert_allclose(found["nll_x"], -np.log([0.7, 0.3]), rtol=1e-6)
    np.testing.assert_allclose(found["dp"], [0.6 - 0.7, 0.5 - 0.3], rtol=1e-5)


def test_pairwise_sums_are_close_for_any_length() -> None:
    rng = np.random.default_rng(6)
    for size in (1, 2, 3, 1000, 262_144):
        x = rng.random((2, size), np.float32)
        found = np.asarray(divergence.pairwise_sum(jnp.asarray(x)))
        np.testing.assert_allclose(found, x.sum(-1, dtype=np.float64), rtol=3e-7)


def positions(kl: np.ndarray) -> Positions:
    rng = np.random.default_rng(7)
    nll = rng.random((kl.shape[0], kl.shape[1] - 1), np.float32)
    return Positions(
        kl, (kl < 1).astype(np.float32), nll, nll + np.float32(0.01), 0.1 * nll, first=256
    )


def test_the_summary() -> None:
    kl = np.random.default_rng(8).exponential(0.1, (4, 255)).astype(np.float32)
    kl[0, 0] = 0
    found = positions(kl).summary()
    flat = kl.astype(np.float64).ravel()
    assert found["positions"] == 4 * 255
    assert found["mean"] == pytest.approx(flat.mean(), rel=1e-12)
    assert found["standard_error"] == pytest.approx(flat.std(ddof=1) / math.sqrt(1020), rel=1e-12)
    assert found["median"] == pytest.approx(np.median(flat))
    assert found["p90"] < found["p95"] < found["p99"] < found["p99_9"] < found["max"]
    assert found["window_min"] < found["mean"] < found["window_max"]
    assert found["perplexity_ratio"] == pytest.approx(math.exp(0.01), rel=1e-6)
    assert found["perplexity"] / found["reference_perplexity"] == pytest.approx(math.exp(0.01))
    assert found["perplexity_ratio_se"] < 1e-6  # every pair differs alike
    histogram = found["histogram"]
    assert histogram["zero"] == 1
    assert sum(histogram["counts"]) + histogram["zero"] + histogram["below"] == 1020
    places = found["by_position"]
    assert places["first"][0] == 256
    assert len(places["first"]) == len(places["mean"]) == divergence.PLACES
    assert np.average(places["mean"], weights=np.diff([*places["first"], 511])) == pytest.approx(
        found["mean"]
    )


def test_losses_beyond_float64_stay_numbers() -> None:
    nll = np.zeros((1, 3), np.float32)
    far = Positions(nll + 9, nll, nll, nll + np.float32(2000), nll, first=0)
    found = far.summary()
    assert found["perplexity"] == found["perplexity_ratio"] == pytest.approx(1e304, rel=0.1)
    assert found["perplexity_ratio_se"] == 0
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("who", [0, 1])
def test_logits_that_are_not_finite_are_named(who: int, value: float) -> None:
    pair = [logits(np.random.default_rng(i), 5.0, 64) for i in range(2)]
    pair[who][3, 11] = value
    name = ("reference", "build")[who]
    with pytest.raises(ModelError, match=f"^{name}: its logits are not finite in window 7"):
        fidelity._check_finite("reference", "build", measured(*pair), 7)
    fine = [logits(np.random.default_rng(i), 5.0, 64) for i in range(2)]
    fidelity._check_finite("reference", "build", measured(*fine), 7)


def test_which_of_two_builds_is_closer() -> None:
    a, b = np.array([[0.0, 0.1, 0.3]]), np.array([[0.0, 0.2, 0.1]])
    found = divergence.closer(a, b)
    assert found["a_closer"] == found["b_closer"] == found["equal"] == pytest.approx(1 / 3)
    assert found["mean_ratio"] == pytest.approx(0.75)
    assert divergence.closer(np.zeros((1, 2)), np.ones((1, 2)))["mean_ratio"] is None
