"""Decides what becomes of every tensor before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..checkpoint.errors import CheckpointError
from ..checkpoint.header import TensorInfo
from ..checkpoint.naming import TEXT_PREFIXES
from ..checkpoint.reader import TensorReader, aligned_empty
from ..checkpoint.writer import TensorSpec
from .layout import (
    Layout,
    Role,
    dense_linears,
    fused_with,
    refuse_packed,
    ties_head,
)
from .packing import GROUP

ScaleDtype = Literal["bfloat16", "float16", "float32"]
STORED_DTYPES: Mapping[ScaleDtype, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

TEXT_ONLY_PREFIX = TEXT_PREFIXES[-1]

_REASONS = {
    Role.EMBEDDING: "token embedding: readers cannot load a packed one under a tied head",
    Role.PER_LAYER_EMBEDDING: "per-layer embedding: packed only on request (--pack-ple)",
    Role.HEAD: "untied lm_head: readers expect it dense",
    Role.ROUTER: "router: readers expect it dense",
    Role.TEXT: "norm or scalar",
    Role.TOWER: "vision or audio",
    Role.OTHER: "unknown to qatpack",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a repack may do.

    - `scale_dtype`: dtype of the stored steps. bfloat16 is what every reader computes with,
      float32 keeps every value bit for bit for readers that multiply in float32.
    - `keep_off_grid`: leave a tensor that does not certify, and the ones fused with it, in bf16
      instead of stopping.
    - `text_only`: drop the vision and audio towers and their embedders, and name the text decoder
      `model.*`, as transformers' causal class wants it (vLLM takes both names).
    - `pack_ple`: pack the per-layer embedding too (vLLM >= 0.29 on GPU reads it).
    - `shard_bytes`: most tensor bytes of one output file.
    - `hash_files`: record sha256 of every source and output file.
    - `base_model`: `org/name` for the card when the source does not tell it.
    """

    scale_dtype: ScaleDtype = "bfloat16"
    keep_off_grid: bool = False
    text_only: bool = False
    pack_ple: bool = False
    shard_bytes: int = 5_000_000_000
    hash_files: bool = True
    base_model: str | None = None


