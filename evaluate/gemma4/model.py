"""The Gemma 4 text decoder, top to bottom: pure functions over a pytree of weights.

Checked against transformers' `modeling_gemma4.py`, which is the reference. Letters in the shapes
beside the lines: B rows of the batch, T tokens of this call, S keys attended to, E hidden, L
layers, P per-layer width, N query heads, K key/value heads, G = N/K, D head width, F MLP width, V
vocabulary. Activations have the dtype of the final norm's weight; norms, rotary angles, softmax and
logits are float32.

`weights` holds, by the checkpoint's own last names, `embed_tokens` [V, E], `norm` [E], `layers` (a
tuple of dicts), `lm_head` where the head is not tied, and for models with per-layer inputs (PLE)
`embed_tokens_per_layer` [V, L*P], `per_layer_model_projection` [L*P, E],
`per_layer_projection_norm` [P]. A linear is [out, in], dense or packed (see `linear.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import Keys, attend
from .config import SLIDING, Config, Layer, Rope
from .linear import product, rows

Array = jax.Array
Weights = dict[str, Any]
# Takes one layer's new keys and values, (layer index, k, v), and returns all that it attends to.
Remember = Callable[[int, Array, Array], Sequence[Keys]]


def forward(
    weights: Weights,
    tokens: Array,
    positions: Array,
    *,
    config: Config,
    at: Array | None = None,
) -> tuple[Array, tuple[tuple[Array, Array] | None, ...]]:
    """Run whole prompts: hidden states after the final norm, and every layer's keys and values.

    Args:
        weights: the model (see the module).
        tokens: int32[B, T].
        positions: int32[B, T], the place of each token in its row; -1 marks padding, left or right.
        config: what model it is.
        at: int32[B]; give it to get the hidden state of that one index of each row only. Layers
            that share keys and values then skip the rest of the prompt.

    Returns:
        hidden states [B, T, E] ([B, 1, E] with `at`), and for each layer (k, v), each [B, K, T, D],
        or None where the layer shares another's.
    """
    kv: list[tuple[Array, Array] | None] = [None] * len(config.layers)

    def remember(index: int, k: Array, v: Array) -> Sequence[Keys]:
        kv[index] = (k, v)
        return [Keys(k, v, positions)]

    hidden = run_layers(weights, tokens, positions, remember, config=config, at=at)
    return hidden, tuple(kv)


def run_layers(
    weights: Weights,
    tokens: Array,
    positions: Array,
    remember: Remember,
    *,
    config: Config,
    at: Array | None = None,
) -> Array:
    """Hidden states [B, T, E] after the final norm; `remember` decides where keys are kept."""
    h = embed(weights, tokens, config)  # [B, T, E]
    ple = per_layer_inputs(weights, tokens, h, config)  # [B, T, L, P] or None
    keys: dict[int, Sequence[Keys]] = {}
    for index, layer in enumerate(config.layers):
        if at is not None and index == config.first_shared:
            h, ple, positions = (_pick(x, at) for x in (h, ple, positions))
        own = None if ple is None else ple[:, :, index]  # [B, T, P]
        w = weights["layers"][index]
        if config.owns_kv(index):
            k, v = keys_values(_input_norm(h, w, config), w, positions, layer, config)
            keys[index] = remember(index, k, v)
        h = run_layer(h, own, w, positions, keys[layer.kv_from], layer, config)
    if at is not None and config.first_shared == len(config.layers):
        h = _pick(h, at)
    return rms_norm(h, weights["norm"], config.eps)


def logits(weights: Weights, hidden: Array, *, config: Config) -> Array:
    """Logits float32[..., V] of final hidden states [..., E], softcap applied (once)."""
    x = product(hidden, weights["embed_tokens" if config.tied else "lm_head"], jnp.float32)
    return x if config.softcap is None else jnp.tanh(x / config.softcap) * config.softcap


def embed(weights: Weights, tokens: Array, config: Config) -> Array:
    """Token embeddings [B, T, E] times sqrt(E), the factor rounded to the activations' dtype."""
    x = rows(weights["embed_tokens"], tokens, weights["norm"].dtype)
    return x * jnp.asarray(math.sqrt(config.hidden), x.dtype)


def per_layer_inputs(weights: Weights, tokens: Array, h: Array, config: Config) -> Array | None:
    """What each layer is told about its token beside the residual: [B, T, L, P], None without PLE.

    (norm(projection of the embedding) + the token's own row) / sqrt(2).
    """
    if not config.ple:
        return None
    shape = (*tokens.shape, len(config.layers), config.ple)
    x = scaled(product(h, weights["per_layer_model_projection"]), config.hidden**-0.5)
    x = rms_norm(x.reshape(shape), weights["per_layer_projection_norm"], config.eps)
    own = rows(weights["embed_tokens_per_layer"], tokens, h.dtype)  # [B, T, L*P]
    own = own * jnp.asarray(math.sqrt(config.ple), own.dtype)
    return scaled(x + own.reshape(shape), 2.0**-0.5)


