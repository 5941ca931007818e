"""What a manifest claims, proven again from the source by whoever runs this.

Nothing the manifest says is taken on trust: hashes are computed, the plan is made anew from the
source and the recorded options, and chosen tensors are derived again and compared byte for byte.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from ..card.files import CARD_NAME, EVALUATION_NAME, VERIFY_NAME, plot_names
from ..checkpoint.errors import CheckpointError, QatpackError
from ..checkpoint.folder import read_json
from ..checkpoint.hashing import hash_file
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import MANIFEST_NAME, read_manifest
from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader
from ..repack.finish import MANIFEST_FORMAT, plan_config
from ..repack.layout import Layout
from ..repack.plan import Options, PackedModule, Plan, make_plan, same_bytes
from ..repack.sidecars import sidecar_names
from ..repack.stream import blocks
from .build import Build
from .findings import Finding, error, listed, warning

LATER = (CARD_NAME, VERIFY_NAME, EVALUATION_NAME, MANIFEST_NAME)
"""Files that are written or written again after the repack, beside the card's plots."""

T = TypeVar("T")


@dataclass(frozen=True)
class Provenance:
    """What was proven, and what was not looked at, each as a sentence."""

    proven: tuple[str, ...]
    unproven: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As in verify_report.json."""
        return {"proven": list(self.proven), "unproven": list(self.unproven)}


class _Ledger:
    """Collects what the steps below prove, leave open, and find wrong."""

    def __init__(self) -> None:
        self.proven: list[str] = []
        self.unproven: list[str] = []
        self.findings: list[Finding] = []

    def blame(self, code: str, where: str, what: str, do: str) -> None:
        self.findings.append(error(code, where, what, do))

    def result(self) -> tuple[Provenance, list[Finding]]:
        return Provenance(tuple(self.proven), tuple(self.unproven)), self.findings


def rederive(
    build: Build, source: Path, layout: Layout, *, share: float, progress: Progress
) -> tuple[Provenance, list[Finding]]:
    """Prove the build's manifest from its source folder.

    `share` of the packed modules and of the copied tensors are derived again, at least one of
    each; 1.0 takes all. `progress` gets the bytes hashed or read. Whatever is wrong, also with
    the manifest itself, becomes a finding.
    """
    ledger = _Ledger()
    try:
        manifest = read_manifest(build.folder)
    except CheckpointError as fault:
        ledger.blame("manifest", build.name, str(fault).partition(": ")[2].rstrip("."),
                     "nothing can be derived again without it")  # fmt: skip
        return ledger.result()
    if manifest.get("format") != MANIFEST_FORMAT:
        what = f"format {manifest.get('format')!r}, this version reads {MANIFEST_FORMAT!r}"
        ledger.blame("manifest", MANIFEST_NAME, what, "use the qatpack that wrote it")
        return ledger.result()
    _check_tool(manifest, ledger)
    origin = manifest.get("source")
    files = origin.get("files") if isinstance(origin, Mapping) else None
    _check_files(files, source, "source", ledger, progress)
    _check_files(manifest.get("files"), build.folder, "output", ledger, progress)
    _check_unlisted(manifest.get("files"), build.folder, ledger)
    plan = _plan(manifest, layout, ledger)
    if plan is not None:
        try:
            _check_names(manifest, plan, ledger)
        except (KeyError, TypeError, AttributeError) as fault:
            what = f"its records cannot be read ({type(fault).__name__}: {fault})"
            ledger.blame("manifest", MANIFEST_NAME, what, "repack the source")
        _check_sidecars(plan, build, ledger)
        _check_plan(plan, build, ledger)
        _check_packed(plan, build, share, ledger, progress)
        _check_copied(plan, build, share, ledger, progress)
    return ledger.result()


def _check_tool(manifest: Mapping[str, Any], ledger: _Ledger) -> None:
    tool = manifest.get("tool")
    made = tool.get("version") if isinstance(tool, Mapping) else None
    if made != version("qatpack"):
        what = f"made by qatpack {made}, derived again by {version('qatpack')}"
        ledger.findings.append(warning("tool-version", MANIFEST_NAME, what))


def _records(value: object) -> list[tuple[str, object, object]] | None:
    """(name, bytes, sha256) of each file, or None for anything but a list of such records."""
    if not isinstance(value, list) or not all(isinstance(v, Mapping) for v in value):
        return None
    records = [(v.get("name"), v.get("bytes"), v.get("sha256")) for v in value]
    return [r for r in records if isinstance(r[0], str)] if records else None


def _check_files(
    value: object, folder: Path, side: str, ledger: _Ledger, progress: Progress
) -> None:
    """Size and sha256 of every recorded file of one side."""
    records = _records(value)
    if records is None:
        ledger.blame("manifest", MANIFEST_NAME, f"lists no {side} files", "repack the source")
        return
    good, unhashed = 0, []
    twice = [name for name, count in Counter(r[0] for r in records).items() if count > 1]
    if twice:
        what = f"lists {side} files twice: {listed(twice)}"
        ledger.blame("manifest", MANIFEST_NAME, what, _advice("output"))
    for name, size, sha256 in records:
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            ledger.blame(
                "manifest", MANIFEST_NAME, f"lists {name!r}, outside the folder", "refuse it"
            )
        elif not _is_file(path):
            ledger.blame(f"{side}-missing", name, "recorded in the manifest, but missing",
                         f"give the {side} folder as it was")  # fmt: skip
        elif sha256 is None:
            unhashed.append(name)
        elif path.stat().st_size == size and hash_file(path, progress=progress) == sha256:
            good += 1
        elif side == "output" and name in LATER:
            ledger.unproven.append(f"{name} was changed after the repack")
        else:
            what = f"size or sha256 is not the {side} file's that the manifest records"
            ledger.blame(f"{side}-differs", name, what, _advice(side))
    if good:
        ledger.proven.append(f"{good} {side} files have the recorded size and sha256")
    if unhashed:
        ledger.unproven.append(f"no sha256 is recorded for {listed(unhashed)}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _check_names(manifest: Mapping[str, Any], plan: Plan, ledger: _Ledger) -> None:
    """What the manifest says of every tensor, and that it names all the files it came from."""
    checkpoint = plan.layout.checkpoint
    listed_files = {name for name, _, _ in _records(manifest["source"].get("files")) or ()}
    weights = {header.path.name for header in checkpoint.files}
    if absent := weights - listed_files:
        what = f"lists no hash of the source's {listed(absent)}"
        ledger.blame("manifest", MANIFEST_NAME, what, "repack the source")
    stated = {
        "packed": {p.get("name") for p in manifest["packed"]},
        "copied": {n for names in manifest["copied"].values() for n in names},
        "dropped": {n for names in manifest["dropped"].values() for n in names},
    }
    derived = {
        "packed": {t.name for t in plan.packed_sources},
        "copied": set(plan.copied),
        "dropped": set(plan.dropped),
    }
    wrong = [part for part, names in derived.items() if stated[part] != names]
    totals = manifest["totals"]
    wrong += [
        f"totals.{key}"
        for key, value in {
            "source_tensors": len(checkpoint.tensors),
            "source_bytes": checkpoint.tensor_bytes,
            "packed_tensors": len(derived["packed"]),
            "packed_modules": len(plan.packed),
            "copied_tensors": len(plan.copied),
            "dropped_tensors": len(plan.dropped),
            "output_bytes": plan.output_bytes(),
        }.items()
        if totals.get(key) != value
    ]
    if wrong:
        what = f"says otherwise than source and options of: {listed(wrong)}"
        ledger.blame("manifest", MANIFEST_NAME, what, _advice("output"))
    if identity := manifest["source"].get("id"):
        ledger.unproven.append(f"that these source files are {identity} on the Hub")


def _check_sidecars(plan: Plan, build: Build, ledger: _Ledger) -> None:
    """The files that a repack copies beside the weights."""
    source = plan.layout.checkpoint.folder
    names = sidecar_names(source, text_only=plan.options.text_only)
    differ = [
        output
        for name, output in names.items()
        if not _is_file(build.folder / output)
        or (build.folder / output).read_bytes() != (source / name).read_bytes()
    ]
    if differ:
        what = f"not the source's bytes: {listed(differ)}"
        ledger.blame("sidecar-differs", build.name, what, _advice("output"))
    if good := len(names) - len(differ):
        ledger.proven.append(f"{good} files beside the weights are the source's bytes")


def _advice(side: str) -> str:
    if side == "source":
        return "give the commit of the source that the manifest names"
    return "do not trust this folder; repack the source"


def _check_unlisted(value: object, folder: Path, ledger: _Ledger) -> None:
    """Files that nobody vouches for."""
    known = {*(name for name, _, _ in _records(value) or ()), *LATER, *plot_names(folder)}
    extra = [
        name
        for path in folder.rglob("*")
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in known
    ]
    if weights := [n for n in extra if n.endswith(".safetensors")]:
        what = f"not recorded in the manifest: {listed(weights)}"
        ledger.blame("output-unlisted", folder.name, what, "remove them")
    if rest := [n for n in extra if n not in weights]:
        ledger.unproven.append(f"files that the manifest does not list: {listed(rest)}")


def _plan(manifest: Mapping[str, Any], layout: Layout, ledger: _Ledger) -> Plan | None:
    """The plan of the repack, made anew."""
    try:
        options = _options(manifest["options"])
        copied = manifest["copied"]
        off = {n: r for r, names in copied.items() if "off the grid" in r for n in names}
        return make_plan(layout, options, off_grid=off)
    except QatpackError as fault:
        ledger.blame("plan", MANIFEST_NAME, str(fault).rstrip("."), "give the right source")
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        what = f"its options cannot be read ({type(fault).__name__}: {fault})"
        ledger.blame("manifest", MANIFEST_NAME, what, "repack the source")
    return None


def _options(recorded: Mapping[str, Any]) -> Options:
    dtype = recorded["scale_dtype"]
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"scale_dtype {dtype!r}")
    return Options(
        scale_dtype=dtype,
        keep_off_grid=recorded["on_off_grid"] == "keep",
        text_only=recorded["text_only"] is True,
        pack_ple=recorded["pack_ple"] is True,
    )


def _check_plan(plan: Plan, build: Build, ledger: _Ledger) -> None:
    """The tensors and the config that follow from source and options."""
    expected = {s.name: (s.dtype, s.shape) for unit in plan.units() for s in unit}
    found = {n: (t.dtype, t.shape) for n, t in build.checkpoint.tensors.items()}
    wrong = [n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)]
    if wrong:
        what = f"{len(wrong)} tensors are not those that the source gives: {listed(wrong)}"
        ledger.blame("plan", build.name, what, _advice("output"))
    else:
        ledger.proven.append(f"the {len(found)} tensors are those that source and options give")
    try:
        same = read_json(build.folder / "config.json") == plan_config(plan)
    except CheckpointError as fault:
        ledger.blame("config-differs", "config.json", str(fault).rstrip("."), _advice("output"))
        return
    if same:
        ledger.proven.append("config.json is the one that source and options give")
    else:
        what = "is not the one that source and options give"
        ledger.blame("config-differs", "config.json", what, _advice("output"))


def _chosen(items: Sequence[tuple[str, T]], share: float) -> list[tuple[str, T]]:
    """A share of named things, at least one, spread by a hash of the name: the same each time."""
    count = min(len(items), max(1, round(share * len(items))))
    ranked = sorted(items, key=lambda item: hashlib.sha256(item[0].encode()).digest())
    return ranked[:count]


def _check_packed(
    plan: Plan, build: Build, share: float, ledger: _Ledger, progress: Progress
) -> None:
    modules = [(m.module, m) for m in plan.packed if m.module in build.packed]
    chosen = sorted(_chosen(modules, share), key=lambda m: m[1].source.offset)
    wrong: list[str] = []
    with TensorReader() as reader:
        for name, module in chosen:
            if not _derives(plan, module, build, reader, progress):
                wrong.append(name)
    _settle(wrong, len(chosen), len(plan.packed), "packed modules derived again", ledger)


def _derives(
    plan: Plan, module: PackedModule, build: Build, reader: TensorReader, progress: Progress
) -> bool:
    """Whether recovering the module's grid gives the bytes that the build has."""
    tensors = build.checkpoint.tensors
    specs = module.specs(plan.options.scale_dtype)
    shape, packed, scale = (tensors.get(spec.name) for spec in specs)
    if shape is None or packed is None or scale is None:
        return False
    if any(t.nbytes != s.nbytes for t, s in zip((shape, packed, scale), specs, strict=True)):
        return False
    for block in blocks(module, reader, plan.options.scale_dtype):
        result, width = block.result, block.result.scale.itemsize
        if not (
            _equal(reader, packed, block.first * 16, result.packed)
            and _equal(reader, scale, block.first * width, result.scale)
        ):
            return False
        progress(block.bits.nbytes)
    return reader.read(shape).tolist() == [module.rows, module.columns]


