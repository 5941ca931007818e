"""A packed build as its files have it, read without trusting that its parts fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.naming import text_prefix
from ..checkpoint.reader import TensorReader
from .findings import Finding, error

SCALE_DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A packed module whose tensors fit each other.

    `packed: i32[rows, columns / 8]`, `scale: [rows, columns / group_size]`; stacked modules
    count their leading axes as rows.
    """

    module: str
    packed: TensorInfo
    scale: TensorInfo
    group_size: int

    @property
    def rows(self) -> int:
        """Output features, times the experts of a stacked module."""
        return self.packed.rows

    @property
    def columns(self) -> int:
        """Input features."""
        return self.packed.columns * 8

    @property
    def scale_dtype(self) -> str:
        """bfloat16, float16 or float32."""
        return SCALE_DTYPES[self.scale.dtype]


@dataclass(frozen=True)
class Build:
    """An opened build: its checkpoint, the sound packed modules, and what is wrong with others.

    `broken`: modules with packed tensors that cannot be decoded; each has a finding.
    """

    name: str
    checkpoint: Checkpoint
    prefix: str
    packed: Mapping[str, PackedTensor]
    broken: frozenset[str]
    findings: tuple[Finding, ...]

    @property
    def folder(self) -> Path:
        """Where it stands."""
        return self.checkpoint.folder


def open_build(folder: Path, *, name: str | None = None) -> Build:
    """Open a build. Raises `CheckpointError` where the files themselves are damaged."""
    checkpoint = Checkpoint.open(folder)
    modules = {n.removesuffix(s) for n in checkpoint.tensors for s in (PACKED, SCALE, SHAPE)
               if n.endswith(s)}  # fmt: skip
    packed: dict[str, PackedTensor] = {}
    findings: list[Finding] = []
    with TensorReader() as reader:
        for module in sorted(modules):
            tensor, found = _read_module(checkpoint, module, reader)
            findings += found
            if tensor is not None:
                packed[module] = tensor
    try:
        prefix = text_prefix(checkpoint.tensors) if packed else ""
    except CheckpointError:
        prefix = ""
    broken = frozenset(modules - packed.keys())
    return Build(name or folder.name, checkpoint, prefix, packed, broken, tuple(findings))


def _read_module(
    checkpoint: Checkpoint, module: str, reader: TensorReader
) -> tuple[PackedTensor | None, list[Finding]]:
    packed, scale, shape = (checkpoint.tensors.get(module + s) for s in (PACKED, SCALE, SHAPE))
    missing = [s for s, t in ((PACKED, packed), (SCALE, scale)) if t is None]
    if packed is None or scale is None:
        lost = " and ".join(module.rpartition(".")[2] + s for s in missing)
        what = f"{lost} missing: readers load random weights here, vLLM without a word"
        return None, [error("packed-missing", module, what, "export it again")]
    if fault := _fault(packed, scale):
        return None, [error("packed-shape", module, fault, "export it again")]
    tensor = PackedTensor(module, packed, scale, packed.columns * 8 // scale.columns)
    return tensor, list(_shape_findings(tensor, shape, reader))


def _fault(packed: TensorInfo, scale: TensorInfo) -> str | None:
    """Why the two cannot be decoded together, or None."""
    if packed.dtype != "I32" or len(packed.shape) not in (2, 3):
        return f"weight_packed is {packed.dtype} {list(packed.shape)}, expected I32 [out, in/8]"
    if scale.dtype not in SCALE_DTYPES:
        return f"weight_scale is {scale.dtype}, expected one of {', '.join(SCALE_DTYPES)}"
    if packed.nbytes == 0 or scale.nbytes == 0:
        return "holds no values"
    columns = packed.columns * 8
    fits = scale.shape[:-1] == packed.shape[:-1] and columns % scale.columns == 0
    if not fits or (columns // scale.columns) % 8:
        return (
            f"weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} do not "
            f"agree: {columns} columns are no whole groups of a multiple of 8"
        )
    return None


def _shape_findings(
    tensor: PackedTensor, shape: TensorInfo | None, reader: TensorReader
) -> Iterator[Finding]:
    expected = [*tensor.packed.shape[:-1], tensor.columns]
    do = f"write it as I64 [{len(expected)}] = {expected}"
    if shape is None:
        what = "weight_shape missing: transformers and tpu-inference need it"
        yield error("shape-missing", tensor.module, what, do)
        return
    if shape.dtype not in ("I64", "I32") or shape.shape != (len(expected),):
        what = f"weight_shape is {shape.dtype} {list(shape.shape)}"
        yield error("shape-wrong", tensor.module, what, do)
        return
    stated = reader.read(shape).tolist()
    if stated != expected:
        what = f"weight_shape says {stated}, weight_packed holds {expected}"
        yield error("shape-wrong", tensor.module, what, do)
