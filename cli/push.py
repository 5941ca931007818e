"""`qatpack push`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..checkpoint.units import size
from .progress import byte_bar
from .repack import hub_id, start_jax_on_cpu
from .text import one_line, print_json, warn

if TYPE_CHECKING:
    from ..push.job import Plan, Pushed

SHOWN = 8
"""Names in a row of the table."""

_NO_BRANCH = re.compile(
    r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|^[-./]|[./]$|^@?$|^[0-9a-f]{40}$"
)
"""What git takes for no branch name, and what everybody would take for a commit."""


def _branch_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if _NO_BRANCH.search(value):
        raise click.BadParameter(f"{value!r} cannot name a branch; write main or v2.", ctx, param)
    return value


@click.command()
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path))
@click.argument("repo", metavar="ORG/NAME", callback=hub_id)
@click.option(
    "--branch",
    default="main",
    show_default=True,
    callback=_branch_name,
    help="Branch to push to; created from main if it is not there.",
)
@click.option("--pr", is_flag=True, help="Open a pull request instead of pushing to a branch.")
@click.option(
    "--public",
    is_flag=True,
    help="Make the repository public once everything has arrived, or push to one that is public; "
    "--pr changes no visibility.",
)
@click.option("--yes", is_flag=True, help="Do not ask before --public or --delete.")
@click.option(
    "--delete", is_flag=True, help="Remove files in the repository that the build does not have."
)
@click.option(
    "--no-hash", is_flag=True, help="Do not hold the files against the manifest's sha256."
)
@click.option("--dry-run", is_flag=True, help="Check everything, print what would change, stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan and the result as JSON.")
def push(
    folder: Path,
    repo: str,
    branch: str,
    pr: bool,
    public: bool,
    yes: bool,
    delete: bool,
    no_hash: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Push a finished FOLDER to the Hub repository ORG/NAME.

    First checks the folder (every file of the manifest with its hash, what readers demand), the
    token's rights and the repository. Only the manifest's files, the card and the result files it
    shows are sent, in one commit; then the Hub's listing is read back and compared. A repository
    that is not there is created, private without --public. After an interruption run it again:
    what has arrived is not sent twice.

    \b
    Example:
      qatpack push gemma-4-E2B-it-w4a16 my-org/gemma-4-E2B-it-w4a16 --dry-run
    """
    if pr and branch != "main":
        raise click.UsageError("--pr opens a pull request on main; leave out --branch.")
    start_jax_on_cpu()
    from ..card.results import read_results
    from ..push.folder import recorded
    from ..push.job import Options, plan_push
    from ..push.job import push as run

    options = Options(branch=branch, pr=pr, public=public, delete=delete, hash_files=not no_hash)
    _quiet_bars()
    total = 0 if no_hash else sum(r.size for r in recorded(read_results(folder).build))
    with byte_bar("sha256", total) as progress:
        plan = plan_push(folder, repo, options, progress=progress, tell=warn)
    for message in plan.payload.warnings:
        warn(message)
    if not as_json:
        _print_plan(plan)
    if dry_run:
        if as_json:
            print_json({**plan.to_json(), "pushed": None})
        else:
            click.echo("\nNothing was changed.")
        return
    _confirm(plan, yes)
    pushed = run(plan, tell=warn)
    print_json({**plan.to_json(), "pushed": pushed.to_json()}) if as_json else _print(plan, pushed)


def _quiet_bars() -> None:
    """The client's bars only where somebody watches."""
    from huggingface_hub.utils import disable_progress_bars

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()


def _print_plan(plan: Plan) -> None:
    there, payload, changes = plan.there, plan.payload, plan.changes
    visibility = "private" if plan.private else "public"
    rows = [
        ("repository", f"{plan.endpoint}/{there.id}"),
        ("", visibility if there.exists else f"will be created, {visibility}"),
        ("branch", "a pull request on main" if plan.options.pr else _branch(plan)),
        ("account", plan.account.name),
        ("files", f"{len(payload.files)}, {size(payload.bytes)}"),
        ("hashes", _hashes(plan)),
        ("new", _named(changes.new)),
        ("changed", _named(changes.changed)),
        ("unchanged", str(len(changes.unchanged))),
        ("deleted", _named(changes.deleted)),
        ("kept there", _named(changes.kept)),
        ("stays here", _named(payload.left)),
        ("to send", f"at most {size(plan.sent_bytes)}"),
    ]
    for label, text in rows:
        click.echo(f"{label:<10}  {one_line(text)}")


def _branch(plan: Plan) -> str:
    new = "" if plan.there.has_branch or not plan.there.exists else " (new)"
    return f"{plan.there.branch}{new}"


def _hashes(plan: Plan) -> str:
    payload = plan.payload
    if payload.hashed is None:
        return "skipped (--no-hash)"
    missing = f", {payload.unrecorded} not recorded" if payload.unrecorded else ""
    return f"{payload.hashed} as in the manifest{missing}"


def _named(names: tuple[str, ...]) -> str:
    if not names:
        return "0"
    rest = len(names) - SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"{len(names)}: {', '.join(names[:SHOWN])}{more}"


def _confirm(plan: Plan, yes: bool) -> None:
    """Ask before what cannot be taken back quietly."""
    there, doomed = plan.there, plan.changes.deleted
    questions = []
    if plan.publishes:
        questions.append(f"Make {there.id} public?")
    elif plan.options.public and there.private is False:
        questions.append(f"Push to {there.id}, which is public?")
    if doomed:
        questions.append(f"Delete {len(doomed)} files of {there.id}?")
    for question in () if yes else questions:
        try:
            agreed = click.confirm(question, err=True)
        except click.Abort:  # no answer, and no end of the line either
            click.echo(err=True)
            agreed = False
        if not agreed:
            raise click.ClickException("not confirmed, nothing was changed; scripts pass --yes.")


def _print(plan: Plan, pushed: Pushed) -> None:
    there, count = plan.there, len(plan.payload.files)
    if not pushed.sent:
        click.echo(f"\nNothing to push: {there.id} already holds these {count} files.")
    else:
        click.echo(f"\nPushed, and read back: {count} files with their sizes and hashes.")
    visibility = "private" if pushed.private else "public"
    click.echo(f"{pushed.pr_url or pushed.url} ({visibility})")
    click.echo(f"Next: qatpack verify {there.id}@{pushed.commit}")
