"""The embedded checkpoint and its builds: loaded, run, and set against transformers."""

from __future__ import annotations

import functools
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from qatpack.checkpoint.errors import CheckpointError, ModelError
from qatpack.checkpoint.header import TensorInfo
from qatpack.checkpoint.reader import TensorReader
from qatpack.checkpoint.source import resolve_source
from qatpack.evaluate.gemma4 import generate, model
from qatpack.evaluate.gemma4.config import Config
from qatpack.evaluate.gemma4.lanes import Lanes
from qatpack.evaluate.gemma4.load import Model, load
from qatpack.evaluate.gemma4.packed import Levels, Words
from qatpack.repack import packing
from qatpack.repack.job import repack
from qatpack.repack.plan import Options

DEMO = Path(__file__).parents[3] / "demo" / "checkpoint"
PROMPT = [2, *range(300, 390)]  # past the window of 64
BUILDS: dict[str, Options] = {
    "bfloat16": Options(scale_dtype="bfloat16"),
    "float16-text-only": Options(scale_dtype="float16", text_only=True),
    "float32-packed-tables": Options(scale_dtype="float32", pack_ple=True),
}


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("builds") / request.param
    repack(resolve_source(DEMO), out, BUILDS[request.param])
    return out


@functools.partial(jax.jit, static_argnames="config")
def run(weights: Any, tokens: jax.Array, config: Config) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.forward(weights, tokens, positions, config=config)
    return model.logits(weights, hidden, config=config)


def logits(loaded: Model) -> np.ndarray:
    return np.asarray(run(loaded.weights, jnp.asarray([PROMPT]), loaded.config))


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DEMO, dtype=torch.float32).eval()


def test_logits_of_the_embedded_checkpoint(reference: Any) -> None:
    loaded = load(DEMO, dtype=jnp.float32)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([PROMPT])).logits.numpy()
    np.testing.assert_allclose(logits(loaded), expected, rtol=0, atol=1e-4)


def test_128_greedy_tokens_are_those_of_transformers(reference: Any) -> None:
    loaded = load(DEMO, dtype=jnp.float32)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompt = [2, *tokenizer.encode("The function returns a list of").ids]
    ours, _ = generate.generate(loaded.weights, [prompt], config=loaded.config, max_tokens=128)
    with torch.no_grad():
        theirs = reference.generate(
            torch.tensor([prompt]), max_new_tokens=128, do_sample=False, eos_token_id=None
        )
    assert len(set(ours[0])) > 10
    assert ours[0] == theirs[0, len(prompt) :].tolist()


