import pytest
import tiny
from huggingface_hub import ModelCard

from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.source import Source
from qatpack.repack.card import card_metadata, source_card
from qatpack.repack.job import repack
from qatpack.repack.plan import Options

MANIFEST = {"source": {"id": "google/x", "commit": None}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("source") / "c")


def test_the_hub_reads_our_card(tmp_path, source):
    manifest = repack(Source(source, "google/gemma-x", "c" * 40, {}), tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    data = card.data.to_dict()
    assert data["base_model"] == "google/gemma-x"
    assert data["base_model_relation"] == "quantized"
    assert data["license"] == "apache-2.0"
    assert data["license_link"] == "https://ai.google.dev/gemma/docs/gemma_4_license"
    assert data["pipeline_tag"] == "any-to-any"
    assert data["library_name"] == "transformers"
    assert {"compressed-tensors", "w4a16"} <= set(data["tags"])
    assert f"{manifest['totals']['groups']:,}" in card.text
    assert "c" * 40 in card.text
    assert "ORIGINAL_README.md" in card.text


def test_licence_is_never_guessed():
    assert card_metadata(MANIFEST, {})["license"] == "other"
    assert card_metadata(MANIFEST, {"license": "gemma"})["license"] == "gemma"


def test_no_base_model_where_the_source_has_no_id(tmp_path, source):
    repack(Source(source, None, None, {}), tmp_path / "out")
    assert "base_model" not in ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    repack(Source(source, None, None, {}), tmp_path / "named", Options(base_model="a/b"))
    assert ModelCard.load(tmp_path / "named" / "README.md").data.base_model == "a/b"


def test_source_without_a_card_or_without_metadata(tmp_path):
    assert source_card(tmp_path) == {}
    (tmp_path / "README.md").write_text("# only text\n")
    assert source_card(tmp_path) == {}


@pytest.mark.parametrize(
    "text", ["---\na: [\n---\n", "---\n- a\n- b\n---\n", "---\n: :\n  - x: [\n---\n"]
)
def test_broken_metadata_names_the_file(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(CheckpointError, match=r"README\.md: its metadata block cannot be read"):
        source_card(tmp_path)
