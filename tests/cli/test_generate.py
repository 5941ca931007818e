"""`qatpack generate` on the embedded checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from click.testing import CliRunner, Result

from qatpack.cli.generate import generate

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
PROMPT = "The function returns a list of"


@pytest.fixture(autouse=True)
def compile_cache_off_again() -> object:
    yield
    jax.config.update("jax_compilation_cache_dir", None)


def invoke(tmp_path: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(
        generate, [str(DEMO), PROMPT, "--cache-dir", str(tmp_path / "xla"), *arguments]
    )
    assert result.exit_code == 0, result.output
    return result


def test_text_on_stdout_figures_on_stderr_and_json_alone(tmp_path: Path) -> None:
    plain = invoke(tmp_path, "--max-tokens", "24")
    assert "tokens/s" in plain.stderr
    assert "prefill" in plain.stderr
    assert plain.stdout.strip()
    assert "tokens/s" not in plain.stdout
    value = json.loads(invoke(tmp_path, "--max-tokens", "24", "--json").stdout)
    assert value["text"].strip() == plain.stdout.strip()
    assert value["prompt_ids"][0] == 2
    assert len(value["ids"]) <= 24
    assert value["tokens_per_second"] > 0
    assert value["weight_bytes"] > 1e6


def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    def run() -> list[str]:
        jax.clear_caches()
        events: list[str] = []
        jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
        invoke(tmp_path, "--max-tokens", "4", "--chat")
        jax.monitoring.clear_event_listeners()
        return events

    miss = "/jax/compilation_cache/cache_misses"
    assert run().count(miss) > 0
    assert run().count(miss) == 0


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    result = CliRunner().invoke(generate, [str(tmp_path), "x", "--cache-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "tokenizer.json: not found" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "nan"], "finite"),
        (["--temperature", "inf"], "finite"),
        (["--temperature", "1", "--top-p", "nan"], "finite"),
        (["--seed", "99999999999999999999"], "not in the range"),
        (["--top-k", "5"], "need a --temperature"),
    ],
)
def test_sampling_that_makes_no_sense(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(generate, [str(DEMO), PROMPT, *arguments])
    assert result.exit_code == 2
    assert said in result.stderr


def test_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    """Such a cache would take all memory of the machine."""
    result = CliRunner().invoke(
        generate, [str(DEMO), "x", "--max-tokens", "99999999", "--cache-dir", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "fewer --max-tokens" in str(result.exception)


def test_top_k_above_the_vocabulary_is_all_of_it_and_no_temperature_too_small(
    tmp_path: Path,
) -> None:
    invoke(tmp_path, "--max-tokens", "1", "--temperature", "1", "--top-k", "99999999999")
    greedy = invoke(tmp_path, "--max-tokens", "4").stdout
    assert invoke(tmp_path, "--max-tokens", "4", "--temperature", "1e-300").stdout == greedy
