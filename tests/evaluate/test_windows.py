"""Texts and how they are cut: protocols, the one BOS, texts that are too short, WikiText-2."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hub import Hub

from qatpack.checkpoint.errors import ModelError
from qatpack.evaluate import texts, windows
from qatpack.evaluate.texts import Text, embedded_text, read_text
from qatpack.evaluate.tokens import open_vocabulary
from qatpack.evaluate.windows import REQUEST, Protocol, check_length, cut

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"
VOCABULARY = open_vocabulary(DEMO)
TEXT = embedded_text()
IDS = VOCABULARY.encode(TEXT.content)[1:]


def test_consecutive_windows_lose_and_repeat_no_token() -> None:
    found = cut(TEXT, VOCABULARY, Protocol(windows=8, length=512))
    assert found.tokens.shape == (8, 512)
    assert found.tokens.dtype == np.int32
    assert (found.tokens[:, 0] == 2).all()
    assert found.tokens[:, 1:].ravel().tolist() == IDS[: 8 * 511]
    assert (found.first, found.last, found.scored, found.targets) == (0, 512, 512, 511)
    assert found.text_tokens == len(IDS)


def test_llama_cpp_chunks_as_its_perplexity_tool_does() -> None:
    found = cut(TEXT, VOCABULARY, Protocol("llama.cpp", windows=3, length=512))
    flat = [2, *IDS][: 3 * 512]
    for row, start in zip(found.tokens, range(0, 3 * 512, 512), strict=True):
        assert row[0] == 2  # in the place of the token that stood there
        assert row[1:].tolist() == flat[start + 1 : start + 512]
    assert (found.first, found.last) == (256, 511)
    assert found.scored == found.targets == 255


def test_a_chat_frame_stands_before_every_window_and_is_not_scored() -> None:
    frame = VOCABULARY.encode(VOCABULARY.chat(REQUEST))
    found = cut(TEXT, VOCABULARY, Protocol(chat=True, windows=2, length=128))
    assert (found.tokens[:, : len(frame)] == frame).all()
    room = 128 - len(frame)
    assert found.tokens[:, len(frame) :].ravel().tolist() == IDS[: 2 * room]
    assert (found.first, found.scored, found.targets) == (len(frame) - 1, room + 1, room)
    with pytest.raises(ModelError, match="give a longer --length"):
        cut(TEXT, VOCABULARY, Protocol(chat=True, windows=1, length=len(frame)))


def test_texts_that_cannot_be_cut() -> None:
    with pytest.raises(ModelError, match=r"4 windows of 512 take 2,044; give .* --windows 2"):
        cut(Text("short.txt", TEXT.content[:3000]), VOCABULARY, Protocol(windows=4))
    with pytest.raises(ModelError, match=r"and 1 window of 8 take 7; give a longer text\.$"):
        cut(Text("empty.txt", ""), VOCABULARY, Protocol(windows=1, length=8))
    with pytest.raises(ModelError, match="has a BOS token"):
        cut(Text("odd.txt", "before <bos> after"), VOCABULARY, Protocol(windows=1, length=8))


def test_windows_longer_than_the_model_was_made_for() -> None:
    config = {"text_config": {"max_position_embeddings": 2048}}
    with pytest.raises(ModelError, match=r"2,049 tokens .* 2,048 positions of it .*--length"):
        check_length(Protocol(length=2049), config, "it")
    check_length(Protocol(length=2048), config, "it")
    check_length(Protocol(length=2049), {}, "it")


def test_a_second_bos_is_found_however_it_came() -> None:
    tokens = np.array([[2, 5, 6], [2, 2, 7]], np.int32)
    with pytest.raises(ModelError, match="window 1 has 2 BOS tokens"):
        windows._check_bos(tokens, 2)
    with pytest.raises(ModelError, match="window 0 has 0 BOS tokens"):
        windows._check_bos(np.array([[5, 6]], np.int32), 2)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(ModelError, match="cannot be read"):
        read_text(path)
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match=r"is not UTF-8 \(byte 3\)"):
        read_text(path)
    path.write_text("café\r\n", encoding="utf-8", newline="")
    assert read_text(path) == Text("text.txt", "café\r\n")
    assert read_text(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


RAW = " \n = Title = \n \n A paragraph \u2028 with odd breaks . \n"
CALL = """
import json, sys
from qatpack.checkpoint.errors import SourceError
from qatpack.evaluate import texts
texts.WIKITEXT_SHA256 = sys.argv[1] or texts.WIKITEXT_SHA256
try:
    print(json.dumps([texts.wikitext(joined=joined).content for joined in (True, False)]))
except SourceError as error:
    print(json.dumps(str(error)))
"""


def fetched(tmp_path: Path, data: bytes, sha256: str = "") -> object:
    """What `wikitext` makes of a Hub that serves `data`; a process of its own, since
    huggingface_hub reads its environment when imported."""
    repo = {texts.WIKITEXT_COMMIT: {texts.WIKITEXT_FILE: data}}
    with Hub({f"datasets/{texts.WIKITEXT_REPO}": repo}) as hub:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        call = [sys.executable, "-c", CALL, sha256]
        done = subprocess.run(call, env=env, capture_output=True, text=True, check=True)
        assert hub.downloads() == {texts.WIKITEXT_FILE}
    return json.loads(done.stdout)


def zipped(raw: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(texts.WIKITEXT_MEMBER, raw)
    return buffer.getvalue()


def test_wikitext_comes_from_the_pinned_commit(tmp_path: Path) -> None:
    joined, raw = fetched(tmp_path, zipped(RAW), hashlib.sha256(RAW.encode()).hexdigest())
    assert raw == RAW
    # As datasets' loading script has it: rows of white space only are empty.
    assert joined == " = Title = \n A paragraph \u2028 with odd breaks . \n"


@pytest.mark.parametrize("data", [zipped("another text"), b"no zip"])
def test_another_file_in_its_place_is_refused(tmp_path: Path, data: bytes) -> None:
    said = fetched(tmp_path, data)
    assert isinstance(said, str)
    assert "--text" in said
    assert ("has sha256" in said) or ("is no zip" in said)


def test_a_text_names_what_it_is() -> None:
    named = replace(TEXT, revision="a" * 40).to_json(7)
    assert named == {
        "name": TEXT.name, "sha256": TEXT.sha256, "revision": "a" * 40, "tokens": 7
    }  # fmt: skip
