"""What leaves the folder: the manifest's files, the card and the results that it shows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..card.build import Build
from ..card.files import CARD_NAME, ORIGINAL_CARD_NAME, check_own
from ..card.kept import is_generated
from ..card.metadata import source_card
from ..card.page import licence_warning, make_card, read_card
from ..card.results import Results, read_results
from ..checkpoint.errors import PushError
from ..checkpoint.hashing import hash_file
from ..checkpoint.manifest import MANIFEST_NAME, FileRecord
from ..checkpoint.progress import Progress
from ..checkpoint.units import size
from ..verify.findings import listed


@dataclass(frozen=True)
class LocalFile:
    """One file to push: a path, or text that is about to be written there.

    `sha256` is None as long as nobody has computed or recorded it.
    """

    name: str
    path: Path
    size: int
    sha256: str | None
    text: bytes | None = None

    def git_oid(self) -> str:
        """The sha1 by which git names the content, for files that are no LFS objects."""
        data = self.path.read_bytes() if self.text is None else self.text
        return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()


@dataclass(frozen=True)
class Payload:
    """Everything that is pushed, by name, and what was found on the way.

    - `results`: what the card is made from; `card_written`: whether its text is ours and new.
    - `left`: files of the folder that stay here.
    - `hashed`: files whose sha256 was computed and is the recorded one, None where hashing was
      skipped; `unrecorded`: those that have none in the manifest.
    """

    folder: Path
    build: Build
    results: Results
    files: Mapping[str, LocalFile]
    left: tuple[str, ...]
    card_written: bool
    hashed: int | None = None
    unrecorded: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files.values())


def read_payload(folder: Path, repo: str) -> Payload:
    """What a push of a finished folder sends; nothing is hashed yet.

    The card is made anew for `repo` in memory, unless it is somebody else's README.md. Raises
    `CheckpointError` for a folder that is not finished, a damaged manifest or a file that is a
    link, `PushError` for files that are missing or have another size.
    """
    results = read_results(folder)
    files = {
        record.name: LocalFile(record.name, folder / record.name, record.size, record.sha256)
        for record in recorded(results.build)
    }
    for name in files:
        check_own(folder, name)
    _check_sizes(folder, files)
    for name in (MANIFEST_NAME, *results.names):
        path = folder / name
        files[name] = LocalFile(name, path, path.stat().st_size, hash_file(path))
    card, ours, warnings = _card(folder, repo)
    digest = hashlib.sha256(card).hexdigest()
    files[CARD_NAME] = LocalFile(CARD_NAME, folder / CARD_NAME, len(card), digest, card)
    return Payload(
        folder=folder,
        build=results.build,
        results=results,
        files=dict(sorted(files.items())),
        left=_left(folder, files),
        card_written=ours,
        warnings=(*results.warnings, *warnings),
    )


def _card(folder: Path, repo: str) -> tuple[bytes, bool, tuple[str, ...]]:
    """The card's bytes, whether they are ours, and what to say about it."""
    old = read_card(folder)
    if old and not is_generated(old):
        said = f"{CARD_NAME}: is not written by qatpack and goes as it is, figures included."
        return (folder / CARD_NAME).read_bytes(), False, (said,)
    _, text = make_card(folder, repo=repo)
    warning = licence_warning(source_card(folder / ORIGINAL_CARD_NAME))
    return text.encode(), True, (warning,) if warning else ()


def _check_sizes(folder: Path, files: Mapping[str, LocalFile]) -> None:
    missing = [file.name for file in files.values() if not file.path.is_file()]
    if missing:
        raise PushError(
            f"{folder}: lacks {listed(missing)}, named by {MANIFEST_NAME}; repack it again."
        )
    for file in files.values():
        if (found := file.path.stat().st_size) != file.size:
            raise PushError(
                f"{file.path}: has {found:,} bytes, {MANIFEST_NAME} says {file.size:,}; it was "
                "changed or cut: repack it again."
            )


def _left(folder: Path, files: Mapping[str, LocalFile]) -> tuple[str, ...]:
    """What else lies there, hidden files included: never pushed."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return tuple(sorted(name for name in names if name not in {*files, CARD_NAME}))


def recorded(build: Build) -> tuple[FileRecord, ...]:
    """The files that are held against a hash of the manifest: all but the card."""
    return tuple(record for record in build.files if record.name != CARD_NAME)


def hashed(payload: Payload, progress: Progress) -> Payload:
    """The payload after hashing every file that the manifest lists.

    A file without a recorded hash gets the one it has. `progress` gets the bytes of each step,
    `payload.bytes` at most. Raises `PushError` for a file that is not the one that was written.
    """
    files, good = dict(payload.files), 0
    records = recorded(payload.build)
    for record in records:
        path = files[record.name].path
        found = hash_file(path, progress=progress)
        if record.sha256 not in (None, found):
            raise PushError(
                f"{path}: its {size(record.size)} have another sha256 than {MANIFEST_NAME} "
                "records; repack it again."
            )
        good += record.sha256 is not None
        files[record.name] = replace(files[record.name], sha256=found)
    return replace(payload, files=files, hashed=good, unrecorded=len(records) - good)
