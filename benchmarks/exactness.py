"""How exact each stored scale is, against the best that any scale of its dtype could be.

    python benchmarks/exactness.py                                # the embedded checkpoint
    python benchmarks/exactness.py --synthetic E2B --layers 5 --vocab 4096

For every group of every packed tensor: the share of values that come back bit for bit from the
stored scale, beside the optimum by brute force over the `--reach` numbers of that dtype on either
side of the recovered step. On a synthetic checkpoint levels and steps are also compared with the
ones it was made from. Prints a table, and one JSON line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import layouts
import ml_dtypes
import numpy as np
import synthesize

from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.reader import TensorReader
from qatpack.checkpoint.units import share
from qatpack.cli.text import table
from qatpack.repack.grid import Grid, Status, recover
from qatpack.repack.layout import read_layout
from qatpack.repack.plan import Options, make_plan

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bfloat16": BF16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
ROWS = 4096


def blocks(folder: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """(tensor, first row, bf16[rows, in]) of everything that a repack packs."""
    plan = make_plan(read_layout(Checkpoint.open(folder)), Options())
    with TensorReader() as reader:
        for tensor in plan.packed_sources:
            for start in range(0, tensor.rows, ROWS):
                stop = min(start + ROWS, tensor.rows)
                yield tensor.name, start, reader.read_rows(tensor, start, stop)


def identical(levels: np.ndarray, scale: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Values of each group that come back: levels, bits [groups, 32], scale [groups]."""
    decoded = (scale.astype(np.float32)[:, None] * levels).astype(BF16).view(np.uint16)
    return (decoded == bits).sum(axis=1)


def optimum(
    levels: np.ndarray, step: np.ndarray, bits: np.ndarray, dtype: np.dtype, reach: int
) -> int:
    """The most values that one scale of `dtype` a group can bring back."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    nearest = step.astype(dtype).view(unsigned)
    best = np.zeros(len(bits), int)
    for move in range(-reach, reach + 1):
        candidate = (nearest.astype(np.int64) + move).astype(unsigned).view(dtype)
        best = np.maximum(best, identical(levels, candidate, bits))
    return int(best.sum())


def score(weights: np.ndarray, dtype: str, reach: int) -> tuple[Grid, dict[str, int]]:
    """Recover one block and count against the optimum."""
    grid = recover(weights, dtype)
    levels = grid.levels.reshape(-1, 32).astype(np.float32)
    bits = weights.view(np.uint16).reshape(-1, 32)
    step = grid.step.reshape(-1)
    certified = (grid.status.reshape(-1) == Status.CERTIFIED) | (
        grid.status.reshape(-1) == Status.ZERO
    )
    return grid, {
        "values": bits.size,
        "identical": int(identical(levels, grid.scale.reshape(-1), bits).sum()),
        "optimum": optimum(levels, step, bits, DTYPES[dtype], reach),
        "groups": len(bits),
        "refused": int((~certified).sum()),
    }


def wrong(grid: Grid, levels: np.ndarray, steps: np.ndarray) -> dict[str, int]:
    """Groups whose levels, or whose step interval, are not those the weights were made from."""
    proven = (grid.levels.reshape(-1, 32) == levels.reshape(-1, 32)).all(axis=1)
    # The ends are known to 1 in 2^17.
    lo, hi, step = (x.reshape(-1).astype(float) for x in (grid.lo, grid.hi, steps))
    inside = (lo * (1 - 2**-17) <= step) & (step <= hi * (1 + 2**-17))
    return {"wrong levels": int((~proven).sum()), "step outside": int((~inside).sum())}


def measure(
    folder: Path, truth: dict[str, layouts.Tensor], reach: int
) -> dict[str, dict[str, int]]:
    """Sums by scale dtype over the whole checkpoint."""
    sums: dict[str, dict[str, int]] = {dtype: {} for dtype in DTYPES}
    for name, start, weights in blocks(folder):
        for dtype, total in sums.items():
            grid, counts = score(weights, dtype, reach)
            if name in truth:
                rows = slice(start, start + len(weights))
                counts |= wrong(grid, *synthesize.true_grid(truth[name], rows, seed=0))
            for key, value in counts.items():
                total[key] = total.get(key, 0) + value
    return sums


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--synthetic", metavar="CONFIG", help="E2B, E4B, 12B, 26B-A4B or 31B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--reach", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder, truth = DEMO, {}
        if options.synthetic:
            folder = Path(work) / "c"
            synthesize.synthesize(
                options.synthetic, folder, layers=options.layers, vocab=options.vocab
            )
            config = json.loads((folder / "config.json").read_text())
            truth = {t.name: t for t in layouts.tensors(config)}
        sums = measure(folder, truth, options.reach)
    header = ("scales", "groups", "refused", "identical", "optimum", "points short")
    rows = [(*header, "wrong levels", "step outside") if truth else header]
    for dtype, s in sums.items():
        short = 100 * (s["optimum"] - s["identical"]) / s["values"]
        row = (dtype, f"{s['groups']:,}", s["refused"], share(s["identical"], s["values"]))
        row += (share(s["optimum"], s["values"]), f"{short:.4f}")
        rows.append((*row, s["wrong levels"], s["step outside"]) if truth else row)
    print(table(rows))
    print(json.dumps({"checkpoint": options.synthetic or "embedded", "sums": sums}))


if __name__ == "__main__":
    main()
