"""Where checkpoints of the family keep the text decoder: its tensors and its config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import CheckpointError

# Multimodal checkpoints of today, multimodal ones of older exports, text-only ones.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")

_TEXT = re.compile(
    "(" + "|".join(re.escape(p) for p in TEXT_PREFIXES) + r")(layers\.\d+\.|embed_tokens\.)"
)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text decoder's part of a config.json: `text_config`, or all of a text-only one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def text_prefix(names: Iterable[str]) -> str:
    """The prefix under which the text decoder stands, one of `TEXT_PREFIXES`.

    Raises `CheckpointError` when there is no text decoder, or when two prefixes are mixed.
    """
    found: dict[str, str] = {}
    for name in names:
        if match := _TEXT.match(name):
            found.setdefault(match[1], name)
    if not found:
        raise CheckpointError(
            "no text decoder found: no tensor is named "
            + " or ".join(f"{p}layers.N.*" for p in TEXT_PREFIXES)
            + "; is this a Gemma checkpoint?"
        )
    if len(found) > 1:
        examples = " and ".join(sorted(found.values()))
        raise CheckpointError(
            f"two naming schemes are mixed in one checkpoint ({examples}); "
            "use one export, not parts of two."
        )
    return next(iter(found))
