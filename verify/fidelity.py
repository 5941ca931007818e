"""The packed tensors against the reference: both sides read once, a block of groups at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..checkpoint.header import TensorInfo
from ..checkpoint.progress import Progress
from ..checkpoint.reader import TensorReader
from ..repack.grid import GROUP
from .compare import Block, Compared, block_groups
from .pairs import Kind, Pair
from .tally import Tally

THREADS = 2
"""Blocks compared at once; XLA spreads a block over more cores by itself."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One packed tensor as compared.

    `first_wrong`: row and group of the first group with other levels, another step or a
    non-finite scale; None where there is none.
    """

    module: str
    kind: Kind
    shape: tuple[int, int]
    group_size: int
    scale_dtype: str
    tally: Tally
    first_wrong: tuple[int, int] | None

    def to_json(self) -> dict[str, Any]:
        """As in verify_report.json."""
        return {
            "module": self.module,
            "kind": self.kind.value,
            "shape": list(self.shape),
            "group_size": self.group_size,
            "scale_dtype": self.scale_dtype,
            "first_wrong": self.first_wrong and list(self.first_wrong),
            **self.tally.to_json(),
        }


@dataclass(frozen=True, slots=True)
class _Piece:
    """Runs of groups of a pair, to lie in a block from group `first` on."""

    number: int
    spans: tuple[range, ...]
    first: int

    @property
    def groups(self) -> int:
        return sum(map(len, self.spans))

    def index(self, place: int) -> int:
        """The number within its module of the group at a place of the part."""
        for span in self.spans:
            if place < len(span):
                return span[place]
            place -= len(span)
        raise IndexError(place)


def compare_pairs(
    pairs: Sequence[Pair], *, sample: int | None, progress: Progress
) -> list[Fidelity]:
    """Compare packed tensors, or `sample` rows of each; `progress` gets the reference bytes."""
    tallies, firsts = [Tally()] * len(pairs), dict[int, int]()
    numbered = list(enumerate(pairs))
    # Blocks mix modules, but not what they are compiled for.
    for _, alike in groupby(numbered, key=lambda item: _kernel_of(item[1])):
        for piece, compared in _compare(dict(alike), sample):
            number = piece.number
            tallies[number] += compared.tally
            if compared.wrong.size:
                firsts.setdefault(number, piece.index(int(compared.wrong[0])))
            progress(piece.groups * pairs[number].tensor.group_size * 2)
    return [
        _fidelity(pair, tally, firsts.get(number))
        for (number, pair), tally in zip(numbered, tallies, strict=True)
    ]


def _kernel_of(pair: Pair) -> tuple[int, str, bool]:
    """Group size, scale dtype, and whether groups of 32 end where rows do."""
    tensor = pair.tensor
    return tensor.group_size, tensor.scale_dtype, tensor.columns % GROUP == 0


def _fidelity(pair: Pair, tally: Tally, first: int | None) -> Fidelity:
    tensor = pair.tensor
    return Fidelity(
        tensor.module,
        pair.kind,
        (tensor.rows, tensor.columns),
        tensor.group_size,
        tensor.scale_dtype,
        tally,
        None if first is None else divmod(first, tensor.columns // tensor.group_size),
    )


def _compare(pairs: dict[int, Pair], sample: int | None) -> Iterator[tuple[_Piece, Compared]]:
    """Compare pairs of one kind, in order; each thread has its own open files and memory."""
    size, scale_dtype, certify = _kernel_of(next(iter(pairs.values())))
    free: SimpleQueue[tuple[Block, TensorReader]] = SimpleQueue()

    def work(pieces: list[_Piece]) -> list[tuple[_Piece, Compared]]:
        block, reader = own = free.get()
        try:
            for piece in pieces:
                _read(pairs[piece.number], piece, reader, block)
            found = block.compare(
                [slice(p.first, p.first + p.groups) for p in pieces], certify=certify
            )
            return list(zip(pieces, found, strict=True))
        finally:
            free.put(own)

    with ExitStack() as readers, ThreadPoolExecutor(THREADS) as pool:
        for _ in range(THREADS):
            free.put((Block(size, scale_dtype), readers.enter_context(TensorReader())))
        try:
            for found in pool.map(work, _blocks(pairs, sample)):
                yield from found
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _blocks(pairs: dict[int, Pair], sample: int | None) -> Iterator[list[_Piece]]:
    """The groups of all pairs, of several in one block where they are small."""
    block: list[_Piece] = []
    first = 0
    for number, pair in pairs.items():
        most = block_groups(pair.tensor.group_size)
        spans = list(_spans(pair, sample))
        while spans:
            taken, spans = _cut(spans, most - first)
            block.append(_Piece(number, taken, first))
            first += block[-1].groups
            if first == most:
                yield block
                block, first = [], 0
    if block:
        yield block


def _cut(spans: list[range], most: int) -> tuple[tuple[range, ...], list[range]]:
    """The first `most` groups of some runs, and the rest."""
    taken: list[range] = []
    for number, span in enumerate(spans):
        taken.append(span[:most])
        most -= len(taken[-1])
        if not most:
            rest = [span[len(taken[-1]) :], *spans[number + 1 :]]
            return tuple(taken), [r for r in rest if r]
    return tuple(taken), []


def _spans(pair: Pair, sample: int | None) -> Iterator[range]:
    """Runs of groups: all of the module, or `sample` rows spread over it."""
    row = pair.tensor.columns // pair.tensor.group_size
    rows = pair.tensor.rows
    if sample is None or sample >= rows:
        yield range(rows * row)
        return
    for chosen in np.unique(np.linspace(0, rows - 1, sample).astype(int)).tolist():
        yield range(chosen * row, (chosen + 1) * row)


def _read(pair: Pair, piece: _Piece, reader: TensorReader, block: Block) -> None:
    """Put a piece into its place of a block."""
    base = pair.source.row * pair.source.columns * 2
    sides: tuple[tuple[TensorInfo, int, np.ndarray], ...] = (
        (pair.source.source, base, block.bits),
        (pair.tensor.packed, 0, block.packed),
        (pair.tensor.scale, 0, block.scale),
    )
    for tensor, start, array in sides:
        nbytes, place = array.nbytes // len(array), piece.first
        for span in piece.spans:
            into = array[place : place + len(span)].reshape(-1).view(np.uint8)
            reader.read_into(tensor, start + span.start * nbytes, into)
            place += len(span)


def sampled_bytes(pair: Pair, sample: int | None) -> int:
    """Reference bytes that comparing a pair reads."""
    rows = pair.tensor.rows if sample is None else min(sample, pair.tensor.rows)
    return rows * pair.tensor.columns * 2
