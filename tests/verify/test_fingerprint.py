"""The published fingerprint of Google's export, on synthetic weights of E2B's own layout."""

import json

import numpy as np
import pytest
import synthesize
from layouts import cut, tensors
from safetensors.numpy import save_file

from qatpack.checkpoint.source import resolve_source
from qatpack.demo import rerounded
from qatpack.repack.job import repack
from qatpack.repack.plan import Options as RepackOptions
from qatpack.verify.job import Options, open_reference, verify
from qatpack.verify.verdict import Verdict


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """One decoder layer of E2B at full width, without the towers."""
    folder = tmp_path_factory.mktemp("e2b")
    config = cut(synthesize.read_config("E2B"), layers=1, vocab=64)
    arrays = {
        t.name: np.concatenate(list(synthesize.blocks(t, seed=0))).reshape(t.shape)
        for t in tensors(config)
        if ".language_model." in t.name
    }
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_rerounding_and_ours(source, tmp_path):
    reference = open_reference(resolve_source(source))
    quick = Options(conformance=False)
    theirs = verify(resolve_source(rerounded.export(source, tmp_path / "theirs")), reference, quick)
    assert theirs.judgement.verdict is Verdict.REROUNDED
    assert theirs.total.max_7_5 == theirs.total.groups
    assert theirs.total.on_level == 0
    assert theirs.total.relative_error == pytest.approx(0.0667, abs=1e-4)
    for tensor in theirs.tensors:
        assert tensor.tally.relative_error == pytest.approx(0.0667, abs=5e-4)
    repack(resolve_source(source), tmp_path / "ours", RepackOptions(scale_dtype="float32"))
    ours = verify(resolve_source(tmp_path / "ours"), reference, quick)
    assert ours.judgement.text == "exact: every group certified, 100 % identical"
    assert ours.total.groups == theirs.total.groups