def densified(build: Path, out: Path) -> Path:
    """The build with every packed tensor replaced by the weights it stands for."""
    shutil.copytree(build, out)
    tensors = load_file(out / "model.safetensors")
    for name in [n for n in tensors if n.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        words, scale = tensors.pop(name), tensors.pop(f"{module}.weight_scale")
        tensors.pop(f"{module}.weight_shape")
        tensors[f"{module}.weight"] = packing.decode(words, scale)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def dense(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(densified(build, tmp_path_factory.mktemp("dense") / "build"))


def test_exact_logits_are_the_dense_ones_bit_for_bit(build: Path, dense: Model) -> None:
    exact = load(build)
    np.testing.assert_array_equal(logits(exact), logits(dense))
    if "float32" in build.name:
        np.testing.assert_array_equal(logits(exact), logits(load(DEMO)))


def test_exact_text_is_the_dense_text(build: Path, dense: Model) -> None:
    texts = [
        generate.generate(m.weights, [PROMPT], config=m.config, max_tokens=16)[0]
        for m in (load(build), dense)
    ]
    assert texts[0] == texts[1]


def test_packed_weights_stay_packed_and_tables_too(build: Path) -> None:
    loaded = load(build)
    layer = loaded.weights["layers"][0]
    assert isinstance(layer["q_proj"], Words)
    assert layer["q_proj"].words.nbytes * 4 == layer["q_proj"].words.shape[0] * 160 * 2
    assert isinstance(loaded.weights["embed_tokens_per_layer"], Words) == (
        "packed-tables" in build.name
    )
    assert "lm_head" not in loaded.weights


@pytest.mark.parametrize(("platform", "form"), [("cpu", Lanes), ("tpu", Levels)])
def test_fast_logits_are_near_the_exact_ones(
    build: Path, platform: str, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = load(build)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: platform)
        fast = load(build, decode="fast")
    assert isinstance(fast.weights["layers"][0]["q_proj"], form)
    a, b = (jax.nn.log_softmax(logits(m)) for m in (exact, fast))
    assert float(jnp.mean(jnp.sum(jnp.exp(a) * (a - b), axis=-1))) < 1e-4


def test_older_prefix_and_surplus_shared_keys_are_accepted(tmp_path: Path) -> None:
    expected = logits(load(DEMO))
    folder = shutil.copytree(DEMO, tmp_path / "older")
    tensors = {
        n.replace("model.language_model.", "language_model.model."): v
        for n, v in load_file(folder / "model.safetensors").items()
    }
    prefix = "language_model.model.layers.5.self_attn."
    tensors |= {f"{prefix}{n}_proj.weight": np.zeros((64, 160), ml_dtypes.bfloat16) for n in "kv"}
    tensors |= {"lm_head.weight": tensors["language_model.model.embed_tokens.weight"].copy()}
    save_file(tensors, folder / "model.safetensors")
    loaded = load(folder)
    assert "lm_head" not in loaded.weights
    np.testing.assert_array_equal(logits(loaded), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t, p: t.pop(f"{p}layers.3.layer_scalar"), ModelError, "layers.3.layer_scalar"),
        (lambda t, p: t.update({f"{p}layers.3.odd": t[f"{p}norm.weight"]}), ModelError, "odd"),
        (
            lambda t, p: t.update({f"{p}layers.6.input_layernorm.weight": t[f"{p}norm.weight"]}),
            ModelError, "not part of this model: layers.6.input_layernorm.weight",
        ),
        (
            lambda t, p: t.update({f"{p}norm.weight": t[f"{p}norm.weight"][:-1].copy()}),
            ModelError, r"norm.weight' has shape \[159\], config.json asks for \[160\]",
        ),
        (
            lambda t, p: t.update({"model.layers.0.mlp.up_proj.weight": t[f"{p}norm.weight"]}),
            CheckpointError, "two naming schemes",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.language_model.")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(error, match=message):
        load(folder)


def test_a_missing_scale_is_named(build: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(build, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("layers.1.mlp.up_proj.weight_scale"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


@pytest.mark.parametrize(("decode", "dtype"), [("exact", jnp.float32), ("fast", None)])
def test_the_host_holds_one_linear_beside_the_device(
    build: Path, decode: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each read, nothing but the latest is left of what was read earlier and is on the device in
    another form: dense weights cast to float32, packed linears laid out anew."""
    suffix = ".weight" if dtype else ("_proj.weight_packed", "_proj.weight_scale")
    buffers: list[tuple[str, weakref.ref[np.ndarray]]] = []
    left: list[str] = []
    original = TensorReader.read

    def read(self: TensorReader, info: TensorInfo) -> np.ndarray:
        module = info.name.rpartition(".")[0]
        before = [(n.rpartition(".")[0], b) for n, b in buffers if not n.startswith(f"{module}.")]
        # The runtime keeps the arguments of its latest call, one linear, until the next.
        earlier = [(m, b) for m, b in before if m != before[-1][0]]
        deadline = time.monotonic() + 5  # the runtime lets go from a thread of its own
        while (held := [n for n, b in earlier if b() is not None]) and time.monotonic() < deadline:
            time.sleep(0.001)
        left.extend(held)
        array = root = original(self, info)
        while isinstance(root.base, np.ndarray):
            root = root.base
        if info.name.endswith(suffix):
            buffers.append((info.name, weakref.ref(root)))
        return array

    monkeypatch.setattr(TensorReader, "read", read)
    load(build, decode=decode, dtype=dtype)
    assert len(buffers) > 40
    assert not left


def test_towers_and_tied_heads_are_never_read() -> None:
    read: list[int] = []
    loaded = load(DEMO, progress=read.append)
    assert sum(read) == loaded.nbytes
    with safe_open(DEMO / "model.safetensors", "np") as f:
        assert len(read) == sum("language_model" in n for n in f.keys())  # noqa: SIM118
