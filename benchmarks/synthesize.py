"""Write a checkpoint with the exact layout of a real QAT Gemma 4 and weights whose grid is known.

Names, shapes, dtypes, header and config are the real ones; the weights are random. Everything the
real checkpoint has on the 4-bit grid is bf16(step * level) here, and `true_grid` gives the steps
and levels of any rows back, so that recovery can be checked against the truth. Tokenizer and
processor files are left out: a made-up one would pretend to be real.

    python benchmarks/synthesize.py --config E2B --out /tmp/e2b --layers 6 --vocab 65536

The files depend on the arguments and on numpy's random streams, on nothing else.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from layouts import Config, Tensor, cut, tensors
from numpy.typing import NDArray
from tqdm import tqdm

GROUP = 32
POOL_GROUPS = 32_768
"""Groups in the pool of levels and, at most, in a block: 2 MiB of bf16."""

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
CONFIGS = {
    "E2B": "e2b_config.json",
    "E4B": "e4b_config.json",
    "12B": "12b_config.json",
    "26B-A4B": "26b_a4b_config.json",
    "31B": "31b_config.json",
}

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: any-to-any
tags:
- synthetic
---

# Random weights with the layout of Gemma 4 {name} QAT

Written by qatpack's `benchmarks/synthesize.py` (layers {layers}, vocabulary {vocab}, seed {seed})
to measure and test the repacking of the real checkpoint. The model knows nothing.
"""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Pools:
    """Random numbers that every block is cut from, each stored twice over so that cuts wrap.

    `levels: f32[2 * POOL_GROUPS, 32]`, integers -8..7; `steps: f32[2 * POOL_GROUPS]`;
    `noise: f32[2 * POOL_GROUPS * 32]`, standard normal.
    """

    levels: Floats
    steps: Floats
    noise: Floats


@functools.lru_cache(maxsize=4)
def pools(seed: int) -> Pools:
    """The pools of a seed: 17 MB, shared by all tensors.

    Levels are Gaussian groups rounded on step = max|w| / 8, so +8 becomes 7 and only -8 stays:
    57 % of the groups peak on level 8 and the others on 7 (E2B: 60.5 % and 39.5 %).
    """
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((POOL_GROUPS, GROUP), dtype=np.float32)
    # Adding 0.0 makes -0.0 (a negative weight rounded) the +0.0 that level 0 stands for.
    levels = np.rint(weights * (8 / np.abs(weights).max(axis=1, keepdims=True))) + 0.0
    steps = np.exp(rng.uniform(math.log(2e-3), math.log(5e-3), POOL_GROUPS))
    noise = rng.standard_normal(POOL_GROUPS * GROUP, dtype=np.float32)
    found = (np.clip(levels, -8, 7), steps.astype(np.float32), noise)
    return Pools(*(np.concatenate([values, values]) for values in found))


