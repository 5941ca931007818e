"""Estimate the decoder's speed on a TPU v5e from the real compiler's schedule, without a TPU.

    python benchmarks/tpu_schedule.py                                  # the whole table
    python benchmarks/tpu_schedule.py --config E2B --build w4a16 --batch 1 --context 1024 --ops 20
    python benchmarks/tpu_schedule.py --linear 12288,1536 --build w4a16 --batch 8

Needs Python 3.12 and `jax[tpu]`: libtpu compiles the program for a described chip. Each case is
compiled in a process of its own that makes the compiler write its final bundles. An op takes the
larger of its bundles at 1.5 GHz (never less than its matmuls at 197 TFLOP/s) and its HBM bytes at
0.86 of 819 GB/s, and 0.7 us more where it reads HBM itself. Asynchronous copies run beneath other
ops, first come, first served. Collectives of a mesh are counted, not timed. Nothing here is
measured on a TPU.

Calibration. Two figures of a real v5e are published: E2B in bf16 decodes 150.7 tokens/s (6.64 ms)
without Python between the steps, and a 4-bit engine that unpacks every weight before its matmul
runs at 0.777x of its own bf16; `--build words`, our exact path, does the like. docs/speed.md says
what this estimate makes of both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tpu_bundles
import tpu_hlo
from tpu_hlo import Computation, Module, Op
from tpu_target import BANDWIDTH, CONFIGS, require_libtpu

CLOCK = 1.5e9  # bundles/s
FLOPS = 197e12  # bfloat16 operations/s, v5e data sheet
STREAM = 0.86 * BANDWIDTH  # bytes/s
LATENCY = 0.7e-6  # s, of an op that waits for HBM
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
}  # fmt: skip
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclass
class Line:
    """All ops of one compiled program: their seconds, of which HBM idles, and of bundles."""

    example: str
    shape: str
    count: int = 0
    seconds: float = 0
    idle: float = 0
    issue: float = 0
    nbytes: float = 0


@dataclass
class Schedule:
    """One pass through a program, in seconds and bytes."""

    seconds: float = 0
    idle: float = 0
    """Seconds in which HBM moves nothing: what a better schedule could still save."""
    issue: float = 0
    nbytes: float = 0
    prefetched: float = 0
    stalled: float = 0
    collectives: int = 0
    unknown: int = 0
    """Ops whose bundles were not found; counted as free but for their bytes."""
    lines: dict[str, Line] = field(default_factory=dict)


class Player:
    """Plays the schedule: synchronous ops one after another, asynchronous copies beneath them."""

    def __init__(self, module: Module, cycles: dict[str, int]) -> None:
        self.module, self.cycles = module, cycles
        self.by_structure = {
            module.structure(op, c): cycles[op.name]
            for c in module.computations.values()
            for op in c.values()
            if op.name in cycles
        }

    def play(self, name: str) -> Schedule:
        """Run a computation once; a loop of unknown length inside it runs once."""
        total, copies = Schedule(), _Copies()
        computation = self.module.computations[name]
        for op in computation.values():
            if op.kind in _FREE or tpu_hlo.is_free(op):
                continue
            if op.kind.startswith(_COLLECTIVES):
                total.collectives += not op.kind.endswith("-done")
            elif op.kind.endswith("-start"):
                copies.start(op, computation, total)
            elif op.kind.endswith("-done"):
                total.stalled += (waited := copies.wait(op.operands[0]))
                total.seconds += waited
            elif op.kind == "while":
                self._add(total, self.play(op.called("body") or ""), self.module.trips(op) or 1)
            elif op.kind == "call":
                self._add(total, self.play(op.called("to_apply") or ""), 1)
            elif not op.kind.endswith("-update"):
                self._run(op, computation, total, copies)
        return total

    def _run(self, op: Op, computation: Computation, total: Schedule, copies: _Copies) -> None:
        """Add one op, with copies under way beneath it."""
        key = self.module.structure(op, computation)
        cycles = self.by_structure.get(key)
        total.unknown += cycles is None
        # The length of some loops over a matmul is not in the bundles.
        issue = max((cycles or 0) / CLOCK, self.module.flops(op, computation) / FLOPS)
        nbytes = self.module.hbm_bytes(op, computation)
        seconds = max(issue, nbytes / STREAM) + LATENCY * (nbytes > 0)
        idle = copies.run_beneath(seconds - nbytes / STREAM)
        line = total.lines.setdefault(key, Line(f"{op.kind} {op.name}", op.shape))
        line.count += 1
        for x in (total, line):
            x.seconds, x.idle = x.seconds + seconds, x.idle + idle
            x.issue, x.nbytes = x.issue + issue, x.nbytes + nbytes

    def _add(self, total: Schedule, part: Schedule, times: int) -> None:
        for name in ("seconds", "idle", "issue", "nbytes", "prefetched", "stalled", "collectives"):
            setattr(total, name, getattr(total, name) + times * getattr(part, name))
        total.unknown += part.unknown
        for key, line in part.lines.items():
            own = total.lines.setdefault(key, Line(line.example, line.shape))
            for name in ("count", "seconds", "idle", "issue", "nbytes"):
                setattr(own, name, getattr(own, name) + times * getattr(line, name))


class _Copies:
    """Asynchronous copies under way: HBM serves them in the order they were started."""

    def __init__(self) -> None:
        self.left: dict[str, float] = {}

    def start(self, op: Op, computation: Computation, total: Schedule) -> None:
        done = next((o for o in computation.values() if op.name in o.operands), op)
        from_hbm = any(
            tpu_hlo.hbm_bytes(computation[o].shape) for o in op.operands if o in computation
        )
        moves = from_hbm or tpu_hlo.hbm_bytes(done.shape) > 0
        nbytes = tpu_hlo.all_bytes(done.shape) if moves else 0.0
        self.left[op.name] = nbytes
        total.nbytes, total.prefetched = total.nbytes + nbytes, total.prefetched + nbytes

    def run_beneath(self, seconds: float) -> float:
        """Serve copies for the seconds that an op leaves HBM to them; returns those left over."""
        spare = seconds * STREAM
        for name in self.left:
            served = min(spare, self.left[name])
            self.left[name] -= served
            spare -= served
        return spare / STREAM

    def wait(self, name: str) -> float:
        """Seconds until a copy, and all before it, are through."""
        if name not in self.left:
            return 0
        left = 0.0
        for other in list(self.left):
            left += self.left.pop(other)
            if other == name:
                break
        return left / STREAM


def decode_step(module: Module) -> str:
    """The body of the program's one outer loop: a step of `generate.decode`."""
    loops = [op for op in module.computations[module.entry].values() if op.kind == "while"]
    bodies = [op.called("body") or "" for op in loops if module.trips(op) is None]
    return max(bodies, key=lambda b: len(module.computations[b]), default=module.entry)


