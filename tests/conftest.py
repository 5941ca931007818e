"""One run of `qatpack demo` for all tests that look at what it prints and leaves."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Demo:
    """Where it stands, what it printed, and its evaluation.json."""

    folder: Path
    stdout: str
    value: dict[str, Any]


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory):
    from click.testing import CliRunner

    from qatpack.cli import main

    folder = tmp_path_factory.mktemp("demo") / "demo"
    result = CliRunner().invoke(main, ["demo", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    value = json.loads((folder / "report" / "evaluation.json").read_text())
    return Demo(folder, result.stdout, value)
