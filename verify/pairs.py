"""Which reference rows each packed module was made from, and what kind of linear it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..repack.layout import Layout, Role
from ..repack.plan import PackedModule, packed_modules
from .build import Build, PackedTensor
from .findings import Finding, error


class Kind(StrEnum):
    """The part of a decoder layer a packed tensor belongs to; totals are given for each."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    PLE = "PLE"
    EMBEDDING = "embeddings"
    EXPERTS = "experts"
    OTHER = "other"


_LAST = {
    **{f"{k.value}_proj": k for k in (Kind.Q, Kind.K, Kind.V, Kind.O)},
    **{f"{k.value}_proj": k for k in (Kind.GATE, Kind.UP, Kind.DOWN)},
    "embed_tokens": Kind.EMBEDDING,
    "embed_tokens_per_layer": Kind.EMBEDDING,
    "lm_head": Kind.EMBEDDING,
    "per_layer_input_gate": Kind.PLE,
    "per_layer_projection": Kind.PLE,
    "per_layer_model_projection": Kind.PLE,
}


def kind_of(module: str) -> Kind:
    """The kind of a module, by the last part of its name."""
    if ".experts." in module:
        return Kind.EXPERTS
    return _LAST.get(module.rpartition(".")[2], Kind.OTHER)


@dataclass(frozen=True, slots=True)
class Pair:
    """A packed module and the reference rows it should decode to, of the same shape."""

    tensor: PackedTensor
    source: PackedModule

    @property
    def kind(self) -> Kind:
        """For the totals."""
        return kind_of(self.tensor.module)


def reference_name(name: str, build: Build, reference: Layout) -> str:
    """A name of the build as the reference has it, where the two use other text prefixes."""
    if name in reference.checkpoint.tensors or not name.startswith(build.prefix):
        return name
    return reference.prefix + name.removeprefix(build.prefix)


def reference_modules(reference: Layout) -> dict[str, PackedModule]:
    """Module name -> rows of the reference, for all that could have been packed."""
    modules: dict[str, PackedModule] = {}
    for tensor in reference.checkpoint.tensors.values():
        role = reference.roles[tensor.name]
        whole = tensor.name.removesuffix(".weight")
        if role is Role.EXPERTS:
            modules |= {m.module: m for m in packed_modules(tensor, role, tensor.name)}
        if role is Role.EXPERTS or (len(tensor.shape) == 2 and whole != tensor.name):
            modules[whole] = PackedModule(whole, tensor, 0, tensor.rows)
    return modules


def make_pairs(
    build: Build, reference: Layout, modules: Mapping[str, PackedModule]
) -> tuple[list[Pair], list[Finding]]:
    """Every packed module of the build with its reference rows, in the reference's file order."""
    pairs: list[Pair] = []
    findings: list[Finding] = []
    for module, tensor in build.packed.items():
        source = modules.get(reference_name(module, build, reference))
        if source is None:
            findings.append(_unknown(module))
        elif fault := _mismatch(tensor, source):
            findings.append(error("reference-shape", module, fault, "check the reference"))
        else:
            pairs.append(Pair(tensor, source))
    pairs.sort(key=lambda p: (p.source.source.file, p.source.source.offset, p.source.row))
    return pairs, findings


def _unknown(module: str) -> Finding:
    what = "packed, but the reference has no weight of that name"
    return error("reference-missing", module, what, "check that this is the build's reference")


def _mismatch(tensor: PackedTensor, source: PackedModule) -> str | None:
    ours, theirs = [tensor.rows, tensor.columns], [source.rows, source.columns]
    if ours != theirs:
        return f"decodes to {ours}, the reference is {theirs}"
    if source.source.dtype != "BF16":
        return f"the reference is {source.source.dtype}; the grid is proven in BF16"
    return None