@dataclass(frozen=True, slots=True)
class PackedModule:
    """One linear to be packed: rows `row` to `row + rows` of a source tensor's 2-D view.

    `module` gets `.weight_packed` i32[rows, columns/8], `.weight_scale` [rows, columns/32] and
    `.weight_shape` i64[2].
    """

    module: str
    source: TensorInfo
    row: int
    rows: int

    @property
    def columns(self) -> int:
        """Input features."""
        return self.source.columns

    @property
    def groups(self) -> int:
        """Groups of 32 along the input dim."""
        return self.rows * self.columns // GROUP

    def specs(self, scale_dtype: ScaleDtype) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Shape, packed and scale tensors as they will stand in the output."""
        return (
            TensorSpec(f"{self.module}.weight_shape", "I64", (2,)),
            TensorSpec(f"{self.module}.weight_packed", "I32", (self.rows, self.columns // 8)),
            TensorSpec(
                f"{self.module}.weight_scale",
                STORED_DTYPES[scale_dtype],
                (self.rows, self.columns // GROUP),
            ),
        )


@dataclass(frozen=True)
class Plan:
    """Every source tensor as exactly one of packed, copied, dropped.

    - `packed`: the modules to write, in file order; several may share one source tensor.
    - `copied`, `dropped`: tensor name -> reason.
    - `ignore`: the module names of all linears left dense.
    """

    layout: Layout
    options: Options
    packed: tuple[PackedModule, ...]
    copied: Mapping[str, str]
    dropped: Mapping[str, str]
    ignore: tuple[str, ...]

    def output_name(self, name: str) -> str:
        """The name in the output of a source tensor or module."""
        return output_name(name, self.layout, self.options)

    @property
    def packed_sources(self) -> tuple[TensorInfo, ...]:
        """The source tensors that are packed, each once."""
        return tuple({m.source.name: m.source for m in self.packed}.values())

    def units(self) -> Iterator[tuple[TensorSpec, ...]]:
        """Output tensors in the order of the source's bytes; a module's three stay together."""
        modules: dict[str, list[PackedModule]] = {}
        for module in self.packed:
            modules.setdefault(module.source.name, []).append(module)
        for tensor in self.layout.checkpoint.tensors.values():
            if tensor.name in self.copied:
                yield (TensorSpec.copy_of(tensor, self.output_name(tensor.name)),)
            for module in modules.get(tensor.name, ()):
                yield module.specs(self.options.scale_dtype)

    def output_bytes(self) -> int:
        """Tensor bytes of the output."""
        return sum(spec.nbytes for unit in self.units() for spec in unit)

    @property
    def packed_source_bytes(self) -> int:
        """Source bytes that the recovery reads."""
        return sum(t.nbytes for t in self.packed_sources)

    @property
    def source_bytes(self) -> int:
        """Source bytes that go into the output, packed or copied."""
        tensors = self.layout.checkpoint.tensors
        return self.packed_source_bytes + sum(tensors[name].nbytes for name in self.copied)

    def summary(self) -> dict[str, Any]:
        """Tensors and bytes of each part, copied and dropped by reason, largest first.

        Source bytes throughout, except `output`.
        """
        checkpoint = self.layout.checkpoint
        return {
            "source": {"tensors": len(checkpoint.tensors), "bytes": checkpoint.tensor_bytes},
            "packed": {"tensors": len(self.packed_sources), "bytes": self.packed_source_bytes},
            "copied": self._by_reason(self.copied),
            "dropped": self._by_reason(self.dropped),
            "output": {
                "tensors": sum(len(unit) for unit in self.units()),
                "bytes": self.output_bytes(),
            },
            "ignore": list(self.ignore),
        }

    def _by_reason(self, reasons: Mapping[str, str]) -> dict[str, dict[str, int]]:
        sums: dict[str, dict[str, int]] = {}
        for name, reason in reasons.items():
            entry = sums.setdefault(reason, {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += self.layout.checkpoint[name].nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]["bytes"]))


def make_plan(
    layout: Layout, options: Options, *, off_grid: Mapping[str, str] | None = None
) -> Plan:
    """Plan a repack. `off_grid`: source tensors known not to certify -> why (they stay bf16).

    Raises `CheckpointError`: a packed source, a tied lm_head that differs from the embedding, an
    untied one that is missing.
    """
    refuse_packed(layout)
    dropped = _dropped(layout, options)
    wanted = (Role.LINEAR, Role.EXPERTS, *((Role.PER_LAYER_EMBEDDING,) if options.pack_ple else ()))
    candidates = [t for role in wanted for t in layout.named(role)]
    dense = _dense_reasons(candidates, off_grid or {})
    packed = tuple(
        module
        for t in layout.checkpoint.tensors.values()
        if layout.roles[t.name] in wanted and t.name not in dense
        for module in packed_modules(t, layout.roles[t.name], output_name(t.name, layout, options))
    )
    sources = {m.source.name for m in packed}
    copied = {
        name: dense.get(name) or _REASONS[role]
        for name, role in layout.roles.items()
        if name not in dropped and name not in sources
    }
    ignore = tuple(output_name(m, layout, options) for m in dense_linears(layout, copied))
    plan = Plan(layout, options, packed, copied, dropped, ignore)
    _check_sum(plan, sources)
    return plan


def output_name(name: str, layout: Layout, options: Options) -> str:
    """The name in the output of a tensor or module: a text-only build's decoder is `model.*`."""
    if options.text_only and name.startswith(layout.prefix):
        return TEXT_ONLY_PREFIX + name.removeprefix(layout.prefix)
    return name.removeprefix("language_model.") if options.text_only else name


def packed_modules(tensor: TensorInfo, role: Role, name: str) -> list[PackedModule]:
    """The modules one source tensor becomes: `name`, or one per expert, unfused.

    Stacked experts are [experts, out, in], gate before up; vLLM's loader takes them one by one as
    `experts.<e>.gate_proj`.
    """
    name = name.removesuffix(".weight")
    if role is not Role.EXPERTS:
        return [PackedModule(name, tensor, 0, tensor.rows)]
    parent, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    experts, out = tensor.shape[0], tensor.shape[1] // len(parts)
    return [
        PackedModule(f"{parent}.{e}.{p}", tensor, (e * len(parts) + i) * out, out)
        for e in range(experts)
        for i, p in enumerate(parts)
    ]