def estimate(args: argparse.Namespace) -> dict[str, Any]:
    """Compile one case in this process and play it."""
    with tempfile.TemporaryDirectory(prefix="qatpack-llo-") as dump:
        os.environ["LIBTPU_INIT_ARGS"] = tpu_bundles.dump_flags(Path(dump))
        import tpu_target  # libtpu reads the flags when the first chip is described

        traced, floor = _traced(args)
        program, seconds = tpu_target.compiled(traced)
        text = program.as_text()
        if args.hlo:
            Path(args.hlo).write_text(text)
        module = tpu_hlo.parse(text)
        player = Player(module, tpu_bundles.read_cycles(Path(dump)))
    name = decode_step(module) if args.only == "decode" and not args.linear else module.entry
    schedule = player.play(name)
    lines = sorted(schedule.lines.values(), key=lambda x: -x.seconds)
    return {
        "ms": 1e3 * schedule.seconds,
        "floor_ms": 1e3 * floor / BANDWIDTH,
        "hbm_idle_ms": 1e3 * schedule.idle,
        "bundles_ms": 1e3 * schedule.issue,
        "hbm_ms": 1e3 * schedule.nbytes / BANDWIDTH,
        "hbm_gb": schedule.nbytes / 1e9,
        "largest_result_mb": module.largest_in_hbm(module.entry) / 1e6,
        "prefetched_gb": schedule.prefetched / 1e9,
        "stalled_ms": 1e3 * schedule.stalled,
        "ops": sum(x.count for x in lines),
        "collectives": schedule.collectives,
        "unknown_ops": schedule.unknown,
        "compile_s": seconds,
        **tpu_target.memory(program),
        "lines": [asdict(x) for x in lines[: args.ops]],
    }


