"""A text cut into windows of tokens, by a protocol: what is run, and which places are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..checkpoint.errors import ModelError
from .texts import Text
from .tokens import Vocabulary, most_positions

Style = Literal["consecutive", "llama.cpp"]
# The user's turn before a text that is scored as the model's answer.
REQUEST = "Write an article."


@dataclass(frozen=True)
class Protocol:
    """How a text is cut.

    - `consecutive`: windows of BOS and the next length - 1 tokens, no token left out or repeated.
      Every place is scored; with `chat` those that predict the text, behind the user's turn.
    - `llama.cpp`: as its llama-perplexity does: BOS and the text in chunks of `length`, the first
      token of each replaced by BOS, places length/2 .. length - 2 scored.
    """

    style: Style = "consecutive"
    chat: bool = False
    windows: int = 8
    length: int = 512


@dataclass(frozen=True)
class Windows:
    """tokens int32[windows, length], each row with one BOS, at its start.

    Places `first` to `last` - 1 of each row are scored; `text_tokens` is the length of the text.
    """

    tokens: np.ndarray
    first: int
    last: int
    bos: int
    text_tokens: int

    @property
    def scored(self) -> int:
        """Scored places of a window."""
        return self.last - self.first

    @property
    def targets(self) -> int:
        """Those of them whose next token is in the window: a loss can be taken there."""
        return min(self.last, self.tokens.shape[1] - 1) - self.first


def check_length(protocol: Protocol, config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` for windows longer than a model was made for, by its config.json.

    `name`: of the model. A config without max_position_embeddings sets no bound.
    """
    most = most_positions(config)
    if most is not None and protocol.length > most:
        raise ModelError(
            f"windows of {protocol.length:,} tokens are longer than the {most:,} positions of "
            f"{name} (max_position_embeddings in its config.json); give a shorter --length"
        )


def cut(text: Text, vocabulary: Vocabulary, protocol: Protocol) -> Windows:
    """Tokenize a text and cut it.

    Raises `ModelError`: the text is too short, spells a BOS, or the chat frame fills the window.
    """
    ids = vocabulary.encode(text.content)[1:]
    if protocol.style == "llama.cpp":
        frame, ids, step = [], [vocabulary.bos, *ids], protocol.length
        first, last = protocol.length // 2, protocol.length - 1
    else:
        frame = [vocabulary.bos]
        if protocol.chat:
            frame = vocabulary.encode(vocabulary.chat(REQUEST))
        step = protocol.length - len(frame)
        first, last = (len(frame) - 1 if protocol.chat else 0), protocol.length
    if step < 2 or first >= last - 1:
        raise ModelError(
            f"windows of {protocol.length} tokens leave no room for the text beside the "
            f"{len(frame)} tokens of its frame; give a longer --length."
        )
    if len(ids) < protocol.windows * step:
        whole, plural = len(ids) // step, "s" * (protocol.windows != 1)
        fewer = f", or --windows {whole}" if whole else ""
        raise ModelError(
            f"{text.name}: has {len(ids):,} tokens, and {protocol.windows} window{plural} of "
            f"{protocol.length} take {protocol.windows * step:,}; give a longer text{fewer}."
        )
    rows = np.asarray(ids[: protocol.windows * step], np.int32).reshape(protocol.windows, step)
    if protocol.style == "llama.cpp":
        rows[:, 0] = vocabulary.bos
    head = np.tile(np.asarray(frame, np.int32), (protocol.windows, 1))
    tokens = np.concatenate([head, rows], axis=1)
    _check_bos(tokens, vocabulary.bos)
    return Windows(tokens, first, last, vocabulary.bos, len(ids))


def _check_bos(tokens: np.ndarray, bos: int) -> None:
    """Exactly one, at the start: a second one, or none, changes every figure."""
    counts = (tokens == bos).sum(axis=1)
    wrong = np.flatnonzero((counts != 1) | (tokens[:, 0] != bos))
    if len(wrong):
        raise ModelError(
            f"window {wrong[0]} has {counts[wrong[0]]} BOS tokens (id {bos}) and starts with "
            f"{tokens[wrong[0], 0]}; exactly one stands at its start."
        )
