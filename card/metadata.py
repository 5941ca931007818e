"""The YAML block of the card, by huggingface_hub's own classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.header import regular_size
from .evaluation import Evaluation
from .markdown import is_address, one_line
from .results import Results

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TAGS = ("gemma", "qat", "w4a16", "int4", "compressed-tensors", "vllm", "qatpack")

_WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_KEPT = ("license", "license_name", "license_link", "pipeline_tag", "library_name", "language")
_WORDS = ("license", "license_name", "pipeline_tag", "library_name")
_FILE = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII)
LONGEST = 500


@dataclass(frozen=True)
class SourceCard:
    """What we take from the source's card; `exists`: whether there is one at all."""

    exists: bool
    metadata: Mapping[str, Any]


def source_card(path: Path) -> SourceCard:
    """The YAML metadata of the source's card; empty where it has none.

    Raises `CheckpointError` when the block is there and cannot be read.
    """
    if not path.exists():
        return SourceCard(False, {})
    regular_size(path)
    # Imported here: it takes half a second, and only a finishing repack needs it.
    from huggingface_hub import metadata_load

    try:
        found = dict(metadata_load(path) or {})
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: its metadata block cannot be read: {reason}.") from error
    return SourceCard(True, {k: v for k in _KEPT if (v := _kept(k, found.get(k))) is not None})


def _kept(key: str, value: object) -> str | list[str] | None:
    """A value of the source's metadata if it is one the Hub could accept, else None."""
    if isinstance(value, bool):  # `language: no` is read as one
        return "no" if key == "language" and not value else None
    if isinstance(value, list) and key in ("language", "license"):
        words = [w for item in value if isinstance(w := _kept(key, item), str)]
        return words or None
    if not isinstance(value, str):
        return None
    text = one_line(value)
    if key in (*_WORDS, "language"):
        return text if _WORD.fullmatch(text) else None
    good = is_address(text) or _FILE.fullmatch(text)
    return text if good and len(text) <= LONGEST else None


def card_metadata(results: Results, source: SourceCard, title: str) -> dict[str, Any]:
    """The metadata of our card: licence and task from the source's, the rest from the results.

    The licence is never guessed: `other` where the source states none.
    """
    metadata: dict[str, Any] = dict(source.metadata)
    metadata.setdefault("license", "other")
    metadata.setdefault("library_name", "transformers")
    if results.build.source_id:
        metadata["base_model"] = results.build.source_id
        metadata["base_model_relation"] = "quantized"
    metadata["tags"] = list(TAGS)
    if evaluated := list(_eval_results(results.evaluation)):
        metadata |= {"model_name": title, "eval_results": evaluated}
    return metadata


def to_yaml(metadata: Mapping[str, Any]) -> str:
    """The block as the Hub reads it, checked by reading it back with huggingface_hub.

    Raises `CheckpointError` where that gives anything else.
    """
    from huggingface_hub import ModelCard, ModelCardData

    try:
        data = ModelCardData(**metadata)
        text = data.to_yaml()
        read = ModelCard(f"---\n{text}\n---\n").data.to_dict()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the card's metadata is refused by huggingface_hub: {error}.") from (
            error
        )
    if read != data.to_dict():
        raise CheckpointError("the card's metadata does not read back as it was written.")
    return text


def _eval_results(evaluation: Evaluation | None) -> Iterator[EvalResult]:
    """What the Hub shows beside the model: fidelity to the reference on one text."""
    if evaluation is None or evaluation.divergence is None:
        return
    from huggingface_hub import EvalResult

    found, how = evaluation.divergence, evaluation.conventions
    name = one_line(how.text)
    figures: tuple[tuple[str, str, float], ...] = (
        ("perplexity", "perplexity", found.perplexity),
        ("kl_divergence", f"mean {how.direction}, {how.unit}", found.mean),
        ("top1_agreement", "share of positions with the reference's top token", found.same_top),
    )
    for metric, label, value in figures:
        yield EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=re.sub(r"[^\w./-]+", "-", name).strip("-") or "text",
            dataset_name=name,
            dataset_revision=how.text_revision,
            metric_type=metric,
            metric_name=one_line(label),
            metric_value=float(f"{value:.6g}"),
        )
