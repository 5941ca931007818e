"""The result files of a folder: which of them may lend the card their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import read_json
from ..checkpoint.hashing import hash_file
from ..checkpoint.manifest import MANIFEST_NAME, read_manifest
from .build import Build, read_build
from .evaluation import Evaluation, read_evaluation
from .fields import FieldError
from .files import EVALUATION_NAME, VERIFY_NAME, check_own, plot_names
from .verification import Verification, read_verification

T = TypeVar("T")


@dataclass(frozen=True)
class Results:
    """Everything a card may say of a build.

    `plots` are only shown beside a verification or an evaluation of this build. `warnings` say
    which file lends nothing, and why.
    """

    build: Build
    verification: Verification | None = None
    evaluation: Evaluation | None = None
    plots: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The files beside the manifest's that the card draws on, as paths in the folder."""
        shown = ((VERIFY_NAME, self.verification), (EVALUATION_NAME, self.evaluation))
        return (*(name for name, found in shown if found is not None), *self.plots)


def read_results(folder: Path) -> Results:
    """Read the manifest and what was measured later.

    A result file of another build, of part of one, or a damaged one lends no figures: `warnings`
    names it. Raises `CheckpointError` where the folder or its manifest is missing or damaged, and
    for a file that is a link.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; name one that repack finished.")
    build = read_build(read_manifest(folder))
    for name in (MANIFEST_NAME, VERIFY_NAME, EVALUATION_NAME):
        check_own(folder, name)
    digest = hash_file(folder / MANIFEST_NAME)
    warnings: list[str] = []
    verification = _read(
        folder / VERIFY_NAME,
        lambda report: read_verification(report, build, digest),
        "`qatpack verify FOLDER --reference SRC --write`",
        warnings,
    )
    evaluation = _read(
        folder / EVALUATION_NAME,
        lambda report: read_evaluation(report, build),
        "`qatpack evaluate FOLDER --reference SRC --write`",
        warnings,
    )
    plots = plot_names(folder)
    if plots and verification is None and evaluation is None:
        warnings.append("plots: left out, no result file of this build stands beside them.")
        plots = ()
    return Results(build, verification, evaluation, plots, tuple(warnings))


def _read(
    path: Path, parse: Callable[[Mapping[str, Any]], T], command: str, warnings: list[str]
) -> T | None:
    if not path.exists():
        return None
    try:
        return parse(read_json(path))
    except (CheckpointError, FieldError) as error:
        said = str(error).removeprefix(f"{path}: ").rstrip(".")
        warnings.append(f"{path.name}: left out of the card: {said}; make it anew with {command}.")
        return None
