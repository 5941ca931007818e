"""The text that is scored: a file, WikiText-2 from the Hub, or the one that comes with qatpack."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..checkpoint.errors import ModelError, SourceError
from ..checkpoint.source import fetch_dataset_file

# The zip that llama.cpp's scripts fetch: the original archive, byte for byte. The test split is a
# plain file in it; Salesforce/wikitext has it as parquet only.
WIKITEXT_REPO = "ggml-org/ci"
WIKITEXT_COMMIT = "927b3642933080f1b0e811e2f916e14c292992f9"
WIKITEXT_FILE = "wikitext-2-raw-v1.zip"
WIKITEXT_MEMBER = "wikitext-2-raw/wiki.test.raw"
WIKITEXT_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"


@dataclass(frozen=True)
class Text:
    """A text and where it comes from; `revision` is a Hub commit, None for a file."""

    name: str
    content: str
    revision: str | None = None

    @property
    def sha256(self) -> str:
        """Of the UTF-8 bytes that are tokenized."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def to_json(self, tokens: int) -> dict[str, Any]:
        """As in evaluation.json; `tokens` is how many it has."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "revision": self.revision,
            "tokens": tokens,
        }


def embedded_text() -> Text:
    """An essay of 25 kB that comes with qatpack."""
    content = (files("qatpack.evaluate") / "text.txt").read_text(encoding="utf-8")
    return Text("qatpack's own (evaluate/text.txt)", content)


def read_text(path: Path) -> Text:
    """A UTF-8 file. Raises `ModelError`: it cannot be read, or is no UTF-8."""
    try:
        return Text(path.name, path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); name another text."
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 (byte {error.start}); convert it first.") from error


def wikitext(*, joined: bool) -> Text:
    """The test split of raw WikiText-2 v1.

    Args:
        joined: as the published comparison has it, the rows of Salesforce/wikitext joined with "":
            its loading script empties rows of white space only, so that blank lines are gone.
            Otherwise the file as it is, which llama.cpp scores.

    Raises:
        SourceError: the Hub cannot be reached, or what it sends is not the known file.
    """
    path = fetch_dataset_file(WIKITEXT_REPO, WIKITEXT_FILE, WIKITEXT_COMMIT)
    try:
        data = zipfile.ZipFile(io.BytesIO(path.read_bytes())).read(WIKITEXT_MEMBER)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise _not_wikitext(f"is no zip with {WIKITEXT_MEMBER}") from error
    if (found := hashlib.sha256(data).hexdigest()) != WIKITEXT_SHA256:
        raise _not_wikitext(f"{WIKITEXT_MEMBER} has sha256 {found}, expected {WIKITEXT_SHA256}")
    content = data.decode("utf-8")
    if joined:
        content = "".join(row for row in io.StringIO(content) if row.strip())
    return Text("wikitext-2-raw-v1 test", content, WIKITEXT_COMMIT)


def _not_wikitext(found: str) -> SourceError:
    where = f"{WIKITEXT_REPO} at {WIKITEXT_COMMIT}: {WIKITEXT_FILE}"
    return SourceError(f"{where}: {found}; give the text as a file with --text")
