"""Progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..checkpoint.progress import Progress


@contextmanager
def byte_bar(label: str, total: int) -> Iterator[Progress]:
    """A bar with bytes and rate; silent where stderr is no terminal."""
    with bars(label, total, "B") as step:
        yield step


@contextmanager
def bars(label: str, total: int, unit: str) -> Iterator[Progress]:
    """A bar that counts `unit`s ("B" for bytes); silent where stderr is no terminal."""
    from tqdm import tqdm

    if sys.stderr is None:  # closed by the caller's shell
        yield lambda _: None
        return
    with tqdm(
        total=total, desc=label, unit=unit, unit_scale=unit == "B", disable=None,
        dynamic_ncols=True,
    ) as bar:  # fmt: skip
        yield bar.update
