"""The divergence of builds from their reference over the windows of a text.

First every model runs all windows, alone on the device, and leaves its hidden states in a store;
then heads alone turn them into logits, a block of positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..checkpoint.errors import ModelError
from ..checkpoint.progress import Progress
from . import divergence
from .divergence import Positions
from .gemma4.load import Model
from .heads import Head
from .states import AGAIN, Store, run_window
from .windows import Windows

BLOCK = 64  # positions whose logits are held at once: 67 MB a model at 262,144 tokens


SECOND = (0, AGAIN)  # the second run of the first window


def missing(store: Store, windows: Windows, *, again: bool = False) -> list[tuple[int, str]]:
    """(window, tag) of the states that the store lacks; `again`: a second run of window 0 too."""
    wanted = [(i, "") for i in range(len(windows.tokens))] + [SECOND] * again
    return [(i, tag) for i, tag in wanted if not store.has(windows.tokens[i], tag)]


def fill(
    model: Model, store: Store, windows: Windows, wanted: Sequence[tuple[int, str]], step: Progress
) -> None:
    """Run the windows that are missing."""
    for index, tag in wanted:
        tokens = windows.tokens[index]
        store.write(tokens, run_window(model, tokens), tag)
        step(1)


def compare(
    names: Sequence[str],
    heads: Sequence[Head],
    stores: Sequence[Store],
    windows: Windows,
    step: Progress,
) -> list[Positions]:
    """The divergence of each build from the reference, which comes first in every sequence.

    `step` is called once a window. Raises `ModelError` where logits are not finite.
    """
    found: list[list[dict[str, np.ndarray]]] = [[] for _ in heads[1:]]
    for index, tokens in enumerate(windows.tokens):
        states = [_read(store, tokens) for store in stores]
        parts = _window(heads, states, tokens, windows)
        for name, rows, part in zip(names[1:], found, parts, strict=True):
            _check_finite(names[0], name, part, index)
            rows.append(part)
        step(1)
    return [_positions(rows, windows) for rows in found]


def check_itself(name: str, head: Head, store: Store, windows: Windows) -> dict[str, Any]:
    """The reference against a second run of itself, on the first window: mean and max, in nats.

    0 on a device that repeats itself: no divergence below this means anything.

    Raises `ModelError` where logits are not finite.
    """
    tokens = windows.tokens[0]
    states = [_read(store, tokens), _read(store, tokens, AGAIN)]
    (part,) = _window([head, head], states, tokens, windows)
    _check_finite(name, name, part, 0)
    return {
        "mean": float(part["kl"].mean(dtype=np.float64)),
        "max": float(part["kl"].max()),
        "positions": windows.scored,
    }


def _read(store: Store, tokens: np.ndarray, tag: str = "") -> np.ndarray:
    states = store.read(tokens, tag)
    if states is None:
        raise RuntimeError(f"{store.folder}: states vanished during the evaluation")
    return states


def _window(
    heads: Sequence[Head], states: Sequence[np.ndarray], tokens: np.ndarray, windows: Windows
) -> list[dict[str, np.ndarray]]:
    """What `divergence.compare` gives for each build at the scored places of one window."""
    found: list[list[dict[str, np.ndarray]]] = [[] for _ in heads[1:]]
    for start, stop in _blocks(windows):
        targets = jnp.asarray(_padded(tokens[start + 1 : stop + 1]))
        x, x_norm = heads[0].scores(_padded(states[0][start:stop]))
        for parts, head, own in zip(found, heads[1:], states[1:], strict=True):
            y, y_norm = head.scores(_padded(own[start:stop]))
            result = divergence.compare(x, y, x_norm, y_norm, targets)
            parts.append({k: np.asarray(v)[: stop - start] for k, v in result.items()})
    return [{k: np.concatenate([p[k] for p in parts]) for k in parts[0]} for parts in found]


def _check_finite(reference: str, build: str, part: Mapping[str, np.ndarray], index: int) -> None:
    """NaN or infinity anywhere in a row of logits makes its divergence and its losses NaN."""
    for name, field in ((reference, "nll_x"), (build, "nll_y"), (build, "kl")):
        if not np.isfinite(part[field]).all():
            raise ModelError(
                f"{name}: its logits are not finite in window {index}; look at its weights with "
                "qatpack verify, or try --dtype float32."
            )


def _blocks(windows: Windows) -> Iterator[tuple[int, int]]:
    for start in range(windows.first, windows.last, BLOCK):
        yield start, min(start + BLOCK, windows.last)


def _padded(rows: np.ndarray) -> np.ndarray:
    """`BLOCK` rows, so that one compilation serves all; what the added ones give is dropped."""
    return np.pad(rows, [(0, BLOCK - len(rows))] + [(0, 0)] * (rows.ndim - 1))


def _positions(parts: Sequence[dict[str, np.ndarray]], windows: Windows) -> Positions:
    stacked = {k: np.stack([p[k] for p in parts]) for k in parts[0]}
    with_target = slice(0, windows.targets)
    return Positions(
        kl=stacked["kl"],
        same_top=stacked["same_top"],
        nll_x=stacked["nll_x"][:, with_target],
        nll_y=stacked["nll_y"][:, with_target],
        dp=stacked["dp"][:, with_target],
        first=windows.first,
    )
