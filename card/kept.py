"""The hand-written parts of a card: between marks, and kept when the rest is written anew."""

from __future__ import annotations

import re

from ..checkpoint.errors import CheckpointError
from .files import CARD_NAME

PARTS = ("introduction", "notes")
"""The names of the parts, in the order in which they stand in a card."""

GENERATED = "<!-- Written by `qatpack card`"
"""How the second paragraph of every card of ours begins."""

_BEGIN = re.compile(r"<!-- hand-written: (.*?) -->")
_PART = re.compile(
    r"<!-- hand-written: (?P<name>\w+) -->\n(?P<text>.*?)<!-- end of hand-written: (?P=name) -->",
    re.DOTALL,
)


def marked(name: str, text: str) -> str:
    """A part between its marks."""
    return f"<!-- hand-written: {name} -->\n{text}<!-- end of hand-written: {name} -->"


def is_generated(card: str) -> bool:
    """Whether a card was written by us, so that it may be written again."""
    return GENERATED in card


def read_parts(card: str) -> dict[str, str]:
    """The hand-written parts of a card by name.

    Raises `CheckpointError` where a mark is broken, unknown or there twice: regenerating would
    lose text.
    """
    found = list(_PART.finditer(card))
    names = [match["name"] for match in found]
    if sorted(names) != sorted(_BEGIN.findall(card)) or any(
        _BEGIN.search(match["text"]) for match in found
    ):
        raise CheckpointError(
            f"{CARD_NAME}: a hand-written part has no end or a mark inside; close it with "
            "<!-- end of hand-written: NAME -->."
        )
    if odd := [name for name in names if name not in PARTS or names.count(name) > 1]:
        raise CheckpointError(
            f"{CARD_NAME}: the hand-written part {odd[0]} is unknown or there twice; there is one "
            f"each of {' and '.join(PARTS)}."
        )
    return {match["name"]: match["text"] for match in found}
