import fcntl
import json
import os
import subprocess
import sys

import click
import numpy as np
import pytest
import tiny
from click.testing import CliRunner

from qatpack.cli import main
from qatpack.cli.text import table

PART = f"{tiny.TEXT}layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _keep_platform(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def invoke(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("source") / "c")


@pytest.fixture(scope="module")
def build(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("build") / "out"
    invoke("repack", source, out)
    return out


def commands(group=main, path=()):
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_every_help_ends_with_an_example_and_explains_every_option(path, command):
    text = invoke(*path, "--help").stdout
    assert f"Example:\n    qatpack {' '.join(path)} " in text
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_version():
    assert invoke("--version").stdout.startswith("qatpack, version ")


def test_dry_run_writes_nothing(tmp_path, source):
    result = invoke("repack", source, tmp_path / "out", "--dry-run")
    assert "Nothing was written" in result.stdout
    assert "vision or audio" in result.stdout
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(invoke("repack", source, tmp_path / "out", "--dry-run", "--json").stdout)
    assert plan["source"]["tensors"] == len(tiny.tensors())
    assert plan["free_bytes"] > 0


def test_repack_prints_what_was_proven_and_the_next_command(tmp_path, source):
    result = invoke("repack", source, tmp_path / "out", "--scale-dtype", "float32")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in result.stdout.splitlines() if line}
    assert rows["values identical"] == ["100", "%"]
    assert f"{tmp_path / 'out'}" in result.stdout
    assert result.stderr == ""


def test_repack_json_is_the_manifest_and_nothing_else(tmp_path, source):
    result = invoke("repack", source, tmp_path / "out", "--json")
    assert json.loads(result.stdout) == json.loads(
        (tmp_path / "out" / "repack_report.json").read_text()
    )


