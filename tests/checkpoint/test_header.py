import contextlib
import json
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qatpack.checkpoint.errors import CheckpointError
from qatpack.checkpoint.header import MAX_HEADER, read_header


def file_bytes(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape=(2,), dtype="BF16"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.fixture
def refused(tmp_path):
    def check(content, *words):
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        message = str(caught.value)
        assert message.startswith(str(path))
        assert "\n" not in message
        for word in words:
            assert str(word) in message
        return message

    return check


GOOD = {"b": entry(0, 4), "a": entry(4, 4, (0,)), "c": entry(4, 5, (), "U8")}


def test_reads_tensors_in_file_order(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(GOOD, b"12345"))
    header = read_header(path)
    assert [t.name for t in header.tensors] == ["b", "a", "c"]
    assert header.tensors[0].shape == (2,)
    assert header.tensors[2].offset == header.data_start + 4
    assert header.tensors[2].rows == header.tensors[2].columns == 1
    assert header.metadata is None


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"n": 3, "l": [1]}, "text", 7])
def test_metadata_of_any_kind_is_tolerated(tmp_path, metadata):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"__metadata__": metadata, **GOOD}, b"12345"))
    header = read_header(path)
    assert len(header.tensors) == 3
    assert header.metadata == (metadata if isinstance(metadata, dict) else None)


def test_truncated_file_names_expected_and_found_bytes(refused):
    content = file_bytes(GOOD, b"123")
    refused(content, "truncated", len(content), len(content) + 2)


def test_trailing_bytes_name_expected_and_found(refused):
    content = file_bytes(GOOD, b"12345xyz")
    refused(content, "3 trailing bytes", len(content), len(content) - 3)


def test_short_file(refused):
    refused(b"1234", "4 bytes")
    refused(b"", "0 bytes")


def test_header_longer_than_the_file(refused):
    refused(file_bytes(GOOD, b"12345", length=10_000), "10000", "truncated")


def test_header_length_is_garbage(refused):
    refused(file_bytes(GOOD, length=2**63), 2**63, MAX_HEADER)


def test_lfs_pointer(refused):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 10208852878\n"
    refused(pointer, "Git LFS pointer", len(pointer))


def test_duplicate_names(refused):
    text = b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2)
    refused(file_bytes(text, b"1234"), "'a'", "twice")


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":NaN}', b"[]", b"3"])
def test_header_that_is_no_json_object(refused, text):
    refused(file_bytes(text))


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (entry(0, 3), "span 3"),
        (entry(0, 4, dtype="Q4"), "unknown dtype"),
        (entry(0, 4, (-2,)), "bad shape"),
        (entry(0, 4, (True, 2)), "bad shape"),
        ({"dtype": "BF16", "shape": 2, "data_offsets": [0, 4]}, "bad shape"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0]}, "data_offsets"),
        ({"dtype": ["BF16"], "shape": [2], "data_offsets": [0, 4]}, "unknown dtype"),
        ({"shape": [2]}, "lacks dtype"),
        (None, "lacks dtype"),
        (entry(4, 0), "span -4"),
        (entry(0, 2**62, (2**61,)), "truncated"),
        (entry(0, 2**65, (2**64,)), "bad shape"),
        ({"dtype": "BF16", "shape": [2] * 200_000, "data_offsets": [0, 4]}, "bad shape"),
        ({"dtype": "Q" * 100_000, "shape": [2], "data_offsets": [0, 4]}, "unknown dtype"),
    ],
)
def test_bad_entry(refused, bad, word):
    refused(file_bytes({"a": bad}, b"1234"), "'a'" if word != "truncated" else "", word)


def test_holes_and_overlaps(refused):
    refused(file_bytes({"a": entry(0, 4), "b": entry(6, 10)}, b"0" * 10), "'b'", "hole")
    refused(file_bytes({"a": entry(0, 4), "b": entry(2, 6)}, b"0" * 6), "'b'", "overlaps")
    refused(file_bytes({"a": entry(2, 6)}, b"0" * 6), "'a'", "hole")


def test_a_folder_or_a_pipe_in_the_place_of_a_file(tmp_path):
    with pytest.raises(CheckpointError, match="no regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_header(tmp_path / "pipe")


def test_messages_stay_short_whatever_the_file_says(refused):
    assert len(refused(file_bytes({"n" * 1_000_000: {}}), "lacks dtype")) < 1000
    assert len(refused(file_bytes({"a": entry(0, 4, (10**4000,) * 2)}, b"1234"))) < 1500


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.builds(lambda b: file_bytes(b), st.binary(max_size=80)))
def test_no_bytes_raise_anything_else(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        read_header(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_flipped_byte_reads_or_is_refused(tmp_path_factory, data):
    content = bytearray(file_bytes(GOOD, b"12345"))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flip.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert all(t.offset + t.nbytes <= len(content) for t in header.tensors)
