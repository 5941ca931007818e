"""Compile the decoder for a real TPU v5e on a machine without one, from shapes alone.

    python benchmarks/tpu_compile.py --config E2B --build w4a16 --batch 1 --context 4096

Needs `jax[tpu]` (libtpu is the compiler; no TPU is touched). For prefill and one 32-token decode
loop it prints whether they compile, the bytes of arguments and temporaries against a chip's 16.9
GB, and how many bytes a decode step must read, which at 819 GB/s bounds its speed from below.
Nothing here is measured on a TPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tpu_target


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Compile what was asked for: whether it compiles, the seconds, and its bytes on one chip."""
    import jax

    config = tpu_target.config_of(args.config)
    mesh = tpu_target.mesh_of(args.chips)
    weights = tpu_target.weights_of(config, args.build, args.scale_dtype, mesh, head=args.head)
    state = tpu_target.state_of(config, args.batch, args.context, mesh)
    result: dict[str, Any] = vars(args) | {"jax": jax.__version__}
    for name in args.only or ("decode", "prefill"):
        traced = tpu_target.traced(name, weights, state, config, mesh, args.prompt)
        try:
            program, seconds = tpu_target.compiled(traced)
        except Exception as e:  # what the compiler says is the result
            result[name] = {"compiles": False, "why": str(e)[:600]}
            continue
        result[name] = {"compiles": True, "compile_s": seconds} | tpu_target.memory(program)
        result[name]["fits"] = result[name]["total_bytes"] < tpu_target.HBM_BYTES
        if args.hlo:
            Path(args.hlo).write_text(program.as_text())
    floor = tpu_target.step_bytes(weights, state, config)
    result["step_bytes_a_chip"] = floor
    result["step_floor_ms"] = 1e3 * floor / tpu_target.BANDWIDTH
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="E2B", choices=tpu_target.CONFIGS)
    parser.add_argument("--build", default="w4a16", choices=["bf16", "w4a16"])
    parser.add_argument("--head", default="bf16", choices=["bf16", "int4"])
    parser.add_argument("--scale-dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=512, help="Padded prompt tokens of prefill.")
    parser.add_argument("--chips", type=int, default=1, choices=[1, 8])
    parser.add_argument("--only", action="append", choices=["decode", "prefill"])
    parser.add_argument("--hlo", help="Write the optimized HLO of the last program here.")
    args = parser.parse_args()
    tpu_target.require_libtpu()
    result = report(args)
    for name in ("decode", "prefill"):
        if name in result:
            print(f"{name}: {result[name]}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
