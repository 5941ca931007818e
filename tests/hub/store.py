"""Stored files: bytes or paths, and the two ways in which a Hub names their content."""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

File = bytes | Path
CHUNK = 1 << 20
LARGE = 10 << 20
"""From here on the Hub keeps any file with LFS."""


def size(file: File) -> int:
    return len(file) if isinstance(file, bytes) else file.stat().st_size


def chunks(file: File, start: int = 0) -> Iterator[bytes]:
    if isinstance(file, bytes):
        yield file[start:]
        return
    with open(file, "rb") as stream:
        stream.seek(start)
        while data := stream.read(CHUNK):
            yield data


def is_lfs(name: str, file: File) -> bool:
    return name.endswith(".safetensors") or size(file) >= LARGE


@lru_cache(maxsize=1000)
def sha256(file: File) -> str:
    digest = hashlib.sha256()
    for data in chunks(file):
        digest.update(data)
    return digest.hexdigest()


@lru_cache(maxsize=1000)
def git_oid(file: File) -> str:
    digest = hashlib.sha1(b"blob %d\0" % size(file))
    for data in chunks(file):
        digest.update(data)
    return digest.hexdigest()


def describe(name: str, file: File, *, oid: str, digest: str) -> dict[str, Any]:
    """How the Hub describes a stored file; its two listings differ in two keys."""
    if not is_lfs(name, file):
        return {oid: git_oid(file), "size": size(file)}
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(file)}\n".encode()
    lfs = {digest: sha256(file), "size": size(file), "pointerSize": 134}
    return {oid: git_oid(pointer), "size": size(file), "lfs": lfs}