def run_layer(
    h: Array,
    ple: Array | None,
    w: Weights,
    positions: Array,
    keys: Sequence[Keys],
    layer: Layer,
    config: Config,
) -> Array:
    """One layer, [B, T, E] -> [B, T, E]: attention and MLP between norms, PLE, the layer scalar."""
    norm = lambda x, name: rms_norm(x, w[name], config.eps)  # noqa: E731
    x = attention(_input_norm(h, w, config), w, positions, keys, layer, config)
    h = h + norm(x, "post_attention_layernorm")
    x = mlp(norm(h, "pre_feedforward_layernorm"), w)
    h = h + norm(x, "post_feedforward_layernorm")
    if ple is not None:
        x = gelu(product(h, w["per_layer_input_gate"])) * ple  # [B, T, P]
        h = h + norm(product(x, w["per_layer_projection"]), "post_per_layer_input_norm")
    return h * w["layer_scalar"]


def keys_values(
    x: Array, w: Weights, positions: Array, layer: Layer, config: Config
) -> tuple[Array, Array]:
    """Keys (normed and rotated) and values (normed without a weight), each [B, K, T, D]."""
    k = _heads(product(x, w["k_proj"]), layer.kv_heads)
    v = _heads(product(x, w["v_proj"]), layer.kv_heads) if layer.v_proj else k
    k = rotate(rms_norm(k, w["k_norm"], config.eps), positions, config.rope(layer.kind))
    return k, rms_norm(v, None, config.eps)


def attention(
    x: Array,
    w: Weights,
    positions: Array,
    keys: Sequence[Keys],
    layer: Layer,
    config: Config,
) -> Array:
    """Causal grouped-query attention, scores not scaled (queries are normed): [B, T, E]."""
    q = _heads(product(x, w["q_proj"]), config.heads)  # [B, N, T, D]
    q = rotate(rms_norm(q, w["q_norm"], config.eps), positions, config.rope(layer.kind))
    window = config.window if layer.kind == SLIDING else None
    out = attend(q, positions, keys, window)  # [B, N, T, D]
    out = out.swapaxes(1, 2).reshape(*x.shape[:2], -1)  # [B, T, N*D]
    return product(out, w["o_proj"])


def mlp(x: Array, w: Weights) -> Array:
    """The gated MLP, [B, T, E] -> [B, T, E]. A mixture of experts would stand beside it."""
    return product(gelu(product(x, w["gate_proj"])) * product(x, w["up_proj"]), w["down_proj"])


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """x / rms(x) over the last axis, times the weight itself (not 1 + weight), in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed if weight is None else normed * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Array, positions: Array, rope: Rope) -> Array:
    """Rotary embedding of x [B, N, T, D] at positions [B, T]; halves of D are the pairs."""
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies(x.shape[-1], rope)
    cos, sin = jnp.cos(angles), jnp.sin(angles)  # [B, 1, T, D/2]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def frequencies(head_dim: int, rope: Rope) -> np.ndarray:
    """Radians a position for each pair, float32[D/2]; 0 beyond the share that turns.

    "Proportional" RoPE takes the exponents over the whole head width, not over the share.
    """
    turning = int(rope.share * head_dim // 2)
    exponents = np.arange(turning, dtype=np.float32) * 2 / np.float32(head_dim)
    inverse = np.float32(1) / (np.float32(rope.theta) ** exponents) / np.float32(rope.factor)
    return np.pad(inverse, (0, head_dim // 2 - turning)).astype(np.float32)


def gelu(x: Array) -> Array:
    """The tanh form of GELU, in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def scaled(x: Array, factor: float) -> Array:
    """x times a float32 factor; jax would round a Python float to x's dtype first."""
    return (x.astype(jnp.float32) * jnp.float32(factor)).astype(x.dtype)


def _input_norm(h: Array, w: Weights, config: Config) -> Array:
    return rms_norm(h, w["input_layernorm"], config.eps)


def _heads(x: Array, count: int) -> Array:
    """[B, T, N*D] -> [B, N, T, D]."""
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _pick(x: Array | None, at: Array) -> Any:
    """Index `at` of axis 1 of each row: [B, T, ...] -> [B, 1, ...]."""
    if x is None:
        return None
    return jnp.take_along_axis(x, at.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
