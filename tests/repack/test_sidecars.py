import pytest

from qatpack.repack.sidecars import copy_sidecars, sidecar_names

TRAVEL = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "merges.txt", "vocab.json", "chat_template.jinja", "generation_config.json",
    "LICENSE", "LICENSE.txt", "Licence", "NOTICE", "notice.md", "COPYING", "USE_POLICY.md",
    "additional_chat_templates/tool.jinja",
)  # fmt: skip
STAY = (
    "config.json", "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin.index.json", "pytorch_model.bin", "model.gguf", ".env", ".gitattributes",
    "train.log", "repack_report.json", "verify_report.json", "evaluation.json", "script.py",
    "notes/x.json", "credentials.json", "train_log.txt", "trainer_state.json", "requirements.txt",
    "hf_quant_config.json", "quantize_config.json", "qatpack-progress.json", "ORIGINAL_README.md",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    for name in (*TRAVEL, *STAY, "README.md", "processor_config.json", "preprocessor_config.json"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode() + b"\r\n\xff")
    return source


def test_what_travels_and_what_stays(folder):
    names = sidecar_names(folder)
    assert set(names) - set(TRAVEL) == {
        "README.md", "processor_config.json", "preprocessor_config.json",
    }  # fmt: skip
    assert names["README.md"] == "ORIGINAL_README.md"
    assert set(TRAVEL) <= set(names)
    text = sidecar_names(folder, text_only=True)
    assert set(names) - set(text) == {"processor_config.json", "preprocessor_config.json"}


def test_bytes_and_records(folder, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    names = sidecar_names(folder)
    records = copy_sidecars(folder, target)
    assert [r.name for r in records] == list(names)
    for record in records:
        data = (target / names[record.name]).read_bytes()
        assert data == (folder / record.name).read_bytes()
        assert record.size == len(data)
