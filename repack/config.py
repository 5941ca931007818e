"""The output's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.errors import CheckpointError
from .layout import ties_head
from .packing import GROUP

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
PLE_TARGET = "re:.*embed_tokens_per_layer$"


def quantization_config(ignore: Sequence[str], *, pack_ple: bool = False) -> dict[str, Any]:
    """The `quantization_config` of a W4A16 pack-quantized folder, as compressed-tensors defines it.

    `quantization_status` has to say "compressed": without it transformers loads random weights
    and only reports it. `ignore` are exact module names: vLLM remaps prefixes, so an anchored
    pattern can miss.
    """
    groups = {"group_0": _group("Linear")}
    if pack_ple:
        groups["group_1"] = _group(PLE_TARGET)
    return {
        "config_groups": groups,
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _group(target: str) -> dict[str, Any]:
    return {
        "format": "pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": [target],
        "weights": {
            "actorder": None,
            "dynamic": False,
            "group_size": GROUP,
            "num_bits": 4,
            "strategy": "group",
            "symmetric": True,
            "type": "int",
        },
    }


def output_config(
    source: Mapping[str, Any],
    ignore: Sequence[str],
    *,
    text_only: bool = False,
    pack_ple: bool = False,
) -> dict[str, Any]:
    """The source's config with exactly one quantization_config, at the top level.

    Everything else stays as it was. With `text_only` it becomes the text_config under the causal
    architecture. Raises `CheckpointError` when there is nothing to make that from.
    """
    config = without_quantization(source)
    if text_only:
        config = _text_only(config)
    config["quantization_config"] = quantization_config(ignore, pack_ple=pack_ple)
    return config


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` without any quantization config, nested ones included."""
    return {
        key: without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in QUANTIZATION_KEYS
    }


def _text_only(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if text is None:
        return config
    architectures = config.get("architectures")
    if not isinstance(text, dict) or not isinstance(architectures, list) or not architectures:
        raise CheckpointError("has no text_config object or no list of architectures.")
    name = str(architectures[0]).replace("ForConditionalGeneration", "ForCausalLM")
    own = {"architectures": [name], "tie_word_embeddings": ties_head(config)}
    if "transformers_version" in config:
        own["transformers_version"] = config["transformers_version"]
    return text | own
