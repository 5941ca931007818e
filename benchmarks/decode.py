"""Prefill and decode of our decoder in one run: bf16, packed `exact` and packed `fast`.

    python benchmarks/decode.py --reference /tmp/e2b6 --build /tmp/e2b6-w4a16

Runs on JAX's default device (CPU, GPU or TPU). Each path at each batch runs once untimed, then all
of them in turn, `--repeats` times; times are medians. Beside them stand the bytes that a step must
read (weights without tables, head, keys and values), at what share of the memory's bandwidth that
ran, and what bounds the step. The bandwidth is that of a sum over 256 MiB, measured in the same run
after every turn. A human table goes to stderr, one JSON line last to stdout.

On a device that holds one model at a time, choose with `--paths fast`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qatpack.evaluate.devices import use_compile_cache
from qatpack.evaluate.gemma4 import generate
from qatpack.evaluate.gemma4.load import Model, load
from qatpack.evaluate.speed import step_bytes

PATHS = ("bf16", "exact", "fast")
BATCHES = (1, 4, 8)
MEMORY_BOUND = 0.6  # share of the bandwidth from which on the memory bounds a step
BUSY = 0.8  # share of the cores from which on they do, be it arithmetic or reads short of the peak


@dataclass(frozen=True)
class Timed:
    """One run: seconds of the prefill and of one step, and cores busy meanwhile (CPU only)."""

    prefill: float
    step: float
    cores: float


def run(model: Model, batch: int, args: argparse.Namespace) -> Timed:
    """One answer of a model to `batch` equal prompts, timed."""
    prompt = [2, *range(100, 99 + args.prompt_tokens)]
    busy = time.process_time()
    start = time.perf_counter()
    chunks = list(generate.stream(
        model.weights, [prompt] * batch, config=model.config, max_tokens=args.tokens,
        chunk=args.tokens - 1,
    ))  # fmt: skip
    cores = (time.process_time() - busy) / (time.perf_counter() - start)
    return Timed(chunks[0].seconds, chunks[1].seconds / chunks[1].steps, cores)


def read_bandwidth() -> float:
    """Bytes a second of a sum over 256 MiB on the device, the best of three."""
    array = jnp.ones((8192, 8192), jnp.float32)
    total = jax.jit(lambda a: jnp.sum(a, axis=1))
    total(array).block_until_ready()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        total(array).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return array.nbytes / best


def bound(share: float, cores: float) -> str:
    """What limits a step, by its share of the memory's bandwidth and the cores busy."""
    if share >= MEMORY_BOUND:
        return "memory"
    if jax.default_backend() != "cpu":
        return "not memory"
    busy = cores / len(os.sched_getaffinity(0))
    return "cores" if busy >= BUSY else "gaps between operations"


def measure(
    models: dict[str, Model], args: argparse.Namespace
) -> tuple[dict[tuple[str, int], list[Timed]], float]:
    """Every path at every batch, and the bandwidth (the best of all turns)."""
    found: dict[tuple[str, int], list[Timed]] = {(p, b): [] for b in args.batches for p in models}
    bandwidth = 0.0
    for turn in range(args.repeats + 1):
        for (path, batch), times in found.items():
            timed = run(models[path], batch, args)
            print(f"turn {turn}: {path}, batch {batch}: {1e3 * timed.step:.1f} ms a step",
                  file=sys.stderr, flush=True)  # fmt: skip
            if turn:  # the first one compiles
                times.append(timed)
        bandwidth = max(bandwidth, read_bandwidth())
    return found, bandwidth


def row(
    model: Model, path: str, batch: int, times: list[Timed], bandwidth: float, length: int
) -> dict[str, Any]:
    """One row of the table, seconds and bytes."""
    step = statistics.median(t.step for t in times)
    cores = statistics.median(t.cores for t in times)
    nbytes = step_bytes(model, batch, length)
    share = nbytes / step / bandwidth
    return {
        "path": path, "batch": batch, "step_seconds": step, "tokens_per_second": batch / step,
        "prefill_seconds": statistics.median(t.prefill for t in times),
        "bytes_a_step": nbytes, "share_of_bandwidth": share, "cores": cores,
        "bound": bound(share, cores), "turns": [asdict(t) for t in times],
    }  # fmt: skip


def show(rows: list[dict[str, Any]], bandwidth: float) -> None:
    """Print the table of `rows` to stderr; bandwidth in bytes/s."""
    base = {r["batch"]: r["step_seconds"] for r in rows if r["path"] == "bf16"}
    titles = (
        f"{'path':6} {'batch':>5} {'prefill ms':>10} {'step ms':>8} {'tokens/s':>8} {'of bf16':>7} "
        f"{'MB/step':>8} {'of bandwidth':>12} {'cores':>5}  bound by"
    )
    print(f"{jax.devices()[0].device_kind}, reads {bandwidth / 1e9:.1f} GB/s", file=sys.stderr)
    print(titles, file=sys.stderr)
    for r in rows:
        ratio = f"{base[r['batch']] / r['step_seconds']:7.2f}" if base else f"{'-':>7}"
        print(
            f"{r['path']:6} {r['batch']:5} {1e3 * r['prefill_seconds']:10.1f} "
            f"{1e3 * r['step_seconds']:8.2f} {r['tokens_per_second']:8.1f} {ratio} "
            f"{r['bytes_a_step'] / 1e6:8.1f} {r['share_of_bandwidth']:12.2f} {r['cores']:5.2f}  "
            f"{r['bound']}",
            file=sys.stderr,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.repeats < 1 or args.tokens < 2:
        parser.error("--repeats below 1 or --tokens below 2 measure nothing")
    use_compile_cache()
    folders = {"bf16": args.reference, "exact": args.build, "fast": args.build}
    models = {p: load(folders[p], decode="fast" if p == "fast" else "exact") for p in args.paths}
    found, bandwidth = measure(models, args)
    length = generate.default_cache_length([range(args.prompt_tokens)], args.tokens)
    rows = [row(models[p], p, b, times, bandwidth, length) for (p, b), times in found.items()]
    show(rows, bandwidth)
    print(json.dumps({
        "rows": rows, "read_bytes_per_second": bandwidth,
        "device": jax.devices()[0].device_kind, "cores": len(os.sched_getaffinity(0)),
        "prompt_tokens": args.prompt_tokens, "tokens": args.tokens, "jax": version("jax"),
        "weight_bytes": {p: m.nbytes for p, m in models.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
