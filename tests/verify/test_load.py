"""`--load vllm`: with a stand-in for vLLM, and with the real one where it is installed."""

import importlib.util
import json
import sys
import time

import numpy as np
import pytest

from qatpack.verify import load
from qatpack.verify.build import open_build
from qatpack.verify.load import load_in

VLLM = """
import json, os, signal, subprocess, sys
from types import SimpleNamespace

CASE = json.load(open(os.environ["STAND_IN"]))
print("noise of vLLM")
os.write(1, b"noise of its C++ library\\n")


class SamplingParams:
    def __init__(self, **settings):
        self.top = settings["prompt_logprobs"]


class LLM:
    def __init__(self, model, **settings):
        if "old" in CASE and "model_loader_extra_config" in settings:
            raise ValueError("Unexpected extra config keys for load format auto: {'e'}")
        if "killed" in CASE:
            print("out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if "lingers" in CASE:
            subprocess.Popen(["sleep", "40"])
        if "refuses" in CASE:
            raise ValueError("Following weights were not\\n initialized from checkpoint: {'norm'}")

    def generate(self, prompts, wanted, use_tqdm):
        if "kernel" in CASE:
            raise AttributeError("'_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'")
        if "crash" in CASE:
            raise RuntimeError("shapes do not fit")
        ids = prompts[0]["prompt_token_ids"]
        assert len(ids) == len(CASE["logprobs"]) + 1 and wanted.top == 5
        at = [{int(t): SimpleNamespace(logprob=p) for t, p in x.items()} for x in CASE["logprobs"]]
        return [SimpleNamespace(prompt_logprobs=[None, *at])]
"""

KERNEL = """
import torch

# The AVX2 build of vLLM lacks its 4-bit kernel: bf16(scale * level), then a product in bf16.
if not torch.cpu._is_avx512_supported():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cpu_gemm_wna16(Tensor input, Tensor q_weight, Tensor(a!) output, Tensor scales, "
        "Tensor? zeros, Tensor? bias, int pack_factor, str isa_hint) -> ()"
    )

    def multiply(x, packed, out, scales, zeros, bias, pack_factor, isa_hint):
        columns = x.shape[-1]
        words = packed.reshape(-1, columns, 2, 1)
        levels = ((words >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15) - 8
        weight = levels.reshape(-1, columns, 16).permute(1, 0, 2).reshape(columns, -1)
        scale = scales.repeat_interleave(columns // len(scales), 0)
        out.copy_(x @ (scale * weight.to(scale.dtype)))

    library.impl("cpu_gemm_wna16", multiply, "CPU")
"""


@pytest.fixture(scope="module")
def build(builds):
    return open_build(builds["bfloat16"])


@pytest.fixture(scope="module")
def decoded(build):
    """Log-probabilities of the prompt by the decoded weights."""
    return load._dense_logprobs(build, load._prompt(build.checkpoint.config))


@pytest.fixture
def stand_in(tmp_path, monkeypatch, decoded):
    """`stand_in("case", logprobs)`: a vLLM that does that."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("STAND_IN", str(tmp_path / "case.json"))

    def make(*cases, logprobs=(), rounding=0.0):
        passes = {False: decoded, True: decoded + rounding}
        monkeypatch.setattr(load, "_dense_logprobs", lambda b, i, exact=False: passes[exact])
        case = dict.fromkeys(cases, True) | {"logprobs": logprobs}
        (tmp_path / "case.json").write_text(json.dumps(case))

    return make


def answer(decoded, config, off=0.0):
    """What vLLM says: of the prompt's own tokens and the likeliest, each `off` nats too high."""
    ids = load._prompt(config)
    return [
        {int(t): float(at[t]) + off for t in {following, *np.argsort(at)[-5:].tolist()}}
        for following, at in zip(ids[1:], decoded, strict=False)
    ]


