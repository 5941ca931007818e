"""Whole evaluations of a model of two layers: what comes out, in which order, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_builds import FAST

from qatpack.checkpoint.errors import CheckpointError, ModelError
from qatpack.checkpoint.manifest import MANIFEST_NAME
from qatpack.checkpoint.source import resolve_source
from qatpack.evaluate import origin, subjects
from qatpack.evaluate import run as run_module
from qatpack.evaluate.evaluation import Caution, Evaluation, write_evaluations
from qatpack.evaluate.gemma4.load import load
from qatpack.evaluate.job import HEADS_ADVICE, Options, no_bars, prepare
from qatpack.evaluate.run import evaluate
from qatpack.evaluate.states import AGAIN
from qatpack.evaluate.table import notes
from qatpack.verify.report import Report

KL = {**FAST, "parts": ("kl",)}
Edited = Callable[..., Path]


def run(reference: Path, *folders: Path, **options: Any) -> Evaluation:
    named = [(folder.name, resolve_source(folder)) for folder in folders]
    return evaluate(resolve_source(reference), named, Options(**options))


def test_the_parts_agree_with_each_other(evaluation: Evaluation) -> None:
    assert evaluation.repeatable
    far, near = evaluation.builds
    assert far.divergence is not None
    assert near.divergence is not None
    assert 0 < near.divergence["mean"] < far.divergence["mean"] < 1
    assert near.divergence["positions"] == 2 * 32
    for outcome in evaluation.builds:
        said = outcome.greedy
        assert said is not None
        assert said["tokens"] == len(said["ids"]) == FAST["tokens"]
        assert (said["margin"] is None) == (said["first_difference"] is None)
        assert said["equal_before"] <= said["equal"] <= said["tokens"]
        assert said["reference_text"] == (evaluation.reference.greedy or {})["text"]
    assert near.grid is not None
    assert near.grid["verdict"]["kind"] == "trained grid"


def test_the_json_says_how_it_was_measured_and_nothing_of_this_disk(
    evaluation: Evaluation, small: Path
) -> None:
    value = evaluation.to_json()
    text = json.dumps(value, allow_nan=False)
    assert str(small.parent) not in text
    assert value["format"] == "qatpack.evaluation/1"
    used = value["conventions"]
    assert used["positions"] == 2 * 32
    assert used["targets"] == 2 * 31
    assert used["first_ids"][0] == used["bos"] == 2
    assert used["order"] == "A B C C B A"
    assert used["dtype"] == "bfloat16"
    assert value["machine"]["platform"] == "cpu"
    assert value["machine"]["bandwidth"] is None
    assert set(value["reference"]["sha256"]) == {"config.json", "model.safetensors"}
    (pair,) = value["comparisons"]
    assert (pair["a"], pair["b"]) == ("rerounded", "bfloat16")
    assert pair["b_closer"] > 0.9
    assert 0 < pair["mean_ratio"] < 0.5
    only = evaluation.to_json(only="bfloat16")
    assert [b["name"] for b in only["builds"]] == ["bfloat16"]
    assert only["comparisons"] == []
    said = (Caution("of all"), Caution("of one", "bfloat16"), Caution("of another", "rerounded"))
    warned = replace(evaluation, cautions=said)
    assert warned.to_json(only="bfloat16")["warnings"] == ["of all", "of one"]
    assert warned.to_json()["warnings"] == warned.warnings == [c.text for c in said]


def test_speed_is_measured_there_and_back(evaluation: Evaluation) -> None:
    for outcome in (evaluation.reference, *evaluation.builds):
        assert [run["batch"] for run in outcome.speed] == [1]
        for run in outcome.speed:
            rate = run["tokens_per_second"]
            assert run["repeats"] == 2 * FAST["repeats"]
            assert run["steps"] == FAST["tokens"] - 1
            assert 0 < rate["min"] <= rate["median"] <= rate["max"]
            assert 0 < run["prefill_ms"] <= run["ttft_ms"]
            assert run["bandwidth_share"] is None
    assert evaluation.reference.speed[0]["ratio"] is None
    assert evaluation.builds[0].speed[0]["ratio"] > 0


def test_kept_states_serve_again_and_a_new_build_runs_alone(
    evaluation: Evaluation,
    small: Path,
    builds: dict[str, Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[str] = []

    def recorded(folder: Path, **options: Any) -> Any:
        loads.append(folder.name)
        return load(folder, **options)

    monkeypatch.setattr(subjects, "load", recorded)
    again = run(small, builds["bfloat16"], **KL, cache=cache)
    assert loads == []
    assert evaluation.self_check is not None
    assert again.self_check == {**evaluation.self_check, "recorded": True}
    assert not evaluation.self_check["recorded"]
    assert any("as recorded by" in line for line in notes(again.to_json()))
    assert again.builds[0].divergence == evaluation.builds[1].divergence
    new = run(small, builds["float32"], **KL, cache=cache)
    assert loads == ["float32"]
    exact = new.builds[0].divergence
    assert exact is not None
    assert exact["mean"] == exact["max"] == 0  # identical weights
    assert exact["same_top"] == exact["perplexity_ratio"] == 1
    assert new.builds[0].grid is None
    assert new.reference.greedy is None


def test_one_model_on_the_device_at_a_time(
    small: Path, builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    before, held, sizes = live(), [], []
    visits: list[str] = []

    def recorded(folder: Path, **options: Any) -> Any:
        held.append(live() - before)
        model = load(folder, **options)
        sizes.append(model.nbytes)
        visits.append(folder.name)
        return model

    monkeypatch.setattr(subjects, "load", recorded)
    parts = ("kl", "greedy", "speed")
    run(small, builds["bfloat16"], **{**FAST, "parts": parts}, cache=tmp_path)
    assert visits[:2] == ["reference", "bfloat16"]  # exact
    # The speed part, A B B A: the two visits of B are one stay.
    assert visits[2:] == ["reference", "bfloat16", "reference"]
    assert max(held) < 0.02 * min(sizes)
    assert live() - before < 0.02 * min(sizes)


def test_a_reference_that_does_not_repeat_itself_is_told(
    small: Path, builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qatpack.evaluate.states import Store

    write = Store.write

    def noisy(store: Store, tokens: np.ndarray, states: np.ndarray, tag: str = "") -> None:
        write(store, tokens, states * states.dtype.type(1.5) if tag == AGAIN else states, tag)

    monkeypatch.setattr(Store, "write", noisy)
    found = run(small, builds["float32"], **KL, cache=tmp_path)
    assert not found.repeatable
    assert found.self_check is not None
    assert found.self_check["max"] > 0
    assert any("second run of itself" in said for said in found.warnings)


def test_a_high_perplexity_is_told(
    small: Path, builds: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "PERPLEXED", 10)
    found = run(small, builds["float32"], **KL, cache=cache)
    assert any("--chat" in said for said in found.warnings)


def test_another_reference_is_refused_unless_forced(
    small: Path, edited: Edited, tmp_path: Path
) -> None:
    def move(arrays: dict[str, np.ndarray]) -> None:
        arrays["model.language_model.norm.weight"] *= 2

    other = edited("bfloat16", move)
    options = {**KL, "cache": tmp_path}
    with pytest.raises(ModelError, match=r"no build of reference: 1 of \d+ copied .*--force"):
        run(small, other, **options)
    found = run(small, other, **options, force=True)
    assert any("copied tensors differ" in said for said in found.warnings)


SPEED = {**FAST, "parts": ("speed",), "tokens": 2}
DOWN = "model.language_model.layers.1.mlp.down_proj"


def checked(
    small: Path, folder: Path, **options: Any
) -> tuple[list[Report], Callable[[Report], Any]]:
    """What `Job.verify` says before anything is loaded."""
    job = prepare(
        resolve_source(small), [("it", resolve_source(folder))], Options(**options), no_bars
    )
    return job.verify(), lambda report: list(job.faults(report))


def test_a_record_of_another_source_is_refused_without_the_grid(
    small: Path, builds: dict[str, Path], edited: Edited
) -> None:
    other = edited("bfloat16")
    path = other / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    (record,) = (f for f in manifest["source"]["files"] if f["name"] == "model.safetensors")
    record["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    said = r"it: is no build of reference: its repack_report.json names another sha256 of model"
    with pytest.raises(ModelError, match=rf"{said}.*--force"):
        checked(small, other, **SPEED)
    (report,), faults = checked(small, other, **SPEED, force=True)
    assert len(faults(report)) == 1
    for name in ("bfloat16", "rerounded"):
        (report,), faults = checked(small, builds[name], **SPEED)
        assert faults(report) == []
        assert origin.doubt(report) is None


def test_a_sampled_verdict_that_is_not_good_is_told(small: Path, edited: Edited) -> None:
    def move(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"{DOWN}.weight_packed"][:] ^= 0x1

    folder = edited("bfloat16", move)
    (report,), _ = checked(small, folder, **SPEED)
    assert (origin.doubt(report) or "").startswith("it: ")
    (folder / MANIFEST_NAME).unlink()  # then it may be anybody's, rounded anew
    assert origin.doubt(report) is None


def test_scales_that_are_not_finite_are_refused_unless_forced(small: Path, edited: Edited) -> None:
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"{DOWN}.weight_scale"][-1, -1] = np.nan

    broken = edited("bfloat16", spoil)
    for parts in (("grid",), ("greedy",)):
        options = {**FAST, "parts": parts}
        with pytest.raises(ModelError, match=r"cannot be measured: 1 scales are NaN.*--force"):
            checked(small, broken, **options)
        (report,), faults = checked(small, broken, **options, force=True)
        assert "scales are NaN" in faults(report)[0]


def test_builds_that_mean_something_else_by_their_weights(
    small: Path, edited: Edited, tmp_path: Path
) -> None:
    module = "model.language_model.layers.0.mlp.up_proj"

    def shift(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"{module}.weight_zero_point"] = np.zeros((1, 1), np.int8)

    def wider(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8

    with pytest.raises(ModelError, match=r"cannot be run: .*up_proj has a weight_zero_point"):
        run(small, edited("bfloat16", shift), **KL, cache=tmp_path)
    with pytest.raises(ModelError, match="cannot be run: its config group group_0 has num_bits 8"):
        run(small, edited("float32", config=wider), **KL, cache=tmp_path)


def test_a_build_with_a_broken_module(small: Path, edited: Edited, tmp_path: Path) -> None:
    module = "model.language_model.layers.1.mlp.down_proj"
    broken = edited("bfloat16", lambda arrays: arrays.pop(f"{module}.weight_scale"))
    with pytest.raises(ModelError, match=r"cannot be run: .*down_proj.weight_scale missing"):
        run(small, broken, **KL, cache=tmp_path)


def test_no_room_on_the_device(
    small: Path, builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, **_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 bytes")

    monkeypatch.setattr(subjects, "load", full)
    with pytest.raises(ModelError, match=r"reference: no room on the device .*--mesh"):
        run(small, builds["float32"], **KL, cache=tmp_path)


def test_no_room_for_the_heads() -> None:
    with (
        pytest.raises(ModelError, match=r"the heads: no room .*one build at a time"),
        subjects.room("the heads", HEADS_ADVICE),
    ):
        raise MemoryError


def test_other_faults_of_the_runtime_keep_their_name() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError), subjects.room("x"):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")


def test_references_that_cannot_be_used(
    small: Path, builds: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="packed"):
        run(builds["float32"], builds["float32"], **KL, cache=tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (bare / name).symlink_to(small / name)
    config = json.loads((small / "config.json").read_text())
    del config["text_config"]["bos_token_id"]
    (bare / "config.json").unlink()
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="names a BOS"):
        run(bare, builds["float32"], **KL, cache=tmp_path)


def test_each_build_gets_its_own_file(evaluation: Evaluation, builds: dict[str, Path]) -> None:
    paths = write_evaluations(evaluation)
    try:
        assert [p.parent for p in paths] == [builds["rerounded"], builds["bfloat16"]]
        value = json.loads(paths[1].read_text())
        assert value == evaluation.to_json(only="bfloat16")
    finally:
        for path in paths:
            path.unlink()
