"""The rooms: what may import what."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each room may import from itself and from those to its right.
ORDER = ["cli", "push", "demo", "evaluate", "verify", "repack", "card", "checkpoint"]


def imports(room):
    """(file, the room it imports from) of every relative import that leaves its folder."""
    for path in sorted((ROOT / room).rglob("*.py")):
        depth = len(path.relative_to(ROOT / room).parts)  # dots that lead out of the room, less one
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
                yield path.name, (node.module or node.names[0].name).split(".")[0]


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_one_way(room):
    below = ORDER[ORDER.index(room) :]
    assert [pair for pair in imports(room) if pair[1] not in below] == []


def test_the_test_sees_imports():
    assert {name for _, name in imports("cli")} >= {"repack", "checkpoint"}


@pytest.mark.parametrize("room", ORDER)
def test_rooms_import_each_other_relatively_and_are_typed(room):
    assert (ROOT / room / "py.typed").exists()
    for path in (ROOT / room).rglob("*.py"):
        assert "from qatpack" not in path.read_text(), path
