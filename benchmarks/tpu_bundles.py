"""Cycles of each compiled op, counted in the final VLIW bundles that libtpu can write out.

One bundle issues in one cycle. A loop's bundles count as often as it runs; the compiler writes the
trip count into the exit test. Waits for memory are not bundles: the player adds those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# `  0x1a PF: >> { ...`: address, label of a block, one > for each loop around it.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<label>[A-Z]{2})?\s*:\s*(?P<loops>[> ]*)\{")
_TRIPS = re.compile(r"scmp\.\w+\.s32\.totalorder %\w+, (\d+) /\* loop exit test")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_FILE = re.compile(r"\d+-(?P<op>.+)-\d+-final_bundles\.txt$")


def dump_flags(folder: Path) -> str:
    """LIBTPU_INIT_ARGS that make the compiler write its final bundles into `folder`."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )


def read_cycles(folder: Path) -> dict[str, int]:
    """Cycles by the op's name, of every program in the folder."""
    found = {}
    for path in folder.glob("*final_bundles.txt"):
        name = _FILE.match(path.name)
        if name and "schedule-analysis" not in path.name:
            found[name["op"]] = count_cycles(path.read_text(errors="replace"))
    return found


@dataclass
class _Loop:
    bundles: int = 0
    trips: int = 1
    stages: int = 0

    def cycles(self) -> int:
        # A loop pipelined over s further stages runs n + s times, its body n times.
        return self.bundles * max(1, self.trips - self.stages)


def count_cycles(text: str) -> int:
    """Cycles of one program. A loop whose trip count is not a constant counts once."""
    nest = [_Loop()]  # the program itself, then the loops that the line stands in

    def close(depth: int) -> None:
        while len(nest) - 1 > depth:
            inner = nest.pop()
            nest[-1].bundles += inner.cycles()

    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if not bundle:
            continue
        depth = bundle["loops"].count(">")
        close(max(0, depth - 1) if bundle["label"] == "LB" else depth)
        while len(nest) - 1 < depth:
            nest.append(_Loop())
        loop = nest[-1]
        loop.bundles += 1
        loop.stages = max([loop.stages, *map(int, _STAGE.findall(line))])
        if trips := _TRIPS.search(line):
            loop.trips = int(trips[1])
    close(0)
    return nest[0].bundles
