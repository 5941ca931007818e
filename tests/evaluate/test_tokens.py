"""Exactly one BOS, chat templates, streaming text, and folders that cannot be read."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from qatpack.checkpoint.errors import CheckpointError, ModelError
from qatpack.evaluate.tokens import check_ids, check_positions, open_vocabulary

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"


def test_exactly_one_bos_whatever_the_text_says() -> None:
    vocabulary = open_vocabulary(DEMO)
    plain = vocabulary.encode("The function")
    assert plain[0] == 2
    assert plain.count(2) == 1
    assert vocabulary.encode("<bos>The function") == plain
    assert vocabulary.encode("<bos><bos>The function") == plain
    assert vocabulary.encode("") == [2]
    with pytest.raises(ModelError, match="has a BOS token"):
        vocabulary.encode("The <bos>function")


def test_a_chat_has_one_bos_and_ends_with_the_models_turn() -> None:
    vocabulary = open_vocabulary(DEMO)
    text = vocabulary.chat("Hello")
    assert text == "<bos><|turn>user\nHello<turn|>\n<|turn>model\n"
    assert vocabulary.encode(text).count(2) == 1
    assert vocabulary.stop == (1, 106, 50)


def test_without_jinja2_a_chat_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(ModelError, match="pip install jinja2"):
        open_vocabulary(DEMO).chat("Hello")


def test_streamed_text_is_the_text_and_holds_back_half_characters() -> None:
    vocabulary = open_vocabulary(DEMO)
    text = "naïve ☃ snow — 雪 ok"
    ids = vocabulary.encode(text)[1:]
    pieces = list(vocabulary.decode_stream([i] for i in ids))
    assert "".join(pieces) == text
    assert not any("�" in p for p in pieces)
    assert len([p for p in pieces if p]) > 3


def test_folders_without_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: not found"):
        open_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        open_vocabulary(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    with pytest.raises(ModelError, match="names a BOS"):
        open_vocabulary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 2, "eos_token_id": 1}))
    vocabulary = open_vocabulary(tmp_path)
    assert vocabulary.stop == (1,)
    with pytest.raises(ModelError, match="no chat template"):
        vocabulary.chat("Hello")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tokenizer and settings of the embedded checkpoint, to be damaged."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds a JSON list"),
        ("{bad", "is not valid JSON"),
        ('{"bos_token_id": "x"}', "bos_token_id is 'x'"),
        ('{"bos_token_id": [2]}', r"bos_token_id is \[2\]"),
        ('{"eos_token_id": ["x"]}', r"eos_token_id is \['x'\]"),
    ],
)
def test_damaged_settings_are_named(folder: Path, text: str, said: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises((CheckpointError, ModelError), match=rf"generation_config\.json: {said}"):
        open_vocabulary(folder)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (b"{% if %}", "is no chat template"),
        (b"{{ messages.x.y }}", "the chat template fails"),
        (b"{{ 1 + 'a' }}", "the chat template fails"),
        (b"caf\xe9", "cannot be read"),
    ],
)
def test_a_broken_chat_template_is_named(folder: Path, template: bytes, said: str) -> None:
    (folder / "chat_template.jinja").write_bytes(template)
    with pytest.raises(ModelError, match=rf"chat_template\.jinja: {said}.*--chat"):
        open_vocabulary(folder).chat("Hello")


def test_ids_that_the_model_has_no_row_for(tmp_path: Path) -> None:
    check_ids([2, 1535], 1536, tmp_path)
    with pytest.raises(ModelError, match=r"token id 1536, and the model has 1,536 tokens"):
        check_ids([2, 1536], 1536, tmp_path)


def test_more_tokens_than_the_model_has_positions() -> None:
    config = {"text_config": {"max_position_embeddings": 2048}}
    check_positions(1, 2047, config, "it")
    check_positions(1, 2048, {}, "it")
    with pytest.raises(ModelError, match=r"2,048 positions of it .* fewer --max-tokens"):
        check_positions(1, 2048, config, "it")
