"""The token embedding in 4 bits: QAT checkpoints keep it on the trained grid along its rows."""

from __future__ import annotations

import numpy as np

from ...checkpoint.errors import ModelError
from ...checkpoint.header import TensorInfo
from ...checkpoint.progress import Progress
from ...checkpoint.reader import TensorReader
from ...repack.grid import GROUP, Grid, describe_group, recover
from .packed import PER_WORD

BLOCK = 32 << 20  # bytes of the table recovered at a time


def recover_table(
    reader: TensorReader, table: TensorInfo, progress: Progress | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A bf16 table [V, E] as words uint32[V, E/8] and steps float32[V, E/32].

    bf16(step * level) is the table bit for bit, except that a stored -0.0 comes back as 0.0: the
    grid is recovered and proved by value, with the step kept in float32. The host holds the result
    and one block of rows.

    Raises:
        ModelError: the table is not bfloat16, or one of its groups is off the grid.
    """
    count, width = table.shape
    if table.dtype != "BF16" or width % GROUP:
        raise ModelError(
            f"{table.file}: {table.name!r} is {table.dtype}{list(table.shape)}; a head in 4 bits "
            f"needs BF16 and a width in whole groups of {GROUP}, so load it as stored."
        )
    words = np.empty((count, width // PER_WORD), np.uint32)
    steps = np.empty((count, width // GROUP), np.float32)
    rows = max(1, BLOCK // (2 * width))
    for start in range(0, count, rows):
        values = reader.read_rows(table, start, min(start + rows, count))
        grid = recover(values, "float32")
        if grid.counts.refused:
            raise _off_grid(table, start, values, grid)
        words[start : start + rows] = grid.packed.view(np.uint32)
        steps[start : start + rows] = grid.step
        if progress:
            progress(values.nbytes)
    return words, steps


def _off_grid(table: TensorInfo, start: int, values: np.ndarray, grid: Grid) -> ModelError:
    """The error that names the first group without a step."""
    row, group = np.argwhere(np.isnan(grid.step))[0].tolist()
    bits = values[row, group * GROUP : (group + 1) * GROUP].view(np.uint16)
    return ModelError(
        f"{table.file}: {table.name!r} row {start + row}, columns {group * GROUP} to "
        f"{group * GROUP + GROUP - 1}, {describe_group(bits)}; the head cannot be held in 4 bits, "
        "so load it as stored."
    )
