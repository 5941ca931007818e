"""Runs a folder in vLLM, in a process of its own: `python -m qatpack.verify.engine FOLDER`.

Standard input: JSON {"ids": [token, ...], "top": N}. Standard output: one JSON object, all else
that vLLM prints goes to standard error:

- `tracked` (whether vLLM checked that every parameter was loaded), and `logprobs`: for each token
  but the first {token: log-probability} in nats of that token and of the N likeliest;
- or `stage` ("load" or "run") and `fault`, what vLLM raised there.

Only the standard library is imported here besides vLLM, whose memory goes with the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

MAX_TOKENS = 2048
"""Context vLLM makes room for: an image of a multimodal model has to fit."""


def main() -> None:
    """Answer one request."""
    answer = _claim_stdout()
    request = json.load(sys.stdin)
    stage = "load"
    try:
        engine, tracked = _load(sys.argv[1])
        stage = "run"
        found = {"tracked": tracked, "logprobs": _logprobs(engine, request["ids"], request["top"])}
    except Exception as fault:  # whatever vLLM raises is the answer
        found = {"stage": stage, "fault": f"{type(fault).__name__}: {fault}"}
    with answer:
        json.dump(found, answer)
    sys.stderr.flush()
    os._exit(0)  # vLLM's threads and worker processes can hang at exit


def _claim_stdout() -> TextIO:
    """Standard output for us alone: what vLLM and its C++ libraries print goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answer


def _load(folder: str) -> tuple[Any, bool]:
    """The engine, and whether missing tensors would have raised."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    options = {
        "model": folder,
        "dtype": "bfloat16",
        "max_model_len": MAX_TOKENS,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    try:
        return LLM(**options, model_loader_extra_config={"enable_weights_track": True}), True
    except ValueError as fault:
        if "Unexpected extra config keys" not in str(fault):
            raise
        return LLM(**options), False  # a vLLM that is older than the tracking


def _logprobs(engine: Any, ids: Sequence[int], top: int) -> list[dict[int, float]]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
    output = engine.generate([{"prompt_token_ids": list(ids)}], wanted, use_tqdm=False)[0]
    return [{t: p.logprob for t, p in at.items()} for at in output.prompt_logprobs[1:]]


if __name__ == "__main__":
    main()
