"""From a checkpoint folder to weights on the device, one tensor at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...checkpoint.errors import ModelError
from ...checkpoint.folder import Checkpoint
from ...checkpoint.naming import text_prefix
from ...checkpoint.progress import Progress
from ...checkpoint.reader import TensorReader
from .config import Config, read_config, tensor_shapes
from .head import recover_table
from .linear import Path as Decode
from .linear import prepare
from .packed import PER_WORD, Levels, Words, narrowed
from .packed import decode as decode_words
from .sharding import cut_axis, weight_sharding
from .weights import assemble, is_inner_norm

Head = Literal["stored", "int4"]
TABLES = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight")
# Present in some exports and of no use here: base models store keys for layers that share them.
_UNUSED = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm")


@dataclass(frozen=True)
class Model:
    """A loaded decoder: what it is, its weights, and the bytes they take on the device."""

    config: Config
    weights: dict[str, Any]
    nbytes: int


def load(
    folder: str | Path,
    *,
    decode: Decode = "exact",
    head: Head = "stored",
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load the text decoder of a checkpoint, a packed build or a text-only one.

    Packed weights stay packed on the device. Towers, and a head that is tied, are never read.
    The host holds one tensor, or packed linear, beside what the device has taken over.

    Args:
        folder: where config.json and the safetensors files stand.
        decode: `exact` for fidelity, `fast` for speed (see `linear`); the same for dense weights.
        head: `int4` holds the head, with a tied one the token embedding, in 4 bits: a quarter of
            its bytes. The levels and float32 steps are recovered and proved: the same weights,
            but where `Levels` hold them the product takes float16 steps (see `packed.narrowed`).
        dtype: of the activations and of dense weights; by default as stored.
        mesh: devices to cut the weights over (see `sharding`); None for the default device.
        progress: called with the bytes of each tensor read.

    Raises:
        CheckpointError: damaged files.
        ModelError: an unknown model, tensors missing, surplus or of another shape, or a head that
            is not on the 4-bit grid.
    """
    if head == "int4" and mesh is not None:
        raise ModelError("a head in 4 bits is for one device: leave out the mesh, or the option.")
    checkpoint = Checkpoint.open(Path(folder))
    config = read_config(checkpoint.folder)
    prefix = text_prefix(checkpoint.tensors)
    _check_names(checkpoint, prefix, config)
    with TensorReader() as reader:
        source = _Source(checkpoint, config, prefix, reader, decode, head, dtype, mesh, progress)
        weights = assemble(config, functools.partial(_leaf, source, tensor_shapes(config)))
    nbytes = sum(weight_bytes(x) for x in jax.tree.leaves(weights))
    return Model(config, weights, nbytes)


def load_head(folder: str | Path, config: Config, dtype: np.dtype[Any]) -> jax.Array:
    """Load the head alone, [V, E] as `dtype`: `lm_head`, or the embedding that it is tied to.

    Packed weights are decoded. Raises as `load` does.
    """
    checkpoint = Checkpoint.open(Path(folder))
    prefix = text_prefix(checkpoint.tensors)
    _check_names(checkpoint, prefix, config)
    with TensorReader() as reader:
        source = _Source(checkpoint, config, prefix, reader, "exact", "stored", dtype, None, None)
        leaf = _leaf(source, tensor_shapes(config), source.head_name)
    return leaf if isinstance(leaf, jax.Array) else jax.jit(decode_words)(leaf).astype(dtype)


@dataclass(frozen=True)
class _Source:
    checkpoint: Checkpoint
    config: Config
    prefix: str
    reader: TensorReader
    decode: Decode
    head: Head
    dtype: Any
    mesh: jax.sharding.Mesh | None
    progress: Progress | None

    def full(self, name: str) -> str:
        """The checkpoint's name of one of ours; a head stands outside the decoder's prefix."""
        return name if name.startswith("lm_head.") else self.prefix + name

    def has(self, name: str) -> bool:
        return self.full(name) in self.checkpoint.tensors

    def read(self, name: str) -> np.ndarray:
        info = self.checkpoint[self.full(name)]
        array = self.reader.read(info)
        if self.progress:
            self.progress(info.nbytes)
        return array

    @property
    def head_name(self) -> str:
        """The tensor that gives the logits."""
        return "embed_tokens.weight" if self.config.tied else "lm_head.weight"

    def prepared(self, name: str, packed: Words) -> Any:
        """The form of a packed linear that the products want."""
        shards = self.mesh.size if self.mesh is not None else 1
        cut = shards > 1 and cut_axis(name, self.config, shards) == 1
        laid = prepare(
            packed, self.decode, platform=jax.default_backend(), shards=shards if cut else 1
        )
        return jax.block_until_ready(laid)  # before the next is read: its words leave the memory

    def prepared_head(self, name: str, packed: Words) -> Any:
        """The same for a head in 4 bits: a step reads all scales, a lookup those of its rows."""
        laid = self.prepared(name, packed)
        return narrowed(laid, lookups=self.config.tied) if isinstance(laid, Levels) else laid

    def put(self, name: str, array: np.ndarray) -> jax.Array:
        """One array on the device, or cut over the mesh, and off the host before the next."""
        where = self.mesh and weight_sharding(self.mesh, name, array.shape, self.config)
        return jax.block_until_ready(jax.device_put(array, where))


