"""The compiler's scheduled HLO, read as text: its ops in order, and the bytes each moves in HBM."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64} | {
    f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)
}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) \(.*\{\s*$")
_OP = re.compile(r"^\s*(ROOT )?%?([\w.\-<>]+) = ")
_NAME = re.compile(r"%([\w.\-<>]+)")
_GIVEN = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call")
_SLICES = ("slice", "dynamic-slice", "gather")  # read no more of an operand than they return


@dataclass(frozen=True)
class Op:
    """One instruction. `attributes` is the text after the operands."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    def called(self, attribute: str) -> str | None:
        """The computation that `calls=`, `body=` or `condition=` names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-<>]+)", self.attributes)
        return found[1] if found else None


Computation = dict[str, Op]


@dataclass(frozen=True)
class Module:
    """Computations by name, each its ops in the order they are scheduled."""

    computations: dict[str, Computation]
    entry: str
    _keys: dict[str, str] = field(default_factory=dict)

    def trips(self, loop: Op) -> int | None:
        """How often a while loop runs: the one constant that its condition compares with."""
        condition = self.computations[loop.called("condition") or ""]
        root = next(op for op in condition.values() if op.root)
        limits = [op.literal for op in condition.values() if op.kind == "constant"]
        counted = root.kind == "compare" and "direction=LT" in root.attributes
        return int(limits[0]) if counted and len(limits) == 1 else None

    def structure(self, op: Op, computation: Computation) -> str:
        """Equal for ops of which the compiler makes one program: it dumps only one of them."""
        given = ",".join(computation[o].shape for o in op.operands if o in computation)
        body = op.called("calls")
        return f"{op.kind} {op.shape} ({given}) {self._body(body) if body else ''}"

    def _body(self, name: str) -> str:
        if name not in self._keys:
            ops = self.computations[name]
            place = {n: str(i) for i, n in enumerate(ops)}
            self._keys[name] = ";".join(
                f"{x.kind} {x.shape} {','.join(place.get(o, '?') for o in x.operands)}"
                for x in ops.values()
            )
        return self._keys[name]

    def flops(self, op: Op, computation: Computation) -> float:
        """Operations of the matmuls (convolutions, on a TPU) in an op, never too many."""
        if op.kind == "fusion" and (name := op.called("calls")):
            body = self.computations[name]
            return sum(self.flops(o, body) for o in body.values())
        labels = re.search(r"dim_labels=(\w+?)_", op.attributes)
        if op.kind != "convolution" or not labels:
            return 0
        contracted = _dims(computation[op.operands[0]].shape)[labels[1].index("f")]
        return 2 * math.prod(_dims(op.shape)) * contracted

    def hbm_bytes(self, op: Op, computation: Computation) -> float:
        """Bytes that a synchronous op reads from and writes to HBM."""
        read = sum(
            self._read(op, index, hbm_bytes(computation[name].shape))
            for index, name in enumerate(op.operands)
            if name in computation
        )
        return read + self._written(op, computation)

    def largest_in_hbm(self, name: str) -> float:
        """Bytes of the largest result that an op of a computation, or of one that it calls, leaves
        in HBM; what it is given, and what it changes in place, is none."""
        sizes = [0.0]
        for op in self.computations[name].values():
            inner = op.called("body") or op.called("to_apply")
            if op.kind in ("while", "call") and inner:
                sizes.append(self.largest_in_hbm(inner))
            elif op.kind not in _GIVEN and not op.kind.endswith(("-start", "-update")):
                sizes.append(self._written(op, self.computations[name]))
        return max(sizes)

    def _read(self, op: Op, index: int, whole: float) -> float:
        if not whole:
            return 0
        if op.kind in _SLICES and index == 0:
            return min(whole, all_bytes(op.shape))
        if op.kind == "dynamic-update-slice" and index == 0:
            return 0
        if op.kind == "fusion" and (body := op.called("calls")):
            part = self._parameter_read(body, index)
            return whole if part is None else min(whole, part)
        return whole

    def _parameter_read(self, name: str, index: int) -> float | None:
        """Bytes that a fusion reads of parameter `index`; None for all of it."""
        body = self.computations[name]
        of = next(
            (o.name for o in body.values() if o.kind == "parameter" and o.literal == str(index)), ""
        )
        total, waiting = 0.0, [of]
        while waiting:
            source = waiting.pop()
            if not source or body[source].root:
                return None
            for user in (o for o in body.values() if source in o.operands):
                if user.kind in ("bitcast", "get-tuple-element"):
                    waiting.append(user.name)
                elif user.kind in _SLICES and user.operands[0] == source:
                    total += all_bytes(user.shape)
                elif user.kind == "fusion" and (inner := user.called("calls")):
                    part = self._parameter_read(inner, user.operands.index(source))
                    if part is None:  # passed on or read whole, and so as its users read it
                        waiting.append(user.name)
                    total += part or 0
                elif user.kind != "dynamic-update-slice" or user.operands[0] != source:
                    return None
        return total

    def _written(self, op: Op, computation: Computation) -> float:
        whole = hbm_bytes(op.shape)
        if not whole:
            return 0
        if op.kind == "dynamic-update-slice":
            return min(whole, all_bytes(computation[op.operands[1]].shape))
        if op.kind == "fusion" and (name := op.called("calls")):
            body = self.computations[name]
            root = next(o for o in body.values() if o.root)
            while root.kind == "bitcast":
                root = body[root.operands[0]]
            if root.kind == "dynamic-update-slice":
                return min(whole, all_bytes(body[root.operands[1]].shape))
        return whole


def is_free(op: Op) -> bool:
    """Whether an op has no program of its own: it joins prefetched pieces, or is one operation on
    a scalar in scalar memory, S(6)."""
    own = op.kind in ("fusion", "call") or op.kind.startswith(("all-", "reduce-scatter"))
    scalar = "S(6)" in op.shape and not op.shape.startswith("(") and not own
    return scalar or 'custom_call_target="ConcatBitcast"' in op.attributes


def parse(text: str) -> Module:
    """Read `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if head := _HEAD.match(line):
                current = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif op := _parse_op(line):
            current[op.name] = op
    return Module(computations, entry)


def _parse_op(line: str) -> Op | None:
    head = _OP.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    split = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:split], rest[split:].lstrip()
    kind, _, _ = rest.partition("(")
    end = _closing(rest, len(kind))
    given = rest[len(kind) + 1 : end]
    return Op(head[2], shape, kind, tuple(_NAME.findall(given)), given, rest[end:], bool(head[1]))


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError(f"no closing bracket in {text[:80]!r}")


def _dims(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(d) for d in found[2].split(",") if d] if found else []


def _arrays(shape: str) -> Iterator[tuple[float, bool]]:
    """Bytes of each array of a shape, and whether it lies in HBM: S(1) is on-chip memory."""
    for dtype, dims, layout in _ARRAY.findall(shape):
        if dtype in _BITS:
            count = math.prod(int(d) for d in dims.split(",") if d)
            yield count * _BITS[dtype] / 8, bool(dims) and "S(" not in layout


@functools.cache
def hbm_bytes(shape: str) -> float:
    """Bytes of a shape's arrays that lie in HBM."""
    return sum(size for size, in_hbm in _arrays(shape) if in_hbm)


@functools.cache
def all_bytes(shape: str) -> float:
    """Bytes of a shape's arrays, wherever they lie."""
    return sum(size for size, _ in _arrays(shape))
