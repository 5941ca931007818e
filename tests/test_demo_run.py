"""One run of `qatpack demo`: what it leaves and prints, and the figures that the tool promises.

All in one file, so that workers of pytest-xdist run it once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from qatpack.cli import main

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo" / "checkpoint"


@dataclass(frozen=True)
class Run:
    """Where it stands, what it printed, and its evaluation.json."""

    folder: Path
    stdout: str
    value: dict[str, Any]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    result = CliRunner().invoke(main, ["demo", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    value = json.loads((folder / "report" / "evaluation.json").read_text())
    return Run(folder, result.stdout, value)


def test_what_it_leaves_and_says(demo_run: Run) -> None:
    assert {p.name for p in demo_run.folder.iterdir()} == {
        "reference", "rerounded", "bfloat16", "float32", "cache", "report",
    }  # fmt: skip
    assert {p.name for p in (demo_run.folder / "report").iterdir()} == {
        "evaluation.md", "evaluation.json", "kl.png", "kl_by_position.png", "levels.png",
        "speed.png",
    }  # fmt: skip
    assert "rerounded: re-rounded: steps are max/7.5 in 100 % of groups" in demo_run.stdout
    assert "float32: exact: every group certified, 100 % identical" in demo_run.stdout


VARYING = re.compile(r"^(tokens/s|  min\.\.max|  first token)")


def session_lines(text: str) -> str:
    """A demo's output with what differs from machine to machine taken out: speeds, and digits of
    divergences that depend on a processor's order of additions."""
    text = text.split("\non CPU")[0]
    text = re.sub(
        r"\s+decodes at\s+\S+x\s+\(batch 1\)\s+the\s+speed\s+of\s+(the\s+)?", " decodes ", text
    )
    lines = [line for line in text.splitlines() if not VARYING.match(line)]
    return re.sub(r"-{2,}|[ \n]+", " ", re.sub(r"\d[\d.,e-]*", "#", "\n".join(lines)))


def test_the_session_in_the_readme_is_what_demo_prints(demo_run: Run) -> None:
    (session,) = re.findall(
        r"qatpack demo --out \S+\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert session_lines(demo_run.stdout).startswith(
        session_lines(session.rstrip().removesuffix("...")).rstrip()
    )
    shown = {line.split("  ")[0]: line for line in session.splitlines()}
    for label in ("disk", "relative error", "values identical"):
        assert shown[label].split() in [line.split() for line in demo_run.stdout.splitlines()]


@pytest.fixture(scope="module")
def builds(demo_run: Run) -> dict[str, dict[str, Any]]:
    return {build["name"]: build for build in demo_run.value["builds"]}


def test_float32_scales_are_the_reference_to_the_last_bit(builds: dict[str, Any]) -> None:
    exact = builds["float32"]
    assert exact["divergence"]["positions"] == 8 * 512
    assert exact["divergence"]["mean"] == exact["divergence"]["max"] == 0
    assert exact["divergence"]["same_top"] == 1
    assert exact["greedy"]["equal"] == exact["greedy"]["tokens"] == 128


def test_bfloat16_scales_are_a_hundred_times_closer_than_rounding_anew(
    builds: dict[str, Any],
) -> None:
    theirs, ours = (builds[name]["divergence"] for name in ("rerounded", "bfloat16"))
    assert 0 < ours["mean"] < theirs["mean"] / 100
    assert builds["rerounded"]["greedy"]["first_difference"] is not None


def test_the_perplexity_is_transformers(demo_run: Run) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    text = (ROOT / "evaluate" / "text.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = torch.tensor([[2, *ids[i : i + 511]] for i in range(0, 8 * 511, 511)])
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    found = demo_run.value["reference_results"]["perplexity"]
    assert np.isclose(found, loss.exp().item(), rtol=1e-4)