def unpackable(tensor: TensorInfo) -> str | None:
    """Why a linear cannot be packed whatever its values are, or None."""
    if tensor.dtype != "BF16":
        return f"dtype {tensor.dtype}: the grid can only be proven in BF16"
    if tensor.columns % GROUP:
        return f"input dim {tensor.columns} is no multiple of {GROUP}"
    if tensor.nbytes == 0:
        return "empty"
    if tensor.name.removesuffix(".weight").endswith("gate_up_proj") and tensor.shape[-2] % 2:
        return f"gate_up_proj has an odd number of rows ({tensor.shape[-2]})"
    return None


def _dense_reasons(
    candidates: Collection[TensorInfo], off_grid: Mapping[str, str]
) -> dict[str, str]:
    """Candidates that stay bf16 -> why: their shape, their values, or a fused partner's."""
    reasons = {
        t.name: reason
        for t in candidates
        if (reason := unpackable(t) or off_grid.get(t.name)) is not None
    }
    culprits = {fused_with(name.removesuffix(".weight")): name for name in reasons}
    for tensor in candidates:
        culprit = culprits.get(fused_with(tensor.name.removesuffix(".weight")))
        if culprit is not None:
            reasons.setdefault(tensor.name, f"readers fuse it with {culprit}, which stays dense")
    return reasons


def _dropped(layout: Layout, options: Options) -> dict[str, str]:
    dropped = _dropped_head(layout)
    if options.text_only:
        dropped |= dict.fromkeys(
            (t.name for t in layout.named(Role.TOWER)), "vision or audio: not in a text-only build"
        )
    return dropped


def _dropped_head(layout: Layout) -> dict[str, str]:
    """The stored lm_head, if the config ties it and its bytes are the embedding's."""
    tied, heads = ties_head(layout.checkpoint.config), layout.named(Role.HEAD)
    folder = layout.checkpoint.folder
    if not tied:
        if not heads:
            raise CheckpointError(
                f"{folder}: config.json says tie_word_embeddings false, but there is no "
                "lm_head.weight; one of the two is wrong."
            )
        return {}
    embedding = layout.checkpoint[f"{layout.prefix}embed_tokens.weight"]
    for head in heads:
        if not same_bytes(head, embedding):
            raise CheckpointError(
                f"{folder}: config.json ties lm_head to the embedding, but {head.name} differs "
                f"from {embedding.name}; set tie_word_embeddings to false or remove the tensor."
            )
    return dict.fromkeys((h.name for h in heads), f"identical to {embedding.name}, tied by config")


def same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors agree in dtype, shape and every byte; reads both in blocks."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    block = 1 << 23
    left, right = aligned_empty(block), aligned_empty(block)
    with TensorReader() as reader:
        for start in range(0, a.nbytes, block):
            count = min(block, a.nbytes - start)
            reader.read_into(a, start, left[:count])
            reader.read_into(b, start, right[:count])
            if (left[:count] != right[:count]).any():
                return False
    return True


def _check_sum(plan: Plan, sources: Collection[str]) -> None:
    """Every tensor in exactly one place, every byte accounted for."""
    parts = [set(sources), set(plan.copied), set(plan.dropped)]
    everything = plan.layout.checkpoint.tensors
    if set().union(*parts) != set(everything) or sum(map(len, parts)) != len(everything):
        raise RuntimeError("the plan does not account for every tensor exactly once")
    names = [spec.name for unit in plan.units() for spec in unit]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(
            f"{plan.layout.checkpoint.folder}: two tensors would both be named {twice} in the "
            "output; one of them is a left-over."
        )
    rows = sum(m.rows * m.columns * 2 for m in plan.packed)
    if rows != sum(everything[name].nbytes for name in sources):
        raise RuntimeError("the packed modules do not cover their source tensors exactly")
