"""What evaluation.json says, and whether it speaks of this build."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.hub import COMMIT, SHA256
from ..checkpoint.manifest import FileRecord
from .build import VERSION, Build, is_weights
from .fields import FieldError, Fields
from .files import EVALUATION_FORMAT


@dataclass(frozen=True)
class Conventions:
    """How it was measured, as docs/evaluate.md names it; None for a part that did not run."""

    text: str
    text_sha256: str
    text_revision: str | None
    protocol: str
    chat: bool
    windows: int
    length: int
    positions: int
    direction: str
    unit: str
    arithmetic: str
    dtype: str
    decode: str
    speed_decode: str | None
    new_tokens: int | None
    repeats: int | None
    order: str | None


@dataclass(frozen=True)
class Divergence:
    """KL(reference || build) over all positions, in nats; perplexities of both."""

    mean: float
    standard_error: float
    median: float
    p99: float
    max: float
    same_top: float
    same_top_se: float
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_se: float


@dataclass(frozen=True)
class Greedy:
    """Tokens before the first one that is not the reference's; the floor is the reference's own."""

    tokens: int
    equal_before: int
    floor_equal_before: int


@dataclass(frozen=True)
class Speed:
    """Decoding at one batch size, in tokens/s of all rows together."""

    batch: int
    median: float
    lowest: float
    highest: float
    prefill_ms: float
    ttft_ms: float
    ratio: float | None
    reference: float | None


@dataclass(frozen=True)
class Evaluation:
    """The figures of one evaluation; a part that did not run is None or empty."""

    version: str
    platform: str
    device: str
    devices: int
    cpu: str | None
    jax: str
    conventions: Conventions
    divergence: Divergence | None
    greedy: Greedy | None
    speed: tuple[Speed, ...]


def read_evaluation(report: Mapping[str, Any], build: Build) -> Evaluation:
    """The figures of an evaluation that read the weight files of `build` and of its source.

    Raises `FieldError` for one of another build or of several, and for a damaged one.
    """
    fields = Fields(report)
    if fields.text("format") != EVALUATION_FORMAT:
        raise FieldError(f"format is not {EVALUATION_FORMAT}")
    builds = fields["builds"].items()
    if len(builds) != 1:
        raise FieldError(f"it speaks of {len(builds)} builds")
    (ours,) = builds
    _check_files(ours, build.files, "build")
    _check_files(fields["reference"], build.source_files, "source")
    _check_repeatable(fields["reference_results"])
    machine = fields["machine"]
    return Evaluation(
        version=fields["tool"].text("version", VERSION),
        platform=machine.text("platform"),
        device=machine.text("device"),
        devices=machine.integer("count"),
        cpu=machine.text_or_none("cpu"),
        jax=machine.text("jax", VERSION),
        conventions=_conventions(fields["conventions"]),
        divergence=_divergence(ours["divergence"]) if ours.has("divergence") else None,
        greedy=_greedy(ours["greedy"]) if ours.has("greedy") else None,
        speed=_speeds(ours["speed"], fields["reference_results"]),
    )


def _check_files(fields: Fields, records: Sequence[FileRecord], side: str) -> None:
    """Raise `FieldError` unless the weight files read are those that the manifest records."""
    if not fields.has("sha256"):
        raise FieldError(f"it names no sha256 of the {side}'s files (run it with its kl part)")
    read = {n: h for n, h in fields.mapping("sha256").items() if is_weights(n)}
    recorded = {r.name: r.sha256 for r in records if is_weights(r.name)}
    if None in recorded.values():
        raise FieldError(f"the manifest records no sha256 of the {side}'s files to hold it against")
    if not read or not read.items() <= recorded.items():
        raise FieldError(f"it read other files of the {side} than the manifest records")


def _check_repeatable(reference: Fields) -> None:
    """Raise `FieldError` where the reference differed from a second run of itself."""
    if reference.has("self_check") and (most := reference["self_check"].number("max")) > 0:
        raise FieldError(f"the reference differs from itself by up to {most:.3g} nats (self_check)")


def _conventions(fields: Fields) -> Conventions:
    text = fields["text"]
    return Conventions(
        text=text.text("name"),
        text_sha256=text.text("sha256", SHA256),
        text_revision=text.text_or_none("revision", COMMIT),
        protocol=fields.text("protocol"),
        chat=fields.flag("chat"),
        windows=fields.integer("windows"),
        length=fields.integer("length"),
        positions=fields.integer("positions"),
        direction=fields.text("direction"),
        unit=fields.text("unit"),
        arithmetic=fields.text("arithmetic"),
        dtype=fields.text("dtype"),
        decode=fields.text("fidelity_decode"),
        speed_decode=fields.text_or_none("speed_decode"),
        new_tokens=fields.integer_or_none("new_tokens"),
        repeats=fields.integer_or_none("repeats"),
        order=fields.text_or_none("order"),
    )


def _divergence(fields: Fields) -> Divergence:
    most = {"same_top": 1.0}
    return Divergence(
        **{
            name: fields.number(name, most=most.get(name, math.inf))
            for name in Divergence.__dataclass_fields__
        }
    )


def _greedy(fields: Fields) -> Greedy:
    tokens = fields.integer("tokens")
    floor = fields["floor"].part("equal_before", tokens)
    return Greedy(tokens, fields.part("equal_before", tokens), floor)


def _speeds(fields: Fields, reference: Fields) -> tuple[Speed, ...]:
    theirs = {
        item.integer("batch"): item["tokens_per_second"].number("median")
        for item in (reference["speed"].items() if reference.has("speed") else ())
    }
    return tuple(
        Speed(
            batch=item.integer("batch"),
            median=item["tokens_per_second"].number("median"),
            lowest=item["tokens_per_second"].number("min"),
            highest=item["tokens_per_second"].number("max"),
            prefill_ms=item.number("prefill_ms"),
            ttft_ms=item.number("ttft_ms"),
            ratio=item.number_or_none("ratio"),
            reference=theirs.get(item.integer("batch")),
        )
        for item in fields.items()
    )
