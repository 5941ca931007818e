"""The parts of an evaluation by themselves: stores, heads, greedy match, speed, table, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from qatpack.checkpoint.errors import OutputError
from qatpack.cli.evaluate import _write as write_files
from qatpack.cli.evaluate import evaluate as command
from qatpack.cli.text import table as aligned
from qatpack.evaluate import greedy, outputs, plots, speed
from qatpack.evaluate.evaluation import Evaluation
from qatpack.evaluate.gemma4 import model
from qatpack.evaluate.gemma4.config import read_config
from qatpack.evaluate.gemma4.load import load
from qatpack.evaluate.heads import load_heads
from qatpack.evaluate.machine import read_machine
from qatpack.evaluate.report import markdown_text, write_report
from qatpack.evaluate.speed import Run, Visit
from qatpack.evaluate.states import open_store
from qatpack.evaluate.table import ROOM, _share, columns, findings, nats, notes, tables

BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS = np.arange(5, dtype=np.int32)
forward = jax.jit(model.forward, static_argnames="config")
logits = jax.jit(model.logits, static_argnames="config")


def test_states_come_back_bit_for_bit(tmp_path: Path) -> None:
    store = open_store(tmp_path, {"model.safetensors": "ab"}, dtype=BF16, devices=1)
    states = np.random.default_rng(0).standard_normal((5, 8)).astype(BF16)
    assert store.read(TOKENS) is None
    store.write(TOKENS, states)
    found = store.read(TOKENS)
    assert found is not None
    assert found.dtype == BF16
    assert found.tobytes() == states.tobytes()
    assert store.read(TOKENS, "again") is None
    assert store.read(TOKENS + 1) is None


def test_states_of_other_weights_or_another_dtype_are_not_taken(tmp_path: Path) -> None:
    folders = {
        open_store(tmp_path, {"model.safetensors": digest}, dtype=dtype, devices=devices).folder
        for digest, dtype, devices in (
            ("ab", BF16, 1), ("cd", BF16, 1), ("ab", np.dtype("f4"), 1), ("ab", BF16, 4),
        )
    }  # fmt: skip
    assert len(folders) == 4
    assert all((folder / "key.json").exists() for folder in folders)


def zip_start(_: bytes) -> bytes:
    return b"PK\x03\x04"


def zeroed(data: bytes) -> bytes:
    return data[:-8] + bytes(8)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:-1],
        lambda data: data[32:],
        lambda _: b"PK\x03\x04",
        zeroed,
    ],
)
def test_damaged_states_are_run_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store = open_store(tmp_path, {"model.safetensors": "ab"}, dtype=BF16, devices=1)
    store.write(TOKENS, np.ones((5, 8), BF16))
    (path,) = store.folder.glob("*.states")
    path.write_bytes(damage(path.read_bytes()))
    assert store.read(TOKENS) is None


def test_states_of_another_shape_are_run_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, {"model.safetensors": "ab"}, dtype=BF16, devices=1)
    for states in (np.ones((4, 8), BF16), np.ones((5, 8), np.float32), np.ones(5, BF16)):
        store.write(TOKENS, states)
        assert store.read(TOKENS) is None


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sha256 = {"model.safetensors": "ab"}
    with pytest.raises(OutputError, match=r"file.*--cache-dir"):
        open_store(tmp_path / "file", sha256, dtype=BF16, devices=1)
    store = open_store(tmp_path, sha256, dtype=BF16, devices=1)
    store._path(TOKENS, "").mkdir()
    assert store.read(TOKENS) is None
    with pytest.raises(OutputError, match=rf"{store.folder}: .*--cache-dir"):
        store.write(TOKENS, np.ones((5, 8), BF16))


def test_a_shared_head_is_held_once_and_gives_the_models_logits(
    small: Path, builds: dict[str, Path]
) -> None:
    config = read_config(small)
    first, second = load_heads([(small, config, BF16), (builds["float32"], config, BF16)])
    assert first.weights is second.weights
    loaded = load(small)
    text = jnp.arange(14)[None]
    hidden = forward(loaded.weights, text, text, config=config)[0][0]
    found, _ = first.scores(np.asarray(hidden))
    expected = logits(loaded.weights, hidden, config=config)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


def test_the_greedy_match() -> None:
    same = greedy.match([1, 2, 3], [0.5, 0.4, 0.3], [1, 2, 3])
    assert (same.equal, same.equal_before, same.first_difference, same.margin) == (3, 3, None, None)
    parted = greedy.match([1, 2, 3, 4], [0.5, 0.4, 0.3, 0.2], [1, 9, 3, 9])
    assert (parted.equal, parted.equal_before) == (2, 1)
    assert (parted.first_difference, parted.margin) == (1, 0.4)


def test_margins_are_those_of_the_chosen_tokens(small: Path) -> None:
    loaded = load(small)
    prompt = [2, 468, 930]
    ids = greedy.continue_greedily(loaded, prompt, tokens=12, step=lambda _: None)
    margins = greedy.top_margins(loaded, prompt, ids)
    assert len(margins) == len(ids) == 12
    assert min(margins) >= 0
    text = jnp.asarray([[*prompt, *ids[:-1]]])
    hidden = forward(loaded.weights, text, jnp.arange(14)[None], config=loaded.config)[0][0]
    scores = np.asarray(logits(loaded.weights, hidden, config=loaded.config))[len(prompt) - 1 :]
    top = np.sort(scores, axis=-1)
    np.testing.assert_allclose(margins, top[:, -1] - top[:, -2], atol=0.1)
    clear = np.asarray(margins) > 0.2  # where rounding decides nothing
    assert clear.any()
    assert (scores.argmax(-1) == np.asarray(ids))[clear].all()


def test_the_bytes_of_a_step(small: Path, builds: dict[str, Path]) -> None:
    dense = load(small)
    table = dense.weights["embed_tokens_per_layer"].nbytes
    layers = dense.config.layers
    cache = sum(2 * x.kv_heads * x.head_dim * n for x, n in zip(layers, (64, 128), strict=True))
    assert speed.step_bytes(dense, 1, 128) == dense.nbytes - table + 2 * cache
    assert speed.step_bytes(dense, 4, 128) == dense.nbytes - table + 4 * 2 * cache
    packed = load(builds["bfloat16"], decode="fast")
    assert speed.step_bytes(packed, 1, 128) < 0.75 * speed.step_bytes(dense, 1, 128)


def test_the_summary_of_runs_on_a_device_of_known_bandwidth() -> None:
    from dataclasses import replace

    machine = replace(read_machine(2), bandwidth=1000.0)
    runs = [Run(0.1, 0.2, seconds, 10) for seconds in (1.0, 2.0, 4.0)]
    slow = [Visit(3.0, 50, {2: runs}, {2: 400}, 70), Visit(5.0, 50, {2: runs[:1]}, {2: 400}, 90)]
    quick = [Visit(1.0, 50, {2: [Run(0.1, 0.2, 0.5, 10)]}, {2: 400}, None)]
    (entry,) = speed.summarize(slow, machine, quick)
    assert entry["tokens_per_second"] == {"median": 15.0, "min": 5.0, "max": 20.0}
    assert (entry["repeats"], entry["steps"], entry["load_s"]) == (4, 10, 4.0)
    assert (entry["bytes_per_step"], entry["bytes_per_token"]) == (400, 200)
    assert entry["bandwidth_share"] == pytest.approx(400 * 7.5 / 2000)
    assert entry["device_bytes"] == 90
    assert entry["ratio"] == pytest.approx(15 / 40)


def test_the_table_fits_and_says_what_was_measured(evaluation: Evaluation) -> None:
    value = evaluation.to_json()
    long = [{**b, "name": "org/a-build-with-a-very-long-name-indeed"} for b in value["builds"]]
    shown = list(tables({**value, "builds": [*value["builds"], *long, long[0]]}))
    assert [len(rows[0]) for rows in shown] == [6, 3]
    assert max(map(len, aligned(shown[0]).splitlines())) <= 100
    cells = {row[0]: row[1:] for row in shown[0]}
    assert cells["mean KL, nats"][0] == "0"
    assert cells["mean KL, nats"][1] == cells["mean KL, nats"][3] != cells["mean KL, nats"][2]
    assert cells["equal greedy start"][0].endswith(" of 12")
    said = "\n".join([*notes(value), *findings(value)])
    for word in ("KL(reference || build)", "nats", "exact decode", "A B C C B A",
                 "2 windows of 32", "first ids 2 ", "jax", "12 tokens"):  # fmt: skip
        assert word in said


def test_a_share_says_100_only_where_it_is() -> None:
    shown = [_share(x) for x in (None, 0.0, 0.97391, 0.999996, 0.99992, 1.0, 1.204)]
    assert shown == ["-", "0 %", "97.39 %", "99.999 %", "99.992 %", "100 %", "120.4 %"]


def test_every_build_has_a_column_name_of_its_own() -> None:
    names = ["a/gemma-w4a16", "b/gemma-w4a16", "c/gemma-long-bf16-w4", "c/gemma-long-fp16-w4"]
    names.append("c/gemma-longer-bf16-w4")
    found = columns(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert max(map(len, found.values())) <= ROOM
    assert found["b/gemma-w4a16"] == "gemma-w4a16 2"


def test_names_of_others_are_shown_as_they_are(evaluation: Evaluation) -> None:
    odd = "x|<b>`a`\n# [y](z)\x1b[2J"
    value = evaluation.to_json()
    value["builds"][0]["name"] = value["reference"]["name"] = odd
    value["conventions"]["prompt"] = value["conventions"]["text"]["name"] = odd
    page = markdown_text({**value, "warnings": [odd]}, [])
    marked = r"x|\<b\>\`a\`\\n# \[y\](z)\\x1b\[2J"
    assert page.startswith(f"# Evaluation against {marked}")
    assert f"- warning: {marked}" in page
    assert f"| {marked.replace('|', chr(92) + '|')} |" in page
    assert f"**{marked}**" in page
    assert "<b>" not in page
    assert "\n# [" not in page
    assert "\x1b" not in aligned([("", odd)]) + page


def test_parts_that_did_not_run_are_left_out(evaluation: Evaluation) -> None:
    from dataclasses import replace

    bare = replace(
        evaluation,
        parts=("kl",),
        builds=tuple(replace(b, grid=None, greedy=None, speed=()) for b in evaluation.builds),
        reference=replace(evaluation.reference, greedy=None, speed=()),
    ).to_json()
    (rows,) = tables({**bare, "comparisons": []})
    assert not any("greedy" in row[0] or "tokens/s" in row[0] for row in rows)
    assert "Greedy" not in markdown_text(bare, [])


def test_the_report(
    evaluation: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = evaluation.to_json()
    written = write_report(value, tmp_path / "report")
    names = {path.name for path in written}
    assert names == {
        "evaluation.md", "evaluation.json", "kl.png", "kl_by_position.png", "levels.png",
        "speed.png",
    }  # fmt: skip
    page = (tmp_path / "report" / "evaluation.md").read_text()
    assert all(f"({name})" in page for name in names if name.endswith(".png"))
    assert str(tmp_path) not in page
    assert json.loads((tmp_path / "report" / "evaluation.json").read_text()) == value
    monkeypatch.setattr(plots, "has_matplotlib", lambda: False)
    assert len(write_report(value, tmp_path / "plain")) == 2


def test_nats() -> None:
    assert [nats(x) for x in (0.0, 2.5e-9, 0.000123, 0.0714, 1.5)] == [
        "0", "2.50e-09", "0.000123", "0.0714", "1.5"
    ]  # fmt: skip


@pytest.fixture
def compile_cache_off_again() -> object:
    yield
    jax.config.update("jax_compilation_cache_dir", None)


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else str(result.exception) + result.output


def test_the_command(
    small: Path,
    builds: dict[str, Path],
    cache: Path,
    tmp_path: Path,
    evaluation: Evaluation,
    compile_cache_off_again: object,
) -> None:
    options = (
        builds["rerounded"], builds["bfloat16"], "--reference", small, "--only", "kl", "--only",
        "greedy", "--windows", 2, "--length", 32, "--max-tokens", 12, "--cache-dir", cache,
    )  # fmt: skip
    text = invoke(*options, "--json", tmp_path / "all.json", "--report", tmp_path / "report")
    assert "mean KL, nats" in text
    assert "tokens/s" not in text
    value = json.loads((tmp_path / "all.json").read_text())
    assert value["builds"][0]["divergence"] == evaluation.builds[0].divergence
    assert value["parts"] == ["kl", "greedy"]
    alone = json.loads(invoke(*options, "--json", "-"))
    assert alone == value
    assert (tmp_path / "report" / "kl.png").exists()


def test_outputs_are_refused_before_the_work(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    build = tmp_path / "build"  # no checkpoint: whoever starts to work says so
    (build / "evaluation.json").mkdir(parents=True)
    for arguments, said in (
        (("--json", tmp_path), "is no plain file"),
        (("--json", tmp_path / "none" / "x.json"), "its folder is not there"),
        (("--report", blocked / "report"), "is no folder"),
        (("--write",), "evaluation.json: is no plain file"),
    ):
        text = invoke(build, "--reference", build, *arguments, code=1)
        assert said in text
    with pytest.raises(OutputError, match="cannot be written"):
        outputs.check_file(Path("/proc/x.json"))


def test_one_file_that_fails_does_not_cost_the_others(
    evaluation: Evaluation, builds: dict[str, Path], tmp_path: Path
) -> None:
    blocked = builds["rerounded"] / "evaluation.json"
    blocked.mkdir()
    written = builds["bfloat16"] / "evaluation.json"
    try:
        with pytest.raises(OutputError, match=r"all\.json: .*rerounded.*evaluation\.json: "):
            write_files(evaluation, tmp_path / "none" / "all.json", tmp_path / "report", True)
        assert json.loads(written.read_text()) == evaluation.to_json(only="bfloat16")
        assert (tmp_path / "report" / "evaluation.md").exists()
    finally:
        blocked.rmdir()
        written.unlink()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--write"], "download it to one"),
        (["--text", "x", "--dataset", "wikitext-2"], "one of --text and --dataset"),
        (["--chat", "--protocol", "llama.cpp"], "--chat belongs to"),
        (["--batch", "1,x"], "no list of batch sizes"),
        (["--batch", "0"], "no list of batch sizes"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in invoke(tmp_path / "none", "--reference", "reference", *arguments, code=2)


def test_a_text_too_short(small: Path, builds: dict[str, Path], tmp_path: Path,
                          compile_cache_off_again: object) -> None:  # fmt: skip
    (tmp_path / "short.txt").write_text("A few words.")
    text = invoke(
        builds["float32"], "--reference", small, "--text", tmp_path / "short.txt",
        "--cache-dir", tmp_path, code=1,
    )  # fmt: skip
    assert "short.txt: has" in text
