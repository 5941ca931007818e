"""The embedded checkpoint, its three builds and the re-rounded one, made once for this room."""

import json
import shutil

import pytest
from safetensors.numpy import save_file
from verify_builds import DEMO, DTYPES, read_arrays

from qatpack.checkpoint.source import resolve_source
from qatpack.demo import rerounded
from qatpack.repack.job import repack
from qatpack.repack.plan import Options
from qatpack.verify.job import open_reference


@pytest.fixture(scope="session")
def reference():
    return open_reference(resolve_source(DEMO))


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    """Name -> folder; never written to, see `edited`."""
    root = tmp_path_factory.mktemp("builds")
    for dtype in DTYPES:
        repack(resolve_source(DEMO), root / dtype, Options(scale_dtype=dtype))
    rerounded.export(DEMO, root / "rerounded")
    return {name: root / name for name in (*DTYPES, "rerounded")}


@pytest.fixture
def edited(builds, tmp_path):
    """`edited(name, change, config=...)`: a copy with tensors and config changed in place."""

    def make(name, change=None, *, config=None, manifest=True):
        folder = tmp_path / name
        shutil.copytree(builds[name], folder)
        if change is not None:
            arrays = read_arrays(folder)
            change(arrays)
            save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        if config is not None:
            path = folder / "config.json"
            value = json.loads(path.read_text())
            config(value)
            path.write_text(json.dumps(value))
        if not manifest:
            (folder / "repack_report.json").unlink()
        return folder

    return make