def _traced(args: argparse.Namespace) -> tuple[Any, float]:
    """What to compile, and the bytes it must read at least."""
    import tpu_target

    mesh = tpu_target.mesh_of(args.chips)
    if args.linear:
        return tpu_target.traced_linear(args.linear, args.build, args.batch, mesh)
    config = tpu_target.config_of(args.config)
    weights = tpu_target.weights_of(config, args.build, args.scale_dtype, mesh, head=args.head)
    state = tpu_target.state_of(config, args.batch, args.context, mesh)
    traced = tpu_target.traced(args.only, weights, state, config, mesh, args.prompt)
    return traced, tpu_target.step_bytes(weights, state, config)


CASES: list[dict[str, Any]] = [
    *(
        {"config": "E2B", "build": build, "head": head, "batch": batch, "context": context}
        for context in (1024, 4096)
        for batch in (1, 4, 8)
        for build, head in (("bf16", "bf16"), ("w4a16", "bf16"), ("w4a16", "int4"))
    ),
    {"config": "E2B", "build": "words", "head": "bf16", "batch": 1, "context": 1024},
    *(
        {"config": "E4B", "build": build, "head": head, "batch": 1, "context": 1024}
        for build, head in (("bf16", "bf16"), ("w4a16", "bf16"), ("w4a16", "int4"))
    ),
    *(
        {"config": "31B", "build": build, "head": "bf16", "batch": 1, "context": 1024, "chips": 8}
        for build in ("bf16", "w4a16")
    ),
]


def table(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case in a process of its own; a line of the table as soon as it is known."""
    print("| case | ms | floor ms | of bf16 | HBM GB | compile s |\n|---|---|---|---|---|---|")
    dense: dict[tuple[Any, ...], float] = {}
    results = []
    for case in cases:
        flags = [f"--{k}={v}" for k, v in case.items()]
        done = subprocess.run(
            [sys.executable, __file__, "--json", *flags], capture_output=True, text=True
        )
        if done.returncode:
            print(f"| {_title(case)} | {done.stderr.strip().splitlines()[-1][:200]} |")
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        key = tuple(case[k] for k in ("config", "batch", "context"))
        if case["build"] == "bf16":
            dense[key] = result["ms"]
        ratio = f"{dense[key] / result['ms']:.2f}" if key in dense else ""
        print(
            f"| {_title(case)} | {result['ms']:.2f} | {result['floor_ms']:.2f} | {ratio} "
            f"| {result['total_bytes'] / 1e9:.2f} | {result['compile_s']:.0f} |",
            flush=True,
        )
        results.append(case | result)
    return results


def _title(case: dict[str, Any]) -> str:
    head = ", 4-bit head" if case["head"] == "int4" else ""
    chips = f", {case['chips']} chips" if case.get("chips", 1) > 1 else ""
    build = {"bf16": "bf16", "w4a16": "4-bit", "words": "4-bit, unpacked first"}[case["build"]]
    return (
        f"{case['config']} {build}{head}, batch {case['batch']}, context {case['context']}{chips}"
    )


def print_lines(result: dict[str, Any]) -> None:
    """Print one case: its figures, then its costliest ops as a table."""
    for key, value in result.items():
        if key != "lines":
            print(f"{key:16} {value:.4g}" if isinstance(value, float) else f"{key:16} {value}")
    print("| us | HBM idle us | ops | bundles us | MB | op |\n|---|---|---|---|---|---|")
    for x in result["lines"]:
        print(
            f"| {1e6 * x['seconds']:.1f} | {1e6 * x['idle']:.1f} | {x['count']} "
            f"| {1e6 * x['issue']:.1f} "
            f"| {x['nbytes'] / 1e6:.2f} | {x['example']} {x['shape'][:60]} |"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, help="One case instead of the whole table.")
    parser.add_argument("--build", default="w4a16", choices=["bf16", "w4a16", "words"])
    parser.add_argument("--head", default="bf16", choices=["bf16", "int4"])
    parser.add_argument("--scale-dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512, help="Padded prompt tokens of prefill.")
    parser.add_argument("--chips", type=int, default=1, choices=[1, 8])
    parser.add_argument("--only", default="decode", choices=["decode", "prefill"])
    parser.add_argument("--linear", metavar="OUT,IN", help="One linear instead of a model.")
    parser.add_argument("--ops", type=int, default=20, help="Lines of the costliest ops to show.")
    parser.add_argument("--hlo", help="Write the optimized HLO here.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    args = parser.parse_args()
    require_libtpu()
    if not (args.config or args.linear):
        results: Any = table(CASES)
    else:
        results = estimate(args)
        if not args.json:
            print_lines(results)
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
