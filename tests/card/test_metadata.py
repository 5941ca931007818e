"""The YAML block: from a source's card to what the Hub accepts."""

import pytest
import tiny
import yaml
from huggingface_hub import ModelCard

from qatpack.card.metadata import SourceCard, card_metadata, source_card, to_yaml
from qatpack.card.page import licence_warning
from qatpack.card.results import read_results
from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.source import Source
from qatpack.repack.job import repack
from qatpack.repack.plan import Options


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("source") / "c")


@pytest.fixture(scope="module")
def results(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("build") / "out"
    repack(Source(source, "google/gemma-x", "c" * 40, {}), out)
    return read_results(out)


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
    assert "model-index" not in data
    assert f"{manifest['totals']['groups']:,}" in card.text
    assert "c" * 40 in card.text
    assert "ORIGINAL_README.md" in card.text


def test_licence_is_never_guessed(results):
    none, gemma = SourceCard(True, {}), SourceCard(True, {"license": "gemma"})
    assert card_metadata(results, none, "t")["license"] == "other"
    assert "states no licence" in licence_warning(none)
    assert card_metadata(results, gemma, "t")["license"] == "gemma"
    assert licence_warning(gemma) is None


def test_no_base_model_where_the_source_has_no_id(tmp_path, source):
    repack(Source(source, None, None, {}), tmp_path / "out")
    assert "base_model" not in ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    repack(Source(source, None, None, {}), tmp_path / "named", Options(base_model="a/b"))
    assert ModelCard.load(tmp_path / "named" / "README.md").data.base_model == "a/b"


def test_source_without_a_card_or_without_metadata(tmp_path):
    path = tmp_path / "README.md"
    assert source_card(path) == SourceCard(False, {})
    path.write_text("# only text\n")
    assert source_card(path) == SourceCard(True, {})


@pytest.mark.parametrize(
    "text", ["---\na: [\n---\n", "---\n- a\n- b\n---\n", "---\n: :\n  - x: [\n---\n"]
)
def test_broken_metadata_names_the_file(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(CheckpointError, match=r"README\.md: its metadata block cannot be read"):
        source_card(tmp_path / "README.md")


def read(tmp_path, **metadata):
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(metadata)}---\n")
    return source_card(tmp_path / "README.md").metadata


def test_only_what_the_hub_could_accept_is_taken(tmp_path):
    kept = read(
        tmp_path,
        license="other",
        license_name="gemma",
        license_link="https://ai.google.dev/gemma/terms",
        pipeline_tag="text\n---\ngeneration",
        library_name=["a"],
        language=["en", "de", 3, False, "x y"],
        tags=["private"],
        base_model="google/other",
        model_index=[1],
    )
    assert kept == {
        "license": "other",
        "license_name": "gemma",
        "license_link": "https://ai.google.dev/gemma/terms",
        "language": ["en", "de", "no"],
    }
    several = read(tmp_path, license=["mit", "gemma"], language=4, license_link="")
    assert several == {"license": ["mit", "gemma"]}
    assert licence_warning(SourceCard(True, several)) is None


@pytest.mark.parametrize("address", ["https://a.example/terms", "LICENSE", "terms/LICENSE.md"])
def test_a_licence_link_is_an_address_or_a_file(tmp_path, address):
    assert read(tmp_path, license_link=address) == {"license_link": address}
    for odd in ("javascript:alert(1)", "../LICENSE", "/etc/passwd", "data:text/html,x", "a b"):
        assert read(tmp_path, license_link=odd) == {}


@pytest.mark.parametrize("link", ["x\n---\n# Title\n", "a: b\n- c", "'\"{}[]%@`!&*", "l" * 5000])
def test_metadata_cannot_leave_its_block(tmp_path, results, link):
    kept = read(tmp_path, license="gemma", license_link=link)
    block = to_yaml(card_metadata(results, SourceCard(True, kept), "t"))
    data = ModelCard(f"---\n{block}\n---\n\n# Card\n")
    assert data.text.strip() == "# Card"
    assert data.data.to_dict().get("license_link") == kept.get("license_link")
    assert "\n" not in kept.get("license_link", "")
