"""Decode speed on this machine, in one run: ours against transformers and a JAX engine.

    python benchmarks/synthesize.py --config E2B --layers 6 --vocab 32768 --out /tmp/e2b6
    qatpack repack /tmp/e2b6 /tmp/e2b6-w4a16
    git clone https://github.com/xbill9/tpu-jax /tmp/tpu-jax
    python benchmarks/decode_peers.py --reference /tmp/e2b6 --build /tmp/e2b6-w4a16 \
        --tpu-jax /tmp/tpu-jax

Greedy, batch 1, the weights in bf16 and packed. Each family of engines has a process of its own,
asked for one run at a time, so that nothing else computes meanwhile. Each engine runs once untimed,
then all of them in turn, `--repeats` times. The rate is that of the tokens after the first; "step
by step" is our own loop with Python between the tokens. tpu-jax runs with its default options. A
human table goes to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Decodes once: the tokens, and how many a second there were after the first.
Run = Callable[[], tuple[list[int], float]]
FAMILIES = ("ours", "transformers", "tpu-jax")


def prompt_of(args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt: BOS, then ids of no meaning."""
    return [2, *range(100, 99 + args.prompt_tokens)]


def ours(args: argparse.Namespace) -> dict[str, Run]:
    """Our decoder's engines by name, loaded: the loop on the device, and step by step."""
    from qatpack.evaluate.gemma4 import generate
    from qatpack.evaluate.gemma4.load import Model, load

    def decoded(model: Model, chunk: int) -> Run:
        def run() -> tuple[list[int], float]:
            chunks = list(generate.stream(
                model.weights, [prompt_of(args)], config=model.config, max_tokens=args.tokens,
                chunk=chunk,
            ))  # fmt: skip
            rate = (args.tokens - 1) / sum(c.seconds for c in chunks[1:])
            return [t for c in chunks for t in c.tokens[0]], rate

        return run

    models = {"bf16": load(args.reference), "4-bit": load(args.build, decode="fast")}
    runs: dict[str, Run] = {}
    for name, model in models.items():
        runs[f"ours {name}"] = decoded(model, args.tokens - 1)
        runs[f"ours {name}, step by step"] = decoded(model, 1)
    return runs


def transformers(args: argparse.Namespace) -> dict[str, Run]:
    """transformers' engines by name, loaded; its time to the first token is taken off."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = torch.tensor([prompt_of(args)])

    def decoded(folder: Path) -> Run:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()

        def timed(count: int) -> tuple[list[int], float]:
            start = time.perf_counter()
            with torch.no_grad():
                out = model.generate(
                    ids, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start

        def run() -> tuple[list[int], float]:
            first = timed(1)[1]
            tokens, seconds = timed(args.tokens)
            return tokens, (args.tokens - 1) / (seconds - first)

        return run

    return {
        "transformers bf16": decoded(args.reference),
        "transformers 4-bit": decoded(args.build),
    }


def tpu_jax(args: argparse.Namespace) -> dict[str, Run]:
    """The tpu-jax checkout's engines by name, loaded."""
    from jax_engine import JaxGemmaEngine  # pyright: ignore[reportMissingImports]

    def decoded(folder: Path, mode: str) -> Run:
        engine = JaxGemmaEngine(str(folder), add_bos=False, quant_mode=mode)
        engine.load(str(folder))

        def run() -> tuple[list[int], float]:
            tokens, stats = engine.generate(
                prompt_of(args), max_new_tokens=args.tokens, temperature=0.0
            )
            return tokens, 1000 * (args.tokens - 1) / stats.decode_ms

        return run

    return {
        "tpu-jax bf16": decoded(args.reference, "fp16"),
        "tpu-jax 4-bit": decoded(args.build, "w4a16"),
    }


def serve(args: argparse.Namespace) -> None:
    """The process of one family: its engines' names, then for each name asked for, a run."""
    answers, sys.stdout = sys.stdout, sys.stderr
    runs = {"ours": ours, "transformers": transformers, "tpu-jax": tpu_jax}[args.serve](args)
    print(json.dumps(list(runs)), file=answers, flush=True)
    for line in sys.stdin:
        tokens, rate = runs[line.strip()]()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = {"tokens": tokens, "rate": rate, "peak": peak}
        print(json.dumps(answer), file=answers, flush=True)


class Engines:
    """One family's process."""

    def __init__(self, family: str, args: argparse.Namespace) -> None:
        environment = os.environ | {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
        if family == "tpu-jax":
            paths = (str(args.tpu_jax), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--serve", family],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.names: list[str] = self._answer()

    def run(self, name: str) -> dict[str, Any]:
        """One run of an engine: its tokens, rate, and the peak of the process so far."""
        assert self._process.stdin
        print(name, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with code {self._process.wait()}; see above")
        return json.loads(line)


def compare(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Rates of every engine, and of its last run the tokens and the peak of its process."""
    skipped = [] if args.tpu_jax else ["tpu-jax"]
    skipped += ["transformers", "tpu-jax"] if args.no_peer else []
    families = [Engines(f, args) for f in FAMILIES if f not in skipped]
    rates: dict[str, list[float]] = {n: [] for f in families for n in f.names}
    last: dict[str, Any] = {}
    for turn in range(args.repeats + 1):
        for family in families:
            for name in family.names:
                last[name] = family.run(name)
                print(f"turn {turn}: {name} {last[name]['rate']:.2f}", file=sys.stderr, flush=True)
                if turn:  # the first one compiles and warms up
                    rates[name].append(last[name]["rate"])
    for family in families:
        family.close()
    return rates, last


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--tpu-jax", type=Path, help="A checkout of xbill9/tpu-jax.")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="Only our own engines.")
    parser.add_argument("--serve", choices=FAMILIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    if args.repeats < 1:
        parser.error("--repeats 0 measures nothing; give 1 or more")
    rates, last = compare(args)
    print(f"{'engine':28} {'tokens/s':>9} {'min':>7} {'max':>7}", file=sys.stderr)
    for name, found in rates.items():
        print(
            f"{name:28} {statistics.median(found):9.2f} {min(found):7.2f} {max(found):7.2f}",
            file=sys.stderr,
        )
    print(json.dumps({
        "tokens_per_second": rates,
        "generated": {n: r["tokens"] for n, r in last.items()},
        "peak_rss_bytes": {n: r["peak"] for n, r in last.items()},
        "tokens": args.tokens,
        "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "versions": {p: version(p) for p in ("jax", "torch", "transformers")},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
