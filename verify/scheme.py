"""What config.json says about the packing, and whether readers take it so.

Everything is read without trusting its types: a value of the wrong kind is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..repack.config import QUANTIZATION_KEYS
from .build import Build
from .findings import Finding, error, listed, warning

CONFIG = "config.json"
KEY = "quantization_config"
_REPACK = "set it as `qatpack repack` writes it"


@dataclass(frozen=True)
class Scheme:
    """The quantization_config as far as it is sound.

    - `raw`: the object itself, {} where there is none.
    - `targets`, `ignore`: module names, class names or `re:` patterns.
    - `group_sizes`: as stated, -1 for one group a row.
    """

    raw: Mapping[str, Any]
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    group_sizes: tuple[int, ...] = ()


def read_scheme(config: Mapping[str, Any]) -> tuple[Scheme, list[Finding]]:
    """The scheme and what is wrong with it."""
    found = dict(_find(config, ""))
    findings = [_misplaced(path) for path in found if path != KEY]
    raw = found.get(KEY)
    if raw is None:
        what = "no quantization_config: readers load the packed tensors as unexpected ones"
        return Scheme({}), [*findings, error("config", CONFIG, what, _REPACK)]
    if not isinstance(raw, Mapping):
        what = f"a {type(raw).__name__}, expected an object"
        return Scheme({}), [*findings, error("config", f"{CONFIG}: {KEY}", what, _REPACK)]
    findings += _field_findings(raw)
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        findings.append(_wrong("config_groups", groups, "an object with a group"))
        return Scheme(raw, ignore=_strings(raw.get("ignore"))), findings
    targets: list[str] = []
    sizes: list[int] = []
    for name, group in groups.items():
        findings += _group_findings(str(name), group)
        if isinstance(group, Mapping):
            targets += _strings(group.get("targets"))
            weights = group.get("weights")
            size = weights.get("group_size") if isinstance(weights, Mapping) else None
            sizes += [size] if type(size) is int else [-1] if _by_row(weights) else []
    return Scheme(raw, tuple(targets), _strings(raw.get("ignore")), tuple(sizes)), findings


def _find(config: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in QUANTIZATION_KEYS and value is not None:
            yield path + key, value
        elif isinstance(value, Mapping):
            yield from _find(value, f"{path}{key}.")


def _misplaced(path: str) -> Finding:
    what = "a quantization config at another place than the top level, where readers look"
    return error("config", f"{CONFIG}: {path}", what, f"keep one {KEY}, at the top level")


def _wrong(key: str, value: object, expected: str) -> Finding:
    shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
    return error("config", f"{CONFIG}: {KEY}.{key}", f"{shown}, expected {expected}", _REPACK)


def _field_findings(raw: Mapping[str, Any]) -> Iterator[Finding]:
    if raw.get("quant_method") != "compressed-tensors":
        yield _wrong("quant_method", raw.get("quant_method"), "'compressed-tensors'")
    if raw.get("format") != "pack-quantized":
        yield _wrong("format", raw.get("format"), "'pack-quantized'")
    if raw.get("quantization_status") != "compressed":
        expected = "'compressed': without it transformers loads random weights and only reports it"
        yield _wrong("quantization_status", raw.get("quantization_status"), expected)
    ignore = raw.get("ignore")
    if ignore is not None and len(_strings(ignore)) != _length(ignore):
        yield _wrong("ignore", ignore, "a list of module names")
    for field in ("sparsity_config", "transform_config"):
        if raw.get(field):
            yield _wrong(field, raw[field], "empty: the weights are only packed")
    if scheme := raw.get("kv_cache_scheme"):
        yield _wrong("kv_cache_scheme", scheme, "null: W4A16 leaves the cache alone")
    if anchored := [t for t in _strings(ignore) if t.startswith(("re:model.", "re:^"))]:
        what = f"anchored patterns: {listed(anchored)}; vLLM renames prefixes and misses them"
        do = "write exact module names, or begin with re:.*"
        yield warning("config-pattern", f"{CONFIG}: {KEY}.ignore", what, do)


def _group_findings(name: str, group: object) -> Iterator[Finding]:
    key = f"config_groups.{name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        yield _wrong(key, group, "an object with targets and weights")
        return
    targets = group.get("targets")
    if not _strings(targets) or len(_strings(targets)) != _length(targets):
        yield _wrong(f"{key}.targets", targets, "a list such as ['Linear']")
    if group.get("format") not in (None, "pack-quantized"):
        yield _wrong(f"{key}.format", group["format"], "'pack-quantized'")
    for field in ("input_activations", "output_activations"):
        if group.get(field) is not None:
            yield _wrong(f"{key}.{field}", group[field], "null (A16)")
    expected = (("num_bits", 4), ("type", "int"), ("symmetric", True))
    for field, value in expected:
        if weights.get(field) != value or type(weights.get(field)) is not type(value):
            yield _wrong(f"{key}.weights.{field}", weights.get(field), repr(value))
    if weights.get("strategy") not in ("group", "channel"):
        yield _wrong(f"{key}.weights.strategy", weights.get("strategy"), "'group'")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        what = "null: readers fail or decode wrongly"
        yield _wrong(f"{key}.weights.actorder", weights["actorder"], what)


def size_findings(build: Build, scheme: Scheme) -> Iterator[Finding]:
    """Where scales are stored for other groups than the config states."""
    if not scheme.group_sizes:
        return
    odd = [t for t in build.packed.values() if not _fits(t.group_size, t.columns, scheme)]
    if odd:
        sizes = ", ".join(str(s) for s in sorted({t.group_size for t in odd}))
        stated = ", ".join(map(str, scheme.group_sizes))
        what = f"{len(odd)} modules have scales for groups of {sizes}, config.json states {stated}"
        yield error("group-size", listed(t.module for t in odd), what, "export it again")


def _fits(size: int, columns: int, scheme: Scheme) -> bool:
    return size in scheme.group_sizes or (size == columns and -1 in scheme.group_sizes)


def _by_row(weights: object) -> bool:
    return isinstance(weights, Mapping) and weights.get("strategy") == "channel"


def _strings(value: object) -> tuple[str, ...]:
    """The strings of a list, () of anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(v for v in value if isinstance(v, str))


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sequence) and not isinstance(value, str) else -1
