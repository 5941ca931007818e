"""The measuring of builds and their reference: what runs in which order, alone on the device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..checkpoint.errors import ModelError
from ..checkpoint.progress import Progress
from ..checkpoint.source import Source
from ..verify import job as verification
from ..verify.report import Report
from . import fidelity, greedy, origin, speed
from .devices import cache_home, pick_mesh
from .divergence import Positions
from .gemma4.linear import Path as Decode
from .gemma4.load import Model
from .greedy import Answer
from .heads import load_heads
from .speed import Visit
from .states import Store, open_store
from .subjects import Subject, check_decodable, hash_files, on_device, open_subject, room
from .texts import Text, embedded_text
from .tokens import Vocabulary, check_ids, check_positions, open_vocabulary
from .windows import Protocol, Windows, check_length, cut

T = TypeVar("T")
PARTS = ("grid", "kl", "greedy", "speed")
PROMPT = "The history of the Roman Empire"
HEADS_ADVICE = "evaluate one build at a time, leave out --dtype, or take a device with more memory"
# A label, how many of what: the bar's step function, for as long as it is shown.
Bars = Callable[[str, int, str], AbstractContextManager[Progress]]


@contextmanager
def no_bars(_label: str, _total: int, _unit: str) -> Iterator[Progress]:
    """Progress that nobody sees."""
    yield lambda _: None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how.

    - `parts`: of `PARTS`. Without `grid` a few rows are compared all the same: builds of another
      reference are refused, unless `force`.
    - `text`, `protocol`: what is scored; by default the embedded text, 8 windows of 512.
    - `dtype`: of activations and dense weights; None as stored. In float32 the divergence is that
      of the weights alone, without the rounding of bfloat16 activations.
    - `decode`: of the speed part; the others take `exact`.
    - `prompt`, `tokens`: what is continued, and by how many tokens.
    - `batches`, `repeats`: of the timed runs.
    - `mesh`: devices to spread each model over; None for one, or all where one has no room.
    - `cache`: where hidden states are kept; by default $QATPACK_CACHE or ~/.cache/qatpack.
    """

    parts: tuple[str, ...] = PARTS
    text: Text = field(default_factory=embedded_text)
    protocol: Protocol = field(default_factory=Protocol)
    dtype: str | None = None
    decode: Decode = "fast"
    prompt: str = PROMPT
    tokens: int = 128
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    mesh: int | None = None
    cache: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class Exact:
    """What one model left behind when it ran with the `exact` decode."""

    weight_bytes: int | None = None
    answer: Answer | None = None
    """Of the reference."""
    ids: tuple[int, ...] = ()
    """Of a build."""
    repeated: bool = False
    """Whether this is the reference and its second run of a window was done now."""


