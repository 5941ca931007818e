"""Ours against transformers on shrunk real configs, and proof that the test sees each part."""

from __future__ import annotations

import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qatpack.evaluate.gemma4 import attention, model

from .conftest import Reference, reference

ATOL = 1e-4
LENGTH = 30  # past the window of 8


def tokens_of(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(3, 256, (batch, length))


def positions_of(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)


def our_logits(
    ref: Reference, tokens: np.ndarray, positions: np.ndarray, code: types.ModuleType = model
) -> np.ndarray:
    # Not jitted: operations compiled once serve every test and mutant of the same shapes.
    hidden, _ = code.forward(
        ref.weights, jnp.asarray(tokens), jnp.asarray(positions), config=ref.config
    )
    return np.asarray(code.logits(ref.weights, hidden, config=ref.config))


def test_logits_at_every_position(ref: Reference) -> None:
    tokens = tokens_of(2, LENGTH)
    ours = our_logits(ref, tokens, positions_of(tokens))
    np.testing.assert_allclose(ours, ref.logits(tokens), rtol=0, atol=ATOL)


def test_a_head_of_its_own() -> None:
    ref = reference("e2b", tied=False)
    tokens = tokens_of(2, LENGTH)
    assert not np.array_equal(ref.weights["lm_head"], ref.weights["embed_tokens"])
    ours = our_logits(ref, tokens, positions_of(tokens))
    np.testing.assert_allclose(ours, ref.logits(tokens), rtol=0, atol=ATOL)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_batch_changes_nothing(ref: Reference, side: str) -> None:
    """One row longer than the window of 8, one shorter, each against a run of its own."""
    tokens, lengths = tokens_of(2, LENGTH), np.array([[19], [5]])
    mask = np.arange(LENGTH) < lengths
    mask = mask[:, ::-1].copy() if side == "left" else mask
    ours = our_logits(ref, tokens, np.where(mask, mask.cumsum(1) - 1, -1))
    for row in range(2):
        alone = ref.logits(tokens[row][mask[row]][None])
        np.testing.assert_allclose(ours[row][mask[row]], alone[0], rtol=0, atol=ATOL)


def test_hidden_states_at_one_index_are_those_of_the_whole_prompt(ref: Reference) -> None:
    tokens = jnp.asarray(tokens_of(2, LENGTH))
    positions, at = jnp.asarray(positions_of(np.asarray(tokens))), jnp.array([29, 11])
    whole, _ = model.forward(ref.weights, tokens, positions, config=ref.config)
    some, _ = model.forward(ref.weights, tokens, positions, config=ref.config, at=at)
    assert some.shape == (2, 1, ref.config.hidden)
    picked = whole[jnp.arange(2), at]
    np.testing.assert_allclose(np.asarray(some[:, 0]), np.asarray(picked), rtol=0, atol=2e-5)


def test_long_prompts_taken_in_blocks_of_queries(
    e2b: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(2, LENGTH)
    expected = our_logits(e2b, tokens, positions_of(tokens))
    monkeypatch.setattr(attention, "QUERIES", 5)
    ours = our_logits(e2b, tokens, positions_of(tokens))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=ATOL)


def test_bfloat16_has_the_same_top_token_where_the_margin_exceeds_the_noise() -> None:
    half, full = reference("e2b", torch.bfloat16), reference("e2b")
    tokens = tokens_of(2, LENGTH)
    ours = our_logits(half, tokens, positions_of(tokens))
    theirs = half.logits(tokens)
    noise = np.abs(theirs - full.logits(tokens)).max(-1)  # at each position
    top2 = np.sort(theirs, axis=-1)[..., -2:]
    clear = top2[..., 1] - top2[..., 0] > noise
    assert clear.mean() > 0.4
    assert np.abs(ours - theirs).mean() < 1.5 * np.abs(theirs - full.logits(tokens)).mean()
    assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all()


# What a mutant changes in model.py; a source text that is gone fails loudly.
MUTANTS = {
    "layer_scalar skipped": ('return h * w["layer_scalar"]', "return h"),
    "norms swapped": ('mlp(norm(h, "pre_feedforward', 'mlp(norm(h, "post_feedforward'),
    "first layer shared instead of the last": (
        "keys[layer.kv_from]",
        "keys[min(k for k in keys if config.layers[k].kind == layer.kind)]",
    ),
    "softcap twice": (
        "* config.softcap\n",
        "* config.softcap if 0 else jnp.tanh(jnp.tanh(x / config.softcap)) * config.softcap\n",
    ),
    "softcap missing": ("if config.softcap is None", "if True"),
    "whole head rotates": ("int(rope.share * head_dim // 2)", "head_dim // 2"),
    "rope exponents over the share": (
        "np.float32(head_dim)", "np.float32(head_dim * rope.share)",
    ),
    "same rope everywhere": (
        "positions, config.rope(layer.kind))\n    win", "positions, config.rope_full)\n    win",
    ),
    "norm by 1 + weight": ("normed * weight", "normed * (1 + weight)"),
    "values not normed": ("return k, rms_norm(v, None, config.eps)", "return k, v"),
    "embedding not scaled": ("math.sqrt(config.hidden)", "1"),
    "per-layer rows not scaled": ("math.sqrt(config.ple)", "1"),
    "per-layer rows forgotten": ("scaled(x + own.reshape(shape)", "scaled(x"),
    "per-layer gate without gelu": (
        'gelu(product(h, w["per_layer_input_gate"]))', 'product(h, w["per_layer_input_gate"])',
    ),
    "window forgotten": ("config.window if layer.kind == SLIDING else None", "None"),
    "window off by one": ("config.window if", "config.window + 1 if"),
    "erf gelu": ("approximate=True", "approximate=False"),
}  # fmt: skip


def mutant(old: str, new: str) -> types.ModuleType:
    """model.py with one piece of its source replaced."""
    source = Path(model.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in model.py"
    module = types.ModuleType(f"{model.__package__}.mutant")
    module.__package__ = model.__package__
    exec(source.replace(old, new), module.__dict__)
    return module


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_part_is_seen(e2b: Reference, name: str) -> None:
    tokens = tokens_of(2, LENGTH)
    ours = our_logits(e2b, tokens, positions_of(tokens), mutant(*MUTANTS[name]))
    assert np.abs(ours - e2b.logits(tokens)).max() > 10 * ATOL


def test_values_of_global_layers_are_their_keys() -> None:
    ref = reference("31b")
    broken = mutant("if layer.v_proj else k\n", "if layer.v_proj else jnp.roll(k, 1, -1)\n")
    tokens = tokens_of(2, LENGTH)
    ours = our_logits(ref, tokens, positions_of(tokens), broken)
    assert np.abs(ours - ref.logits(tokens)).max() > 10 * ATOL
