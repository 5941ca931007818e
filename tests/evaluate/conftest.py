"""The builds of the small checkpoint, and one evaluation of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small_builds
from safetensors.numpy import save_file
from small_builds import FAST
from verify_builds import read_arrays

from qatpack.checkpoint.source import resolve_source
from qatpack.demo.rerounded import export
from qatpack.evaluate.evaluation import Evaluation
from qatpack.evaluate.job import Options
from qatpack.evaluate.run import evaluate
from qatpack.repack.job import repack
from qatpack.repack.plan import Options as RepackOptions


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference; never written to."""
    return small_builds.write(tmp_path_factory.mktemp("small") / "reference")


@pytest.fixture(scope="session")
def builds(small: Path) -> dict[str, Path]:
    """Name -> folder; never written to."""
    for dtype in ("bfloat16", "float32"):
        options = RepackOptions(scale_dtype=dtype)
        repack(resolve_source(small), small.parent / dtype, options)
    export(small, small.parent / "rerounded")
    return {name: small.parent / name for name in ("bfloat16", "float32", "rerounded")}


@pytest.fixture
def edited(builds: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """`edited(name, change, config=...)`: a copy of a build with tensors and config changed."""

    def make(
        name: str,
        change: Callable[[dict[str, np.ndarray]], object] | None = None,
        *,
        config: Callable[[dict[str, object]], object] | None = None,
    ) -> Path:
        folder = tmp_path / f"edited-{name}"
        shutil.copytree(builds[name], folder)
        if change is not None:
            arrays = read_arrays(folder)
            change(arrays)
            save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        if config is not None:
            value = json.loads((folder / "config.json").read_text())
            config(value)
            (folder / "config.json").write_text(json.dumps(value))
        return folder

    return make


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the evaluation below keeps its hidden states."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def evaluation(small: Path, builds: dict[str, Path], cache: Path) -> Evaluation:
    """Two builds, all parts, in small."""
    named = [(name, resolve_source(builds[name])) for name in ("rerounded", "bfloat16")]
    return evaluate(resolve_source(small), named, Options(**FAST, cache=cache))
