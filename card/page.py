"""The card as a whole: metadata, what the build is, its figures, how to make, verify and use it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..checkpoint.errors import CheckpointError, QatpackError
from ..checkpoint.hub import HUB_ID
from ..checkpoint.manifest import MANIFEST_NAME, FileRecord
from ..checkpoint.output import write_file
from ..checkpoint.units import share
from .build import Build
from .files import CARD_NAME, ORIGINAL_CARD_NAME, check_own
from .kept import GENERATED, is_generated, marked, read_parts
from .markdown import link, plain, table
from .measured import measured
from .metadata import SourceCard, card_metadata, source_card, to_yaml
from .results import Results, read_results

PLACEHOLDER = "ORG/NAME"
"""The repository in the commands of a card as long as it is not known."""

_TERMS = re.compile(r"licen[sc]e|notice|copying|use_policy", re.IGNORECASE)
_REPO = re.compile(r"<!-- Written by `qatpack card` for (\S+)")


def card_text(
    results: Results, source: SourceCard, *, repo: str, parts: Mapping[str, str] | None = None
) -> str:
    """The text of README.md.

    `repo`: `org/name` that the commands name. `parts`: the hand-written ones. Nothing in it is a
    figure without a result file. Raises `CheckpointError` where huggingface_hub refuses the
    metadata.
    """
    title = f"{(results.build.source_id or 'QAT checkpoint').rpartition('/')[2]}, exact W4A16"
    metadata = to_yaml(card_metadata(results, source, title))
    paragraphs = _paragraphs(results, source, repo, title, parts or {})
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(paragraphs) + "\n"


def write_card(folder: Path, *, repo: str | None = None, overwrite: bool = False) -> Results:
    """Write the card of a finished folder; returns the results that it shows.

    Raises `CheckpointError` (no manifest, damaged metadata, broken marks) and `QatpackError` for a
    README.md that is not ours, unless `overwrite`.
    """
    results, text = make_card(folder, repo=repo, overwrite=overwrite)
    write_file(folder / CARD_NAME, text.encode())
    return results


def make_card(
    folder: Path, *, repo: str | None = None, overwrite: bool = False
) -> tuple[Results, str]:
    """What `write_card` would write, and from what."""
    results = read_results(folder)
    old = read_card(folder)
    if old and not is_generated(old) and not overwrite:
        raise QatpackError(
            f"{folder / CARD_NAME}: was not written by qatpack; move it away, or write over it "
            "with --overwrite."
        )
    known = _REPO.search(old)
    before = known[1] if known and HUB_ID.fullmatch(known[1]) else PLACEHOLDER
    check_own(folder, ORIGINAL_CARD_NAME)
    source = source_card(folder / ORIGINAL_CARD_NAME)
    parts = read_parts(old) if is_generated(old) else {}
    return results, card_text(results, source, repo=repo or before, parts=parts)


def read_card(folder: Path) -> str:
    """The README.md that stands there, "" where none does. Raises `CheckpointError` for a link."""
    check_own(folder, CARD_NAME)
    path = folder / CARD_NAME
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is no UTF-8 text; move it away.") from error


def licence_warning(source: SourceCard) -> str | None:
    """Said where the source states no licence."""
    if source.metadata.get("license"):
        return None
    return (
        f"{CARD_NAME}: the source's card states no licence, so the card says `other`; add a "
        f"README.md with a licence to the source, or a line to {ORIGINAL_CARD_NAME}."
    )


def _paragraphs(
    results: Results, source: SourceCard, repo: str, title: str, parts: Mapping[str, str]
) -> Iterator[str]:
    build = results.build
    yield f"{GENERATED} for {repo} from result files; text between hand-written marks is kept. -->"
    yield f"# {plain(title)}"
    yield from _what(build)
    yield marked("introduction", parts.get("introduction", ""))
    yield "## How it differs from a re-rounded export"
    yield from _difference(build)
    yield "## Measured"
    yield from measured(results)
    yield "## Use"
    yield from _use(build, repo)
    yield "## How it was made"
    yield from _made(build)
    yield "## Verify it yourself"
    yield from _verify(build, repo)
    yield "## Limits"
    yield _limits(results)
    yield "## Licence and attribution"
    yield _licence(build, source)
    yield marked("notes", parts.get("notes", ""))


def _origin(build: Build) -> str:
    name = build.source_id
    where = f"[{plain(name)}](https://huggingface.co/{name})" if name else "a QAT checkpoint"
    return f"{where}, commit `{build.commit}`" if build.commit else where


def _what(build: Build) -> Iterator[str]:
    part = " Text only: the vision and audio towers are left out." if build.text_only else ""
    yield (
        f"The trained 4-bit weights of {_origin(build)}: the quantization grid of its "
        "quantization-aware training, recovered group by group, proven by decoding it back, and "
        "packed for compressed-tensors (`pack-quantized`, W4A16, groups of 32)."
        f"{part}"
    )


def _difference(build: Build) -> Iterator[str]:
    totals = build.totals
    yield (
        "In the source each weight of a quantized layer is a trained 4-bit level times the step of "
        "its group, rounded to bfloat16; the steps are not stored. An export that takes the "
        "largest magnitude of a group / 7.5 for the step (`memoryless_minmax`) rounds every weight "
        "a second time, to other levels. Here step and level are recovered from the values: "
        f"{totals['certified'] + totals['zero']:,} of {totals['groups']:,} groups decode to the "
        "source's bits again, and nothing was quantized anew."
    )
    identical = share(totals["identical"], totals["values"])
    rounding = (
        "the recovered steps are stored as they are"
        if build.scale_dtype == "float32"
        else f"the recovered steps are rounded to {build.scale_dtype}, the levels are kept"
    )
    yield f"In this folder {rounding}: {identical} of the values come back bit for bit."


def _use(build: Build, repo: str) -> Iterator[str]:
    yield f"vLLM:\n\n```\nvllm serve {repo}\n```"
    kind, loader = (
        ("AutoModelForCausalLM", "AutoTokenizer")
        if build.text_only
        else ("AutoModelForImageTextToText", "AutoProcessor")
    )
    yield (
        "transformers (`pip install compressed-tensors`):\n\n```python\n"
        f"from transformers import {kind}, {loader}\n\n"
        f'model = {kind}.from_pretrained("{repo}", dtype="bfloat16", device_map="auto")\n'
        f'{loader.removeprefix("Auto").lower()} = {loader}.from_pretrained("{repo}")\n```'
    )
    yield f'qatpack, in JAX:\n\n```\nqatpack generate {repo} "Why is the sky blue?" --chat\n```'


def repack_command(build: Build) -> str:
    """The command that made the build, with the options that decide its bytes."""
    words = ["qatpack repack", build.source_id or "SOURCE", "OUT"]
    if build.source_id and build.commit:
        words.append(f"--revision {build.commit}")
    words.append(f"--scale-dtype {build.scale_dtype}")
    words += ["--on-off-grid keep"] * build.keep_off_grid
    words += ["--text-only"] * build.text_only + ["--pack-ple"] * build.pack_ple
    return " ".join([*words, f"--shard-size {build.shard_bytes}"])


def _made(build: Build) -> Iterator[str]:
    yield f"With qatpack {build.version}:\n\n```\n{repack_command(build)}\n```"
    yield "The same source, version and options give the same bytes:"
    yield table(
        [
            ("file", "bytes", "sha256"),
            *(_file_row("source", r) for r in build.source_files),
            *(_file_row("here", r) for r in build.files if r.name != CARD_NAME),
        ]
    )
    yield f"[`{MANIFEST_NAME}`]({MANIFEST_NAME}) holds the counts of every tensor."


def _file_row(side: str, record: FileRecord) -> tuple[str, str, str]:
    digest = f"`{record.sha256}`" if record.sha256 else "not recorded"
    return f"{side}: {plain(record.name)}", f"{record.size:,}", digest


def _verify(build: Build, repo: str) -> Iterator[str]:
    reference = build.source_id or "SOURCE"
    pinned = f" --revision {build.commit}" if build.source_id and build.commit else ""
    yield (
        "Against the source, value by value, and every figure of the manifest derived again:\n\n"
        f"```\nqatpack verify {repo} --reference {reference}{pinned} --rederive --all\n```"
    )


def _limits(results: Results) -> str:
    build, found = results.build, results.verification
    lines = [
        "The proof is that every packed value lies on a 4-bit grid and decodes back; a value moved "
        "to another level in the source itself cannot be seen.",
        "vLLM and transformers compute with bfloat16 scales whatever is stored."
        if build.scale_dtype != "bfloat16"
        else "Steps are rounded to bfloat16, as vLLM and transformers compute with them.",
    ]
    if build.pack_ple:
        lines.append(
            "The per-layer embedding is packed: vLLM reads it from 0.29 on (GPU), transformers does"
            " not."
        )
    if build.keep_off_grid:
        lines.append(f"Tensors that are on no grid were left in bf16: {MANIFEST_NAME} names them.")
    lines += [plain(note) for note in (found.notes if found else ())]
    return "\n".join(f"- {line}" for line in lines)


def _licence(build: Build, source: SourceCard) -> str:
    """Whose work it is and under which terms, from the source's card only."""
    data = source.metadata
    said = [data[key] for key in ("license", "license_name") if data.get(key)]
    words = (", ".join(value) if isinstance(value, list) else str(value) for value in said)
    name = " ".join(map(plain, words)) or "not stated in the source's card"
    address = data.get("license_link")
    terms = f", {link(address)}" if isinstance(address, str) else ""
    lines = [f"Licence, as the source states it: {name}{terms}."]
    lines.append(
        f"The weights are the work of the authors of {_origin(build)}; qatpack changed how they "
        "are stored."
    )
    if source.exists:
        lines.append(f"Their card: [`{ORIGINAL_CARD_NAME}`]({ORIGINAL_CARD_NAME}).")
    if texts := [record.name for record in build.files if _TERMS.match(record.name)]:
        lines.append(f"Files that travel with them: {', '.join(map(plain, texts))}.")
    return " ".join(lines)
