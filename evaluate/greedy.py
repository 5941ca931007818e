"""Greedy continuations of one prompt: how long a build says what its reference says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.progress import Progress
from .gemma4 import model
from .gemma4.config import Config
from .gemma4.generate import default_cache_length, padded_length, stream
from .gemma4.load import Model
from .states import run_window

WIDER = 4  # the floor's cache over the usual one
ROWS = 64  # positions whose logits are held at once


@dataclass(frozen=True)
class Match:
    """Two continuations of `tokens` tokens side by side.

    - `equal`: places with the same token, over all; `equal_before`: before the first difference.
    - `first_difference`: its index, None where there is none; `margin`: there, the logit of the
      reference's likeliest token less that of the second.
    """

    tokens: int
    equal: int
    equal_before: int
    first_difference: int | None
    margin: float | None

    def to_json(self) -> dict[str, Any]:
        """As in evaluation.json."""
        return {
            "tokens": self.tokens,
            "equal": self.equal,
            "equal_before": self.equal_before,
            "first_difference": self.first_difference,
            "margin": self.margin,
        }


@dataclass(frozen=True)
class Answer:
    """The reference's continuation.

    `margins` holds, for each token, the logit of the likeliest less that of the second, from one
    pass over the whole answer; `floor` is the reference against itself with a longer cache.
    """

    ids: tuple[int, ...]
    margins: tuple[float, ...]
    floor: Match


def continue_greedily(
    loaded: Model,
    prompt: Sequence[int],
    *,
    tokens: int,
    wider: bool = False,
    step: Progress,
) -> tuple[int, ...]:
    """The likeliest `tokens` next tokens of one prompt, stop tokens not heeded.

    Batch and cache length follow from prompt and `tokens`: the same for every model, and those of
    the speed part, so that one compilation serves both. `wider` takes a cache `WIDER` times as
    long, all of it padding, which changes nothing but the rounding.
    """
    length = default_cache_length([prompt], tokens) * (WIDER if wider else 1)
    ids: list[int] = []
    for chunk in stream(
        loaded.weights, [prompt], config=loaded.config, max_tokens=tokens, cache_length=length,
        chunk=tokens - 1,
    ):  # fmt: skip
        ids += chunk.tokens[0]
        step(len(chunk.tokens[0]))
    return tuple(ids)


def answer(loaded: Model, prompt: Sequence[int], *, tokens: int, step: Progress) -> Answer:
    """What the reference says, how sure it is of each token, and how well it repeats itself."""
    ids = continue_greedily(loaded, prompt, tokens=tokens, step=step)
    margins = top_margins(loaded, prompt, ids)
    wide = continue_greedily(loaded, prompt, tokens=tokens, wider=True, step=step)
    return Answer(ids, margins, match(ids, margins, wide))


def match(reference: Sequence[int], margins: Sequence[float], ids: Sequence[int]) -> Match:
    """Hold a continuation against the reference's, of the same length."""
    same = [a == b for a, b in zip(reference, ids, strict=True)]
    first = same.index(False) if False in same else None
    return Match(
        tokens=len(same),
        equal=sum(same),
        equal_before=len(same) if first is None else first,
        first_difference=first,
        margin=None if first is None else margins[first],
    )


def top_margins(loaded: Model, prompt: Sequence[int], ids: Sequence[int]) -> tuple[float, ...]:
    """For each of `ids` behind the prompt: logit of the likeliest token less that of the second."""
    text = [*prompt, *ids[:-1]]
    # Zeros behind the text change nothing before them.
    tokens = np.zeros(padded_length(len(text)), np.int32)
    tokens[: len(text)] = text
    hidden = run_window(loaded, tokens)[len(prompt) - 1 : len(text)]
    found: list[float] = []
    for start in range(0, len(hidden), ROWS):
        rows = jnp.asarray(hidden[start : start + ROWS])
        found += _margins(loaded.weights, rows, config=loaded.config).tolist()
    return tuple(found)


@functools.partial(jax.jit, static_argnames="config")
def _margins(weights: model.Weights, hidden: jax.Array, *, config: Config) -> jax.Array:
    top = jax.lax.top_k(model.logits(weights, hidden, config=config), 2)[0]
    return top[:, 0] - top[:, 1]
