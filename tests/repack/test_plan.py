import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from layouts import tensors as real_layout

from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.header import TensorInfo, tensor_bytes
from qatpack.repack.layout import Role, classify, fused_with, module_names, read_layout
from qatpack.repack.plan import Options, make_plan, same_bytes


def listed(entries, config):
    """A checkpoint of these (name, shape, dtype), without any file behind it."""
    tensors, offset = {}, 0
    for name, shape, dtype in entries:
        nbytes = tensor_bytes(dtype, tuple(shape))
        tensors[name] = TensorInfo(name, dtype, tuple(shape), Path("x"), offset, nbytes)
        offset += nbytes
    return read_layout(Checkpoint(Path("x"), tensors, (), config, ()))


def real(name):
    return json.loads((tiny.DATA / f"{name}_config.json").read_text())


def real_plan(name, options=Options()):  # noqa: B008
    config = real(name)
    return make_plan(
        listed([(t.name, t.shape, "BF16") for t in real_layout(config)], config), options
    )


def planned(tmp_path, arrays=None, options=Options(), **write):  # noqa: B008
    folder = tiny.write(tmp_path / "c", arrays, **write)
    return make_plan(read_layout(Checkpoint.open(folder)), options)


def test_e2b_is_googles_export_without_the_head():
    source = json.loads((tiny.DATA / "e2b_tensors.json").read_text())
    layout = listed([(t["name"], t["shape"], t["dtype"]) for t in source], real("e2b"))
    plan = make_plan(layout, Options())
    target = json.loads((tiny.DATA / "e2b_ct_tensors.json").read_text())
    assert len(plan.packed_sources) == 276
    assert {t["name"] for t in source if t["role"] == "quantized_linear"} == {
        t.name for t in plan.packed_sources
    }
    assert {s.name: (s.dtype, s.shape) for unit in plan.units() for s in unit} == {
        t["name"]: (t["dtype"], tuple(t["shape"])) for t in target
    }
    assert plan.output_bytes() == 7_510_672_646
    ignore = real("e2b_w4a16_ct")["quantization_config"]["ignore"]
    assert len(plan.ignore) == len(ignore) == 250
    assert set(plan.ignore) == set(ignore)


@pytest.mark.parametrize(
    ("name", "linears", "groups"),
    [("e4b", 343, 124_149_760), ("12b", 328, 340_623_360), ("31b", 410, 915_210_240)],
)
def test_the_family(name, linears, groups):
    plan = real_plan(name)
    assert len(plan.packed_sources) == linears
    assert sum(m.groups for m in plan.packed) == groups


def test_31b_ignores_what_googles_export_does():
    assert set(real_plan("31b").ignore) == set(
        real("31b_w4a16_ct")["quantization_config"]["ignore"]
    )


def test_12b_ignores_both_names_of_a_renamed_module():
    ignore = real_plan("12b").ignore
    assert "model.embed_vision.patch_dense" in ignore
    assert "model.vision_embedder.patch_dense" in ignore
    assert "model.embed_vision.multimodal_embedder.embedding_projection" in ignore


def test_26b_experts_are_packed_one_by_one_and_the_router_is_not():
    plan = real_plan("26b_a4b")
    experts = [m for m in plan.packed if ".experts." in m.module]
    assert len(experts) == 30 * 128 * 3
    assert sum(m.groups for m in experts) == 713_687_040
    by_name = {m.module: m for m in experts}
    layer = "model.language_model.layers.7.experts."
    up = by_name[f"{layer}5.up_proj"]
    assert (up.row, up.rows, up.columns) == (5 * 1408 + 704, 704, 2816)
    assert by_name[f"{layer}127.down_proj"].row == 127 * 2816
    assert "model.language_model.layers.0.router.proj" in plan.ignore
    assert not any("experts" in name for name in plan.ignore)


def test_every_tensor_ends_in_one_place(tmp_path):
    plan = planned(tmp_path)
    summary = plan.summary()
    parts = [summary["packed"], *summary["copied"].values(), *summary["dropped"].values()]
    assert sum(p["tensors"] for p in parts) == summary["source"]["tensors"] == len(tiny.tensors())
    assert sum(p["bytes"] for p in parts) == summary["source"]["bytes"]
    assert plan.source_bytes == summary["source"]["bytes"]


