"""The token embedding in 4 bits: the same bits, or a refusal that names the place."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from qatpack.checkpoint.errors import ModelError
from qatpack.cli import main
from qatpack.evaluate.gemma4 import head
from qatpack.evaluate.gemma4.lanes import Lanes
from qatpack.evaluate.gemma4.linear import rows
from qatpack.evaluate.gemma4.load import load
from qatpack.evaluate.gemma4.packed import Levels, Words

DEMO = Path(__file__).parents[3] / "demo" / "checkpoint"
NAME = "model.language_model.embed_tokens.weight"
FORMS = [("exact", "cpu", Words), ("fast", "cpu", Lanes), ("fast", "tpu", Levels)]


@pytest.mark.parametrize(("decode", "platform", "form"), FORMS)
def test_looked_up_rows_are_the_stored_ones_bit_for_bit(
    decode: str, platform: str, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "BLOCK", 1 << 16)  # several blocks, the last one short
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: platform)
        read: list[int] = []
        loaded = load(DEMO, decode=decode, head="int4", progress=read.append)  # pyright: ignore
    table = loaded.weights["embed_tokens"]
    assert isinstance(table, form)
    if isinstance(table, Levels):
        assert table.exact is not None
        assert (table.scale.dtype, table.exact.dtype) == (jnp.float16, jnp.float32)
    stored = load_file(DEMO / "model.safetensors")[NAME]
    found = np.asarray(rows(table, jnp.arange(len(stored)).reshape(2, -1), jnp.bfloat16))
    np.testing.assert_array_equal(
        found.reshape(stored.shape).view(np.uint16), stored.view(np.uint16)
    )
    assert loaded.nbytes < load(DEMO).nbytes
    assert sum(read) > loaded.nbytes


def broken(tmp_path: Path) -> Path:
    """The embedded checkpoint with one value of the embedding off the grid."""
    folder = shutil.copytree(DEMO, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    group = tensors[NAME][1001, 64:96]
    sizes = np.abs(group.astype(np.float32))
    # 0.45 of a peak on level 7 or 8 is 3.15 or 3.6 steps.
    group[(sizes.argmax() + 1) % 32] = ml_dtypes.bfloat16(0.45 * sizes.max())
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_table_off_the_grid_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "BLOCK", 1 << 16)
    folder = broken(tmp_path)
    with pytest.raises(ModelError, match=r"embed_tokens.weight' row 1001, columns 64 to 95, "):
        load(folder, head="int4")
    load(folder)


def test_generate_with_the_head_in_4_bits(tmp_path: Path) -> None:
    flags = ["--head", "int4", "--max-tokens", "1", "--json", "--cache-dir", str(tmp_path / "c")]
    ran = CliRunner().invoke(main, ["generate", str(DEMO), "def f(", *flags])
    assert ran.exit_code == 0, ran.stderr
    assert '"head": "int4"' in ran.stdout
    refused = CliRunner().invoke(main, ["generate", str(broken(tmp_path)), "def f(", *flags])
    assert refused.exit_code == 1
    assert "row 1001, columns 64 to 95" in refused.stderr


def test_a_head_in_4_bits_is_for_one_device() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    with pytest.raises(ModelError, match="one device"):
        load(DEMO, head="int4", mesh=mesh)
