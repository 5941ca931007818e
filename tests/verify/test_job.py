"""Packed and copied tensors are compared side by side: what ends one ends the other."""

import time
from concurrent.futures import Future

import pytest

from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.progress import ignore_progress
from qatpack.verify import job
from qatpack.verify.build import open_build

LONG = 20  # seconds


@pytest.fixture
def side_by_side(builds, reference, monkeypatch):
    """`side_by_side(packed, copied)`: both comparisons, with stand-ins for the two."""
    build = open_build(builds["bfloat16"])

    def run(packed, copied):
        monkeypatch.setattr(job, "compare_pairs", lambda *_, **__: packed())
        monkeypatch.setattr(job, "compare_copied", lambda *_, progress, **__: copied(progress))
        return job._compare_all([], build, reference.layout, job.Options(), ignore_progress)

    return run


def slowly(progress):
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        progress(1)
        time.sleep(0.01)


def broken(*_):
    raise CheckpointError("cut")


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_fault_of_the_packed_ones_ends_the_copied_ones(side_by_side):
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="cut"):
        side_by_side(broken, slowly)
    assert time.monotonic() - start < LONG / 2


def test_an_interrupt_while_the_copied_ones_are_waited_for_ends_them(side_by_side, monkeypatch):
    monkeypatch.setattr(Future, "result", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side(list, slowly)
    assert time.monotonic() - start < LONG / 2


def test_a_fault_of_the_copied_ones_is_not_lost(side_by_side):
    with pytest.raises(CheckpointError, match="cut"):
        side_by_side(list, broken)