def test_unknown_tensors_are_copied_and_their_linears_ignored(tmp_path):
    rng = np.random.default_rng(0)
    arrays = tiny.tensors() | {
        "mtp.layers.0.proj.weight": tiny.noise(rng, 32, 64),
        "model.language_model.rotary.inv_freq": np.zeros(8, np.float32),
        "model.language_model.odd": tiny.noise(rng, 2, 2, 64),
    }
    plan = planned(tmp_path, arrays)
    assert set(plan.copied) >= set(arrays) - set(tiny.tensors())
    assert plan.copied["mtp.layers.0.proj.weight"] == "unknown to qatpack"
    assert "mtp.layers.0.proj" in plan.ignore


@pytest.mark.parametrize(
    ("part", "array", "reason", "partners"),
    [
        ("mlp.down_proj", tiny.grid(np.random.default_rng(0), 64, 32)[:, :24], "multiple of 32", 0),
        ("self_attn.o_proj", np.zeros((64, 8), tiny.BF16), "multiple of 32", 0),
        ("mlp.up_proj", np.zeros((128, 64), np.float32), "dtype F32", 1),
        ("self_attn.v_proj", np.zeros((32, 40), tiny.BF16), "multiple of 32", 2),
        ("per_layer_input_gate", np.zeros((0, 64), tiny.BF16), "empty", 0),
    ],
)
def test_what_cannot_be_packed_stays_dense_with_its_reason(tmp_path, part, array, reason, partners):
    name = f"{tiny.TEXT}layers.0.{part}.weight"
    plan = planned(tmp_path, tiny.tensors() | {name: np.ascontiguousarray(array)})
    assert reason in plan.copied[name]
    assert name.removesuffix(".weight") in plan.ignore
    fused = [n for n, r in plan.copied.items() if name in r]
    assert len(fused) == partners
    assert all(n.removesuffix(".weight") in plan.ignore for n in fused)
    assert not {m.module for m in plan.packed} & set(plan.ignore)


def test_an_off_grid_tensor_takes_its_partners_along(tmp_path):
    layout = read_layout(Checkpoint.open(tiny.write(tmp_path / "c")))
    name = f"{tiny.TEXT}layers.1.self_attn.k_proj.weight"
    plan = make_plan(layout, Options(), off_grid={name: "off the grid: x"})
    dense = {n for n in plan.copied if "layers.1.self_attn" in n and "norm" not in n}
    assert {n.split(".")[-2] for n in dense} == {"q_proj", "k_proj", "v_proj"}
    assert f"{tiny.TEXT}layers.1.self_attn.o_proj" in {m.module for m in plan.packed}


def test_partners():
    assert fused_with("a.q_proj") == fused_with("a.v_proj") == "a.qkv"
    assert fused_with("a.gate_proj") == fused_with("a.up_proj") != fused_with("a.down_proj")
    assert fused_with("a.experts.gate_up_proj") == fused_with("a.experts.down_proj")
    assert fused_with("a.experts.0.gate_proj") == fused_with("a.experts.3.down_proj")
    assert fused_with("a.gate_up_proj") == "a.gate_up_proj"


def test_module_names_only_change_where_transformers_renames():
    name = "model.embed_vision.embedding_projection"
    assert module_names(name, "gemma4") == (name,)
    assert len(module_names(name, "gemma4_unified")) == 2


def test_shared_layers_without_and_with_k_and_v(tmp_path):
    absent = planned(tmp_path / "a")
    extra = tiny.tensors() | {
        f"{tiny.TEXT}layers.2.self_attn.{p}_proj.weight": tiny.grid(
            np.random.default_rng(9), 32, tiny.HIDDEN
        )
        for p in "kv"
    }
    present = planned(tmp_path / "b", extra)
    assert len(present.packed) == len(absent.packed) + 2


HEAD = "lm_head.weight"


def head(tmp_path, array, *, tied=True, top=True):
    cfg = tiny.config()
    cfg["text_config"]["tie_word_embeddings"] = tied
    if top:
        cfg["tie_word_embeddings"] = tied
    else:
        del cfg["tie_word_embeddings"]
    arrays = tiny.tensors() | ({} if array is None else {HEAD: array})
    return planned(tmp_path, arrays, cfg=cfg)


EMBEDDING = f"{tiny.TEXT}embed_tokens.weight"


