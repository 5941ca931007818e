"""Text generation: prompts at a few padded lengths, then a loop that stays on the device.

`prefill` and `decode` are the two compiled functions; `stream` and `generate` run them on lists
of token ids and time them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...checkpoint.errors import ModelError
from . import cache as kv_cache
from . import model
from .attention import Keys
from .config import Config
from .sampling import Sampling, choose

Array = jax.Array
SHORTEST = 32  # smallest padded prompt; longer ones are padded to 4x, then 2x steps
PAD = 0  # what a row emits once it has stopped
BROKEN = -1  # what it emits when its hidden state is not finite


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "token", "at", "done", "key"],
    meta_fields=[],
)
@dataclass(frozen=True)
class State:
    """Between two steps: `token` int32[B] is chosen but not yet run, to stand at `at` int32[B].

    `done` bool[B]: the row has emitted a stop id. `key` feeds the sampling.
    """

    cache: kv_cache.Cache
    token: Array
    at: Array
    done: Array
    key: Array


@functools.partial(jax.jit, static_argnames=("config", "cache_length"))
def prefill(
    weights: model.Weights,
    tokens: Array,
    counts: Array,
    stop: Array,
    key: Array,
    sampling: Sampling | None,
    *,
    config: Config,
    cache_length: int,
) -> State:
    """Run prompts and choose their first new token.

    Args:
        weights: the model.
        tokens: int32[B, T], prompts padded on the right.
        counts: int32[B], tokens of each prompt, at least 1.
        stop: int32[n], ids that end a row.
        key: a PRNG key; unused when greedy.
        sampling: None for greedy.
        config: what model it is.
        cache_length: prompt and new tokens together at most, at least T.
    """
    positions = jnp.where(
        jnp.arange(tokens.shape[1]) < counts[:, None], jnp.arange(tokens.shape[1]), -1
    )
    hidden, kv = model.forward(weights, tokens, positions, config=config, at=counts - 1)
    cache = kv_cache.fill(kv, counts, cache_length, config=config)
    done = jnp.zeros(counts.shape, bool)
    return _chosen(weights, hidden, cache, counts, done, stop, key, sampling, config)


def step(
    weights: model.Weights, cache: kv_cache.Cache, token: Array, at: Array, *, config: Config
) -> tuple[Array, kv_cache.Cache]:
    """Run one token a row, `token` int32[B] at position `at` int32[B]: hidden [B, 1, E], cache."""
    new: dict[int, tuple[Array, Array]] = {}

    def remember(index: int, k: Array, v: Array) -> Sequence[Keys]:
        new[index] = (k, v)
        own = cache[index]
        assert own is not None  # the layers that remember are those with a cache
        held = kv_cache.held(at - 1, own["k"].shape[2])
        return Keys(own["k"], own["v"], held), Keys(k, v, at[:, None])

    hidden = model.run_layers(weights, token[:, None], at[:, None], remember, config=config)
    # All is read before anything is written. A cache written first a TPU brings into its on-chip
    # memory, changes there, and carries back whole.
    hidden, new = lax.optimization_barrier((hidden, new))
    return hidden, tuple(
        None if own is None else kv_cache.write(own, *new[index], at)
        for index, own in enumerate(cache)
    )


# XLA would move what is done to weights alone, a cast or a decoding, out of the loop: a second
# copy of the whole model, made anew in every call.
_NOTHING_HOISTED = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,"
    "while-loop-expensive-invariant-code-motion"
}


@functools.partial(
    jax.jit,
    static_argnames=("config", "chunk"),
    donate_argnames="state",
    compiler_options=_NOTHING_HOISTED,
)
def decode(
    weights: model.Weights,
    state: State,
    limit: Array,
    stop: Array,
    sampling: Sampling | None,
    *,
    config: Config,
    chunk: int,
) -> tuple[State, Array, Array]:
    """Up to `limit` (at most `chunk`) more tokens a row in one call; ends when all rows stopped.

    Returns the state (the given one's buffers are reused), tokens int32[B, chunk], and how many
    columns of them are filled. A row that stopped earlier is filled with `PAD`; one whose hidden
    state is not finite stops with `BROKEN`.
    """

    def more(carry: tuple[State, Array, Array]) -> Array:
        state, _, count = carry
        return (count < limit) & ~jnp.all(state.done)

    def body(carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, out, count = carry
        hidden, cache = step(weights, state.cache, state.token, state.at, config=config)
        state = _chosen(
            weights, hidden, cache, state.at + 1, state.done, stop, state.key, sampling, config
        )
        return state, lax.dynamic_update_slice(out, state.token[:, None], (0, count)), count + 1

    out = jnp.full((state.token.shape[0], chunk), PAD, jnp.int32)
    return lax.while_loop(more, body, (state, out, jnp.int32(0)))


def _chosen(
    weights: model.Weights,
    hidden: Array,
    cache: kv_cache.Cache,
    at: Array,
    done: Array,
    stop: Array,
    key: Array,
    sampling: Sampling | None,
    config: Config,
) -> State:
    """The state after choosing the next token from hidden [B, 1, E]."""
    key, use = jax.random.split(key)
    token = choose(model.logits(weights, hidden[:, 0], config=config), use, sampling)
    # The likeliest of NaN is some token, and nobody would know.
    token = jnp.where(jnp.isfinite(hidden[:, 0]).all(axis=-1), token, BROKEN)
    token = jnp.where(done, PAD, token)
    return State(cache, token, at, done | jnp.isin(token, stop) | (token == BROKEN), key)


@dataclass(frozen=True)
class Chunk:
    """New tokens of every row (stop ids included, padding not), and the seconds they took.

    The first chunk is one token a row and its time is the prefill's.
    """

    tokens: list[list[int]]
    seconds: float
    steps: int


def warm_up(
    weights: model.Weights, prompts: Sequence[Sequence[int]], *, max_tokens: int, **options: Any
) -> float:
    """Compile what `stream` with the same arguments will run; returns the seconds it took."""
    start = time.perf_counter()
    length = options.pop("cache_length", None) or default_cache_length(prompts, max_tokens)
    list(stream(weights, prompts, max_tokens=min(2, max_tokens), cache_length=length, **options))
    return time.perf_counter() - start


def padded_length(count: int) -> int:
    """The length a prompt of `count` tokens is padded to: 32, 128, 512, 1024, 2048, ..."""
    size = SHORTEST
    while size < count:
        size *= 4 if size < 512 else 2
    return size


def stream(
    weights: model.Weights,
    prompts: Sequence[Sequence[int]],
    *,
    config: Config,
    max_tokens: int,
    stop: Sequence[int] = (),
    sampling: Sampling | None = None,
    seed: int = 0,
    cache_length: int | None = None,
    chunk: int = 16,
) -> Iterator[Chunk]:
    """Generate in chunks: first one token a row, then up to `chunk` at a time.

    Args:
        weights: the model.
        prompts: token ids of each row, BOS included.
        config: what model it is.
        max_tokens: new tokens a row at most.
        stop: ids that end a row.
        sampling: None for greedy.
        seed: of the sampling.
        cache_length: slots of the full layers' cache; by default what prompt and new tokens need,
            rounded up to a power of two. Fix it to compare runs bit for bit.
        chunk: tokens a row between two looks at the results.

    Raises:
        ModelError: an empty prompt, a cache too short for prompt and new tokens, or hidden states
            that are not finite.
    """
    length = cache_length or default_cache_length(prompts, max_tokens)
    tokens, counts = _batch(prompts, max_tokens, length)
    stops = jnp.asarray(np.asarray(stop, np.int32))
    start = time.perf_counter()
    state = prefill(
        weights, tokens, counts, stops, jax.random.key(seed), sampling,
        config=config, cache_length=length,
    )  # fmt: skip
    ended = np.zeros(len(prompts), bool)
    yield _emit(np.asarray(state.token)[:, None], ended, stop, start)
    left, ended = max_tokens - 1, np.array(state.done)  # a copy: state is donated
    while left > 0 and not ended.all():
        start = time.perf_counter()
        state, out, count = decode(
            weights, state, jnp.int32(min(left, chunk)), stops, sampling,
            config=config, chunk=chunk,
        )  # fmt: skip
        yield _emit(np.asarray(out)[:, : int(count)], ended, stop, start)
        left, ended = left - int(count), np.array(state.done)


def generate(
    weights: model.Weights, prompts: Sequence[Sequence[int]], *, max_tokens: int, **options: Any
) -> tuple[list[list[int]], list[Chunk]]:
    """All new tokens of each row, decoded in one call to the device, and the timed chunks.

    Options are those of `stream`. A row ends after its first stop id.
    """
    options.setdefault("chunk", max_tokens)
    chunks = list(stream(weights, prompts, max_tokens=max_tokens, **options))
    return [[t for c in chunks for t in c.tokens[row]] for row in range(len(prompts))], chunks


def default_cache_length(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Slots for the padded prompts, and for prompts and new tokens; a power of two."""
    longest = max(map(len, prompts), default=0)
    return 1 << (max(padded_length(longest), longest + max_tokens) - 1).bit_length()


def _batch(
    prompts: Sequence[Sequence[int]], max_tokens: int, cache_length: int
) -> tuple[Array, Array]:
    """Prompts as int32[B, T] padded on the right, and their counts int32[B]."""
    counts = [len(p) for p in prompts]
    if min(counts, default=0) == 0:
        raise ModelError("a prompt is empty; a prompt has at least the BOS token.")
    width = padded_length(max(counts))
    needed = max(max(counts) + max_tokens, width)
    if cache_length < needed:
        raise ModelError(
            f"cache_length {cache_length} is too short: the longest prompt has {max(counts)} "
            f"tokens (padded to {width}), {max_tokens} more are wanted; it needs {needed}."
        )
    tokens = np.full((len(prompts), width), PAD, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray(counts, jnp.int32)


def _emit(columns: np.ndarray, ended: np.ndarray, stop: Sequence[int], start: float) -> Chunk:
    """A chunk of int32[B, n]: rows cut after their first stop id, empty where `ended` before."""
    seconds = time.perf_counter() - start
    if (columns == BROKEN).any():
        raise ModelError(
            "the model's hidden states are not finite; look at its weights with qatpack verify."
        )
    rows: list[list[int]] = []
    for row, over in zip(columns.tolist(), ended, strict=True):
        end = next((i + 1 for i, t in enumerate(row) if t in stop), len(row))
        rows.append([] if over else row[:end])
    return Chunk(rows, seconds, columns.shape[1])
