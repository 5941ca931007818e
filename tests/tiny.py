"""Checkpoints of E2B's layout, small enough to be made for each test."""

import copy
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BF16 = ml_dtypes.bfloat16
DATA = Path(__file__).parent / "data"
TEXT = "model.language_model."
HIDDEN, PLE, VOCAB, LAYERS, UNSHARED = 64, 32, 96, 3, 2


def grid(rng, *shape, step_dtype=np.float32, low=-8, high=7):
    """Weights on the grid: bf16[*shape], groups of 32 along the last axis."""
    levels = rng.integers(low, high + 1, shape).astype(np.float32)
    levels.reshape(-1, 32)[:, 0] = low
    steps = np.exp(rng.uniform(-7, -4, (*shape[:-1], shape[-1] // 32)))
    steps = steps.astype(step_dtype).astype(np.float32)
    return (levels * np.repeat(steps, 32, -1)).astype(BF16)


def noise(rng, *shape):
    """Plain bf16 numbers, on no grid."""
    return (rng.standard_normal(shape) * 0.02).astype(BF16)


def config(**changes):
    """E2B's real config.json, cut to the tiny sizes."""
    value = json.loads((DATA / "e2b_config.json").read_text())
    text = value["text_config"]
    text |= {
        "hidden_size": HIDDEN,
        "hidden_size_per_layer_input": PLE,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": LAYERS - UNSHARED,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    return copy.deepcopy(value) | changes


def tensors(seed=0):
    """Name -> array: a text decoder with PLE and a shared K/V layer, and two small towers."""
    rng = np.random.default_rng(seed)
    result = {
        "model.audio_tower.output_proj.bias": noise(rng, HIDDEN),
        "model.audio_tower.output_proj.weight": noise(rng, HIDDEN, 32),
        "model.embed_vision.embedding_projection.weight": noise(rng, HIDDEN, 32),
        f"{TEXT}embed_tokens.weight": grid(rng, VOCAB, HIDDEN),
        f"{TEXT}embed_tokens_per_layer.weight": grid(rng, VOCAB, PLE * LAYERS),
        f"{TEXT}norm.weight": noise(rng, HIDDEN),
        f"{TEXT}per_layer_model_projection.weight": grid(rng, PLE * LAYERS, HIDDEN),
        "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max": np.array(4.0, BF16),
        "model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight": noise(rng, 32, 32),
        "model.vision_tower.patch_embedder.position_embedding_table": noise(rng, 2, 8, 32),
    }
    for layer in range(LAYERS):
        prefix = f"{TEXT}layers.{layer}."
        result |= {
            f"{prefix}input_layernorm.weight": noise(rng, HIDDEN),
            f"{prefix}layer_scalar": noise(rng, 1),
            f"{prefix}mlp.down_proj.weight": grid(rng, HIDDEN, 128),
            f"{prefix}mlp.gate_proj.weight": grid(rng, 128, HIDDEN),
            f"{prefix}mlp.up_proj.weight": grid(rng, 128, HIDDEN),
            f"{prefix}per_layer_input_gate.weight": grid(rng, PLE, HIDDEN),
            f"{prefix}per_layer_projection.weight": grid(rng, HIDDEN, PLE),
            f"{prefix}self_attn.o_proj.weight": grid(rng, HIDDEN, 64),
            f"{prefix}self_attn.q_proj.weight": grid(rng, 64, HIDDEN),
        }
        if layer < UNSHARED:
            result |= {
                f"{prefix}self_attn.k_proj.weight": grid(rng, 32, HIDDEN),
                f"{prefix}self_attn.v_proj.weight": grid(rng, 32, HIDDEN),
                f"{prefix}self_attn.k_norm.weight": noise(rng, 32),
            }
    return dict(sorted(result.items()))


CARD = """\
---
license: apache-2.0
license_link: https://ai.google.dev/gemma/docs/gemma_4_license
pipeline_tag: any-to-any
library_name: transformers
base_model: google/gemma-4-E2B-it
---

# The source's card
"""

SIDECARS = {
    "generation_config.json": (DATA / "e2b_generation_config.json").read_bytes(),
    "processor_config.json": b'{"processor_class": "Gemma4Processor"}\n',
    "chat_template.jinja": b"{{ bos_token }}\n",
    "tokenizer_config.json": b'{"bos_token": "<bos>"}\r\n',
    "LICENSE": b"licence text\n",
    "README.md": CARD.encode(),
}


def write(folder, arrays=None, *, cfg=None, shards=None, metadata=None, sidecars=True):
    """Write a checkpoint folder with safetensors' own writer.

    `shards`: number of files, with an index; None for one file without an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = tensors() if arrays is None else arrays
    if shards is None:
        save_file(arrays, folder / "model.safetensors", metadata)
    else:
        write_shards(folder, arrays, shards)
    (folder / "config.json").write_text(json.dumps(config() if cfg is None else cfg, indent=2))
    for name, data in SIDECARS.items() if sidecars else ():
        (folder / name).write_bytes(data)
    return folder


def write_shards(folder, arrays, count):
    names = list(arrays)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        chosen = names[number::count]
        save_file({n: arrays[n] for n in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    total = sum(a.nbytes for a in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
