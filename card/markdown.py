"""Foreign text in Markdown: what a source or a result file says can add no markup of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 300
"""Characters of a foreign text that are shown."""

_MARKUP = re.compile(r"([\\`*_\[\]|~#!])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_URL = re.compile(r"https?://[\w.-]+(?::\d+)?(?:/[\w.~%/?=&+:@-]*)?", re.ASCII)


def one_line(text: str) -> str:
    """Printable characters only, white space collapsed."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def plain(text: str) -> str:
    """The text as Markdown that shows exactly it: no link, tag, table cell or emphasis."""
    said = one_line(text)
    if len(said) > LONGEST:
        said = f"{said[:LONGEST]}..."
    said = "".join(_ENTITIES.get(c, c) for c in said)
    return _MARKUP.sub(r"\\\1", said).replace("://", ":&#47;&#47;")


def is_address(text: str) -> bool:
    """Whether the text is an http or https address."""
    return _URL.fullmatch(text) is not None


def link(url: str, label: str = "") -> str:
    """A link to a web address, or the text of what is none."""
    if not is_address(url):
        return plain(url)
    return f"[{plain(label or url)}]({url})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of finished Markdown as a table, the first of them its head."""
    ruler = ["---", *("---:" for _ in rows[0][1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ruler, *rows[1:]))
