"""Progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..repack.stream import Progress


@contextmanager
def byte_bar(label: str, total: int) -> Iterator[Progress]:
    """A bar with bytes and rate; silent where stderr is no terminal."""
    from tqdm import tqdm

    if sys.stderr is None:  # closed by the caller's shell
        yield lambda _: None
        return
    with tqdm(
        total=total, desc=label, unit="B", unit_scale=True, disable=None, dynamic_ncols=True
    ) as bar:
        yield bar.update
