"""A checkpoint of two layers cut from the embedded one, for evaluations that take seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from verify_builds import DEMO, read_arrays

from qatpack.evaluate.windows import Protocol

TEXT = "model.language_model."
LAYERS, PLE = (0, 2), 32  # one sliding, one full
FAST: dict[str, Any] = {
    "protocol": Protocol(windows=2, length=32), "tokens": 12, "repeats": 1, "decode": "exact",
}  # fmt: skip


def cut(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two layers of the embedded checkpoint, renumbered."""
    columns = np.concatenate([np.arange(i * PLE, (i + 1) * PLE) for i in LAYERS])
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if not name.startswith(f"{TEXT}layers."):
            found[name] = array
            continue
        number, rest = name.removeprefix(f"{TEXT}layers.").split(".", 1)
        if int(number) in LAYERS:
            found[f"{TEXT}layers.{LAYERS.index(int(number))}.{rest}"] = array
    table, projection = f"{TEXT}embed_tokens_per_layer.weight", "per_layer_model_projection.weight"
    found[table] = np.ascontiguousarray(found[table][:, columns])
    found[TEXT + projection] = np.ascontiguousarray(found[TEXT + projection][columns])
    return found


def write(folder: Path) -> Path:
    """Write it as a checkpoint folder."""
    shutil.copytree(DEMO, folder)
    save_file(cut(read_arrays(DEMO)), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {
        "num_hidden_layers": 2, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
