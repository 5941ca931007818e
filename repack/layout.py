"""What each tensor of a checkpoint is, told from its name and shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.naming import text_prefix

_PACKED_SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")
_TOWER = re.compile(r"(^|_)(vision|audio|image|video|multi_modal)")
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$")
_FUSED = re.compile(r"(?P<parent>.*)\.(?P<part>q_proj|k_proj|v_proj|gate_proj|up_proj)$")

# Modules whose tensors stand under other names in the checkpoint, as transformers' conversion
# mapping for gemma4_unified has them: (in the tensor name, in the module name).
_MODULE_NAMES = (
    ("vision_embedder.patch_dense", "embed_vision.patch_dense"),
    (
        "embed_vision.embedding_projection",
        "embed_vision.multimodal_embedder.embedding_projection",
    ),
)


class Role(StrEnum):
    """What a tensor is to a repack."""

    LINEAR = "text linear"
    EXPERTS = "stacked experts"
    EMBEDDING = "token embedding"
    PER_LAYER_EMBEDDING = "per-layer embedding"
    HEAD = "lm_head"
    ROUTER = "router"
    TEXT = "text norm or scalar"
    TOWER = "vision or audio"
    PACKED = "packed"
    OTHER = "other"


@dataclass(frozen=True)
class Layout:
    """A checkpoint read as a model: the text decoder's prefix and every tensor's role."""

    checkpoint: Checkpoint
    prefix: str
    roles: Mapping[str, Role]

    def named(self, role: Role) -> tuple[TensorInfo, ...]:
        """The tensors of one role, in file order."""
        return tuple(self.checkpoint[name] for name, r in self.roles.items() if r is role)


def read_layout(checkpoint: Checkpoint) -> Layout:
    """Classify every tensor. Raises `CheckpointError` without one clear text decoder."""
    prefix = text_prefix(checkpoint.tensors)
    roles = {t.name: classify(t, prefix) for t in checkpoint.tensors.values()}
    return Layout(checkpoint, prefix, roles)


def classify(tensor: TensorInfo, prefix: str) -> Role:
    """The role of one tensor in a checkpoint whose text decoder stands under `prefix`."""
    name = tensor.name
    if is_packed(name):
        return Role.PACKED
    if name in ("lm_head.weight", "language_model.lm_head.weight"):
        return Role.HEAD
    if _TOWER.search(_component(name)):
        return Role.TOWER
    if not name.startswith(prefix):
        return Role.OTHER
    return _text_role(tensor, name.removeprefix(prefix))


def is_packed(name: str) -> bool:
    """Whether this is a tensor of a compressed-tensors module rather than a plain weight."""
    return name.endswith(_PACKED_SUFFIXES)


def _component(name: str) -> str:
    """The part of the model a tensor belongs to: `vision_tower` of `model.vision_tower.x`."""
    return name.removeprefix("model.").split(".", 1)[0]


def _text_role(tensor: TensorInfo, inner: str) -> Role:
    if inner.startswith("embed_tokens_per_layer."):
        return Role.PER_LAYER_EMBEDDING
    if inner.startswith("embed_tokens."):
        return Role.EMBEDDING
    if ".router." in inner:
        return Role.ROUTER
    if len(tensor.shape) == 3 and _EXPERTS.search(inner):
        return Role.EXPERTS
    if len(tensor.shape) == 2 and inner.endswith(".weight"):
        return Role.LINEAR
    return Role.TEXT if len(tensor.shape) < 2 else Role.OTHER


def ties_head(config: Mapping[str, Any]) -> bool:
    """Whether config.json ties lm_head to the token embedding (Gemma's default: it does)."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else {}
    value = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: tie_word_embeddings is {value!r}; write true or false there."
        )
    return value is not False


def fused_with(module: str) -> str:
    """The key of the modules that readers fuse with this one, or the module itself.

    vLLM loads q, k and v of a layer as one linear, gate and up as another, and all experts of a
    layer as one, and refuses a mixture of packed and dense inside one of them.
    """
    head, separator, _ = module.partition(".experts.")
    if separator:
        return f"{head}.experts"
    if match := _FUSED.fullmatch(module):
        kind = "qkv" if match["part"] in ("q_proj", "k_proj", "v_proj") else "gate_up"
        return f"{match['parent']}.{kind}"
    return module


def module_names(module: str, model_type: str) -> tuple[str, ...]:
    """The names a reader may know a module by: as in the tensors, and as transformers has it."""
    renames = _MODULE_NAMES if model_type == "gemma4_unified" else ()
    return (module, *(module.replace(a, b) for a, b in renames if module.endswith(a)))


def dense_linears(layout: Layout, dense: Iterable[str]) -> tuple[str, ...]:
    """Module names of every linear among the tensors `dense` that stay unpacked, plus lm_head.

    A linear is a 2-D `<module>.weight` that is no embedding. This is what the `ignore` list of a
    quantization_config has to name.
    """
    embeddings = (Role.EMBEDDING, Role.PER_LAYER_EMBEDDING, Role.HEAD)
    model_type = str(layout.checkpoint.config.get("model_type"))
    modules: dict[str, None] = {}
    for name in dense:
        tensor, role = layout.checkpoint[name], layout.roles[name]
        if role is Role.EXPERTS:
            modules[name.removesuffix(".weight").rpartition(".")[0]] = None
        elif len(tensor.shape) == 2 and name.endswith(".weight") and role not in embeddings:
            names = module_names(name.removesuffix(".weight"), model_type)
            modules.update(dict.fromkeys(names))
    return (*modules, "lm_head")


def refuse_packed(layout: Layout) -> None:
    """Raise `CheckpointError` when the checkpoint is a packed build, not a bf16 reference."""
    if packed := layout.named(Role.PACKED):
        raise CheckpointError(
            f"{layout.checkpoint.folder}: is already packed ({packed[0].name}); give the bf16 QAT "
            "checkpoint it was made from."
        )
