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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
