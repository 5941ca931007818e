"""A repacked folder, and result files of it as verify and evaluate write them."""

import json
import shutil

import pytest
from verify_builds import DEMO

from qatpack.checkpoint.hashing import hash_file
from qatpack.checkpoint.source import Source, resolve_source
from qatpack.repack.job import repack
from qatpack.verify.job import Options, open_reference, verify


@pytest.fixture(scope="session")
def repacked(tmp_path_factory):
    """Never written to: see `folder`. With the report of a verification without torch."""
    out = tmp_path_factory.mktemp("card") / "build"
    repack(Source(DEMO, "google/gemma-demo-qat", "c" * 40, {}), out)
    reference = open_reference(resolve_source(DEMO))
    report = verify(resolve_source(out), reference, Options(conformance=False)).to_json()
    return out, report


@pytest.fixture
def folder(repacked, tmp_path):
    shutil.copytree(repacked[0], tmp_path / "build")
    return tmp_path / "build"


@pytest.fixture
def report(repacked):
    """verify_report.json as an object of one's own."""
    return json.loads(json.dumps(repacked[1]))


@pytest.fixture
def put():
    """`put(folder, name, value)`: a result file, as JSON or as the text given."""

    def write(folder, name, value):
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name).write_text(text)

    return write


@pytest.fixture
def evaluation(repacked):
    """evaluation.json of the format of docs/evaluate.md, on this build and its source."""
    speed = {
        "batch": 1, "load_s": 1.0, "prefill_ms": 12.5, "ttft_ms": 20.25, "repeats": 3,
        "tokens_per_second": {"median": 103.5, "min": 101.0, "max": 104.0}, "ratio": 0.777,
    }  # fmt: skip
    divergence = {
        "positions": 4096, "mean": 0.00021, "standard_error": 0.00001, "median": 0.0001,
        "p90": 0.0004, "p95": 0.0005, "p99": 0.0013, "p99_9": 0.004, "max": 0.01,
        "same_top": 0.9929, "same_top_se": 0.0013, "perplexity": 160.4,
        "reference_perplexity": 160.5, "perplexity_ratio": 0.9994, "perplexity_ratio_se": 0.0003,
    }  # fmt: skip
    greedy = {"tokens": 128, "equal": 126, "equal_before": 57,
              "floor": {"tokens": 128, "equal": 127, "equal_before": 91}}  # fmt: skip
    return {
        "format": "qatpack.evaluation/1",
        "tool": {"name": "qatpack", "version": "0.1.0"},
        "parts": ["kl", "greedy", "speed"],
        "reference": {"name": "r", "id": None, "commit": None, "sha256": _hashes(DEMO)},
        "conventions": {
            "text": {"name": "WikiText-2 raw v1 test", "sha256": "a" * 64, "revision": "b" * 40,
                     "tokens": 9483},
            "protocol": "consecutive", "chat": False, "windows": 8, "length": 512,
            "positions": 4096, "direction": "KL(reference || build)", "unit": "nats",
            "arithmetic": "float32", "dtype": "bfloat16", "fidelity_decode": "exact",
            "speed_decode": "fast", "new_tokens": 128, "repeats": 3, "order": "A B B A",
        },
        "machine": {"platform": "tpu", "device": "TPU v5e", "count": 1, "cpu": None,
                    "jax": "0.10.2"},
        "reference_results": {"self_check": {"mean": 0.0, "max": 0.0},
                              "speed": [{**speed, "ratio": None, "tokens_per_second":
                              {"median": 133.2, "min": 130.0, "max": 134.0}}]},
        "builds": [{"name": "b", "id": None, "commit": None, "sha256": _hashes(repacked[0]),
                    "divergence": divergence, "greedy": greedy, "speed": [speed]}],
        "comparisons": [],
        "warnings": [],
    }  # fmt: skip


def _hashes(folder):
    return {path.name: hash_file(path) for path in folder.glob("*.safetensors")}