def true_grid(
    tensor: Tensor, rows: slice, *, seed: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The levels and steps that rows of a grid tensor were made of.

    Leading axes are flattened: row 130 of an expert tensor [128, 1408, 2816] is row 130 of its
    first expert. The stored weight is bf16(float32(step * level)).

    Returns:
        `levels: int8[rows, in]` in -8..7, `steps: f32[rows, in / 32]`, positive, never
        representable in bf16 or float16.
    """
    total, columns = _matrix(tensor)
    start, stop, _ = rows.indices(total)
    height = _block_rows(tensor)
    parts = [_grid(tensor, block, seed) for block in range(start // height, -(-stop // height))]
    first = start // height * height
    window = slice(start - first, stop - first)
    levels = np.concatenate([part[0] for part in parts]).astype(np.int8)
    steps = np.concatenate([part[1] for part in parts])
    return (
        levels.reshape(-1, columns)[window],
        steps.reshape(-1, columns // GROUP)[window],
    )


def blocks(tensor: Tensor, *, seed: int) -> Iterator[NDArray[ml_dtypes.bfloat16]]:
    """The tensor's weights in order, flat bf16 arrays of at most 2 MiB (or one row)."""
    total, columns = _matrix(tensor)
    if tensor.on_grid:
        for block in range(-(-total // _block_rows(tensor))):
            levels, steps = _grid(tensor, block, seed)
            # Not integer rounding on uint32 views: ml_dtypes' cast is twice as fast (measured).
            yield np.multiply(levels, steps[:, None]).astype(ml_dtypes.bfloat16).reshape(-1)
        return
    mean, spread = _spread(tensor)
    size = POOL_GROUPS * GROUP
    for block, start in enumerate(range(0, total * columns, size)):
        offset, _, _ = _draw(tensor.name, block, seed)
        noise = pools(seed).noise[offset : offset + min(size, total * columns - start)]
        yield (mean + spread * noise).astype(ml_dtypes.bfloat16)


def _grid(tensor: Tensor, block: int, seed: int) -> tuple[Floats, Floats]:
    """Levels `f32[groups, 32]` and steps `f32[groups]` of one block of rows.

    A block takes its own cut of either pool and its own factor on the steps: no two are equal.
    """
    total, columns = _matrix(tensor)
    height = _block_rows(tensor)
    groups = min(height, total - block * height) * (columns // GROUP)
    at_levels, at_steps, factor = _draw(tensor.name, block, seed)
    at_levels %= POOL_GROUPS
    steps = pools(seed).steps[at_steps : at_steps + groups] * factor
    steps.view(np.uint32)[...] |= 1  # the last bit of float32 set: no shorter format holds it
    return pools(seed).levels[at_levels : at_levels + groups], steps


def _draw(name: str, block: int, seed: int) -> tuple[int, int, np.float32]:
    """Two pool offsets and a factor in [1/2, 2], hashed so that any block is found directly."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=12).digest()
    noise, step, unit = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    factor = np.float32(2.0 ** (unit / 2**31 - 1))
    return noise % (POOL_GROUPS * GROUP), step % POOL_GROUPS, factor


def _matrix(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns with the leading axes flattened; a scalar is [1, 1]."""
    columns = tensor.shape[-1] if tensor.shape else 1
    return math.prod(tensor.shape[:-1]), columns


def _block_rows(tensor: Tensor) -> int:
    return max(1, POOL_GROUPS // (tensor.shape[-1] // GROUP))


def _spread(tensor: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a tensor off the grid, near what trained ones have."""
    if tensor.role == "layer_scalar":
        return 0.75, 0.05
    if tensor.role.endswith("clip_bound"):
        return (8.0 if tensor.name.endswith("max") else -8.0), 0.5
    if tensor.role.endswith(("_norm", "_scale")) or tensor.name.endswith(".std_scale"):
        return 1.0, 0.1
    return 0.0, 0.02


def header(listed: list[Tensor]) -> bytes:
    """A safetensors header without `__metadata__`, padded to 8 bytes as safetensors does."""
    entries, offset = {}, 0
    for tensor in listed:
        span = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_config(name: str) -> Config:
    """The real config of a size, one of `CONFIGS`."""
    return json.loads((DATA / CONFIGS[name]).read_bytes())


def synthesize(
    name: str,
    folder: Path,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
    shards: int = 1,
) -> dict[str, Any]:
    """Write the checkpoint into a new or empty folder and say what was written.

    Memory stays under 100 MB whatever the size. `config.json` is the real file byte for byte
    unless `layers` or `vocab` cut the model.

    Raises:
        ValueError: the cut, the number of shards, the folder or the free space will not do.
    """
    config = cut(read_config(name), layers=layers, vocab=vocab)
    listed = tensors(config)
    if not 1 <= shards <= len(listed):
        raise ValueError(f"--shards {shards}: give 1 to {len(listed)}")
    size = sum(tensor.nbytes for tensor in listed)
    _prepare(folder, size)
    begun = time.perf_counter()
    with tqdm(total=size, unit="B", unit_scale=True, file=sys.stderr, disable=None) as bar:
        files = _write_files(folder, _split(listed, shards), seed, bar)
    seconds = time.perf_counter() - begun
    _write_sidecars(folder, name, config, uncut=layers is None and vocab is None, seed=seed)
    return {
        "folder": str(folder),
        "config": name,
        "files": files,
        "tensors": len(listed),
        "tensor_bytes": size,
        "grid_groups": sum(t.nbytes // 2 // GROUP for t in listed if t.on_grid),
        "seconds": round(seconds, 2),
        "mb_per_second": round(size / seconds / 1e6, 1),
    }


def _prepare(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty: give a new folder")
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ValueError(f"--out {folder}: {size:,} bytes to write, {free:,} free; cut the model")


def _split(listed: list[Tensor], shards: int) -> list[list[Tensor]]:
    """Runs of consecutive tensors, none empty, near equal in bytes."""
    total, done = sum(tensor.nbytes for tensor in listed), 0
    runs: list[list[Tensor]] = [[]]
    for i, tensor in enumerate(listed):
        full = done >= len(runs) * total / shards or len(listed) - i == shards - len(runs)
        if runs[-1] and full and len(runs) < shards:
            runs.append([])
        runs[-1].append(tensor)
        done += tensor.nbytes
    return runs


def _write_files(folder: Path, runs: list[list[Tensor]], seed: int, bar: tqdm) -> list[str]:
    if len(runs) == 1:
        _write_file(folder / "model.safetensors", runs[0], seed, bar)
        return ["model.safetensors"]
    names = [f"model-{i:05d}-of-{len(runs):05d}.safetensors" for i in range(1, len(runs) + 1)]
    for file, run in zip(names, runs, strict=True):
        _write_file(folder / file, run, seed, bar)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for run in runs for tensor in run)},
        "weight_map": {t.name: file for file, run in zip(names, runs, strict=True) for t in run},
    }
    _write_json(folder / "model.safetensors.index.json", index)
    return names


def _write_file(path: Path, listed: list[Tensor], seed: int, bar: tqdm) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=0) as file:
        _write_all(file.fileno(), header(listed))
        for tensor in listed:
            for block in blocks(tensor, seed=seed):
                _write_all(file.fileno(), block.view(np.uint8).data)
                bar.update(block.nbytes)
        os.fsync(file.fileno())
    partial.rename(path)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """An unbuffered write may be short, near a full disk above all."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_sidecars(folder: Path, name: str, config: Config, *, uncut: bool, seed: int) -> None:
    if uncut:
        shutil.copyfile(DATA / CONFIGS[name], folder / "config.json")
    else:
        _write_json(folder / "config.json", config)
    shutil.copyfile(DATA / "e2b_generation_config.json", folder / "generation_config.json")
    text = config["text_config"]
    layers, vocab = text["num_hidden_layers"], text["vocab_size"]
    card = CARD.format(name=name, layers=layers, vocab=vocab, seed=seed)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Write a checkpoint with a real Gemma 4 QAT layout and a known grid.",
        epilog="example: python benchmarks/synthesize.py --config E2B --out /tmp/e2b --layers 6 "
        "--vocab 65536",
    )
    parser.add_argument("--config", choices=CONFIGS, default="E2B", help="size (default: E2B)")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--layers", type=int, help="keep this many decoder layers")
    parser.add_argument("--vocab", type=int, help="keep this many embedding rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--shards", type=int, default=1, help="safetensors files (default: 1)")
    args = parser.parse_args()
    options = {"layers": args.layers, "vocab": args.vocab}
    try:
        done = synthesize(args.config, args.out, seed=args.seed, shards=args.shards, **options)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(done))


if __name__ == "__main__":
    main()
