"""How a long job tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], object]
"""Called with what each step has done: bytes, windows, tokens or runs."""


def ignore_progress(_: int) -> None:
    """For a job that nobody watches."""
