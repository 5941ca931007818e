"""The embedded checkpoint: what other tests and the README take for granted of it."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.reader import TensorReader
from qatpack.repack.grid import recover

DEMO = Path(__file__).parents[1] / "demo"
CHECKPOINT = DEMO / "checkpoint"
TEXT_FILE = DEMO.parent / "evaluate" / "text.txt"
TEXT = "model.language_model."


def test_it_is_one_small_file_without_metadata():
    (path,) = CHECKPOINT.glob("*.safetensors")
    with safe_open(path, "np") as file:
        assert not file.metadata()
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) < 6_000_000
    assert TEXT_FILE.stat().st_size >= 20_000


def test_it_has_the_layout_of_e2b():
    import re

    normal = lambda name: re.sub(r"\.\d+\.", ".N.", name)  # noqa: E731
    real = json.loads((Path(__file__).parent / "data" / "e2b_tensors.json").read_text())
    ours = Checkpoint.open(CHECKPOINT).tensors
    assert {(normal(t.name), len(t.shape), t.dtype) for t in ours.values()} == {
        (normal(t["name"]), len(t["shape"]), t["dtype"]) for t in real
    }
    config = json.loads((Path(__file__).parent / "data" / "e2b_config.json").read_text())
    assert list(Checkpoint.open(CHECKPOINT).config) == list(config)


@pytest.mark.parametrize("name", ["embed_tokens", "embed_tokens_per_layer"])
def test_the_embeddings_are_on_the_grid_too(name):
    with TensorReader() as reader:
        weight = reader.read(Checkpoint.open(CHECKPOINT)[f"{TEXT}{name}.weight"])
    assert recover(weight).counts.refused == 0


def test_it_has_learned_what_its_card_says():
    import torch
    from tokenizers import Tokenizer
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode(TEXT_FILE.read_text()).ids
    assert 2 not in ids
    windows = torch.tensor([[2, *ids[i : i + 511]] for i in range(0, 4 * 511, 511)])
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.exp() * 5 < model.config.text_config.vocab_size
