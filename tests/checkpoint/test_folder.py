import json

import pytest
import tiny
from safetensors.numpy import save_file

from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.folder import INDEX_NAME, Checkpoint
from qatpack.checkpoint.naming import text_prefix


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message


@pytest.mark.parametrize("shards", [None, 1, 3])
def test_one_file_or_shards_hold_the_same_tensors(tmp_path, shards):
    arrays = tiny.tensors()
    opened = Checkpoint.open(tiny.write(tmp_path / "c", arrays, shards=shards))
    assert set(opened.tensors) == set(arrays)
    assert all(opened[n].shape == a.shape for n, a in arrays.items())
    assert opened.tensor_bytes == sum(a.nbytes for a in arrays.values())
    assert opened.warnings == ()
    assert len(opened.files) == (shards or 1)


def test_shards_without_an_index(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=3)
    (folder / INDEX_NAME).unlink()
    assert set(Checkpoint.open(folder).tensors) == set(tiny.tensors())
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors is missing")


def test_stray_shards_are_left_alone_with_a_warning(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=2)
    arrays = tiny.tensors(seed=1)
    save_file(arrays, folder / "model-00003-of-00003.safetensors")
    opened = Checkpoint.open(folder)
    assert len(opened.files) == 2
    assert "model-00003-of-00003.safetensors" in opened.warnings[0]


def test_a_single_file_wins_over_others_without_an_index(tmp_path):
    folder = tiny.write(tmp_path / "c")
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    opened = Checkpoint.open(folder)
    assert [h.path.name for h in opened.files] == ["model.safetensors"]
    assert "consolidated.safetensors" in opened.warnings[0]


def test_two_files_with_one_name_and_no_index(tmp_path):
    folder = tiny.write(tmp_path / "c")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    refused(folder, "b.safetensors", "a.safetensors holds too")


def edit_index(folder, change):
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_index_names_a_missing_file(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, INDEX_NAME, "model-00002-of-00002.safetensors", "download")


def test_left_over_index_beside_a_single_file(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=2)
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
    save_file(tiny.tensors(), folder / "model.safetensors")
    refused(folder, "left-over, delete it")


def test_index_maps_a_tensor_that_the_shard_lacks(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=2)
    edit_index(folder, lambda i: i["weight_map"].update(ghost="model-00001-of-00002.safetensors"))
    refused(folder, "'ghost'", "not of one export")


def test_shard_holds_a_tensor_that_the_index_lacks(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=2)
    name = next(iter(tiny.tensors()))
    edit_index(folder, lambda i: i["weight_map"].pop(name))
    refused(folder, repr(name), "not of one export")


def test_wrong_total_size_is_a_warning(tmp_path):
    folder = tiny.write(tmp_path / "c", shards=2)
    edit_index(folder, lambda i: i["metadata"].update(total_size=1))
    assert "total_size 1" in Checkpoint.open(folder).warnings[0]


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", ".x", None, 3]
)
def test_index_pointing_out_of_the_folder(tmp_path, file):
    folder = tiny.write(tmp_path / "c", shards=2)
    edit_index(folder, lambda i: i["weight_map"].update(x=file))
    refused(folder, "no plain file name")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"a": 1, "a": 2}'])
def test_broken_index(tmp_path, text):
    folder = tiny.write(tmp_path / "c", shards=2)
    (folder / INDEX_NAME).write_text(text)
    refused(folder, INDEX_NAME)


def test_broken_config(tmp_path):
    folder = tiny.write(tmp_path / "c")
    (folder / "config.json").write_text('{"a": ')
    refused(folder, "config.json", "not valid JSON")


def test_no_folder_no_weights_and_a_file(tmp_path):
    refused(tmp_path / "none", "does not exist")
    refused(tmp_path, "no .safetensors file")
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    refused(path, "is a file")


def test_unknown_tensor_name(tmp_path):
    opened = Checkpoint.open(tiny.write(tmp_path / "c"))
    with pytest.raises(CheckpointError, match="no tensor named 'x'"):
        opened["x"]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_prefixes(prefix):
    names = [f"{prefix}layers.0.mlp.up_proj.weight", "model.vision_tower.x", "lm_head.weight"]
    assert text_prefix(names) == prefix


def test_mixed_prefixes_are_refused_by_name():
    names = ["model.layers.0.x", "model.language_model.layers.0.x"]
    with pytest.raises(
        CheckpointError, match=r"model\.language_model\.layers\.0\.x and model\.layers"
    ):
        text_prefix(names)


def test_no_text_decoder():
    with pytest.raises(CheckpointError, match="no text decoder"):
        text_prefix(["bert.encoder.layer.0.weight"])
