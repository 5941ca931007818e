"""Runs the grid recovery over tensors of any size, a block of groups at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..checkpoint.errors import GridError
from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader, aligned_empty
from ..checkpoint.writer import ShardLayout, ShardWriter
from .grid import BLOCK_GROUPS, BlockResult, Counts, Pending, Status, describe_group, dispatch
from .packing import GROUP
from .plan import PackedModule, ScaleDtype

GROUP_BYTES = 2 * GROUP


@dataclass(frozen=True, slots=True)
class ModuleBlock:
    """The recovery of `groups` consecutive groups of a module, from group `first` on."""

    first: int
    bits: np.ndarray
    result: BlockResult


def blocks(
    module: PackedModule, reader: TensorReader, scale_dtype: ScaleDtype
) -> Iterator[ModuleBlock]:
    """Recover a module's groups in order; reads the next block while XLA works on this one.

    A block's `bits` (uint16[groups, 32]) are good until the next one is taken.
    """
    buffers = [aligned_empty(BLOCK_GROUPS * GROUP_BYTES) for _ in range(2)]
    base = module.row * module.columns * 2
    waiting: tuple[int, np.ndarray, Pending] | None = None
    for number, first in enumerate(range(0, module.groups, BLOCK_GROUPS)):
        count = min(BLOCK_GROUPS, module.groups - first)
        buffer = buffers[number % 2][: count * GROUP_BYTES]
        reader.read_into(module.source, base + first * GROUP_BYTES, buffer)
        bits = buffer.view(np.uint16).reshape(count, GROUP)
        pending = dispatch(bits, scale_dtype)
        if waiting is not None:
            yield ModuleBlock(waiting[0], waiting[1], waiting[2].result())
        waiting = first, bits, pending
    if waiting is not None:
        yield ModuleBlock(waiting[0], waiting[1], waiting[2].result())


def pack_module(
    module: PackedModule,
    reader: TensorReader,
    writer: ShardWriter,
    scale_dtype: ScaleDtype,
    progress: Progress,
) -> Counts:
    """Recover one module and write its three tensors.

    Raises `GridError` at the first group that no positive step holds.
    """
    total = Counts()
    shape, packed, scale = (spec.name for spec in module.specs(scale_dtype))
    writer.write(shape, 0, np.array([module.rows, module.columns], "<i8"))
    for block in blocks(module, reader, scale_dtype):
        if fault := first_fault(module, block):
            raise GridError(f"{module.source.file}: {module.source.name} {fault}; {ADVICE}.")
        writer.write(packed, block.first * GROUP // 2, block.result.packed)
        writer.write(scale, block.first * block.result.scale.itemsize, block.result.scale)
        total += block.result.counts
        progress(block.bits.nbytes)
    return total


ADVICE = (
    "nothing is rounded to make it fit: check that this is the QAT checkpoint, or leave such "
    "tensors in bf16 with --on-off-grid keep"
)


def first_fault(module: PackedModule, block: ModuleBlock) -> str | None:
    """Where in its tensor and why an uncertified group of a block fails, or None if none does.

    The first group that holds NaN or Inf, else the first of all.

    Raises `GridError` for NaN or Inf: a checkpoint that holds one is damaged.
    """
    good = (block.result.status == Status.ZERO) | (block.result.status == Status.CERTIFIED)
    if good.all():
        return None
    infinite = block.result.status == Status.NON_FINITE
    index = int(infinite.argmax() if infinite.any() else good.argmin())
    row, group = divmod(block.first + index, module.columns // GROUP)
    columns = f"{group * GROUP} to {(group + 1) * GROUP - 1}"
    fault = (
        f"row {module.row + row}, group {group} (columns {columns}): "
        f"{describe_group(block.bits[index])}"
    )
    if infinite[index]:
        raise GridError(
            f"{module.source.file}: {module.source.name} {fault}; the checkpoint is damaged, "
            "download it again."
        )
    return fault


def find_fault(module: PackedModule, reader: TensorReader, progress: Progress) -> str | None:
    """Run the certificate over a module without writing; the first fault, or None.

    Goes on to the end even so: NaN or Inf anywhere raises `GridError`.
    """
    found: str | None = None
    for block in blocks(module, reader, "bfloat16"):
        fault = first_fault(module, block)
        found = found or fault
        progress(block.bits.nbytes)
    return found


def copy_tensors(writer: ShardWriter, reader: TensorReader, progress: Progress) -> None:
    """Let the kernel copy the pass-through tensors of one shard."""
    for spec in writer.layout.specs:
        if spec.source is not None:
            writer.copy(spec, reader.descriptor(spec.source.file), progress)


def pack_tensors(
    writer: ShardWriter,
    modules: Mapping[str, PackedModule],
    reader: TensorReader,
    scale_dtype: ScaleDtype,
    progress: Progress,
) -> dict[str, Counts]:
    """Recover and write the packed modules of one shard; counts by module.

    `modules`: the module of each `.weight_packed` name.
    """
    return {
        module.module: pack_module(module, reader, writer, scale_dtype, progress)
        for spec in writer.layout.specs
        if (module := modules.get(spec.name)) is not None
    }


def source_bytes(layout: ShardLayout, modules: Mapping[str, PackedModule]) -> int:
    """The source bytes that a shard is made from."""
    copied = sum(spec.nbytes for spec in layout.specs if spec.source is not None)
    packed = (modules[s.name] for s in layout.specs if s.name in modules)
    return copied + sum(m.groups * GROUP_BYTES for m in packed)
