"""What a checkpoint is, measured: its parts, and which tensors stand on a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader
from ..checkpoint.source import Source
from .config import QUANTIZATION_KEYS
from .grid import BLOCK_GROUPS, Counts, dispatch, share_certified
from .layout import Layout, Role, read_layout, ties_head
from .packing import GROUP
from .plan import Options, PackedModule, make_plan, same_bytes, unpackable
from .stream import blocks

# The corner of a tensor on which other group sizes and the other axis are tried: enough groups
# to tell, few enough for numpy. Tensors that nobody expects on a grid get as many rows measured.
PROBE_ROWS = 32
PROBE_COLUMNS = 512
PROBE_SIZES = (16, 32, 64, 128)

_ON_GRID = (Role.LINEAR, Role.EXPERTS, Role.EMBEDDING, Role.PER_LAYER_EMBEDDING, Role.HEAD)


@dataclass(frozen=True)
class Reading:
    """The grid of one tensor as measured.

    - `counts`: over all groups of 32, or over those of the sampled rows.
    - `shares`: group size -> share certified, on the first rows and columns.
    - `other_axis`: share certified there in groups of 32 down the rows; None with fewer rows.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    counts: Counts
    shares: Mapping[int, float]
    other_axis: float | None

    @property
    def certified(self) -> float:
        """Share of groups that certify; zero groups do."""
        return (self.counts.certified + self.counts.zero) / self.counts.groups

    def to_json(self) -> dict[str, Any]:
        """As `qatpack inspect --json` prints it."""
        return {
            "name": self.name,
            "role": self.role.value,
            "shape": list(self.shape),
            "certified_share": self.certified,
            "share_by_group_size": {str(k): v for k, v in self.shares.items()},
            "share_other_axis": self.other_axis,
            **self.counts.to_json(),
        }


def candidates(layout: Layout) -> tuple[TensorInfo, ...]:
    """Every tensor whose grid can be measured: two axes or more, BF16, whole groups."""
    return tuple(
        t
        for t in layout.checkpoint.tensors.values()
        if len(t.shape) >= 2 and t.rows > 1 and unpackable(t) is None
    )


def read_grid(
    tensor: TensorInfo,
    role: Role,
    reader: TensorReader,
    *,
    sample: int | None,
    progress: Progress,
) -> Reading:
    """Measure one tensor: all of it where a grid is expected and `sample` is None, else rows."""
    if role not in _ON_GRID:
        sample = min(sample or PROBE_ROWS, PROBE_ROWS)
    probe = reader.read_rows(tensor, 0, min(PROBE_ROWS, tensor.rows)).view(np.uint16)
    probe = np.ascontiguousarray(probe[:, :PROBE_COLUMNS])
    if sample is None or sample >= tensor.rows:
        counts = Counts()
        for block in blocks(PackedModule(tensor.name, tensor, 0, tensor.rows), reader, "bfloat16"):
            counts += block.result.counts
            progress(block.bits.nbytes)
    else:
        counts = _count(_rows(tensor, reader, sample))
        progress(tensor.nbytes)
    sizes = [size for size in PROBE_SIZES if probe.shape[1] % size == 0]
    shares = {size: share_certified(probe, size) for size in sizes}
    return Reading(tensor.name, role, tensor.shape, counts, shares, _other_axis(probe))


def _rows(tensor: TensorInfo, reader: TensorReader, count: int) -> np.ndarray:
    """`count` rows spread evenly over the tensor: uint16[count, columns]."""
    chosen = np.unique(np.linspace(0, tensor.rows - 1, min(count, tensor.rows)).astype(int))
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1)
    read = [reader.read_rows(tensor, int(run[0]), int(run[-1]) + 1) for run in runs]
    return np.concatenate(read).view(np.uint16)


def _count(rows: np.ndarray) -> Counts:
    groups = rows.reshape(-1, GROUP)
    total = Counts()
    for start in range(0, len(groups), BLOCK_GROUPS):
        total += dispatch(groups[start : start + BLOCK_GROUPS], "bfloat16").result().counts
    return total


def _other_axis(probe: np.ndarray) -> float | None:
    if len(probe) < GROUP:
        return None
    return share_certified(np.ascontiguousarray(probe[:GROUP].T), GROUP)


def read_grids(
    layout: Layout, *, sample: int | None = None, progress: Progress
) -> Iterator[Reading]:
    """Measure every candidate in file order; `progress` gets each tensor's bytes."""
    with TensorReader() as reader:
        for tensor in candidates(layout):
            yield read_grid(
                tensor, layout.roles[tensor.name], reader, sample=sample, progress=progress
            )


def describe(source: Source, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the files and config.json say, without reading tensors."""
    layout, config = read_layout(checkpoint), checkpoint.config
    parts: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.tensors.values():
        part = parts.setdefault(layout.roles[tensor.name].value, {"tensors": 0, "bytes": 0})
        part["tensors"] += 1
        part["bytes"] += tensor.nbytes
    return {
        "folder": str(source.folder),
        "id": source.id,
        "commit": source.commit,
        "architectures": config.get("architectures"),
        "model_type": config.get("model_type"),
        "text_prefix": layout.prefix,
        "files": {h.path.name: h.size for h in checkpoint.files},
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.tensor_bytes,
        "parts": parts,
        "head": _head(layout),
        "scheme": packed_scheme(layout),
        "warnings": list(checkpoint.warnings),
    }


def _head(layout: Layout) -> dict[str, Any]:
    """Whether the config ties lm_head, and whether a stored one is the embedding's bytes."""
    heads = layout.named(Role.HEAD)
    embedding = layout.checkpoint.tensors.get(f"{layout.prefix}embed_tokens.weight")
    identical = all(embedding is not None and same_bytes(h, embedding) for h in heads)
    return {
        "tied": ties_head(layout.checkpoint.config),
        "stored": bool(heads),
        "identical": identical if heads else None,
    }


def packed_scheme(layout: Layout) -> dict[str, Any] | None:
    """How an already packed build is packed, from its tensors and its config; None if it is not.

    A quantization_config without packed tensors is reported too: it is what a loader will obey.
    """
    found = list(_quantization_configs(layout.checkpoint.config))
    scales = [t for t in layout.named(Role.PACKED) if t.name.endswith(".weight_scale")]
    if not found and not scales:
        return None
    config = found[0] if found else {}
    groups = config.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    ignored = config.get("ignore")
    return {
        "quantization_configs": len(found),
        "quant_method": config.get("quant_method"),
        "format": config.get("format"),
        "weights": first.get("weights") if isinstance(first, Mapping) else None,
        "packed_modules": len(scales),
        "scale_dtypes": sorted({t.dtype for t in scales}),
        "ignored_modules": len(ignored) if isinstance(ignored, list) else 0,
    }


def _quantization_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key in QUANTIZATION_KEYS:
                yield value
            else:
                yield from _quantization_configs(value)


def expected_output(layout: Layout, readings: Sequence[Reading]) -> int:
    """Tensor bytes of a repack that leaves in bf16 what was found off the grid.

    Raises `CheckpointError` where a repack would, for a head that config.json contradicts.
    """
    off_grid = {r.name: "off the grid" for r in readings if r.certified < 1}
    return make_plan(layout, Options(), off_grid=off_grid).output_bytes()