def _leaf(source: _Source, shapes: dict[str, tuple[int, ...]], name: str) -> Any:
    module = name.removesuffix(".weight")
    in_4_bits = source.head == "int4" and name == source.head_name
    if source.has(f"{module}.weight_packed"):
        packed = _packed(source, module, shapes[name])
        if in_4_bits:
            return source.prepared_head(name, packed)
        return packed if name in TABLES else source.prepared(name, packed)
    if in_4_bits:
        info = source.checkpoint[source.full(name)]
        _check_shape(source, name, info.shape, shapes[name])
        words, steps = recover_table(source.reader, info, source.progress)
        return source.prepared_head(name, Words(source.put(name, words), source.put(name, steps)))
    array = source.read(name)
    _check_shape(source, name, array.shape, shapes[name])
    array = array if source.dtype is None else array.astype(source.dtype)
    if source.decode == "fast" and is_inner_norm(name):
        array = array.astype(np.float32)
    return source.put(name, array)


def _packed(source: _Source, module: str, shape: tuple[int, ...]) -> Words:
    """The packed linear or table of a module, as stored."""
    name, (out, width) = f"{module}.weight", shape
    words = source.read(f"{module}.weight_packed").view(np.uint32)
    scale = source.read(f"{module}.weight_scale")
    _check_shape(source, f"{module}.weight_packed", words.shape, (out, width // PER_WORD))
    if scale.shape[0] != out or width % scale.shape[1]:
        _check_shape(source, f"{module}.weight_scale", scale.shape, (out, width // 32))
    return Words(source.put(name, words), source.put(name, scale))


def weight_bytes(x: jax.Array) -> int:
    """What an array takes on the device: half a byte for each int4."""
    return x.size // 2 if x.dtype == jnp.int4 else x.nbytes


def _check_shape(
    source: _Source, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if found != expected:
        raise ModelError(
            f"{source.checkpoint[source.full(name)].file}: {source.full(name)!r} has shape "
            f"{list(found)}, config.json asks for {list(expected)}; they are not of one model."
        )


def _check_names(checkpoint: Checkpoint, prefix: str, config: Config) -> None:
    """Every tensor of the decoder is there, and under its prefix nothing is left over."""
    present = {n.removeprefix(prefix) for n in checkpoint.tensors if n.startswith(prefix)}
    present |= {n for n in checkpoint.tensors if n.startswith("lm_head.")}
    expected = tensor_shapes(config)
    missing = [n for n in expected if not _stored(n, present)]
    if missing:
        raise ModelError(
            f"{checkpoint.folder}: tensors missing: {_some(missing)}; download it again."
        )
    if prefix == "model.":  # older names put the towers beside the decoder
        present = {n for n in present if n.startswith(("layers.", "embed_tokens", "per_layer_"))}
    known = {n.removesuffix(".weight") for n in expected} | {"lm_head"}
    surplus = [n for n in present if _module(n) not in known and not _shared_key(n, config)]
    if surplus:
        raise ModelError(
            f"{checkpoint.folder}: tensors that are not part of this model: "
            f"{_some(sorted(surplus))}; config.json and weights are not of one export."
        )


def _stored(name: str, present: set[str]) -> bool:
    module = name.removesuffix(".weight")
    return name in present or {f"{module}.weight_packed", f"{module}.weight_scale"} <= present


def _module(name: str) -> str:
    """The module of a tensor's name: `layers.0.mlp.up_proj` of `...up_proj.weight_scale`."""
    head, _, last = name.rpartition(".")
    return head if last.startswith("weight") else name


def _shared_key(name: str, config: Config) -> bool:
    """Whether this is a key or value projection of a layer that shares another's."""
    parts = name.split(".", 2)
    if parts[0] != "layers" or not parts[2].startswith(_UNUSED):
        return False
    return int(parts[1]) < len(config.layers) and not config.owns_kv(int(parts[1]))


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
