"""How far one set of logits is from another: the arithmetic, and the statistics over positions.

Float32 throughout on the device, float64 for the statistics. Nothing here knows of models or files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
SERIES = tuple(2 / math.factorial(n) for n in range(2, 12))
DECADES = (-12.0, 2.0)  # of the histogram, in powers of ten of nats
PER_DECADE = 4
LARGEST = 700.0  # nats a token whose perplexity, 1e304, is still a float64
PLACES = 64  # at most so many means by place in a window


def pairwise_sum(x: Array) -> Array:
    """Sum over the last axis by halves: the error grows with its logarithm, and the order of the
    additions is fixed whatever the compiler makes of it."""
    size = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


@jax.jit
def normalizer(logits: Array) -> tuple[Array, Array]:
    """Largest logit and log of the sum of exp(logit - largest), each float32[P]; log-softmax is
    logit - largest - log sum. Kept apart: their sum would lose the digits of the smaller one."""
    peak = jnp.max(logits, axis=-1)
    return peak, jnp.log(pairwise_sum(jnp.exp(logits - peak[:, None])))


@jax.jit
def compare(
    x: Array, y: Array, x_norm: tuple[Array, Array], y_norm: tuple[Array, Array], targets: Array
) -> dict[str, Array]:
    """Distances of the distributions softmax(y) from softmax(x), position by position.

    KL(p || q) is taken as the sum of p * d + q - p with d = log p - log q: the q - p sum to 0, but
    with them every term is at least 0, and an error common to all d cancels in the first order,
    where the plain sum of p * d would show it whole. 1e-7 nats stay visible in float32, and equal
    logits give 0.

    Args:
        x: the reference's logits, float32[P, V].
        y: the build's.
        x_norm, y_norm: `normalizer` of each.
        targets: int32[P], the true next tokens.

    Returns:
        float32[P] each: `kl` in nats, `same_top` 1 or 0, `nll_x` and `nll_y` of the true token in
        nats, `dp` its probability under y less that under x.
    """
    (x_peak, x_log), (y_peak, y_log) = x_norm, y_norm
    d = (x - y) - ((x_peak - y_peak) + (x_log - y_log))[:, None]
    p, q = (
        jnp.exp((logits - peak[:, None]) - log[:, None])
        for logits, peak, log in ((x, x_peak, x_log), (y, y_peak, y_log))
    )
    nll_x, nll_y = (
        (peak - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]) + log
        for logits, peak, log in ((x, x_peak, x_log), (y, y_peak, y_log))
    )
    same = jnp.argmax(x, axis=-1) == jnp.argmax(y, axis=-1)
    return {
        "kl": pairwise_sum(_terms(p, q, d)),
        "same_top": same.astype(jnp.float32),
        "nll_x": nll_x,
        "nll_y": nll_y,
        "dp": jnp.exp(-nll_y) - jnp.exp(-nll_x),
    }


def _terms(p: Array, q: Array, d: Array) -> Array:
    """p * d + q - p, which is p * (d + expm1(-d)): in whichever form does not lose digits.

    Near 0 the series d^2/2 - d^3/6 + ...; far below 0 expm1 would overflow.
    """
    near = jnp.abs(d) < 0.5
    small = jnp.where(near, d, 0.0)
    series = jnp.zeros_like(d)
    for factor in reversed(SERIES):
        series = factor - small * series
    bounded = jnp.maximum(d, -16.0)
    far = jnp.where(d > -16.0, p * (d + jnp.expm1(-bounded)), p * d + (q - p))
    return jnp.where(near, p * (0.5 * small * small * series), far)


@dataclass(frozen=True)
class Positions:
    """What `compare` found at each scored position of each window.

    - `kl`, `same_top`: [windows, positions of a window].
    - `nll_x`, `nll_y`, `dp`: [windows, those whose next token is in the window].
    - `first`: the place in its window of the first scored position.
    """

    kl: np.ndarray
    same_top: np.ndarray
    nll_x: np.ndarray
    nll_y: np.ndarray
    dp: np.ndarray
    first: int

    def summary(self) -> dict[str, Any]:
        """Mean, spread and percentiles, as in evaluation.json (docs/evaluate.md)."""
        kl = self.kl.astype(np.float64)
        windows, flat = kl.mean(axis=1), kl.ravel()
        median, p90, p95, p99, p99_9 = np.percentile(flat, [50, 90, 95, 99, 99.9]).tolist()
        top = float(self.same_top.mean(dtype=np.float64))
        return {
            "positions": flat.size,
            "mean": float(flat.mean()),
            "standard_error": _standard_error(flat),
            "median": median, "p90": p90, "p95": p95, "p99": p99, "p99_9": p99_9,
            "max": float(flat.max()),
            "window_min": float(windows.min()),
            "window_max": float(windows.max()),
            "same_top": top,
            "same_top_se": math.sqrt(top * (1 - top) / max(1, flat.size - 1)),
            **self._perplexities(),
            "rms_dp": float(np.sqrt(np.mean(self.dp.astype(np.float64) ** 2))),
            "histogram": histogram(flat),
            "by_position": self._by_position(),
        }  # fmt: skip

    def _perplexities(self) -> dict[str, float]:
        x, y = (nll.astype(np.float64).ravel() for nll in (self.nll_x, self.nll_y))
        ratio = _exp((y - x).mean())
        return {
            "perplexity": _exp(y.mean()),
            "reference_perplexity": _exp(x.mean()),
            "perplexity_ratio": ratio,
            # Paired: the two losses of a token rise and fall together. Delta method.
            "perplexity_ratio_se": ratio * _standard_error(y - x),
        }

    def _by_position(self) -> dict[str, Any]:
        """Mean over windows at each place, neighbours joined so that at most `PLACES` remain."""
        mean = self.kl.mean(axis=0, dtype=np.float64)
        parts = np.array_split(mean, min(PLACES, len(mean)))
        starts = np.cumsum([0, *map(len, parts[:-1])]) + self.first
        return {"first": starts.tolist(), "mean": [float(part.mean()) for part in parts]}


def histogram(kl: np.ndarray) -> dict[str, Any]:
    """Counts of divergences by their power of ten; zeros, and those below the edges, apart."""
    low, high = DECADES
    edges = np.linspace(low, high, int((high - low) * PER_DECADE) + 1)
    positive = np.log10(kl[kl > 0])
    counts, _ = np.histogram(np.minimum(positive, high), edges)
    below = int((positive < low).sum())
    zero = int((kl == 0).sum())
    return {"decades": edges.tolist(), "counts": counts.tolist(), "zero": zero, "below": below}


def closer(a: np.ndarray, b: np.ndarray) -> dict[str, float | None]:
    """Of two builds' divergences at the same positions: where which is smaller, ratio of means."""
    mean_a, mean_b = (float(kl.mean(dtype=np.float64)) for kl in (a, b))
    return {
        "a_closer": float((a < b).mean()),
        "b_closer": float((b < a).mean()),
        "equal": float((a == b).mean()),
        "mean_ratio": mean_b / mean_a if mean_a else None,
    }


def _standard_error(values: np.ndarray) -> float:
    """Of the mean, positions taken as independent."""
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0


def _exp(nll: float) -> float:
    """exp, but a number where it would overflow: models without a softcap can lose thousands of
    nats a token when they are broken."""
    return math.exp(min(float(nll), LARGEST))
