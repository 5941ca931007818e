"""What shape of Gemma 4 text decoder a checkpoint's config.json describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...checkpoint.errors import ModelError

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
SLIDING, FULL = "sliding_attention", "full_attention"

# What transformers' Gemma4TextConfig assumes when config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "attention_k_eq_v": False,
    "final_logit_softcapping": None,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": False,
}
# The least that each of these whole numbers may be; those of `_ABSENT` may be null.
_WHOLE = {
    "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_global_key_value_heads": 1,
    "head_dim": 1, "global_head_dim": 1, "sliding_window": 1, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip
_NUMBER = "a number above 0 and below 1e38"
_POSITIVE = ("rms_norm_eps", "final_logit_softcapping")
_FLAGS = ("attention_k_eq_v", "tie_word_embeddings", "use_double_wide_mlp")
_ABSENT = (
    "num_global_key_value_heads",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "final_logit_softcapping",
)
_LARGEST = 2**31 - 1  # of what XLA indexes by int32
_MOST = {"num_hidden_layers": 10_000}
_ROPE_DEFAULTS: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer: base wavelength and the share of dims that turn."""

    theta: float
    share: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its kind of attention and its sizes.

    `kv_from` is the layer whose keys and values it attends to: its own index, or, for a shared
    layer, the last unshared layer of the same kind. `v_proj` is False where values are the
    projected keys (`attention_k_eq_v`).
    """

    kind: Literal["sliding_attention", "full_attention"]
    head_dim: int
    kv_heads: int
    intermediate: int
    kv_from: int
    v_proj: bool


@dataclass(frozen=True)
class Config:
    """A dense Gemma 4 text decoder. Hashable: it is a static argument of every jitted function.

    `ple` is the width of the per-layer inputs (0: the model has none), `softcap` the cap of the
    final logits (None: no cap), `window` the tokens a sliding layer sees, itself included.
    """

    vocab: int
    hidden: int
    heads: int
    layers: tuple[Layer, ...]
    window: int
    rope_sliding: Rope
    rope_full: Rope
    eps: float
    softcap: float | None
    tied: bool
    ple: int
    ple_vocab: int

    def rope(self, kind: str) -> Rope:
        """The rotary embedding of a kind of layer."""
        return self.rope_sliding if kind == SLIDING else self.rope_full

    def owns_kv(self, index: int) -> bool:
        """Whether layer `index` computes keys and values of its own."""
        return self.layers[index].kv_from == index

    @property
    def first_shared(self) -> int:
        """Index from which on every layer reads another layer's keys and values."""
        owners = [i for i in range(len(self.layers)) if self.owns_kv(i)]
        return owners[-1] + 1


def read_config(source: str | Path | Mapping[str, Any]) -> Config:
    """The decoder described by a folder, a config.json or its parsed content.

    Takes multimodal configs (their `text_config`) and text-only ones, with `rope_parameters` and
    either `global_head_dim` or transformers 5.2x's `per_layer_config`.

    Raises:
        ModelError: not a Gemma 4, a mixture of experts, or an option this decoder lacks.
    """
    raw, where = (source, "config") if isinstance(source, Mapping) else _load(Path(source))
    text = raw.get("text_config") or raw
    if not isinstance(text, Mapping):
        raise _unexpected(where, "text_config", text, "an object")
    _refuse_foreign(raw, text, where)
    text = {**_DEFAULTS, **text}
    if "tie_word_embeddings" in raw:
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return _from_text(text, where)


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ModelError(f"{path}: not found; give a folder that holds a config.json.") from e
    except ValueError as e:
        raise ModelError(f"{path}: not valid JSON ({e}); download the file again.") from e
    if not isinstance(raw, dict):
        raise ModelError(
            f"{path}: holds a JSON {type(raw).__name__} where an object belongs; download it again."
        )
    return raw, str(path)


