"""The packed tensors against the reference: both sides read once, a block of groups at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..checkpoint.header import TensorInfo
from ..checkpoint.reader import NUMPY_DTYPES, TensorReader, aligned_empty
from ..repack.grid import GROUP, BlockResult, Status
from ..repack.grid import Pending as Recovering
from ..repack.grid import dispatch as recover
from .compare import Pending, block_groups
from .compare import dispatch as compare
from .exact import Certified
from .pairs import Kind, Pair
from .tally import Tally

Progress = Callable[[int], object]


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
class _Block:
    """Groups of a module in memory; `index` numbers them within the module."""

    index: np.ndarray | range
    bits: np.ndarray
    packed: np.ndarray
    scale: np.ndarray


def compare_pair(
    pair: Pair, reader: TensorReader, *, sample: int | None, progress: Progress
) -> Fidelity:
    """Compare one packed tensor, or `sample` of its rows; `progress` gets the reference bytes."""
    total = Tally()
    first: int | None = None
    blocks = _read_blocks(pair, reader, sample)
    # Groups of 32 must not run over the end of a row.
    certify = pair.tensor.columns % GROUP == 0
    for block, tally, wrong in _compare_blocks(blocks, certify=certify):
        total += tally
        if first is None and wrong.size:
            first = int(block.index[int(wrong[0])])
        progress(block.bits.nbytes)
    tensor = pair.tensor
    return Fidelity(
        tensor.module,
        pair.kind,
        (tensor.rows, tensor.columns),
        tensor.group_size,
        tensor.scale_dtype,
        total,
        None if first is None else divmod(first, tensor.columns // tensor.group_size),
    )


def _compare_blocks(
    blocks: Iterator[_Block], *, certify: bool
) -> Iterator[tuple[_Block, Tally, np.ndarray]]:
    """Recover the grid of each block and compare with it, while XLA works and we read on."""
    recovering: deque[tuple[_Block, Recovering | None]] = deque()
    comparing: deque[tuple[_Block, Pending, Tally]] = deque()
    for block in blocks:
        recovering.append((block, _recover(block) if certify else None))
        if len(recovering) > 1:
            comparing.append(_compare(*recovering.popleft()))
        if len(comparing) > 1:
            yield _finish(*comparing.popleft())
    while recovering:
        comparing.append(_compare(*recovering.popleft()))
    while comparing:
        yield _finish(*comparing.popleft())


def _recover(block: _Block) -> Recovering:
    return recover(block.bits.reshape(-1, GROUP), "float32")


def _compare(block: _Block, recovering: Recovering | None) -> tuple[_Block, Pending, Tally]:
    if recovering is None:
        return block, compare(block.bits, block.packed, block.scale, None), Tally()
    result = recovering.result()
    certified = _certified(result)
    proved = int(certified.proved.sum())
    known = Tally(uncertified=len(certified.proved) - proved)
    if block.bits.shape[1] != GROUP:
        return block, compare(block.bits, block.packed, block.scale, None), known
    pending = compare(block.bits, block.packed, block.scale, certified)
    return block, pending, replace(known, compared=proved)


def _certified(result: BlockResult) -> Certified:
    proved = (result.status == Status.CERTIFIED) | (result.status == Status.ZERO)
    return Certified(result.packed, result.peak, result.step, proved)


def _finish(block: _Block, pending: Pending, known: Tally) -> tuple[_Block, Tally, np.ndarray]:
    tally, wrong = pending.result()
    return block, tally + known, wrong


def _read_blocks(pair: Pair, reader: TensorReader, sample: int | None) -> Iterator[_Block]:
    """The module's groups in order. Buffers are used again four blocks later."""
    size = pair.tensor.group_size
    most = block_groups(size)
    row = pair.tensor.columns // size
    slots = [_Slot(pair, max(row, min(most, _groups(pair)))) for _ in range(5)]
    for number, spans in enumerate(_spans(pair, sample, most)):
        yield slots[number % len(slots)].read(reader, spans)


def _groups(pair: Pair) -> int:
    return pair.tensor.rows * pair.tensor.columns // pair.tensor.group_size


class _Slot:
    """Buffers for one block of a module."""

    def __init__(self, pair: Pair, groups: int) -> None:
        size, tensor = pair.tensor.group_size, pair.tensor
        self._pair = pair
        self._scale_dtype = NUMPY_DTYPES[tensor.scale.dtype]
        self._bytes = (2 * size, size // 2, self._scale_dtype.itemsize)
        self._buffers = [aligned_empty(groups * n) for n in self._bytes]

    def read(self, reader: TensorReader, spans: Sequence[range]) -> _Block:
        """Fill the buffers with runs of groups."""
        pair, count = self._pair, sum(map(len, spans))
        base = pair.source.row * pair.source.columns * 2
        sources: tuple[tuple[TensorInfo, int], ...] = (
            (pair.source.source, base),
            (pair.tensor.packed, 0),
            (pair.tensor.scale, 0),
        )
        for (tensor, start), nbytes, buffer in zip(
            sources, self._bytes, self._buffers, strict=True
        ):
            filled = 0
            for span in spans:
                end = filled + len(span) * nbytes
                reader.read_into(tensor, start + span.start * nbytes, buffer[filled:end])
                filled = end
        bits, packed, scale = (
            b[: count * n] for b, n in zip(self._buffers, self._bytes, strict=True)
        )
        index = spans[0] if len(spans) == 1 else np.concatenate([np.asarray(s) for s in spans])
        return _Block(
            index,
            bits.view(np.uint16).reshape(count, -1),
            packed.reshape(count, -1),
            scale.view(self._scale_dtype),
        )


def _spans(pair: Pair, sample: int | None, most: int) -> Iterator[list[range]]:
    """Runs of groups of each block: all of the module, or `sample` rows spread over it."""
    if sample is None or sample >= pair.tensor.rows:
        total = _groups(pair)
        for first in range(0, total, most):
            yield [range(first, min(first + most, total))]
        return
    row = pair.tensor.columns // pair.tensor.group_size
    chosen = np.unique(np.linspace(0, pair.tensor.rows - 1, sample).astype(int)).tolist()
    step = max(1, most // row)
    for start in range(0, len(chosen), step):
        yield [range(r * row, (r + 1) * row) for r in chosen[start : start + step]]


def sampled_bytes(pair: Pair, sample: int | None) -> int:
    """Reference bytes that comparing a pair reads."""
    rows = pair.tensor.rows if sample is None else min(sample, pair.tensor.rows)
    return rows * pair.tensor.columns * 2
