"""The folder by compressed-tensors' own code: its schema, its matching, its decompressor.

The only module of this room that imports torch, and only inside its functions: it takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.reader import TensorReader
from ..repack.layout import Role, classify, module_names
from ..repack.packing import BF16, decode
from .build import Build, PackedTensor
from .exact import as_float32
from .findings import Finding, error, listed, warning
from .scheme import CONFIG, KEY, Scheme

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

DECODED_ROWS = 16
"""Rows decoded at either end of each packed tensor; the rule is the same for all others."""

_NESTED = re.compile(r"\([^()]*[*+}][^()]*\)\s*[*+{]")


@dataclass(frozen=True)
class Modules:
    """The modules that targets and ignore speak of: name -> a module of its class.

    `origin`: where the names are from: the model class, or the tensors where transformers does
    not know it. `parameters`: what the model needs; None where it is not known.
    """

    named: Mapping[str, torch.nn.Module]
    origin: str
    parameters: frozenset[str] | None = None


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


def conform(build: Build, scheme: Scheme, *, complete: bool) -> tuple[list[Finding], list[str]]:
    """Findings, and the checks that ran in words.

    `complete`: whether missing tensors are told too; a reference tells them better.
    """
    with quiet():
        config, findings = _parse(scheme)
        modules = find_modules(build)
        checks = [f"config.json by the schema of compressed-tensors {_version()}"]
        if config is not None:
            findings += _match(build, scheme, modules)
            checks.append(f"targets minus ignore on the modules of {modules.origin}, both ways")
            findings += _decode_all(build, config)
            checks.append(f"{len(build.packed)} packed tensors decoded by compressed-tensors, "
                          f"{2 * DECODED_ROWS} rows of each")  # fmt: skip
        if complete and modules.parameters is not None:
            findings += _missing(build, modules.parameters)
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
    except Exception:  # anything a foreign config can make a model class raise
        return _modules_by_tensors(build)
    named = dict(model.named_modules())
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    needed = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    parameters = frozenset(n for n in needed if n not in tied and not any(i in n for i in ignored))
    origin = f"{type(model).__name__} (transformers {version('transformers')})"
    return Modules(named, origin, parameters)


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


def _decode_all(build: Build, config: QuantizationConfig) -> Iterator[Finding]:
    """Packed tensors that compressed-tensors decodes to something else than qatpack."""
    from compressed_tensors.compressors import BaseCompressor

    decompressor = BaseCompressor.get_value_from_registry("pack-quantized")
    groups = config.config_groups.values()
    schemes = [s for s in groups if not isinstance(s, list) and s.weights is not None]
    if not schemes:
        return  # told by the scheme's own findings
    differ: list[str] = []
    with TensorReader() as reader:
        for tensor in build.packed.values():
            size = tensor.group_size
            by_size = [s for s in schemes if s.weights and s.weights.group_size == size]
            try:
                same = _decodes_alike(tensor, reader, decompressor, (by_size or schemes)[0])
            except Exception as fault:  # whatever its checks raise
                what = f"compressed-tensors {_version()} cannot decode it: {fault}"
                yield error("decode", tensor.module, what, "export it again")
                continue
            if not same:
                differ.append(tensor.module)
    if differ:
        what = f"compressed-tensors {_version()} decodes {len(differ)} modules to other values"
        yield error("decode", listed(differ), what, "report this: one of the two is wrong")


def _decodes_alike(
    tensor: PackedTensor, reader: TensorReader, decompressor: Any, scheme: Any
) -> bool:
    """Both ends of a tensor, with the stored scale and with one cast to bf16 as loaders do."""
    ends = {(0, min(DECODED_ROWS, tensor.rows)), (max(0, tensor.rows - DECODED_ROWS), tensor.rows)}
    for start, stop in sorted(ends):
        packed = reader.read_rows(tensor.packed, start, stop)
        stored = as_float32(reader.read_rows(tensor.scale, start, stop))
        with np.errstate(over="ignore", invalid="ignore"):
            scales = (stored, stored.astype(BF16))
        for scale in scales:
            ours = decode(packed, scale, tensor.group_size)
            theirs = _decompress(packed, scale, tensor, decompressor, scheme)
            if not _same_bits(ours, theirs):
                return False
    return True


def _same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return bool(((ours.view(np.uint16) == theirs.view(np.uint16)) | both_nan).all())


def _decompress(
    packed: np.ndarray, scale: np.ndarray, tensor: PackedTensor, decompressor: Any, scheme: Any
) -> np.ndarray:
    """bf16[rows, columns] by compressed-tensors, which multiplies in the scale's dtype."""
    import torch

    wide = torch.from_numpy(scale.astype(np.float32))
    state = {
        "weight_packed": torch.from_numpy(packed),
        "weight_scale": wide.to(torch.bfloat16) if scale.dtype == BF16 else wide,
        "weight_shape": torch.tensor([len(packed), tensor.columns]),
    }
    weight = decompressor.decompress(state, scheme)["weight"]
    return weight.to(torch.bfloat16).view(torch.int16).numpy().view(BF16)


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
