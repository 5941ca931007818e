"""Decode speed on this machine, in one run: ours against transformers, bf16 and 4-bit.

    python benchmarks/synthesize.py --config E2B --layers 6 --vocab 32768 --out /tmp/e2b6
    qatpack repack /tmp/e2b6 /tmp/e2b6-w4a16
    python benchmarks/decode_peers.py --reference /tmp/e2b6 --build /tmp/e2b6-w4a16

Greedy, batch 1. Each engine runs once untimed, then all of them in turn, `--repeats` times. The
rate is that of the tokens after the first; "step by step" is our own loop with Python between the
tokens. A human table goes to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from qatpack.evaluate.gemma4 import generate
from qatpack.evaluate.gemma4.load import Model, load

Run = Callable[[], float]  # decodes the tokens once, gives tokens/s after the first


def ours(model: Model, prompt: Sequence[int], tokens: int, chunk: int) -> Run:
    def run() -> float:
        chunks = list(
            generate.stream(
                model.weights, [prompt], config=model.config, max_tokens=tokens, chunk=chunk
            )
        )
        return (tokens - 1) / sum(c.seconds for c in chunks[1:])

    return run


def transformers_run(folder: Path, prompt: Sequence[int], tokens: int) -> Run:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([list(prompt)])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - start

    return lambda: (tokens - 1) / (-seconds(1) + seconds(tokens))


def timed_load(folder: Path, decode: Any) -> tuple[Model, float]:
    start = time.perf_counter()
    model = load(folder, decode=decode)
    return model, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="Only our own engines.")
    args = parser.parse_args()
    prompt = [2, *range(100, 99 + args.prompt_tokens)]
    dense, dense_load = timed_load(args.reference, "exact")
    fast, fast_load = timed_load(args.build, "fast")
    loop = args.tokens - 1
    engines: dict[str, Run] = {
        "ours bf16": ours(dense, prompt, args.tokens, loop),
        "ours bf16, step by step": ours(dense, prompt, args.tokens, 1),
        "ours 4-bit": ours(fast, prompt, args.tokens, loop),
        "ours 4-bit, step by step": ours(fast, prompt, args.tokens, 1),
    }
    if not args.no_peer:
        engines["transformers bf16"] = transformers_run(args.reference, prompt, args.tokens)
        engines["transformers 4-bit"] = transformers_run(args.build, prompt, args.tokens)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.repeats + 1):
        for name, run in engines.items():
            rate = run()
            print(f"turn {turn}: {name} {rate:.2f}", file=sys.stderr, flush=True)
            if turn:  # the first one compiles and warms up
                rates[name].append(rate)
    print(f"{'engine':28} {'tokens/s':>9} {'min':>7} {'max':>7}", file=sys.stderr)
    for name, found in rates.items():
        print(
            f"{name:28} {statistics.median(found):9.2f} {min(found):7.2f} {max(found):7.2f}",
            file=sys.stderr,
        )
    print(json.dumps({
        "tokens_per_second": rates,
        "load_seconds": {"bf16": dense_load, "4-bit": fast_load},
        "weight_bytes": {"bf16": dense.nbytes, "4-bit": fast.nbytes},
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "tokens": args.tokens,
        "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "versions": {p: version(p) for p in ("jax", "torch", "transformers")},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
