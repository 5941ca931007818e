from __future__ import annotations

import errno
import os

import pytest

from qatpack.checkpoint.errors import OutputError
from qatpack.checkpoint.output import check_output, write_file


def test_write_file_keeps_the_old_one_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_file(path, b"old")

    def fail(_):
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="I/O error") as caught:
        write_file(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_two_writers_of_one_file_keep_out_of_each_others_way(tmp_path, monkeypatch):
    path, sync = tmp_path / "config.json", os.fsync

    def interrupted(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_file(path, b"second")
        assert path.read_bytes() == b"second"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    write_file(path, b"first")
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_output_may_be_new_or_empty(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    assert check_output(tmp_path / "out", source) == (tmp_path / "out.partial").resolve()
    (tmp_path / "out").mkdir()
    assert check_output(tmp_path / "out", source).name == "out.partial"
    assert check_output(tmp_path / "a" / "b", source).name == "b.partial"


def test_output_that_is_refused(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for out, word in {
        source: "source",
        tmp_path / "link": "source",
        source / "inside": "source",
        tmp_path: "source",
        tmp_path / "file": "is a file",
        tmp_path / "full": "not empty",
        tmp_path / "dangling": "link to nothing",
        tmp_path / "file" / "x": "cannot be written",
    }.items():
        with pytest.raises(OutputError, match=word):
            check_output(out, source)


def test_parent_without_write_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="cannot be written"):
        check_output(tmp_path / "out", tmp_path / "elsewhere")
