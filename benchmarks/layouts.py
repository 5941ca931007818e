"""What a QAT Gemma 4 checkpoint holds: every tensor's name, shape and role, from its config.

Written down from transformers' `modeling_gemma4.py` and `modeling_gemma4_unified.py` (5.24) and
checked against them on the meta device for all five sizes; E2B's list also equals the published
file's. All tensors are bf16. Stored names: 12B's vision embedder is `vision_embedder.*` in files
although its module is `embed_vision` (transformers' `conversion_mapping.py`).
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
Shape = tuple[int, ...]

GRID_ROLES = frozenset(
    {"quantized_linear", "quantized_experts", "token_embedding", "per_layer_embedding"}
)
"""Roles whose weights are step * level in groups of 32 along the last axis."""

CLIP_BOUNDS = ("input_max", "input_min", "output_max", "output_min")


@dataclass(frozen=True)
class Tensor:
    """One bf16 tensor of a checkpoint; `role` is the word `tests/data/e2b_tensors.json` uses."""

    name: str
    shape: Shape
    role: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return 2 * math.prod(self.shape)

    @property
    def on_grid(self) -> bool:
        """Whether its weights are step * level in groups of 32."""
        return self.role in GRID_ROLES


def tensors(config: Config) -> list[Tensor]:
    """Every tensor of the checkpoint a `config.json` describes, by name as safetensors writes it.

    The tied `lm_head` is not there, nor are k_proj, v_proj and k_norm of layers that share them:
    QAT exports hold neither.
    """
    found = [*_text(config["text_config"])]
    if config["model_type"] == "gemma4_unified":
        found += _unified_embedders(config)
    else:
        found += _vision(config["vision_config"])
        found += _embedder("vision", config["vision_config"]["hidden_size"], config)
        if config["audio_config"]:
            found += _audio(config["audio_config"])
            found += _embedder("audio", config["audio_config"]["output_proj_dims"], config)
    return sorted(found, key=lambda tensor: tensor.name)


def cut(config: Config, *, layers: int | None = None, vocab: int | None = None) -> Config:
    """The config of a smaller model of the same structure.

    Unshared and shared layers keep their proportion and their own last layers, so that both parts
    end with full attention as in the real models (transformers forces the last layer to it).
    There are at most as many shared layers as leave every type they need among the unshared ones.

    Raises:
        ValueError: a cut that is no cut: fewer than one layer or row, or more than there are.
    """
    config = copy.deepcopy(config)
    text = config["text_config"]
    if layers is not None:
        _cut_layers(text, layers)
    if vocab is not None:
        if not 0 < vocab <= text["vocab_size"]:
            raise ValueError(f"--vocab {vocab}: give 1 to {text['vocab_size']}")
        text["vocab_size"] = vocab
        if text["vocab_size_per_layer_input"]:
            text["vocab_size_per_layer_input"] = vocab
    return config


def _cut_layers(text: Config, layers: int) -> None:
    total, shared = text["num_hidden_layers"], text["num_kv_shared_layers"]
    if not 0 < layers <= total:
        raise ValueError(f"--layers {layers}: give 1 to {total}")
    unshared_types = text["layer_types"][: total - shared]
    shared_types = text["layer_types"][total - shared :]
    for n_shared in range(round(layers * shared / total), -1, -1):
        head = unshared_types[len(unshared_types) - (layers - n_shared) :]
        tail = shared_types[len(shared_types) - n_shared :]
        if set(tail) <= set(head):
            break
    text |= {
        "num_hidden_layers": layers,
        "num_kv_shared_layers": n_shared,
        "layer_types": head + tail,
    }


def _text(text: Config) -> Iterator[Tensor]:
    root, hidden, ple = "model.language_model", text["hidden_size"], _ple(text)
    yield Tensor(f"{root}.embed_tokens.weight", (text["vocab_size"], hidden), "token_embedding")
    yield Tensor(f"{root}.norm.weight", (hidden,), "text_norm")
    if ple:
        wide = text["num_hidden_layers"] * ple
        rows = text["vocab_size_per_layer_input"]
        yield Tensor(f"{root}.embed_tokens_per_layer.weight", (rows, wide), "per_layer_embedding")
        yield _linear(f"{root}.per_layer_model_projection", wide, hidden)
        yield Tensor(f"{root}.per_layer_projection_norm.weight", (ple,), "text_norm")
    for i in range(text["num_hidden_layers"]):
        layer = f"{root}.layers.{i}"
        yield from _attention(f"{layer}.self_attn", text, i)
        yield from _mlp(f"{layer}.mlp", text, i)
        yield from _layer_rest(layer, text)
        if text["enable_moe_block"]:
            yield from _experts(layer, text)


def _attention(name: str, text: Config, i: int) -> Iterator[Tensor]:
    full = text["layer_types"][i] == "full_attention"
    same_kv = full and text["attention_k_eq_v"]
    head = text["global_head_dim"] if full else text["head_dim"]
    kv_heads = text["num_key_value_heads"]
    if same_kv:
        kv_heads = text["num_global_key_value_heads"] or kv_heads
    hidden, q = text["hidden_size"], text["num_attention_heads"] * head
    yield _linear(f"{name}.q_proj", q, hidden)
    yield _linear(f"{name}.o_proj", hidden, q)
    yield Tensor(f"{name}.q_norm.weight", (head,), "text_norm")
    if not _shares_kv(text, i):
        yield _linear(f"{name}.k_proj", kv_heads * head, hidden)
        yield Tensor(f"{name}.k_norm.weight", (head,), "text_norm")
        if not same_kv:
            yield _linear(f"{name}.v_proj", kv_heads * head, hidden)


def _mlp(name: str, text: Config, i: int) -> Iterator[Tensor]:
    double = text["use_double_wide_mlp"] and _shares_kv(text, i)
    hidden, wide = text["hidden_size"], text["intermediate_size"] * (2 if double else 1)
    yield _linear(f"{name}.gate_proj", wide, hidden)
    yield _linear(f"{name}.up_proj", wide, hidden)
    yield _linear(f"{name}.down_proj", hidden, wide)


def _layer_rest(layer: str, text: Config) -> Iterator[Tensor]:
    hidden, ple = text["hidden_size"], _ple(text)
    norms = [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    if ple:
        yield _linear(f"{layer}.per_layer_input_gate", ple, hidden)
        yield _linear(f"{layer}.per_layer_projection", hidden, ple)
        norms.append("post_per_layer_input_norm")
    for norm in norms:
        yield Tensor(f"{layer}.{norm}.weight", (hidden,), "text_norm")
    yield Tensor(f"{layer}.layer_scalar", (1,), "layer_scalar")


def _experts(layer: str, text: Config) -> Iterator[Tensor]:
    hidden, wide, n = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield Tensor(f"{layer}.experts.gate_up_proj", (n, 2 * wide, hidden), "quantized_experts")
    yield Tensor(f"{layer}.experts.down_proj", (n, hidden, wide), "quantized_experts")
    yield Tensor(f"{layer}.router.proj.weight", (n, hidden), "router_linear_bf16")
    yield Tensor(f"{layer}.router.scale", (hidden,), "router_scale")
    yield Tensor(f"{layer}.router.per_expert_scale", (n,), "router_scale")
    for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        yield Tensor(f"{layer}.{norm}.weight", (hidden,), "text_norm")
    yield Tensor(f"{layer}.pre_feedforward_layernorm_2.weight", (hidden,), "text_norm")


def _vision(vision: Config) -> Iterator[Tensor]:
    root, hidden, wide = "model.vision_tower", vision["hidden_size"], vision["intermediate_size"]
    head, heads = vision["head_dim"], vision["num_attention_heads"]
    kv = vision["num_key_value_heads"] * head
    patch = 3 * vision["patch_size"] ** 2
    table = (2, vision["position_embedding_size"], hidden)
    yield _bf16(f"{root}.patch_embedder.input_proj", hidden, patch, "vision")
    yield Tensor(f"{root}.patch_embedder.position_embedding_table", table, "vision_other")
    if vision["standardize"]:
        yield Tensor(f"{root}.std_bias", (hidden,), "vision_other")
        yield Tensor(f"{root}.std_scale", (hidden,), "vision_other")
    linears = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "pre_feedforward_layernorm": hidden,
        "post_feedforward_layernorm": hidden,
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
    }
    for i in range(vision["num_hidden_layers"]):
        yield from _tower_layer(f"{root}.encoder.layers.{i}", linears, norms, vision, "vision")


def _audio(audio: Config) -> Iterator[Tensor]:
    root, hidden = "model.audio_tower", audio["hidden_size"]
    kernel, head = audio["conv_kernel_size"], hidden // audio["num_attention_heads"]
    yield from _subsampling(f"{root}.subsample_conv_projection", audio)
    yield _bf16(f"{root}.output_proj", audio["output_proj_dims"], hidden, "audio")
    yield Tensor(f"{root}.output_proj.bias", (audio["output_proj_dims"],), "audio_other")
    linears = {f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj")}
    linears |= {
        "self_attn.post": (hidden, hidden),
        "lconv1d.linear_start": (2 * hidden, hidden),
        "lconv1d.linear_end": (hidden, hidden),
    }
    norms = {"norm_out": hidden, "norm_pre_attn": hidden, "norm_post_attn": hidden}
    norms |= {"lconv1d.conv_norm": hidden, "lconv1d.pre_layer_norm": hidden}
    for block in ("feed_forward1", "feed_forward2"):
        linears[f"{block}.ffw_layer_1"] = (4 * hidden, hidden)
        linears[f"{block}.ffw_layer_2"] = (hidden, 4 * hidden)
        norms |= {f"{block}.pre_layer_norm": hidden, f"{block}.post_layer_norm": hidden}
    for i in range(audio["num_hidden_layers"]):
        layer = f"{root}.layers.{i}"
        yield from _tower_layer(layer, linears, norms, audio, "audio")
        yield _bf16(f"{layer}.self_attn.relative_k_proj", hidden, hidden, "audio")
        yield Tensor(f"{layer}.self_attn.per_dim_scale", (head,), "audio_other")
        conv = (hidden, 1, kernel)
        yield Tensor(f"{layer}.lconv1d.depthwise_conv1d.weight", conv, "audio_other")


def _subsampling(name: str, audio: Config) -> Iterator[Tensor]:
    first, second = audio["subsampling_conv_channels"]
    # Two strides of 2 leave a quarter of the mel bins, and there are as many bins as channels.
    yield _bf16(f"{name}.input_proj_linear", audio["hidden_size"], first // 4 * second, "audio")
    for i, shape in enumerate([(first, 1, 3, 3), (second, first, 3, 3)]):
        yield Tensor(f"{name}.layer{i}.conv.weight", shape, "audio_other")
        yield Tensor(f"{name}.layer{i}.norm.weight", shape[:1], "audio_norm")


def _tower_layer(
    layer: str, linears: dict[str, Shape], norms: dict[str, int], tower: Config, kind: str
) -> Iterator[Tensor]:
    for name, (rows, columns) in linears.items():
        yield _bf16(f"{layer}.{name}.linear", rows, columns, kind)
        if tower["use_clipped_linears"]:
            for bound in CLIP_BOUNDS:
                yield Tensor(f"{layer}.{name}.{bound}", (), f"{kind}_clip_bound")
    for name, size in norms.items():
        yield Tensor(f"{layer}.{name}.weight", (size,), f"{kind}_norm")


def _embedder(kind: str, columns: int, config: Config) -> Iterator[Tensor]:
    name = f"model.embed_{kind}.embedding_projection"
    yield _bf16(name, config["text_config"]["hidden_size"], columns, f"embed_{kind}")


def _unified_embedders(config: Config) -> Iterator[Tensor]:
    vision = config["vision_config"]
    root, wide = "model.vision_embedder", vision["mm_embed_dim"]
    patch = 3 * (vision["patch_size"] * vision["pooling_kernel_size"]) ** 2
    table = (vision["mm_posemb_size"], 2, wide)
    yield Tensor(f"{root}.pos_embedding", table, "vision_other")
    yield _bf16(f"{root}.patch_dense", wide, patch, "vision")
    yield Tensor(f"{root}.patch_dense.bias", (wide,), "vision_other")
    for norm, size in {"patch_ln1": patch, "patch_ln2": wide, "pos_norm": wide}.items():
        yield Tensor(f"{root}.{norm}.weight", (size,), "vision_norm")
        yield Tensor(f"{root}.{norm}.bias", (size,), "vision_other")
    yield from _embedder("vision", vision["output_proj_dims"], config)
    yield from _embedder("audio", config["audio_config"]["audio_embed_dim"], config)


def _linear(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(f"{name}.weight", (rows, columns), "quantized_linear")


def _bf16(name: str, rows: int, columns: int, kind: str) -> Tensor:
    return Tensor(f"{name}.weight", (rows, columns), f"{kind}_linear_bf16")


def _ple(text: Config) -> int:
    """Width of one layer's per-layer input; 0 where the model has none."""
    return text["hidden_size_per_layer_input"] or 0


def _shares_kv(text: Config, i: int) -> bool:
    return i >= text["num_hidden_layers"] - text["num_kv_shared_layers"]
