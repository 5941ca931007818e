"""What the tests of verify share: where the embedded checkpoint is, and a folder as arrays."""

from pathlib import Path

from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.reader import TensorReader

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
DTYPES = ("bfloat16", "float16", "float32")


def read_arrays(folder):
    """Name -> array of all tensors of a folder."""
    opened = Checkpoint.open(folder)
    with TensorReader() as reader:
        return {name: reader.read(tensor) for name, tensor in opened.tensors.items()}
