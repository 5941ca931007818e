"""Final hidden states of windows, kept on disk so that no window is run twice.

[length, hidden] a window: 1.6 MB on E2B, where its logits would take 537 MB. A file is found by
what decides its content: the weights, the decoder's code, JAX, the device (a CPU by its name: the
code that XLA makes for it differs), and the window's tokens.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint.errors import OutputError
from ..checkpoint.output import write_file, write_json
from .devices import lean_options
from .gemma4 import model
from .gemma4.config import Config
from .gemma4.load import Model
from .machine import cpu_name

AGAIN = "again"
_DIGEST = hashlib.sha256().digest_size  # a file is the sha256 of its array, and the array as npy


@dataclass(frozen=True)
class Store:
    """The kept states of one model under `folder`, of dtype `dtype`."""

    folder: Path
    dtype: np.dtype[Any]

    def read(self, tokens: np.ndarray, tag: str = "") -> np.ndarray | None:
        """States [length, hidden] of a window; None where it was not run, or the file is not what
        was written."""
        try:
            data = self._path(tokens, tag).read_bytes()
        except OSError:
            return None
        digest, array = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(array).digest() != digest:
            return None
        raw = np.load(io.BytesIO(array))
        if raw.ndim != 2 or len(raw) != len(tokens) or raw.dtype != _stored(self.dtype):
            return None
        return raw.view(self.dtype)

    def write(self, tokens: np.ndarray, states: np.ndarray, tag: str = "") -> None:
        """Keep the states of a window; the file appears whole or not at all.

        Raises `OutputError` where the folder cannot be written.
        """
        data = io.BytesIO()
        np.save(data, states.view(_stored(states.dtype)))
        array = data.getvalue()
        with _writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self._path(tokens, tag), hashlib.sha256(array).digest() + array)

    def has(self, tokens: np.ndarray, tag: str = "") -> bool:
        """Whether the states of a window can be read."""
        return self.read(tokens, tag) is not None

    def _path(self, tokens: np.ndarray, tag: str) -> Path:
        digest = hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()[:32]
        return self.folder / f"{digest}{tag and '-'}{tag}.states"


def open_store(
    home: Path, sha256: Mapping[str, str], *, dtype: np.dtype[Any], devices: int
) -> Store:
    """The store of a model, given by the sha256 of its files, on this machine's kind of device.

    Raises `OutputError` where `home` cannot be written.
    """
    device = jax.devices()[0]
    key = {
        "files": dict(sorted(sha256.items())),
        "dtype": dtype.name,
        "decode": "exact",
        "code": code_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "device": f"{device.platform} {device.device_kind}",
        "cpu": cpu_name() if device.platform == "cpu" else None,
        "devices": devices,
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    folder = home / digest
    with _writable(folder):
        if not (folder / "key.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "key.json", key)
    return Store(folder, dtype)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """npy knows no bfloat16: states are kept as unsigned integers of their size."""
    return np.dtype(f"u{dtype.itemsize}")


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or folder
        raise OutputError(
            f"{folder}: hidden states cannot be kept there ({where}: {error.strerror}); remove "
            "what is in the way, or name another folder with --cache-dir"
        ) from error


@functools.cache
def code_version() -> str:
    """sha256 over the decoder's sources: other code is another model."""
    digest = hashlib.sha256()
    for path in sorted(Path(model.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_window(loaded: Model, tokens: np.ndarray) -> np.ndarray:
    """Final hidden states [length, hidden] of one window, int32[length]."""
    run = _compiled(loaded.config)
    return np.asarray(run(loaded.weights, jnp.asarray(tokens)[None]))


@functools.cache
def _compiled(config: Config) -> Callable[[model.Weights, jax.Array], jax.Array]:
    def forward(weights: model.Weights, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return model.forward(weights, tokens, positions, config=config)[0][0]

    return jax.jit(forward, compiler_options=lean_options())