@dataclass(frozen=True)
class Divergence:
    """`builds`: position by position; `itself`: the reference against a second run, `recorded`
    where an earlier evaluation made that run."""

    builds: tuple[Positions, ...]
    itself: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The measuring parts, over the same models (the reference first), windows and prompt."""

    subjects: tuple[Subject, ...]
    vocabulary: Vocabulary
    windows: Windows
    prompt: tuple[int, ...]
    options: Options
    bars: Bars
    devices: int

    def verify(self) -> list[Report]:
        """Hold every build against the reference's values; refuse one that stems from another."""
        reference = self.subjects[0]
        opened = verification.open_reference(reference.source)
        sample = None if "grid" in self.options.parts else 1
        chosen = verification.Options(conformance=False, sample=sample)
        reports: list[Report] = []
        for subject in self.subjects[1:]:
            total = verification.work_bytes(subject.source, opened, chosen)
            with self.bars(f"{subject.name}: comparing", total, "B") as step:
                report = verification.verify(
                    subject.source, opened, chosen, name=subject.name, progress=step
                )
            if not self.options.force:
                for fault in self.faults(report):
                    raise ModelError(f"{fault}, or --force")
            reports.append(report)
        return reports

    def faults(self, report: Report) -> Iterator[str]:
        """Why a build is not measured unless forced."""
        reference = self.subjects[0]
        return origin.faults(
            report, reference.name, reference.checkpoint, lambda: self.reference_sha256
        )

    @functools.cached_property
    def reference_sha256(self) -> dict[str, str]:
        """Of the reference's files, by name."""
        return self._hash(self.subjects[0])

    @functools.cached_property
    def sha256(self) -> tuple[dict[str, str], ...]:
        """Of each model's files, by name."""
        return (self.reference_sha256, *map(self._hash, self.subjects[1:]))

    def _hash(self, subject: Subject) -> dict[str, str]:
        with self.bars(f"{subject.name}: hashing", subject.disk_bytes, "B") as step:
            return hash_files(subject, step)

    @functools.cached_property
    def stores(self) -> tuple[Store, ...]:
        """Where each model's hidden states are kept."""
        home = (self.options.cache or cache_home()) / "hidden"
        return tuple(
            open_store(home, sha256, dtype=self.dtype_of(subject), devices=self.devices)
            for subject, sha256 in zip(self.subjects, self.sha256, strict=True)
        )

    def run_exact(self) -> list[Exact]:
        """Hidden states into the stores, and greedy answers; models with nothing to do are not
        loaded."""
        found: list[Exact] = []
        for index, subject in enumerate(self.subjects):
            wanted: list[tuple[int, str]] = []
            if "kl" in self.options.parts:
                wanted = fidelity.missing(self.stores[index], self.windows, again=index == 0)
            if not wanted and "greedy" not in self.options.parts:
                found.append(Exact())
                continue
            if "kl" in self.options.parts and index == 0 and fidelity.SECOND not in wanted:
                wanted.append(fidelity.SECOND)  # a kept one would say nothing of today
            work = functools.partial(self._work_exact, index, wanted)
            found.append(self._load(subject, "exact", work))
        return found

    def _work_exact(
        self, index: int, wanted: list[tuple[int, str]], model: Model, _: float
    ) -> Exact:
        name, tokens = self.subjects[index].name, self.options.tokens
        if wanted:
            with self.bars(f"{name}: windows", len(wanted), "window") as step:
                fidelity.fill(model, self.stores[index], self.windows, wanted, step)
        repeated = fidelity.SECOND in wanted
        if "greedy" not in self.options.parts:
            return Exact(model.nbytes, repeated=repeated)
        with self.bars(f"{name}: greedy", tokens if index else 2 * tokens, "token") as step:
            if index == 0:
                said = greedy.answer(model, self.prompt, tokens=tokens, step=step)
                return Exact(model.nbytes, said, repeated=repeated)
            ids = greedy.continue_greedily(model, self.prompt, tokens=tokens, step=step)
            return Exact(model.nbytes, ids=ids)

    def diverge(self, exact: Sequence[Exact]) -> Divergence | None:
        """The divergence of each build, and that of the reference from itself, after
        `run_exact`."""
        if "kl" not in self.options.parts:
            return None
        names = [s.name for s in self.subjects]
        with room("the heads", HEADS_ADVICE):
            heads = load_heads(
                [(s.source.folder, s.config, self.dtype_of(s)) for s in self.subjects]
            )
            itself = fidelity.check_itself(names[0], heads[0], self.stores[0], self.windows)
            with self.bars("divergence", len(self.windows.tokens), "window") as step:
                builds = fidelity.compare(names, heads, self.stores, self.windows, step)
        return Divergence(tuple(builds), {**itself, "recorded": not exact[0].repeated})

    def time_all(self) -> list[list[Visit]]:
        """The visits of each model, in the order A B B A: a machine that grows slower or faster
        meanwhile does so for all alike."""
        found: list[list[Visit]] = [[] for _ in self.subjects]
        if "speed" not in self.options.parts:
            return found
        there = range(len(self.subjects))
        for index, same in itertools.groupby((*there, *reversed(there))):
            repeats = self.options.repeats * len(list(same))
            work = functools.partial(self._work_fast, index, repeats)
            found[index].append(self._load(self.subjects[index], self.options.decode, work))
        return found

    def _work_fast(self, index: int, repeats: int, model: Model, load_s: float) -> Visit:
        batches, name = self.options.batches, self.subjects[index].name
        with self.bars(f"{name}: speed", repeats * len(batches), "run") as step:
            return speed.visit(
                model, load_s, self.prompt,
                batches=batches, tokens=self.options.tokens, repeats=repeats, step=step,
            )  # fmt: skip

    def dtype_of(self, subject: Subject) -> np.dtype[Any]:
        """Of a model's activations."""
        return np.dtype(self.options.dtype or subject.dtype)

    def _load(self, subject: Subject, decode: Decode, work: Callable[[Model, float], T]) -> T:
        with self.bars(f"{subject.name}: loading", subject.checkpoint.tensor_bytes, "B") as step:
            return on_device(
                subject,
                decode,
                work,
                dtype=self.options.dtype,
                mesh=self.options.mesh,
                progress=step,
            )


def prepare(
    reference: Source, builds: Sequence[tuple[str, Source]], options: Options, bars: Bars
) -> Job:
    """Everything that can be refused before a weight is read."""
    name = reference.id or reference.folder.resolve().name
    subjects = [open_subject(name, reference)]
    for build_name, source in builds:
        subjects.append(open_subject(build_name, source))
        check_decodable(subjects[-1])
    vocabulary = open_vocabulary(reference.folder)
    config = subjects[0].checkpoint.config
    check_length(options.protocol, config, name)
    windows = cut(options.text, vocabulary, options.protocol)
    prompt = tuple(vocabulary.encode(options.prompt))
    check_ids((*windows.tokens.flat, *prompt), subjects[0].config.vocab, reference.folder)
    if not {"greedy", "speed"}.isdisjoint(options.parts):
        check_positions(len(prompt), options.tokens, config, name)
    mesh = pick_mesh(subjects[0].checkpoint.tensor_bytes, options.mesh)
    return Job(
        subjects=tuple(subjects),
        vocabulary=vocabulary,
        windows=windows,
        prompt=prompt,
        options=options,
        bars=bars,
        devices=mesh.size if mesh is not None else 1,
    )
