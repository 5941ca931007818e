"""The documented commands exist, with their options, and every command is documented."""

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest

from qatpack.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?qatpack ((?:.*\\\n)*.*)$", re.MULTILINE)


def documented():
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for command in LINE.findall(block):
                yield page.name, command.replace("\\\n", " ").split("  #")[0]


def parse(command):
    """Parse a command line as the real one is, without running it."""
    context = main.make_context(
        "qatpack", shlex.split(command, comments=True), resilient_parsing=False
    )
    with context:
        name, sub, rest = main.resolve_command(context, context._protected_args + context.args)
        with sub.make_context(name, rest, parent=context):
            return name


@pytest.mark.parametrize(("page", "command"), list(documented()))
def test_documented_commands_parse(page, command):
    with contextlib.suppress(click.exceptions.Exit):  # --help and --version
        parse(command)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_is_documented(name):
    assert any(command.split()[0] == name for _, command in documented())


VARYING = re.compile(r"^(tokens/s|  min\.\.max|  first token)")
RATIO = re.compile(r"decodes at\s+\S+x\s+\(batch 1\)\s+the\s+speed\s+of\s+")


def session_lines(text):
    """A demo's output with what differs from machine to machine taken out: speeds, and digits of
    divergences that depend on a processor's order of additions."""
    text = text.split("\non CPU")[0]
    text = re.sub(
        r"\s+decodes at\s+\S+x\s+\(batch 1\)\s+the\s+speed\s+of\s+(the\s+)?", " decodes ", text
    )
    lines = [line for line in text.splitlines() if not VARYING.match(line)]
    return re.sub(r"-{2,}|[ \n]+", " ", re.sub(r"\d[\d.,e-]*", "#", "\n".join(lines)))


def test_the_session_in_the_readme_is_what_demo_prints(demo_run):
    (session,) = re.findall(
        r"qatpack demo --out \S+\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert session_lines(demo_run.stdout).startswith(
        session_lines(session.rstrip().removesuffix("...")).rstrip()
    )
    shown = {line.split("  ")[0]: line for line in session.splitlines()}
    for label in ("disk", "relative error", "values identical"):
        assert shown[label].split() in [line.split() for line in demo_run.stdout.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
