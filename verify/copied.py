"""All that is not packed: byte-identical to the reference, dropped for a known reason, or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.errors import CheckpointError
from ..checkpoint.header import TensorInfo
from ..checkpoint.naming import text_config
from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader
from ..repack.layout import Layout, Role, is_packed, ties_head
from .build import Build
from .findings import Finding, error, listed, warning
from .pairs import reference_name

BLOCK = 1 << 20
_TEXT = (Role.TEXT, Role.EMBEDDING, Role.PER_LAYER_EMBEDDING, Role.ROUTER, Role.LINEAR)


@dataclass(frozen=True)
class Copied:
    """What became of every reference tensor that the build does not pack.

    - `identical`, `differ`, `missing`: reference names.
    - `dropped`: reference name -> why that is right.
    - `added`: tensors of the build that the reference does not have.
    - `text_differ`, `text`: of the text decoder's own tensors, how many differ and how many were
      compared; they tell another model from a damaged one.
    """

    identical: tuple[str, ...]
    identical_bytes: int
    differ: tuple[str, ...]
    missing: tuple[str, ...]
    dropped: Mapping[str, str]
    added: tuple[str, ...]
    text_differ: int
    text: int

    @property
    def foreign(self) -> bool:
        """Whether so much differs that the build stems from another model."""
        return self.text_differ * 2 >= self.text > 0

    def to_json(self) -> dict[str, Any]:
        """As in verify_report.json."""
        return {
            "identical": len(self.identical),
            "identical_bytes": self.identical_bytes,
            "differ": list(self.differ),
            "missing": list(self.missing),
            "dropped": dict(self.dropped),
            "added": list(self.added),
        }


@dataclass(frozen=True, slots=True)
class Head:
    """The language model head of a build. `identical`: to the embedding; None if not stored."""

    tied: bool
    stored: bool
    identical: bool | None

    def to_json(self) -> dict[str, bool | None]:
        """As in verify_report.json."""
        return {"tied": self.tied, "stored": self.stored, "identical": self.identical}

    def __str__(self) -> str:
        if not self.tied:
            return "untied" if self.stored else "untied, MISSING"
        if not self.stored:
            return "no"
        return "yes, identical" if self.identical else "yes, DIFFERENT"


def compare_copied(
    build: Build, reference: Layout, used: set[str], *, ends: bool, progress: Progress
) -> Copied:
    """Compare every reference tensor that is not in `used` (the packed modules' sources).

    `ends`: only the first and last `BLOCK` bytes of each, for a quick look.
    """
    ours = {
        reference_name(name, build, reference): tensor
        for name, tensor in build.checkpoint.tensors.items()
        if not is_packed(name)
    }
    theirs = {n: t for n, t in reference.checkpoint.tensors.items() if n not in used}
    common = [n for n in theirs if n in ours]
    with TensorReader() as reader:
        same = {n: _same(ours[n], theirs[n], reader, ends, progress) for n in common}
    dropped = _dropped(build, reference, [n for n in theirs if n not in ours])
    text = [n for n in common if reference.roles[n] in _TEXT]
    identical = tuple(n for n in common if same[n])
    return Copied(
        identical=identical,
        identical_bytes=sum(theirs[n].nbytes for n in identical),
        differ=tuple(n for n in common if not same[n]),
        missing=tuple(n for n in theirs if n not in ours and n not in dropped),
        dropped=dropped,
        added=tuple(ours[n].name for n in ours if n not in reference.checkpoint.tensors),
        text_differ=sum(not same[n] for n in text),
        text=len(text),
    )


def copied_bytes(reference: Layout, used: set[str], *, ends: bool) -> int:
    """Reference bytes that `compare_copied` reads at most."""
    sizes = [t.nbytes for n, t in reference.checkpoint.tensors.items() if n not in used]
    return sum(min(n, 2 * BLOCK) if ends else n for n in sizes)


def _same(
    ours: TensorInfo, theirs: TensorInfo, reader: TensorReader, ends: bool, progress: Progress
) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    # Two bytearrays compare by memcmp, three times as fast as two numpy arrays.
    left, right = (bytearray(min(BLOCK, theirs.nbytes)) for _ in range(2))
    starts = range(0, theirs.nbytes, BLOCK)
    if ends and len(starts) > 2:
        starts = (0, theirs.nbytes - BLOCK)
    for start in starts:
        count = min(BLOCK, theirs.nbytes - start)
        del left[count:], right[count:]
        reader.read_into(ours, start, np.frombuffer(left, np.uint8))
        reader.read_into(theirs, start, np.frombuffer(right, np.uint8))
        if left != right:
            return False
        progress(count)
    return True


def _dropped(build: Build, reference: Layout, absent: list[str]) -> dict[str, str]:
    """The absent tensors that no reader needs, each with the reason."""
    towers = [n for n in build.checkpoint.tensors if "_tower." in n or ".embed_vision." in n]
    config = build.checkpoint.config
    text_only = not towers and "vision_config" not in config
    tied = ties_head(reference.checkpoint.config)
    shared = _shared_layers(reference)
    reasons: dict[str, str] = {}
    for name in absent:
        role = reference.roles[name]
        if role is Role.HEAD and tied:
            reasons[name] = "tied to the embedding by config"
        elif role is Role.TOWER and text_only:
            reasons[name] = "vision or audio: not in a text-only build"
        elif _is_shared(name.removeprefix(reference.prefix), shared):
            reasons[name] = "k or v of a layer that shares another's"
    return reasons


def _shared_layers(reference: Layout) -> range:
    """Layers that read K and V of an earlier one."""
    config = reference.checkpoint.config
    text = text_config(config)
    total, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    if not isinstance(total, int) or not isinstance(shared, int) or not 0 < shared <= total:
        return range(0)
    return range(total - shared, total)


def _is_shared(inner: str, shared: range) -> bool:
    parts = inner.split(".")
    if len(parts) < 4 or parts[0] != "layers" or not parts[1].isdecimal():
        return False
    return int(parts[1]) in shared and parts[3] in ("k_proj", "v_proj", "k_norm", "v_norm")


def _ties(build: Build) -> bool:
    """As `ties_head`; a flag that is no truth value counts as one, and `head_findings` says so."""
    try:
        return ties_head(build.checkpoint.config)
    except CheckpointError:
        return True


def read_head(build: Build) -> Head:
    """Whether lm_head is stored, and whether it is the embedding."""
    tensors, tied = build.checkpoint.tensors, _ties(build)
    heads = [t for n, t in tensors.items() if n.endswith("lm_head.weight")]
    embedding = tensors.get(f"{build.prefix}embed_tokens.weight")
    if not heads or embedding is None:
        return Head(tied, bool(heads), None)
    with TensorReader() as reader:
        return Head(
            tied, True, all(_same(h, embedding, reader, False, lambda _: None) for h in heads)
        )


def copied_findings(copied: Copied, build: Build) -> Iterator[Finding]:
    """What is wrong with the tensors that should be the reference's."""
    names, where = build.checkpoint.tensors, build.name
    if copied.differ:
        differ, whole = len(copied.differ), len(copied.differ) + len(copied.identical)
        what = f"{differ} of {whole} copied tensors differ from the reference"
        what += f": {listed(copied.differ)}"
        yield error("copied-differ", where, what, "copy them again, or give the right reference")
    if copied.missing:
        what = (
            f"{len(copied.missing)} tensors of the reference are missing: {listed(copied.missing)}"
        )
        yield error("copied-missing", where, f"{what}; vLLM does not notice", "export it again")
    if added := [n for n in copied.added if not n.endswith("lm_head.weight") and n in names]:
        what = f"{len(added)} tensors that the reference does not have: {listed(added)}"
        yield warning("added", where, what, "remove them if they are left-overs")


def head_findings(head: Head, build: Build) -> Iterator[Finding]:
    """A stored tied head is a waste; a different one is used by readers all the same."""
    where = f"{build.name}: lm_head.weight"
    try:
        ties_head(build.checkpoint.config)
    except CheckpointError as fault:
        yield error("head-flag", f"{build.name}: config.json", str(fault), "export it again")
    if head.tied and head.identical is False:
        what = "config.json ties it to the embedding, but it is stored and differs"
        yield error("head-differs", where, what, "remove it: transformers and vLLM would use it")
    elif head.tied and head.stored:
        what = "stored although tied, a copy of the embedding"
        yield warning("head-stored", where, what, "remove it to save its bytes")
    elif not head.tied and not head.stored:
        what = "config.json says untied, but it is missing"
        yield error("head-missing", where, what, "export it again")
