"""Shrunk real configs, with transformers' model of each as the reference."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, Gemma4ForCausalLM, Gemma4UnifiedForCausalLM

from qatpack.evaluate.gemma4.config import Config, read_config
from qatpack.evaluate.gemma4.weights import assemble

DATA = Path(__file__).parents[2] / "data"
FAMILY = ("e2b", "e4b", "12b", "31b")
SLIDING, FULL = "sliding_attention", "full_attention"
# The last unshared layers are 2 (sliding) and 3 (full), not the first ones.
SHARING = [SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL]
PLAIN = [SLIDING, SLIDING, FULL]
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 8, "vocab_size": 256,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "e2b": {"num_kv_shared_layers": 3, "num_attention_heads": 4},
    "e4b": {"num_kv_shared_layers": 3, "num_attention_heads": 4},
    "12b": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "31b": {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
}


def shrunk(name: str) -> dict[str, Any]:
    """A real config.json with its structure kept and its sizes cut."""
    raw = json.loads((DATA / f"{name}_config.json").read_text())
    text = raw["text_config"] | SMALL | OWN[name]
    kinds = SHARING if text["num_kv_shared_layers"] else PLAIN
    text |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    if text["hidden_size_per_layer_input"]:
        text |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256}
    return raw | {"text_config": text}


@dataclass(frozen=True, repr=False)
class Reference:
    """transformers' model in float32 and ours: the same weights."""

    raw: dict[str, Any]
    config: Config
    torch_model: Any
    weights: dict[str, Any]

    def logits(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """transformers' logits, float32[B, T, V]."""
        given = None if mask is None else torch.from_numpy(mask)
        positions = None if mask is None else torch.from_numpy(np.maximum(mask.cumsum(1) - 1, 0))
        with torch.no_grad():
            out = self.torch_model(
                torch.from_numpy(tokens), attention_mask=given, position_ids=positions
            )
        return out.logits.float().numpy()


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that make every part of the model matter: a part left out moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | {
        k: v for k, v in model.named_buffers() if k.endswith("layer_scalar")
    }
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("layer_scalar"):
            tensor.data = 0.6 + 0.1 * noise
        elif "q_norm" in name or "k_norm" in name:
            # Scores are not scaled: wide ones make softmax a switch and float32 noise visible.
            tensor.data = 0.3 + 0.1 * noise
        elif tensor.ndim == 1:
            tensor.data = 1 + 0.3 * noise
        else:
            # Wide enough that the softcap bends the logits.
            tensor.data = noise * (0.5 if "embed_tokens" in name else tensor.shape[1] ** -0.5)


@functools.cache
def reference(name: str, dtype: torch.dtype = torch.float32, tied: bool = True) -> Reference:
    """The reference of one member of the family, built once a session."""
    raw = shrunk(name)
    if not tied:
        raw["tie_word_embeddings"] = raw["text_config"]["tie_word_embeddings"] = False
    config = AutoConfig.for_model(**copy.deepcopy(raw["text_config"]))
    cls = Gemma4UnifiedForCausalLM if "unified" in raw["model_type"] else Gemma4ForCausalLM
    config._attn_implementation = "eager"
    model = cls(config).eval()
    randomize(model, seed=0)
    model.to(dtype)
    state = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    to_jax = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}[dtype]
    leaf = lambda key: jnp.asarray(state[key].float().numpy()).astype(to_jax)  # noqa: E731
    ours = read_config(raw)
    return Reference(raw, ours, model, assemble(ours, leaf))


@pytest.fixture(params=FAMILY)
def ref(request: pytest.FixtureRequest) -> Reference:
    return reference(request.param)


@pytest.fixture
def e2b() -> Reference:
    return reference("e2b")