def _refuse_foreign(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> None:
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ModelError(f"{where}: model_type {kind!r} is not one this decoder runs ({known}).")
    refused = {
        "enable_moe_block": "mixture-of-experts layers (Gemma 4 26B-A4B) are not supported yet",
        "attention_bias": "attention biases are not supported",
    }
    for option, reason in refused.items():
        if text.get(option):
            raise ModelError(f"{where}: {option} is set: {reason}.")
    if text.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{where}: use_bidirectional_attention 'all' is not a causal decoder.")
    if text.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ModelError(f"{where}: hidden_activation {text['hidden_activation']!r} is unknown.")


def _check_values(text: Mapping[str, Any], where: str) -> None:
    """Raise `ModelError` for a value of another kind than the decoder computes with.

    What is missing is named where it is read.
    """
    for key, value in text.items():
        if value is None and key in _ABSENT:
            continue
        if key in _WHOLE and not _is_whole(value, *_bounds(key)):
            expected = "a whole number from {} to {}".format(*_bounds(key))
        elif key in _POSITIVE and not _is_positive(value):
            expected = _NUMBER
        elif key in _FLAGS and not isinstance(value, bool):
            expected = "true or false"
        else:
            continue
        raise _unexpected(where, key, value, expected)


def _bounds(key: str) -> tuple[int, int]:
    return _WHOLE[key], _MOST.get(key, _LARGEST)


def _is_whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_positive(value: object) -> bool:
    """A number above 0 that float32 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e38


def _unexpected(where: str, key: str, value: object, expected: str) -> ModelError:
    shown = repr(value)[:40]
    return ModelError(f"{where}: {key} is {shown}, expected {expected}; download it again.")


def _from_text(text: dict[str, Any], where: str) -> Config:
    _check_values(text, where)
    try:
        layers = _layers(text, where)
        cap = text["final_logit_softcapping"]
        ropes = {**_ROPE_DEFAULTS, **(text.get("rope_parameters") or {})}
        return Config(
            vocab=text["vocab_size"],
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            layers=layers,
            window=text["sliding_window"],
            rope_sliding=_rope(ropes[SLIDING], where),
            rope_full=_rope(ropes[FULL], where),
            eps=float(text["rms_norm_eps"]),
            softcap=cap if cap is None else float(cap),
            tied=text["tie_word_embeddings"],
            ple=text["hidden_size_per_layer_input"] or 0,
            ple_vocab=text.get("vocab_size_per_layer_input") or 0,
        )
    except KeyError as e:
        raise ModelError(f"{where}: the text config lacks {e.args[0]!r}; download it again.") from e
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as e:
        raise ModelError(
            f"{where}: the text config has a value that makes no sense ({e}); download it again."
        ) from e


def _layers(text: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    count = text["num_hidden_layers"]
    kinds = list(
        text.get("layer_types") or [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    )
    kinds[-1] = FULL  # as transformers forces it
    unshared = count - text["num_kv_shared_layers"]
    return tuple(_layer(text, kinds, i, unshared, where) for i in range(count))


def _layer(
    text: Mapping[str, Any], kinds: list[Any], index: int, unshared: int, where: str
) -> Layer:
    kind, shared = kinds[index], index >= unshared
    if kind not in (SLIDING, FULL):
        raise ModelError(f"{where}: layer {index} is of the unknown type {kind!r}.")
    producers = [i for i in range(unshared) if kinds[i] == kind]
    if shared and not producers:
        raise ModelError(
            f"{where}: layer {index} shares keys and values, but no {kind} layer makes any."
        )
    head_dim, kv_heads = _head_sizes(text, kind, index, where)
    if text["num_attention_heads"] % kv_heads:
        raise ModelError(
            f"{where}: layer {index} has {kv_heads} K/V heads, which do not divide the query heads."
        )
    wide = 2 if shared and text["use_double_wide_mlp"] else 1
    return Layer(
        kind=kind,
        head_dim=head_dim,
        kv_heads=kv_heads,
        intermediate=text["intermediate_size"] * wide,
        kv_from=producers[-1] if shared else index,
        v_proj=not (text["attention_k_eq_v"] and kind == FULL),
    )


def _head_sizes(text: Mapping[str, Any], kind: str, index: int, where: str) -> tuple[int, int]:
    """Width and number of the K/V heads: `per_layer_config` where present, else by kind."""
    head_dim, kv_heads = text["head_dim"], text["num_key_value_heads"]
    if "per_layer_config" in text:
        # transformers pads the indices with zeros ("05") and writes only what differs.
        changes = {int(k): v for k, v in text["per_layer_config"].items()}
        own = changes.get(index, {})
        _check_values(own, where)
        return own.get("head_dim", head_dim), own.get("num_key_value_heads", kv_heads)
    if kind == FULL:
        head_dim = text["global_head_dim"]
        if text["attention_k_eq_v"]:
            kv_heads = text["num_global_key_value_heads"] or kv_heads
    return head_dim, kv_heads


def _rope(parameters: Mapping[str, Any], where: str) -> Rope:
    kind = parameters.get("rope_type", "default")
    for key in ("rope_theta", "factor", "partial_rotary_factor"):
        if key in parameters and not _is_positive(parameters[key]):
            raise _unexpected(where, key, parameters[key], _NUMBER)
    if parameters.get("partial_rotary_factor", 1) > 1:
        raise _unexpected(where, "partial_rotary_factor", parameters["partial_rotary_factor"],
                          "at most 1")  # fmt: skip
    if kind == "default":
        return Rope(theta=float(parameters["rope_theta"]))
    if kind == "proportional":
        return Rope(
            theta=float(parameters["rope_theta"]),
            share=float(parameters.get("partial_rotary_factor", 1.0)),
            factor=float(parameters.get("factor", 1.0)),
        )
    raise ModelError(f"{where}: rope_type {kind!r} is not one this decoder knows.")


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder, by its name without prefix, with its dense shape.

    Linears are [out, in] and end in `.weight`, as stored. A tied head has no tensor of its own.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab, config.hidden)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    shapes["norm.weight"] = (config.hidden,)
    if config.ple:
        width = len(config.layers) * config.ple
        shapes["embed_tokens_per_layer.weight"] = (config.ple_vocab, width)
        shapes["per_layer_model_projection.weight"] = (width, config.hidden)
        shapes["per_layer_projection_norm.weight"] = (config.ple,)
    for index in range(len(config.layers)):
        shapes |= {f"layers.{index}.{k}": v for k, v in _layer_shapes(config, index).items()}
    return shapes


def _layer_shapes(config: Config, index: int) -> dict[str, tuple[int, ...]]:
    layer, hidden = config.layers[index], config.hidden
    q, kv = config.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (layer.intermediate, hidden),
        "mlp.up_proj.weight": (layer.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, layer.intermediate),
        "layer_scalar": (1,),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if config.owns_kv(index):
        shapes["self_attn.k_proj.weight"] = (kv, hidden)
        shapes["self_attn.k_norm.weight"] = (layer.head_dim,)
        if layer.v_proj:
            shapes["self_attn.v_proj.weight"] = (kv, hidden)
    if config.ple:
        shapes["per_layer_input_gate.weight"] = (config.ple, hidden)
        shapes["per_layer_projection.weight"] = (hidden, config.ple)
        norms.append("post_per_layer_input_norm")
    return shapes | {f"{name}.weight": (hidden,) for name in norms}
