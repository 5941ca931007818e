"""The schedule estimator: its reading of bundles and HLO, and one linear through the compiler."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tpu_bundles
import tpu_hlo

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tpu_schedule.py"

PROGRAM = """
     0   :  { a }
   0x1 LB: > { b /* iteration index, stage = 1 */ }
   0x2 LB: >> { c }
   0x3   : >> { c ;; %p1 = scmp.ge.s32.totalorder %s1, 4 /* loop exit test */ }
   0x4   : > { b ;; %p2 = scmp.ge.s32.totalorder %s2, 6 /* loop exit test */ }
   0x5 LB: > { d ;; %p2 = scmp.ge.s32.totalorder %s2, 3 /* loop exit test */ }
   0x6   :  { e }
   0x7 LB:  { f }
"""

HLO = """
%fused (p0: bf16[8,128], p1: s32[]) -> bf16[1,128] {
  %p0 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %c = s32[]{:T(128)} constant(0)
  ROOT %d = bf16[1,128]{1,0:T(8,128)S(1)} dynamic-slice(%p0, %p1, %c), dynamic_slice_sizes={1,128}
}

%less (t: (s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(7)
  %t = (s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (w: bf16[8,128], i: s32[]) -> bf16[1,128] {
  %w = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %loop = (s32[]{:T(128)}) while(%i), condition=%less, body=%less
  %all = f32[8,128]{1,0:T(8,128)} convert(%w), metadata={}
  ROOT %row = bf16[1,128]{1,0:T(8,128)S(1)} fusion(%w, %i), kind=kLoop, calls=%fused
}
"""


def test_bundles_count_as_often_as_their_loops_run() -> None:
    # Two loops inside the program: (6 - 1 pipeline stage) * (2 + 4 * 2), and 3.
    assert tpu_bundles.count_cycles(PROGRAM) == 3 + 5 * (2 + 4 * 2) + 3


def test_bytes_of_slices_and_of_whole_operands() -> None:
    module = tpu_hlo.parse(HLO)
    entry = module.computations[module.entry]
    assert module.hbm_bytes(entry["row"], entry) == 2 * 128  # one row, kept on the chip
    assert module.hbm_bytes(entry["all"], entry) == 2 * 1024 + 4 * 1024
    assert module.trips(entry["loop"]) == 7
    assert module.largest_in_hbm(module.entry) == 4 * 1024  # `all`; `row` stays on the chip


@pytest.mark.parametrize(
    ("line", "free"),
    [
        ("%a = f32[]{:T(128)S(6)} rsqrt(%b)", True),
        ("%a = f32[]{:T(128)S(6)} all-reduce(%b), to_apply=%c", False),
        ("%a = f32[8,128]{1,0:T(8,128)S(1)} rsqrt(%b)", False),
        ("%a = (s32[]{:T(128)S(6)}, f32[8]{0:T(128)}) while(%b), body=%c", False),
        ('%a = s4[6,256]{1,0} custom-call(%b), custom_call_target="ConcatBitcast"', True),
        ('%a = s4[6,256]{1,0} custom-call(%b), custom_call_target="TopK"', False),
    ],
)
def test_what_has_no_program_of_its_own(line: str, free: bool) -> None:
    module = tpu_hlo.parse(f"ENTRY %main (b: f32[8]) -> f32[8] {{\n  {line}\n}}\n")
    assert tpu_hlo.is_free(module.computations["main"]["a"]) == free


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_one_linear_through_the_compiler() -> None:
    found = json.loads(run("--linear", "2048,1536", "--json").stdout.splitlines()[-1])
    assert found["unknown_ops"] == 0
    assert found["floor_ms"] < found["ms"] < 20 * found["floor_ms"]
    assert found["total_bytes"] < 2048 * 1536


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler_it_says_what_to_install() -> None:
    done = run("--linear", "2048,1536")
    assert done.returncode == 1
    assert "pip install 'jax[tpu]'" in done.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300
    )
