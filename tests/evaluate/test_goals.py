"""What `qatpack demo` shows on the embedded checkpoint: the figures that the tool promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"


@pytest.fixture(scope="session")
def builds(demo_run: Any) -> dict[str, dict[str, Any]]:
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


def test_the_perplexity_is_transformers(demo_run: Any) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    text = (DEMO.parents[1] / "evaluate" / "text.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = torch.tensor([[2, *ids[i : i + 511]] for i in range(0, 8 * 511, 511)])
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    found = demo_run.value["reference_results"]["perplexity"]
    assert np.isclose(found, loss.exp().item(), rtol=1e-4)
