"""The report folder: evaluation.md and its plots, ready for a model card, and the figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..card.files import EVALUATION_NAME
from ..checkpoint.output import write_file, write_json
from ..checkpoint.units import escaped
from ..verify.tables import markdown
from .outputs import unwritable
from .plots import write_plots
from .table import Row, findings, notes, rows, speed_rows

FILE_NAME = "evaluation.md"
CAPTIONS = {
    "kl.png": "Divergence of each position",
    "kl_by_position.png": "Mean divergence by place in the window",
    "levels.png": "Level of the stored step on which a group's largest weight falls",
    "speed.png": "Steady decode",
}
# What Markdown could read as code, HTML, emphasis, a link or a picture.
_MARKUP = re.compile(r"[\\`<>*_\[\]]")


def write_report(evaluation: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write evaluation.md, evaluation.json and, with matplotlib, PNG plots; returns the paths.

    Takes the JSON form, so that a report can be made anew from evaluation.json. Raises
    `OutputError` where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots = write_plots(evaluation, folder)
        path = folder / FILE_NAME
        write_file(path, markdown_text(evaluation, [p.name for p in plots]).encode())
        write_json(folder / EVALUATION_NAME, evaluation)
    except OSError as error:
        raise unwritable(folder, error) from error
    return [path, folder / EVALUATION_NAME, *plots]


def markdown_text(evaluation: Mapping[str, Any], plots: list[str]) -> str:
    """The whole page; `plots` are files beside it."""
    reference = evaluation["reference"]
    commit = f" at {reference['commit']}" if reference["commit"] else ""
    pieces = [
        f"# Evaluation against {plain(reference['name'] + commit)}",
        _table(rows(evaluation, evaluation["builds"])),
        _list(findings(evaluation)),
        _list(notes(evaluation)),
        _list([f"warning: {line}" for line in evaluation["warnings"]]),
        _table(speed_rows(evaluation)) if "speed" in evaluation["parts"] else "",
        _answers(evaluation),
        "\n\n".join(f"![{CAPTIONS[name]}]({name})" for name in plots),
    ]
    return "\n\n".join(piece for piece in pieces if piece) + "\n"


def _answers(evaluation: Mapping[str, Any]) -> str:
    """What reference and builds wrote."""
    own = evaluation["reference_results"]["greedy"]
    if own is None:
        return ""
    said = [("reference", own["text"])]
    said += [(build["name"], build["greedy"]["text"]) for build in evaluation["builds"]]
    prompt = evaluation["conventions"]["prompt"]
    quoted = [f"**{plain(name)}**\n\n{_block(text)}" for name, text in said]
    return "\n\n".join([f"## Greedy answers to {plain(repr(prompt))}", *quoted])


def plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line; control characters escaped."""
    return _MARKUP.sub(r"\\\g<0>", escaped(text))


def _table(cells: Sequence[Row]) -> str:
    return markdown([tuple(map(plain, row)) for row in cells])


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {plain(line)}" for line in lines)


def _block(text: str) -> str:
    """Indented: the text may hold anything, fences too."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "
