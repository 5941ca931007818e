"""How fast a loaded model answers: prefill, first token and steady decode, apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax

from ..checkpoint.progress import Progress
from .gemma4.cache import slots
from .gemma4.generate import Chunk, default_cache_length, stream, warm_up
from .gemma4.load import Model, weight_bytes
from .gemma4.weights import looked_up
from .machine import Machine


@dataclass(frozen=True)
class Run:
    """One timed answer. `prefill_s` is the device call that ends with the first token on the host,
    `ttft_s` the time from token ids to it, `decode_s` that of the `steps` steps after it."""

    prefill_s: float
    ttft_s: float
    decode_s: float
    steps: int


@dataclass(frozen=True)
class Visit:
    """The model while it was on the device once: its runs for each batch size."""

    load_s: float
    weight_bytes: int
    runs: dict[int, list[Run]]
    bytes_per_step: dict[int, int]
    device_bytes: int | None


def visit(
    loaded: Model,
    load_s: float,
    prompt: Sequence[int],
    *,
    batches: Sequence[int],
    tokens: int,
    repeats: int,
    step: Progress,
) -> Visit:
    """Time a model: for each batch size compile, run once untimed, then `repeats` timed runs.

    Every row is the same prompt, continued greedily by `tokens` tokens, stop tokens not heeded.
    """
    runs: dict[int, list[Run]] = {}
    reads: dict[int, int] = {}
    for batch in batches:
        prompts = [list(prompt)] * batch
        length = default_cache_length(prompts, tokens)
        options: dict[str, Any] = {
            "config": loaded.config,
            "max_tokens": tokens,
            "cache_length": length,
            "chunk": tokens - 1,  # steady decode is one call to the device
        }
        warm_up(loaded.weights, prompts, **options)
        _run(loaded, prompts, options)
        runs[batch] = []
        for _ in range(repeats):
            runs[batch].append(_run(loaded, prompts, options))
            step(1)
        reads[batch] = step_bytes(loaded, batch, length)
    return Visit(load_s, loaded.nbytes, runs, reads, bytes_in_use())


def _run(loaded: Model, prompts: list[list[int]], options: dict[str, Any]) -> Run:
    start = time.perf_counter()
    chunks: list[Chunk] = []
    ttft = 0.0
    for chunk in stream(loaded.weights, prompts, **options):
        if not chunks:
            ttft = time.perf_counter() - start
        chunks.append(chunk)
    later = chunks[1:]
    return Run(
        prefill_s=chunks[0].seconds,
        ttft_s=ttft,
        decode_s=sum(c.seconds for c in later),
        steps=sum(c.steps for c in later),
    )


def step_bytes(loaded: Model, batch: int, cache_length: int) -> int:
    """Bytes that one decode step has to read: every weight but the tables it looks rows up in,
    and the cache of every layer, once for each layer that reads it."""
    config = loaded.config
    rare = jax.tree.leaves(looked_up(loaded.weights, config))
    weights = loaded.nbytes - sum(map(weight_bytes, rare))
    width = loaded.weights["norm"].dtype.itemsize
    cache = sum(
        2 * layer.kv_heads * layer.head_dim * slots(layer, cache_length, config)
        for layer in config.layers
    )
    return weights + batch * cache * width


def bytes_in_use() -> int | None:
    """Of the first device's memory; None where it does not tell, as a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")


def summarize(
    visits: Sequence[Visit], machine: Machine, reference: Sequence[Visit] | None
) -> list[dict[str, Any]]:
    """The visits of one model as in evaluation.json; `reference` gives the ratio."""
    return [_entry(batch, visits, machine, reference) for batch in visits[0].runs]


def _entry(
    batch: int, visits: Sequence[Visit], machine: Machine, reference: Sequence[Visit] | None
) -> dict[str, Any]:
    runs = [run for v in visits for run in v.runs[batch]]
    rates = [run.steps * batch / run.decode_s for run in runs]
    step_bytes = visits[0].bytes_per_step[batch]
    share = None
    if machine.bandwidth is not None:
        share = step_bytes * median(rates) / batch / (machine.bandwidth * machine.count)
    device = [v.device_bytes for v in visits if v.device_bytes is not None]
    return {
        "batch": batch,
        "load_s": median(v.load_s for v in visits),
        "prefill_ms": 1e3 * median(run.prefill_s for run in runs),
        "ttft_ms": 1e3 * median(run.ttft_s for run in runs),
        "tokens_per_second": {"median": median(rates), "min": min(rates), "max": max(rates)},
        "repeats": len(runs),
        "steps": runs[0].steps,
        "bytes_per_step": step_bytes,
        "bytes_per_token": step_bytes / batch,
        "bandwidth_share": share,
        "device_bytes": max(device, default=None),
        "ratio": median(rates) / rate_of(reference, batch) if reference else None,
    }


def rate_of(visits: Sequence[Visit], batch: int) -> float:
    """Median tokens/s, all rows together."""
    return median(r.steps * batch / r.decode_s for v in visits for r in v.runs[batch])