def test_vllm_that_agrees(build, decoded, stand_in, capfd):
    stand_in(logprobs=answer(decoded, build.checkpoint.config, 0.02))
    findings, checks = load_in("vllm", build)
    assert findings == []
    assert "(weights tracked)" in checks[0]
    assert "0.020 nats" in checks[0]
    assert capfd.readouterr().out == ""


def test_an_older_vllm_does_not_track(build, decoded, stand_in):
    stand_in("old", logprobs=answer(decoded, build.checkpoint.config))
    assert "weights not tracked" in load_in("vllm", build)[1][0]


def test_a_process_that_outlives_vllm_is_not_waited_for(build, decoded, stand_in):
    stand_in("lingers", logprobs=answer(decoded, build.checkpoint.config))
    start = time.monotonic()
    assert load_in("vllm", build)[0] == []
    assert time.monotonic() - start < 30


def test_a_module_in_the_current_folder_is_not_taken(
    build, decoded, stand_in, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "vllm.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path / "here")
    stand_in(logprobs=answer(decoded, build.checkpoint.config))
    assert load_in("vllm", build)[0] == []


@pytest.mark.parametrize(("off", "said"), [(0.07, "0.070 nats"), (float("nan"), "inf nats")])
def test_vllm_that_computes_something_else(build, decoded, stand_in, off, said):
    stand_in(logprobs=answer(decoded, build.checkpoint.config, off))
    (found,), checks = load_in("vllm", build)
    assert (found.severity, found.code) == ("error", "load-logprobs")
    assert said in found.what
    assert said in checks[0]


def test_a_model_that_is_sensitive_to_rounding_may_be_further_off(build, decoded, stand_in):
    logprobs = answer(decoded, build.checkpoint.config, 0.3)
    stand_in(logprobs=logprobs, rounding=0.2)
    findings, checks = load_in("vllm", build)
    assert findings == []
    assert "0.300 nats from those of the decoded weights on average (limit 0.400)" in checks[0]
    stand_in(logprobs=logprobs, rounding=0.1)
    assert load_in("vllm", build)[0][0].code == "load-logprobs"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("refuses", "fails to load it: ValueError: Following weights were not initialized"),
        ("crash", "loads it, but fails to run it: RuntimeError: shapes do not fit"),
        ("kernel", "has no 4-bit kernel for this CPU; run this on a CPU with AVX-512"),
        ("killed", "its process ended (signal 9): out of memory"),
    ],
)
def test_a_fault_of_vllm_is_one_finding(build, stand_in, case, said):
    stand_in(case)
    (found,), checks = load_in("vllm", build)
    assert (found.severity, found.code, checks) == ("error", "load", [])
    assert said in str(found)
    assert "\n" not in str(found)
    assert "Traceback" not in str(found)


def test_the_prompt_holds_no_placeholders(build):
    config = {**build.checkpoint.config, "image_token_id": 5, "eos_token_id": [1, 50]}
    config["text_config"] = {**config["text_config"], "vocab_size": 8, "audio_token_id": 6}
    ids = load._prompt(config)
    assert len(ids) == load.TOKENS
    assert set(ids[1:]) <= {3, 4, 7}
    assert ids[0] == 2


def test_vllm_without_transformers_is_told(build, stand_in, monkeypatch):
    stand_in()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "transformers" else real(n, *a)
    )
    (found,), _ = load_in("vllm", build)
    assert "which is missing; pip install transformers" in str(found)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("default")
def test_loading_in_vllm(builds, edited, tmp_path, monkeypatch):
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "sitecustomize.py").write_text(KERNEL)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "kernel"), *sys.path])
    findings, checks = load_in("vllm", open_build(builds["float32"]))
    assert findings == []
    assert "(weights tracked)" in checks[0]
    norm = "model.language_model.layers.1.input_layernorm.weight"
    (found,), _ = load_in("vllm", open_build(edited("bfloat16", lambda a: a.pop(norm))))
    assert "weights were not initialized" in found.what
