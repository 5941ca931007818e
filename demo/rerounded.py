"""A build as Google's export makes it: every group rounded anew on step = max/7.5.

The observer is llm-compressor's `memoryless_minmax`: the largest magnitude of a group, divided by
(7 + 8) / 2 in the weights' own dtype, bfloat16; then compressed-tensors' `quantize`, round and
clip of bf16(value / scale). The tests hold it against compressed-tensors itself. For comparison
only: it is what qatpack exists to avoid.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ..checkpoint.folder import INDEX_NAME, Checkpoint
from ..checkpoint.output import write_json
from ..checkpoint.reader import TensorReader
from ..repack.config import output_config
from ..repack.layout import Role, dense_linears, read_layout
from ..repack.packing import BF16, GROUP, pack


def reround(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`w: bf16[out, in]` to (levels int8[out, in], scale bf16[out, in/32])."""
    groups = w.reshape(w.shape[0], -1, GROUP)
    scale = (np.abs(groups).max(-1).astype(np.float32) / np.float32(7.5)).astype(BF16)
    scale = np.where(scale == 0, np.array(ml_dtypes.finfo(BF16).eps, BF16), scale)
    ratio = (groups.astype(np.float32) / scale.astype(np.float32)[..., None]).astype(BF16)
    levels = np.clip(np.rint(ratio.astype(np.float32)), -8, 7).astype(np.int8)
    return levels.reshape(w.shape), scale


def packed_tensors(module: str, levels: np.ndarray, scale: np.ndarray) -> dict[str, np.ndarray]:
    """The three tensors of a packed module, by name."""
    return {
        f"{module}.weight_packed": pack(levels),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": np.array(levels.shape, np.int64),
    }


def export(source: Path, out: Path, *, head: bool = True) -> Path:
    """Write `out`, the re-rounded build of a small checkpoint folder, and return it.

    With `head` it has a copy of the embedding as lm_head, as Google's export has.
    """
    layout = read_layout(Checkpoint.open(source))
    arrays: dict[str, np.ndarray] = {}
    dense: list[str] = []
    with TensorReader() as reader:
        for tensor in layout.checkpoint.tensors.values():
            if layout.roles[tensor.name] is Role.LINEAR:
                module = tensor.name.removesuffix(".weight")
                arrays |= packed_tensors(module, *reround(reader.read(tensor)))
            else:
                arrays[tensor.name] = reader.read(tensor)
                dense.append(tensor.name)
    if head:
        arrays["lm_head.weight"] = arrays[f"{layout.prefix}embed_tokens.weight"]
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copy(path, out)
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    config = output_config(layout.checkpoint.config, dense_linears(layout, dense))
    write_json(out / "config.json", config)
    return out