def _equal(reader: TensorReader, tensor: TensorInfo, start: int, expected: np.ndarray) -> bool:
    wanted = np.ascontiguousarray(expected).view(np.uint8).reshape(-1)
    found = np.empty_like(wanted)
    reader.read_into(tensor, start, found)
    return np.array_equal(found, wanted)


def _check_copied(
    plan: Plan, build: Build, share: float, ledger: _Ledger, progress: Progress
) -> None:
    tensors = plan.layout.checkpoint.tensors
    pairs = [
        (name, (tensors[name], ours))
        for name in plan.copied
        if (ours := build.checkpoint.tensors.get(plan.output_name(name)))
    ]
    chosen = _chosen(pairs, share)
    wrong: list[str] = []
    for name, (theirs, ours) in chosen:
        if not same_bytes(theirs, ours):
            wrong.append(name)
        progress(theirs.nbytes)
    _settle(wrong, len(chosen), len(plan.copied), "copied tensors compared", ledger)


def _settle(wrong: list[str], looked: int, whole: int, what: str, ledger: _Ledger) -> None:
    """Enter the outcome of one comparison."""
    if wrong:
        said = f"{len(wrong)} of {looked} {what} have other bytes: {listed(wrong)}"
        ledger.blame("not-derived", listed(wrong, most=1), said, _advice("output"))
    elif looked:
        ledger.proven.append(f"{looked} of {whole} {what}: bytes equal")
    if looked < whole:
        ledger.unproven.append(f"{whole - looked} of {whole} not {what}; --all does")


def named_source(folder: Path) -> tuple[str, str | None]:
    """The Hub id and commit that a build's manifest names. Raises `CheckpointError`."""
    origin = read_manifest(folder).get("source")
    name, commit = (
        (origin.get("id"), origin.get("commit")) if isinstance(origin, Mapping) else (None, None)
    )
    if not isinstance(name, str) or not isinstance(commit, str | None):
        raise CheckpointError(
            f"{folder / MANIFEST_NAME}: names no source on the Hub; give it with --reference."
        )
    return name, commit


def derived_bytes(manifest: Mapping[str, Any]) -> Iterator[int]:
    """Sizes of the files that will be hashed, for a progress bar."""
    origin = manifest.get("source")
    sides = (origin.get("files") if isinstance(origin, Mapping) else None, manifest.get("files"))
    for side in sides:
        yield from (size for _, size, _ in _records(side) or () if type(size) is int)
