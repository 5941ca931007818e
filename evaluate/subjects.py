"""The models of an evaluation: what they are, whether they can be run, their time on the device.

One stands on the device at a time: two of full size do not fit a chip of 16 GB.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from ..checkpoint.errors import ModelError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.hashing import hash_file
from ..checkpoint.naming import text_prefix
from ..checkpoint.progress import Progress
from ..checkpoint.reader import NUMPY_DTYPES
from ..checkpoint.source import Source
from ..checkpoint.units import size
from ..verify.build import SCALE_DTYPES, open_build
from ..verify.scheme import read_scheme
from .devices import pick_mesh
from .gemma4.config import Config, read_config
from .gemma4.linear import Path as Decode
from .gemma4.load import Model, load

T = TypeVar("T")
MODEL_ADVICE = "spread it with --mesh, or take a smaller --batch or --length"
# What compressed-tensors may store beside packed weights, and this decoder has no use of.
_FOREIGN = ("weight_zero_point", "weight_g_idx", "weight_global_scale")


@dataclass(frozen=True)
class Subject:
    """The reference or a build. `dtype` is that of its norms, and so of activations."""

    name: str
    source: Source
    checkpoint: Checkpoint
    config: Config
    dtype: np.dtype[Any]

    @property
    def disk_bytes(self) -> int:
        """Of all safetensors files in use."""
        return sum(header.path.stat().st_size for header in self.checkpoint.files)

    @property
    def scale_dtypes(self) -> list[str]:
        """Of the packed weights, sorted; [] where nothing is packed."""
        tensors = self.checkpoint.tensors.values()
        found = {t.dtype for t in tensors if t.name.endswith(".weight_scale")}
        return sorted(SCALE_DTYPES.get(dtype, dtype) for dtype in found)

    def origin(self) -> dict[str, Any]:
        """Name, Hub id and commit: never the local path."""
        return {"name": self.name, "id": self.source.id, "commit": self.source.commit}


def open_subject(name: str, source: Source) -> Subject:
    """Read headers and config. Raises `QatpackError`: damaged, or not a model the decoder runs."""
    checkpoint = Checkpoint.open(source.folder)
    config = read_config(checkpoint.folder)
    norm = checkpoint[f"{text_prefix(checkpoint.tensors)}norm.weight"]
    return Subject(name, source, checkpoint, config, NUMPY_DTYPES[norm.dtype])


def check_decodable(subject: Subject) -> None:
    """Raise `ModelError` for a build whose packed weights mean something else than level * scale.

    What the decoder itself cannot run (other models, missing tensors) it says when it loads.
    """
    build = open_build(subject.source.folder, name=subject.name)
    for finding in build.findings:
        if finding.where in build.broken:
            raise ModelError(f"{subject.name}: cannot be run: {finding.where}: {finding.what}.")
    for name in subject.checkpoint.tensors:
        module, _, last = name.rpartition(".")
        if last in _FOREIGN:
            raise ModelError(
                f"{subject.name}: cannot be run: {module} has a {last}; the decoder knows "
                "symmetric 4-bit weights in their own order only."
            )
    scheme, _ = read_scheme(subject.checkpoint.config)
    for name, field, value in _odd_groups(scheme.raw) if build.packed else ():
        raise ModelError(
            f"{subject.name}: cannot be run: its config group {name} has {field} {value!r}; the "
            "decoder knows symmetric 4-bit integer weights only."
        )


def _odd_groups(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    groups = raw.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        for field, wanted in (("num_bits", 4), ("type", "int"), ("symmetric", True)):
            if isinstance(weights, Mapping) and weights.get(field, wanted) != wanted:
                yield name, field, weights[field]


def hash_files(subject: Subject, progress: Progress) -> dict[str, str]:
    """sha256 of config.json and every weights file, by name; those known from the Hub are taken."""
    found: dict[str, str] = {}
    for path in [
        subject.source.folder / "config.json",
        *(h.path for h in subject.checkpoint.files),
    ]:
        known = subject.source.lfs_sha256.get(path.name)
        found[path.name] = known or hash_file(path, progress=progress)
    return found


def on_device(
    subject: Subject,
    decode: Decode,
    work: Callable[[Model, float], T],
    *,
    dtype: str | None = None,
    mesh: int | None,
    progress: Progress | None,
) -> T:
    """Load a model, do `work(model, seconds of loading)`, and free the device again.

    `work` must keep nothing of the model. Raises `ModelError` where the device has no room.
    """
    devices = pick_mesh(subject.checkpoint.tensor_bytes, mesh)
    with room(subject.name):
        start = time.perf_counter()
        loaded = load(
            subject.source.folder, decode=decode, dtype=dtype, mesh=devices, progress=progress
        )
        result = work(loaded, time.perf_counter() - start)
    del loaded
    gc.collect()
    return result


@contextmanager
def room(name: str, advice: str = MODEL_ADVICE) -> Iterator[None]:
    """Turn an allocation that failed into one sentence, which ends with what helps."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        device = jax.local_devices()[0]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        has = f" of {size(limit)}" if limit else ""
        raise ModelError(
            f"{name}: no room on the device ({device.device_kind}{has}); {advice}."
        ) from error
