"""Every packed tensor by compressed-tensors' own decompressor, held against our decoding.

The decompressor runs on blocks of rows of about its best size, so that memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader
from ..repack.grid import cpu
from ..repack.packing import BF16
from .build import Build, PackedTensor
from .exact import as_float32
from .findings import Finding, error, listed
from .kernel import decode_words

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig

BLOCK_VALUES = 1 << 18
"""Values that are decoded at once: beyond it torch falls out of the cache."""

THREADS = 2
"""Tensors decoded at once."""


def decoded_bytes(build: Build) -> int:
    """Bytes of bf16 that `decode_findings` decodes, for a progress bar."""
    return sum(2 * t.rows * t.columns for t in build.packed.values())


def decode_findings(
    build: Build, config: QuantizationConfig, progress: Progress
) -> Iterator[Finding]:
    """Packed tensors that compressed-tensors cannot decode, or decodes to something else."""
    schemes = _schemes(config)
    if not schemes:
        return  # told by the scheme's own findings
    name = f"compressed-tensors {version('compressed-tensors')}"
    differ: list[str] = []
    refused: dict[str, str] = {}
    for tensor, said in _decode_all(list(build.packed.values()), schemes, progress):
        if isinstance(said, str):
            refused[tensor.module] = said
        elif not said:
            differ.append(tensor.module)
    if refused:
        first = min(refused)
        what = f"{name} cannot decode {len(refused)} modules, {first}: {refused[first]}"
        yield error("decode", listed(refused), what, "export them again")
    if differ:
        what = f"{name} decodes {len(differ)} modules to other values"
        yield error("decode", listed(differ), what, "report this: one of the two is wrong")


def _decode_all(
    tensors: Sequence[PackedTensor], schemes: Sequence[Any], progress: Progress
) -> Iterator[tuple[PackedTensor, bool | str]]:
    """Each tensor with whether it decodes alike, or with what the decompressor says against it."""
    import torch

    def work(tensor: PackedTensor) -> bool | str:
        with TensorReader() as reader:
            try:
                return _decodes_alike(tensor, reader, _scheme_of(tensor, schemes), progress)
            except Exception as fault:  # whatever its checks raise
                return " ".join(str(fault).split())[:160]

    # Blocks this small gain nothing from being split over threads of torch.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from zip(tensors, pool.map(work, tensors), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _schemes(config: QuantizationConfig) -> list[Any]:
    groups = config.config_groups.values()
    return [s for s in groups if not isinstance(s, list) and s.weights is not None]


def _scheme_of(tensor: PackedTensor, schemes: Sequence[Any]) -> Any:
    fitting = [s for s in schemes if s.weights.group_size == tensor.group_size]
    return (fitting or schemes)[0]


def _decodes_alike(
    tensor: PackedTensor, reader: TensorReader, scheme: Any, progress: Progress
) -> bool:
    """All rows, with the stored scale and with one cast to bf16 as loaders do."""
    step = max(1, BLOCK_VALUES // tensor.columns)
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        packed = reader.read_rows(tensor.packed, start, stop)
        stored = as_float32(reader.read_rows(tensor.scale, start, stop))
        with np.errstate(over="ignore", invalid="ignore"):
            cast = stored.astype(BF16)
        for scale in (cast,) if tensor.scale_dtype == "bfloat16" else (stored, cast):
            ours = _decode(packed, scale, tensor)
            if not _same_bits(ours, _decompress(packed, scale, tensor, scheme)):
                return False
        progress(2 * packed.size * 8)
    return True


def _decode(packed: np.ndarray, scale: np.ndarray, tensor: PackedTensor) -> np.ndarray:
    """uint16[rows, columns], the bits of `packing.decode`, in one compiled shape for each size."""
    size = tensor.group_size
    groups, most = scale.size, max(BLOCK_VALUES // size, tensor.columns // size)
    levels, step = np.empty((most, size // 2), np.uint8), np.empty(most, np.float32)
    levels[:groups] = packed.view(np.uint8).reshape(groups, -1)
    step[:groups] = as_float32(scale).reshape(-1)
    with jax.default_device(cpu()):
        found = np.asarray(decode_words(levels, step))[:groups]
    return found.view("<u2").reshape(len(packed), -1)


def _same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    if np.array_equal(ours, theirs):
        return True
    infinite = np.uint16(0x7F80)
    nan = ((ours & np.uint16(0x7FFF)) > infinite) & ((theirs & np.uint16(0x7FFF)) > infinite)
    return bool(((ours == theirs) | nan).all())


def _decompress(
    packed: np.ndarray, scale: np.ndarray, tensor: PackedTensor, scheme: Any
) -> np.ndarray:
    """Bits of bf16[rows, columns] by compressed-tensors, which multiplies in the scale's dtype."""
    import torch
    from compressed_tensors.compressors import BaseCompressor

    if scale.dtype == BF16:
        step = torch.from_numpy(scale.view(np.int16)).view(torch.bfloat16)
    else:
        step = torch.from_numpy(scale)
    state = {
        "weight_packed": torch.from_numpy(packed),
        "weight_scale": step,
        "weight_shape": torch.tensor([len(packed), tensor.columns]),
    }
    decompressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    weight = decompressor.decompress(state, scheme)["weight"]
    return weight.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
