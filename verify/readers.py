"""What the readers of a build are known to demand and to limit, each with name and version.

Measured or read in their source with vllm 0.32, transformers 5.24, compressed-tensors 0.20.1 and
tpu-inference 0.32; a finding names the reader it speaks of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder import read_json
from ..checkpoint.naming import text_config
from ..repack.layout import fused_with
from .build import PACKED, Build
from .findings import Finding, error, listed, note, warning

VLLM, TRANSFORMERS, TPU = "vLLM 0.32", "transformers 5.24", "tpu-inference 0.32"
_PARTS = (".weight_packed", ".weight_scale", ".weight_shape")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def tensor_findings(build: Build) -> Iterator[Finding]:
    """Tensors that break a reader by their names alone."""
    names = build.checkpoint.tensors
    modules = build.packed.keys() | build.broken
    extra = [n for n in names if n.rpartition(".")[0] in modules and not n.endswith(_PARTS)]
    if extra:
        what = f"{len(extra)} tensors beside packed ones: {listed(extra)}; {VLLM} refuses them"
        yield error("extra-tensor", build.name, what, "remove them")
    partners: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(build.prefix) and name.endswith((".weight", PACKED)):
            module = name.rpartition(".")[0]
            partners.setdefault(fused_with(module), []).append(name)
    mixed = {k: v for k, v in partners.items() if len({n.endswith(PACKED) for n in v}) > 1}
    # An extra dense weight beside its own packed one is told above.
    mixed = {k: v for k, v in mixed.items() if not set(v) & set(extra)}
    if mixed:
        what = f"{len(mixed)} fused linears are packed in part: {listed(mixed)}; {VLLM} fails"
        yield error("fused-mixed", build.name, what, "pack all of q, k, v (gate, up), or none")


def limit_findings(build: Build, *, negative_scales: int) -> Iterator[Finding]:
    """Limits of readers that a sound build may run into."""
    where, modules = build.name, list(build.packed)
    dtypes = {t.scale_dtype for t in build.packed.values()} - {"bfloat16"}
    if dtypes:
        what = f"scales are {' and '.join(sorted(dtypes))}: {TRANSFORMERS} and {VLLM} round them"
        yield note("scale-dtype", where, f"{what} to bfloat16, {TPU} and qatpack do not")
    if negative_scales:
        what = f"{negative_scales:,} scales are negative: {TRANSFORMERS} and {VLLM} (CPU, Marlin)"
        do = "repack with positive steps for such kernels"
        yield note("scale-negative", where, f"{what} take them, its int8-activation mode not", do)
    if embeddings := [m for m in modules if ".embed_tokens" in f".{m}"]:
        yield _embedding_note(embeddings)
    if [m for m in modules if re.search(r"\.experts\.\d+\.", m)]:
        what = f"experts are unfused: {VLLM} loads them, {TRANSFORMERS} needs a weight mapping"
        yield note("experts", where, what)
    if [m for m in modules if re.search(r"\.experts\.(gate_up|down)_proj$", m)]:
        what = f"experts are packed stacked: {TRANSFORMERS} fails, {VLLM} mostly"
        yield error("experts", where, what, "unfuse them, as `qatpack repack` does")
    if 32 in {t.group_size for t in build.packed.values()}:
        yield note(
            "kernel", where, f"groups of 32: {VLLM} runs Marlin, its Machete has no such size"
        )
    multimodal = "vision_config" in build.checkpoint.config
    if modules and multimodal and build.prefix != "model.language_model.":
        what = f"text tensors are named {build.prefix}*: {TPU} wants model.language_model.*"
        yield note("naming", where, what)
    if _shares_kv(build.checkpoint.config):
        what = f"layers share K and V: {TPU} still demands k and v of them (its issue #3225)"
        yield note("shared-kv", where, what)


def _embedding_note(modules: list[str]) -> Finding:
    if all(m.endswith("embed_tokens_per_layer") for m in modules):
        what = f"packed: vLLM >= 0.29 reads it on a GPU; on a CPU it fails, {TRANSFORMERS} refuses"
        return note("embedding-packed", listed(modules), what)
    what = f"packed: {VLLM} fails with a packed embedding under a tied head"
    return error("embedding-packed", listed(modules), what, "leave embed_tokens in bf16")


def _shares_kv(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config", config)
    shared = text.get("num_kv_shared_layers") if isinstance(text, Mapping) else None
    return type(shared) is int and shared > 0


def file_findings(build: Build, reference: Path | None) -> Iterator[Finding]:
    """Files beside the weights that readers need.

    A file that the reference lacks too is only warned about: it was not lost here.
    """
    folder, config = build.folder, build.checkpoint.config
    have = {p.name for p in folder.iterdir()}
    theirs = None if reference is None else {p.name for p in reference.iterdir()}

    def lacks(names: tuple[str, ...], what: str, *, needed: bool) -> Iterator[Finding]:
        if have.intersection(names):
            return
        lost = needed if theirs is None else bool(theirs.intersection(names))
        make = error if lost and needed else warning
        do = "copy it from the source" if lost else "add it before publishing"
        yield make("file-missing", f"{build.name}/{names[0]}", f"missing: {what}", do)

    if not config:
        yield error("file-missing", f"{build.name}/config.json", "missing or empty", "export again")
    yield from lacks(_TOKENIZERS, "no reader tokenizes without it", needed=True)
    yield from lacks(("tokenizer_config.json",), "special tokens come from it", needed=False)
    yield from lacks(
        ("generation_config.json",), "generation does not stop at <turn|>", needed=False
    )
    if "vision_config" in config:
        processors = ("processor_config.json", "preprocessor_config.json")
        yield from lacks(processors, f"{VLLM} needs it for the multimodal class", needed=True)
        vision = config["vision_config"]
        if not isinstance(vision, Mapping) or "default_output_length" not in vision:
            what = f"absent: {VLLM} needs it for images"
            yield warning("config-vision", "config.json: vision_config.default_output_length", what)
    if "chat_template.jinja" not in have and not _has_template(folder):
        yield from lacks(("chat_template.jinja",), "chat does not work", needed=False)


def _has_template(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    try:
        return path.exists() and bool(read_json(path).get("chat_template"))
    except CheckpointError:
        return False


def generation_findings(build: Build) -> Iterator[Finding]:
    """Where generation_config.json contradicts config.json; it is a copy, so only warned."""
    path = build.folder / "generation_config.json"
    if not path.exists():
        return
    try:
        generation = read_json(path)
    except CheckpointError as fault:
        what = str(fault).partition(": ")[2].rstrip(".")
        yield error("generation", path.name, what, "copy it from the source")
        return
    yield from _type_findings(generation, path.name)
    config = build.checkpoint.config
    text = text_config(config)
    wanted, stops = _ids(config.get("eos_token_id", text.get("eos_token_id"))), None
    stops = _ids(generation.get("eos_token_id"))
    if stops and wanted - stops:
        what = f"eos_token_id lacks {sorted(wanted - stops)}, which config.json names"
        yield warning("generation", path.name, what, "check where generation should stop")
    for key in ("bos_token_id", "pad_token_id"):
        ours, theirs = _ids(generation.get(key)), _ids(text.get(key))
        if ours and theirs and ours != theirs:
            what = f"{key} is {sorted(ours)}, in config.json {sorted(theirs)}"
            yield warning("generation", path.name, what, "make them agree")
    size = text.get("vocab_size")
    if type(size) is int and (beyond := [i for i in stops if not 0 <= i < size]):
        what = f"eos_token_id {beyond} lies outside the vocabulary of {size}"
        yield warning("generation", path.name, what)


_NUMBER, _COUNT, _FLAG = "a number", "a whole number", "true or false"
_KINDS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "max_length", "max_new_tokens", "num_beams"), _COUNT),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _COUNT),
    **dict.fromkeys(("do_sample", "use_cache"), _FLAG),
    "eos_token_id": "a whole number or a list of them",
}


def _type_findings(generation: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Values of a type that no reader takes; null is a default everywhere."""
    for key, kind in _KINDS.items():
        value = generation.get(key)
        if value is not None and not _is_kind(value, kind):
            what = f"{key} is {json.dumps(value)[:40]}, expected {kind}"
            yield error("generation", where, what, "copy it from the source")


def _is_kind(value: object, kind: str) -> bool:
    if kind == _FLAG:
        return type(value) is bool
    if kind == _NUMBER:
        return type(value) in (int, float)
    if kind == _COUNT:
        return type(value) is int
    return type(value) is int or (
        isinstance(value, list) and bool(value) and all(type(v) is int for v in value)
    )


def _ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if type(v) is int}
