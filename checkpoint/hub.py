"""Names on the Hub; what huggingface_hub raises, by name; and its token, which none may print."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
TOKEN = re.compile(r"hf_\w{8,}")
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))(?!.*\.git$)\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
"""`org/name`, by the rules of huggingface_hub's `validate_repo_id`, without importing it."""

SIGNATURE = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")
"""An address with a query: those of the storage carry their permission in it."""

_SHORTEST = 8
"""Below this many characters a token is no secret worth hiding everywhere."""


def class_names(error: BaseException) -> list[str]:
    """The names of an error's class and its bases.

    By name, because huggingface_hub 1.x raises httpx's classes and 2.x httpx2's.
    """
    return [cls.__name__ for cls in type(error).__mro__]


def status_code(error: BaseException) -> int | None:
    """The HTTP status behind an error, None for one without an answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def sentence(error: BaseException, messages: Mapping[str, str]) -> str | None:
    """The message for an error: by its class and status, by its class alone, then by its bases."""
    status = status_code(error)
    keys = (key for cls in class_names(error) for key in (f"{cls} {status}", cls))
    return next((messages[key] for key in keys if key in messages), None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then what caused it, and so on."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__ or error


def redact(text: str) -> str:
    """The text without a token: neither one of the usual form nor the one in use here."""
    for secret in _secrets():
        text = text.replace(secret, "hf_...")
    return SIGNATURE.sub(r"\1?...", TOKEN.sub("hf_...", text))


def scrub(error: BaseException) -> None:
    """Redact the messages of an error and all its causes, for a traceback."""
    for each in chain(error):
        each.args = tuple(redact(a) if isinstance(a, str) else a for a in each.args)


def _secrets() -> list[str]:
    found = [os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")]
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import constants

        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8"))
    return [token.strip() for token in found if token and len(token.strip()) >= _SHORTEST]
