"""The folder by compressed-tensors' own code: its schema, its matching, its decompressor.

The only module of this room that imports torch, and only inside its functions: it takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from ..checkpoint.progress import Progress, ignore_progress
from ..repack.layout import Role, classify, is_packed, module_names
from .build import Build
from .decompressor import decode_findings
from .findings import Finding, error, listed, note, warning
from .scheme import CONFIG, KEY, Scheme

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

_NESTED = re.compile(r"\([^()]*[*+}][^()]*\)\s*[*+{]")


@dataclass(frozen=True)
class Modules:
    """The modules that targets and ignore speak of: name -> a module of its class.

    `origin`: where the names are from: the model class, or the tensors where it cannot be built,
    and `fault` says why. `shapes`: of every parameter of the model, `needed`: those that no other
    one gives; empty without the class.
    """

    named: Mapping[str, torch.nn.Module]
    origin: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()
    fault: str | None = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch and transformers print off our output."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def conform(
    build: Build, scheme: Scheme, *, complete: bool, progress: Progress = ignore_progress
) -> tuple[list[Finding], list[str]]:
    """Findings, and the checks that ran in words.

    `complete`: whether missing tensors are told too; a reference tells them better. `progress`
    gets the bytes decoded, `decoded_bytes` in all.
    """
    with quiet():
        config, findings = _parse(scheme)
        modules = find_modules(build)
        checks = [f"config.json by the schema of compressed-tensors {_version()}"]
        if config is not None:
            findings += _match(build, scheme, modules)
            checks.append(f"targets minus ignore on the modules of {modules.origin}, both ways")
            findings += decode_findings(build, config, progress)
            rows = sum(t.rows for t in build.packed.values())
            checks.append(f"{len(build.packed)} packed tensors, all {rows:,} rows, given to the "
                          f"decompressor of compressed-tensors {_version()}")  # fmt: skip
        if modules.fault is not None:
            findings.append(_unbuilt(build, modules.fault))
        else:
            findings += _shape_findings(build, modules)
            checks.append(f"shapes as {modules.origin} builds them from config.json")
        if complete and modules.needed:
            findings += _missing(build, modules.needed)
            checks.append(f"every parameter of {modules.origin} stored")
    return findings, checks


def _version() -> str:
    return version("compressed-tensors")


def _parse(scheme: Scheme) -> tuple[QuantizationConfig | None, list[Finding]]:
    """The config as compressed-tensors reads it, or what it says against it."""
    if not scheme.raw:
        return None, []
    from compressed_tensors.quantization import QuantizationConfig

    try:
        return QuantizationConfig.model_validate(dict(scheme.raw)), []
    except Exception as fault:  # pydantic's errors, and whatever its validators raise
        first = " ".join(str(fault).split())[:160]
        what = f"compressed-tensors {_version()} refuses it: {first}"
        do = "set it as `qatpack repack` writes it"
        return None, [error("config-schema", f"{CONFIG}: {KEY}", what, do)]


def find_modules(build: Build) -> Modules:
    """The real modules of the model that config.json names, built without memory."""
    try:
        model = _empty_model(build)
    except Exception as fault:  # anything a foreign config can make a model class raise
        said = " ".join(str(fault).split())[:160]
        return replace(_modules_by_tensors(build), fault=f"{type(fault).__name__}: {said}")
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    needed = frozenset(n for n in shapes if n not in tied and not any(i in n for i in ignored))
    origin = f"{type(model).__name__} (transformers {version('transformers')})"
    return Modules(dict(model.named_modules()), origin, shapes, needed)


def _unbuilt(build: Build, fault: str) -> Finding:
    what = f"the model of config.json cannot be built here ({fault})"
    what += ", so targets and ignore are matched on the tensors' names alone"
    return note("model-unbuilt", build.name, what, "check with the transformers it was made for")


def _shape_findings(build: Build, modules: Modules) -> Iterator[Finding]:
    """Tensors of other shapes than the model that config.json describes."""
    model_type = str(build.checkpoint.config.get("model_type"))
    stored = {f"{t.module}.weight": (t.rows, t.columns) for t in build.packed.values()}
    stored |= {n: t.shape for n, t in build.checkpoint.tensors.items() if not is_packed(n)}
    wrong: dict[str, str] = {}
    for name, shape in stored.items():
        module, _, last = name.rpartition(".")
        names = [name, *(f"{m}.{last}" for m in module_names(module, model_type))]
        expected = next((modules.shapes[n] for n in names if n in modules.shapes), shape)
        if expected != shape:
            wrong[name] = f"{list(shape)} instead of {list(expected)}"
    if wrong:
        first = min(wrong)
        what = f"{len(wrong)} tensors have other shapes than {modules.origin} builds from "
        what += f"config.json, {first} {wrong[first]}"
        yield error("model-shape", listed(wrong), what, "make config.json and weights agree")


def _empty_model(build: Build) -> torch.nn.Module:
    import torch
    import transformers

    _refuse_giants(build)
    config = transformers.AutoConfig.from_pretrained(
        build.folder, local_files_only=True, trust_remote_code=False
    )
    architecture = (config.architectures or [""])[0]
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        return getattr(transformers, architecture)(config)


def _refuse_giants(build: Build) -> None:
    """A config of more layers than the folder has tensors would take forever to build."""
    config = build.checkpoint.config
    for part in (config, *(v for v in config.values() if isinstance(v, Mapping))):
        counts = (part.get(key) for key in ("num_hidden_layers", "num_experts"))
        if any(type(n) is int and n > len(build.checkpoint.tensors) for n in counts):
            raise ValueError("config.json names more layers or experts than there are tensors")


def _modules_by_tensors(build: Build) -> Modules:
    """The 2-D weights as linears, the embeddings as embeddings, and the head."""
    import torch

    with torch.device("meta"):
        linear, embedding = torch.nn.Linear(8, 8), torch.nn.Embedding(8, 8)
    embeddings = (Role.EMBEDDING, Role.PER_LAYER_EMBEDDING)
    named: dict[str, torch.nn.Module] = {"lm_head": linear}
    for tensor in build.checkpoint.tensors.values():
        module = tensor.name.removesuffix(".weight")
        if module != tensor.name and len(tensor.shape) == 2:
            role = classify(tensor, build.prefix) if build.prefix else Role.OTHER
            named[module] = embedding if role in embeddings else linear
    for module in build.packed:
        named[module] = embedding if "embed_tokens" in module else linear
    return Modules(named, "the tensors' names")


def _match(build: Build, scheme: Scheme, modules: Modules) -> Iterator[Finding]:
    """Targets minus ignore against the packed set, both ways."""
    import torch
    from compressed_tensors.utils.match import is_match

    kinds = (torch.nn.Linear, torch.nn.Embedding)
    # A repeated group that repeats inside can take Python's matcher for ever; no build needs one.
    if endless := [p for p in (*scheme.targets, *scheme.ignore) if _NESTED.search(p)]:
        what = f"holds repetitions inside repetitions: {listed(p[:80] for p in endless)}"
        yield error("config-match", f"{CONFIG}: {KEY}", what, "write exact module names")
        return
    try:
        chosen = {
            name
            for name, module in modules.named.items()
            if isinstance(module, kinds) and is_match(name, module, scheme.targets, scheme.ignore)
        }
    except Exception as fault:  # a pattern that is no regular expression
        what = f"compressed-tensors cannot match with it: {fault}"
        yield error("config-match", f"{CONFIG}: {KEY}", what, "write exact module names")
        return
    packed = set(build.packed) | build.broken
    model_type = str(build.checkpoint.config.get("model_type"))
    known = {name for module in packed for name in module_names(module, model_type)}
    if forgotten := chosen - known:
        what = f"{len(forgotten)} modules are targeted and not ignored, yet not packed: "
        do = "add them to ignore"
        where = f"{CONFIG}: {KEY}.ignore"
        yield error("ignore-short", where, what + listed(forgotten), do)
    unfused = {m for m in packed if ".experts." in m and m not in modules.named}
    if unmatched := packed - chosen - unfused:
        what = f"{len(unmatched)} packed modules are ignored or not targeted: {listed(unmatched)}"
        yield error("ignore-long", f"{CONFIG}: {KEY}", what, "take them off ignore")


def _missing(build: Build, parameters: frozenset[str]) -> Iterator[Finding]:
    """Parameters of the model that no tensor provides."""
    model_type = str(build.checkpoint.config.get("model_type"))
    stored: set[str] = set()
    for name in build.checkpoint.tensors:
        module, _, last = name.rpartition(".")
        last = "weight" if last == "weight_packed" else last
        stored |= {f"{m}.{last}" for m in module_names(module, model_type)}
    absent = [n for n in parameters if n not in stored and ".experts." not in n]
    text = [n for n in absent if n.startswith(build.prefix)]
    if text:
        what = f"{len(text)} text parameters are missing: {listed(text)}; vLLM does not notice"
        yield error("tensor-missing", build.name, what, "export it again")
    if rest := [n for n in absent if n not in text]:
        what = f"{len(rest)} parameters are missing: {listed(rest)}"
        yield warning("tensor-missing", build.name, what, "check whether the source has them")
