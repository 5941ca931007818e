"""`qatpack card`."""

from __future__ import annotations

from pathlib import Path

import click

from .repack import hub_id
from .text import warn


@click.command()
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--repo",
    metavar="ORG/NAME",
    callback=hub_id,
    help="The Hub repository that the card's commands name; remembered in the card.",
)
@click.option(
    "--overwrite", is_flag=True, help="Write over a README.md that qatpack has not written."
)
def card(folder: Path, repo: str | None, overwrite: bool) -> None:
    """Write FOLDER's README.md from its result files.

    Figures come from repack_report.json, verify_report.json and evaluation.json only; one of
    another build, of a sample, or damaged lends none and is named on stderr. Text between the
    hand-written marks is kept.

    \b
    Example:
      qatpack card gemma-4-E2B-it-w4a16 --repo my-org/gemma-4-E2B-it-w4a16
    """
    from ..card.files import CARD_NAME, ORIGINAL_CARD_NAME
    from ..card.metadata import source_card
    from ..card.page import licence_warning, write_card
    from ..checkpoint.manifest import MANIFEST_NAME

    results = write_card(folder, repo=repo, overwrite=overwrite)
    for message in results.warnings:
        warn(message)
    if said := licence_warning(source_card(folder / ORIGINAL_CARD_NAME)):
        warn(said)
    click.echo(f"{folder / CARD_NAME} from {', '.join((MANIFEST_NAME, *results.names))}.")
