"""The synthetic checkpoints have the real layout, and weights that are the grid they claim."""

import hashlib
import json
import math
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

# Benchmarks are scripts: they import their neighbours by plain name.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import layouts
import synthesize

TINY = {"layers": 2, "vocab": 300}

read_config = synthesize.read_config


def tiny(name: str, size: int = 64) -> layouts.Config:
    """A config of the real structure with everything narrow, experts and towers included."""
    config = read_config(name)
    text, vision = config["text_config"], config["vision_config"]
    text |= {"hidden_size": size, "intermediate_size": 2 * size, "head_dim": 32}
    text |= {"global_head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    if text["enable_moe_block"]:
        text |= {"num_experts": 4, "moe_intermediate_size": 32, "num_global_key_value_heads": 1}
    vision |= {"hidden_size": size, "num_hidden_layers": 1, "intermediate_size": size}
    vision |= {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    if config["audio_config"]:
        config["audio_config"] |= {"hidden_size": size, "num_hidden_layers": 1}
    return config


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthesize, "read_config", tiny)


def read_file(path: Path) -> dict[str, np.ndarray]:
    """An independent reading of a safetensors file, all bf16 and without gaps."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    found, end = {}, 0
    for name, entry in entries.items():
        assert entry["dtype"] == "BF16"
        start, stop = entry["data_offsets"]
        assert start == end
        end = stop
        found[name] = np.frombuffer(body[start:stop], ml_dtypes.bfloat16).reshape(entry["shape"])
    assert end == len(body)
    return found


def test_e2b_layout_is_the_published_file() -> None:
    real = json.loads((synthesize.DATA / "e2b_tensors.json").read_bytes())
    made = layouts.tensors(read_config("E2B"))
    assert [(t.name, list(t.shape), t.role) for t in made] == [
        (t["name"], t["shape"], t["role"]) for t in real
    ]
    assert sum(tensor.nbytes for tensor in made) == 10_208_596_934
    assert len(synthesize.header(made)) + 10_208_596_934 == 10_208_852_878


@pytest.mark.parametrize(
    ("name", "linears", "linear_groups", "expert_groups"),
    [
        ("E2B", 276, 58_650_624, 0),
        ("E4B", 343, 124_149_760, 0),
        ("12B", 328, 340_623_360, 0),
        ("26B-A4B", 205, 51_420_160, 713_687_040),
        ("31B", 410, 915_210_240, 0),
    ],
)
def test_family_has_the_known_numbers_of_groups(
    name: str, linears: int, linear_groups: int, expert_groups: int
) -> None:
    made = layouts.tensors(read_config(name))
    sizes: dict[str, list[int]] = {"quantized_linear": [], "quantized_experts": []}
    for tensor in made:
        sizes.setdefault(tensor.role, []).append(math.prod(tensor.shape) // 32)
    assert len(sizes["quantized_linear"]) == linears
    assert sum(sizes["quantized_linear"]) == linear_groups
    assert sum(sizes["quantized_experts"]) == expert_groups


def test_experts_are_stacked_and_have_no_suffix() -> None:
    shapes = {t.name: t.shape for t in layouts.tensors(read_config("26B-A4B"))}
    experts = "model.language_model.layers.29.experts"
    assert shapes[f"{experts}.gate_up_proj"] == (128, 1408, 2816)
    assert shapes[f"{experts}.down_proj"] == (128, 2816, 704)
    assert "model.language_model.layers.5.self_attn.v_proj.weight" not in shapes


@pytest.mark.parametrize("name", synthesize.CONFIGS)
def test_every_cut_keeps_the_structure(name: str) -> None:
    config = read_config(name)
    total = config["text_config"]["num_hidden_layers"]
    for layers in range(1, total + 1):
        text = layouts.cut(config, layers=layers)["text_config"]
        shared = text["num_kv_shared_layers"]
        head, tail = text["layer_types"][: layers - shared], text["layer_types"][layers - shared :]
        assert len(head) + len(tail) == layers
        assert set(tail) <= set(head)
        assert text["layer_types"][-1] == "full_attention"
        if layers > 1 and config["text_config"]["num_kv_shared_layers"]:
            assert tail
    assert layouts.cut(config, layers=total) == config


def test_cut_scales_per_layer_inputs() -> None:
    config = layouts.cut(read_config("E2B"), layers=6, vocab=1000)
    shapes = {t.name: t.shape for t in layouts.tensors(config)}
    root = "model.language_model"
    assert shapes[f"{root}.embed_tokens.weight"] == (1000, 1536)
    assert shapes[f"{root}.embed_tokens_per_layer.weight"] == (1000, 6 * 256)
    assert shapes[f"{root}.per_layer_model_projection.weight"] == (6 * 256, 1536)


@pytest.mark.parametrize("bad", [{"layers": 0}, {"layers": 36}, {"vocab": 0}, {"vocab": 262_145}])
def test_impossible_cuts_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give 1 to"):
        layouts.cut(read_config("E2B"), **bad)


@pytest.mark.parametrize("name", ["E2B", "26B-A4B"])
def test_weights_are_steps_times_levels(name: str, narrow: None, tmp_path: Path) -> None:
    synthesize.synthesize(name, tmp_path / "out", **TINY, seed=3)
    stored = read_file(tmp_path / "out" / "model.safetensors")
    made = layouts.tensors(layouts.cut(tiny(name), **TINY))
    assert [tensor.name for tensor in made] == list(stored)
    on_grid = [tensor for tensor in made if tensor.on_grid]
    assert on_grid
    for tensor in on_grid:
        levels, steps = synthesize.true_grid(tensor, slice(None), seed=3)
        expected = (levels * np.repeat(steps, 32, axis=1)).astype(ml_dtypes.bfloat16)
        actual = stored[tensor.name].reshape(expected.shape)
        np.testing.assert_array_equal(actual.view(np.uint16), expected.view(np.uint16))


def test_levels_peak_as_trained_ones_do() -> None:
    wide = layouts.Tensor("wide", (1024, 1024), "quantized_linear")
    levels, steps = synthesize.true_grid(wide, slice(None), seed=0)
    groups = levels.reshape(-1, 32)
    assert (levels.min(), levels.max()) == (-8, 7)
    assert set(np.abs(groups.astype(int)).max(axis=1)) == {7, 8}
    assert 0.5 < (groups.min(axis=1) == -8).mean() < 0.65
    assert steps.min() >= 1e-3
    assert steps.max() <= 1.001e-2
    for shorter in (ml_dtypes.bfloat16, np.float16):
        assert (steps.astype(shorter).astype(np.float32) != steps).all()


def test_no_rows_repeat_and_any_rows_are_found_alone() -> None:
    # 64 groups a row: blocks of 512 rows, so the rows asked for lie in three of them.
    tensor = layouts.Tensor("rows", (1200, 2048), "quantized_linear")
    levels, steps = synthesize.true_grid(tensor, slice(None), seed=0)
    part = synthesize.true_grid(tensor, slice(500, 1100), seed=0)
    np.testing.assert_array_equal(part[0], levels[500:1100])
    np.testing.assert_array_equal(part[1], steps[500:1100])
    rows = np.concatenate(list(synthesize.blocks(tensor, seed=0))).reshape(tensor.shape)
    assert len(np.unique(rows.view(np.uint16), axis=0)) == 1200
    assert not np.array_equal(synthesize.true_grid(tensor, slice(0, 1), seed=1)[0], levels[:1])


def test_everything_off_the_grid_is_finite_and_plausible(narrow: None, tmp_path: Path) -> None:
    synthesize.synthesize("E2B", tmp_path / "out", **TINY)
    stored = read_file(tmp_path / "out" / "model.safetensors")
    for name, values in stored.items():
        assert np.isfinite(values.astype(np.float32)).all(), name
        if name.endswith("layer_scalar"):
            assert 0.5 <= values[0] <= 1
        if name.endswith("_min"):
            assert values < stored[name.removesuffix("_min") + "_max"]


def test_same_arguments_same_bytes(narrow: None, tmp_path: Path) -> None:
    def digests(folder: Path, seed: int) -> dict[str, str]:
        synthesize.synthesize("E2B", folder, **TINY, seed=seed)
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}

    first, second, other = (digests(tmp_path / str(i), seed) for i, seed in enumerate([5, 5, 6]))
    assert first == second
    assert set(first) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert first["model.safetensors"] != other["model.safetensors"]


def test_shards_hold_the_same_tensors(narrow: None, tmp_path: Path) -> None:
    synthesize.synthesize("26B-A4B", tmp_path / "one", **TINY)
    done = synthesize.synthesize("26B-A4B", tmp_path / "three", **TINY, shards=3)
    index = json.loads((tmp_path / "three" / "model.safetensors.index.json").read_bytes())
    whole = read_file(tmp_path / "one" / "model.safetensors")
    parts = {file: read_file(tmp_path / "three" / file) for file in done["files"]}
    assert len(parts) == 3
    assert all(parts.values())
    assert index["metadata"]["total_size"] == done["tensor_bytes"]
    assert index["weight_map"] == {name: file for file, part in parts.items() for name in part}
    assert {name: a.tobytes() for part in parts.values() for name, a in part.items()} == {
        name: a.tobytes() for name, a in whole.items()
    }


def test_uncut_config_is_copied_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(synthesize, "tensors", lambda config: [layouts.Tensor("a", (1,), "x")])
    synthesize.synthesize("E2B", tmp_path)
    assert (tmp_path / "config.json").read_bytes() == (
        synthesize.DATA / "e2b_config.json"
    ).read_bytes()


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ValueError, match="not empty"):
        synthesize.synthesize("E2B", tmp_path)