@pytest.mark.parametrize("top", [True, False])
def test_a_tied_identical_head_is_dropped(tmp_path, top):
    plan = head(tmp_path, tiny.tensors()[EMBEDDING], top=top)
    assert "identical" in plan.dropped[HEAD]
    assert plan.ignore.count("lm_head") == 1


def test_a_tied_but_different_head_stops(tmp_path):
    array = tiny.tensors()[EMBEDDING].copy()
    array[-1, -1] = 3.0
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from .*embed_tokens"):
        head(tmp_path, array)


def test_an_untied_head_is_kept(tmp_path):
    plan = head(tmp_path, tiny.tensors()[EMBEDDING], tied=False)
    assert HEAD in plan.copied
    assert "lm_head" in plan.ignore


def test_an_untied_head_that_is_absent_stops(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings false, but there is no lm_head"
    ):
        head(tmp_path, None, tied=False)


def test_a_tie_flag_that_is_no_truth_value(tmp_path):
    with pytest.raises(CheckpointError, match="tie_word_embeddings is 'false'"):
        head(tmp_path, tiny.tensors()[EMBEDDING], tied="false")


def test_same_bytes_looks_at_every_block(tmp_path):
    big = np.zeros((600, 8192), tiny.BF16)
    other = big.copy()
    other[-1, -1] = 1
    folder = tiny.write(tmp_path / "c", {"a": big, "b": big.copy(), "c": other}, cfg={})
    tensors = Checkpoint.open(folder).tensors
    assert same_bytes(tensors["a"], tensors["b"])
    assert not same_bytes(tensors["a"], tensors["c"])


def test_a_packed_source_is_refused(tmp_path):
    arrays = tiny.tensors() | {f"{tiny.TEXT}layers.0.x.weight_packed": np.zeros((2, 4), np.int32)}
    with pytest.raises(CheckpointError, match="already packed"):
        planned(tmp_path, arrays)


def test_text_only_drops_the_towers_and_renames_the_decoder(tmp_path):
    plan = planned(tmp_path, options=Options(text_only=True))
    names = {s.name for unit in plan.units() for s in unit}
    assert not any("vision" in n or "audio" in n for n in names)
    assert all(n.startswith("model.") and "language_model" not in n for n in names)
    assert plan.ignore == ("lm_head",)
    assert len(plan.dropped) == sum("vision" in n or "audio" in n for n in tiny.tensors())


def test_two_tensors_that_would_get_one_name(tmp_path):
    arrays = tiny.tensors() | {"model.extra.weight": np.zeros(4, tiny.BF16)}
    arrays[f"{tiny.TEXT}extra.weight"] = np.zeros(4, tiny.BF16)
    planned(tmp_path / "whole", arrays)
    with pytest.raises(CheckpointError, match=r"both be named model\.extra\.weight"):
        planned(tmp_path / "text", arrays, Options(text_only=True))


def test_ple_is_packed_on_request(tmp_path):
    plan = planned(tmp_path, options=Options(pack_ple=True))
    assert f"{tiny.TEXT}embed_tokens_per_layer" in {m.module for m in plan.packed}
    assert f"{tiny.TEXT}embed_tokens.weight" in plan.copied


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", (4, 32), Role.LINEAR),
        ("model.language_model.per_layer_model_projection.weight", (4, 32), Role.LINEAR),
        ("model.language_model.norm.weight", (4,), Role.TEXT),
        ("model.language_model.layers.0.router.proj.weight", (4, 32), Role.ROUTER),
        ("model.language_model.layers.0.experts.down_proj", (2, 4, 32), Role.EXPERTS),
        ("model.language_model.layers.0.experts.down_proj", (4, 32), Role.OTHER),
        ("model.embed_audio.embedding_projection.weight", (4, 32), Role.TOWER),
        ("model.multi_modal_projector.x.weight", (4, 32), Role.TOWER),
        ("lm_head.weight", (4, 32), Role.HEAD),
        ("model.audio_tower.lm_head.weight", (4, 32), Role.TOWER),
        ("mtp_lm_head.weight", (4, 32), Role.OTHER),
        ("model.language_model.x.weight_zero_point", (4,), Role.PACKED),
    ],
)
def test_roles(name, shape, role):
    tensor = TensorInfo(name, "BF16", shape, Path("x"), 0, 0)
    assert classify(tensor, "model.language_model.") is role