def test_warnings_go_to_stderr(tmp_path):
    folder = tiny.write(tmp_path / "c")
    (folder / "other.safetensors").write_bytes(b"")
    result = invoke("repack", folder, tmp_path / "out", "--dry-run", "--json")
    json.loads(result.stdout)
    assert "warning: " in result.stderr
    assert "other.safetensors" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["repack", "SRC", "SRC"], "source"),
        (["repack", "nowhere/to/be", "OUT"], "nowhere"),
        (["repack", "EMPTY", "OUT"], "no .safetensors"),
        (["inspect", "EMPTY"], "no .safetensors"),
        (["repack", "SRC", "OUT", "--revision", "main"], "revision"),
        (["demo", "--out", "SRC"], "not empty"),
    ],
)
def test_bad_input_is_one_sentence_and_status_1(tmp_path, source, arguments, word):
    (tmp_path / "empty").mkdir()
    paths = {"SRC": source, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    result = invoke(*(paths.get(a, a) for a in arguments), code=1)
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["repack"],
        ["repack", "a", "b", "--scale-dtype", "int8"],
        ["repack", "a", "b", "--shard-size", "5 parsecs"],
        ["repack", "a", "b", "--shard-size", "0"],
        ["repack", "a", "b", "--shard-size", "1e99GB"],
        ["repack", "a", "b", "--base-model", "gemma"],
        ["inspect", "a", "--sample", "0"],
        ["evaluate", "a", "--reference", "b", "--batch", "99999999999"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_status_2(arguments):
    invoke(*arguments, code=2)


@pytest.mark.parametrize(("text", "files"), [("40kB", 3), ("0.04 MB", 3), ("40000", 3), ("1GB", 1)])
def test_shard_size(tmp_path, source, text, files):
    invoke("repack", source, tmp_path / "out", "--shard-size", text)
    count = len(list((tmp_path / "out").glob("*.safetensors")))
    assert count == files


def off_grid(tmp_path):
    arrays = tiny.tensors()
    arrays[PART] = tiny.noise(np.random.default_rng(0), *arrays[PART].shape)
    return tiny.write(tmp_path / "c", arrays)


def test_off_grid_refuse_and_keep(tmp_path):
    folder = off_grid(tmp_path)
    result = invoke("repack", folder, tmp_path / "out", code=1)
    assert PART in result.stderr
    invoke("repack", folder, tmp_path / "out", "--on-off-grid", "keep", code=1)  # left-overs
    result = invoke("repack", folder, tmp_path / "kept", "--on-off-grid", "keep")
    assert (tmp_path / "kept" / "repack_report.json").exists()
    plan = invoke("repack", folder, tmp_path / "x", "--on-off-grid", "keep", "--dry-run").stdout
    assert "off the grid" in plan
    assert "readers fuse it with" in plan


def test_the_next_command_can_be_pasted(tmp_path, source):
    out = tmp_path / "a $b"
    assert f"Next: qatpack verify '{out}'" in invoke("repack", source, out).stdout


def test_a_second_run_is_told_of_the_first(tmp_path, source):
    working = tmp_path / "out.partial"
    working.mkdir()
    descriptor = os.open(working, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    result = invoke("repack", source, tmp_path / "out", code=1)
    os.close(descriptor)
    assert "another qatpack is writing there" in result.stderr


def test_inspect_a_reference(source):
    text = invoke("inspect", source).stdout
    assert "text linear, off" not in text
    assert "text linear " in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert "vision or audio, off" in text
    facts = json.loads(invoke("inspect", source, "--json").stdout)
    grid = {entry["name"]: entry for entry in facts["grid"]}
    assert grid[PART]["certified_share"] == 1
    assert grid[PART]["share_by_group_size"]["32"] == 1
    assert grid[PART]["share_by_group_size"]["64"] < 0.1
    assert grid[PART]["share_other_axis"] < 0.1
    assert grid[f"{tiny.TEXT}embed_tokens.weight"]["certified_share"] == 1
    assert (
        grid["model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight"]["certified_share"]
        < 0.1
    )
    assert facts["head"] == {"tied": True, "stored": False, "identical": None}
    assert facts["scheme"] is None


@pytest.mark.parametrize(("change", "word"), [(0, "identical to"), (1, "different from")])
def test_inspect_tells_of_a_stored_head(tmp_path, change, word):
    arrays = tiny.tensors()
    arrays["lm_head.weight"] = arrays[f"{tiny.TEXT}embed_tokens.weight"].copy()
    arrays["lm_head.weight"].view(np.uint16)[0, 0] ^= change
    result = invoke("inspect", tiny.write(tmp_path / "c", arrays))
    assert f"lm_head: tied, stored, {word} the embedding" in result.stdout
    assert ("a repack would stop" in result.stderr) == bool(change)


def test_inspect_a_sample(source):
    facts = json.loads(invoke("inspect", source, "--sample", "4", "--json").stdout)
    grid = {entry["name"]: entry for entry in facts["grid"]}
    assert grid[PART]["groups"] == 4 * tiny.HIDDEN // 32


def test_inspect_shows_what_is_off_and_counts_it_dense(tmp_path, source):
    folder = off_grid(tmp_path)
    assert "text linear, off" in invoke("inspect", folder).stdout
    sizes = [
        json.loads(invoke("inspect", s, "--json").stdout)["expected_output_bytes"]
        for s in (source, folder)
    ]
    # The tensor and the one fused with it: 2 bytes a value instead of 1/2 and a scale.
    assert sizes[1] - sizes[0] == 2 * (128 * tiny.HIDDEN * (2 - 0.5) - 128 * 2 * 2 - 16)


def test_inspect_a_build(source, build):
    facts = json.loads(invoke("inspect", build, "--json").stdout)
    assert facts["scheme"]["packed_modules"] > 10
    assert facts["scheme"]["scale_dtypes"] == ["BF16"]
    assert facts["grid"] == []
    assert "already packed" in invoke("inspect", build).stdout
    invoke("repack", build, build.parent / "again", code=1)


def test_inspect_says_when_a_config_lies(tmp_path):
    cfg = tiny.config()
    cfg["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    text = invoke("inspect", tiny.write(tmp_path / "c", cfg=cfg)).stdout
    assert "although nothing is packed" in text


def test_control_characters_of_a_tensor_name_stay_out_of_the_terminal(tmp_path):
    arrays = tiny.tensors()
    arrays[f"{tiny.TEXT}layers.0.x\n\x1b[31m.weight"] = tiny.noise(np.random.default_rng(0), 4, 64)
    result = invoke("repack", tiny.write(tmp_path / "c", arrays), tmp_path / "out", code=1)
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr
    assert "x\\n\\x1b[31m" in result.stderr


@pytest.mark.parametrize("out", [".", "", "x" * 300, "link/out"])
def test_outputs_that_cannot_be(tmp_path, source, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("link")
    invoke("repack", source, out, code=1)
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("out", ["file/x", "x" * 300, "link"])
def test_a_demo_folder_that_cannot_be(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere/there")
    assert "--out" in invoke("demo", "--out", out, code=1).stderr


@pytest.mark.parametrize("architectures", [5, [5], [None], None, {}])
def test_inspect_takes_any_config(tmp_path, architectures):
    cfg = tiny.config(architectures=architectures, quantization_config={"ignore": 5})
    folder = tiny.write(tmp_path / "c", cfg=cfg)
    invoke("inspect", folder, "--sample", "2")
    invoke("inspect", folder, "--sample", "2", "--json")


def test_an_unexpected_error_asks_for_a_report(monkeypatch, source):
    from qatpack.repack import inspect as module

    def fail(*_):
        raise ZeroDivisionError("x")

    monkeypatch.setattr(module, "describe", fail)
    result = invoke("inspect", source, code=1)
    assert "unexpected ZeroDivisionError: x" in result.stderr
    assert "--debug" in result.stderr
    debugged = CliRunner().invoke(main, ["--debug", "inspect", str(source)])
    assert isinstance(debugged.exception, ZeroDivisionError)


def test_interrupted(monkeypatch, source):
    from qatpack.repack import inspect as module

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "describe", stop)
    assert "--resume" in invoke("inspect", source, code=1).stderr


LOADED = "import sys; {}; print(sorted({{m.split('.')[0] for m in sys.modules}}))"
HEAVY = {"torch", "compressed_tensors", "transformers"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import qatpack.repack.job, qatpack.repack.inspect", HEAVY),
        ("import qatpack.cli", HEAVY | {"jax", "numpy", "huggingface_hub", "safetensors", "tqdm"}),
        (
            "from click.testing import CliRunner; from qatpack.cli import main; "
            "assert CliRunner().invoke(main, ['--help']).exit_code == 0",
            HEAVY | {"jax", "numpy"},
        ),
    ],
)
def test_what_is_imported_when(statement, absent):
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(statement)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    loaded = set(done.stdout.replace("'", "").strip("[]\n").split(", "))
    assert not loaded & absent


def test_table():
    assert table([("", "a"), ("x", 1), ("yy", 10)]) == "     a\n--  --\nx    1\nyy  10"
