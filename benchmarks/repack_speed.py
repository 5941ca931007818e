"""How long a repack takes beside `cp` of its source and beside llm-compressor's model_free_ptq.

    python benchmarks/repack_speed.py --work /tmp/bench                      # E2B, 10.2 GB
    python benchmarks/repack_speed.py --work /tmp/bench --layers 6 --vocab 65536 \\
        --peer-python /path/to/venv/with/llmcompressor/bin/python      # 2 GB, with the peer

All contenders run in turn, `--repeats` times, on a checkpoint that `synthesize.py` makes (kept in
the work folder for the next run), each after reading the source into the page cache and after a
`sync`, which stand outside the clock. Ours and the peer are whole processes, imports included;
ours fsyncs what it writes, `cp` and the peer do not, so `cp + sync` stands beside them. Memory is
sampled from /proc every 20 ms: RssAnon is what the process owns, RSS counts mapped files too.
`identical` compares every packed value, decoded as bf16(f32(scale) * level), with the source.

Prints a table, and one JSON line last on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
from synthesize import synthesize

from qatpack.checkpoint.folder import Checkpoint
from qatpack.checkpoint.reader import TensorReader
from qatpack.checkpoint.units import share
from qatpack.cli.text import table
from qatpack.repack.packing import decode

ROWS = 2048
DATA = Path(__file__).parents[1] / "tests" / "data"
TARGET = r"re:model\.language_model\..*(proj|gate|projection)$"
PEER = f"""
import sys
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import model_free_ptq
weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
model_free_ptq(
    sys.argv[1], sys.argv[2], max_workers=2, device="cpu",
    scheme=QuantizationScheme(targets=[r"{TARGET}"], weights=weights, format="pack-quantized"),
    ignore=[r"re:.*(vision|audio).*", "re:.*embed_tokens.*", "lm_head"],
)
"""


@dataclass
class Contender:
    """One way to make an output folder from the source, and what its runs took."""

    name: str
    command: Sequence[str]
    sync: bool = False
    seconds: list[float] = field(default_factory=list)
    anonymous: int = 0
    resident: int = 0
    identical: float | None = None

    def run(self, source: Path, out: Path) -> None:
        """One run into `out`, timed; the cache is warm and the disk idle when it starts."""
        for path in source.iterdir():
            subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
        os.sync()
        start = time.perf_counter()
        process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None:
            self._sample(process.pid)
            time.sleep(0.02)
        if self.sync:
            os.sync()
        self.seconds.append(time.perf_counter() - start)
        if process.returncode:
            raise SystemExit(f"{self.name} failed: {process.stderr.read().decode()[-2000:]}")
        if self.identical is None and not self.name.startswith("cp"):
            self.identical = identical_share(source, out)
            if source.name == "E2B-all-all":
                check_listing(out)

    def _sample(self, pid: int) -> None:
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        fields = dict(line.split(":", 1) for line in text.splitlines())
        kilobytes = lambda key: int(fields.get(key, "0").split()[0])  # noqa: E731
        self.anonymous = max(self.anonymous, kilobytes("RssAnon") * 1024)
        self.resident = max(self.resident, kilobytes("VmRSS") * 1024)


def identical_share(source: Path, build: Path) -> float:
    """Share of all values of packed tensors whose bf16 bits equal the source's."""
    reference, packed = Checkpoint.open(source), Checkpoint.open(build)
    same = total = 0
    with TensorReader() as reader:
        for name in packed.tensors:
            module = name.removesuffix(".weight_packed")
            if module == name:
                continue
            weight = reference[f"{module}.weight"]
            for start in range(0, weight.rows, ROWS):
                stop = min(start + ROWS, weight.rows)
                words, scale = (
                    reader.read_rows(packed[f"{module}.weight_{part}"], start, stop)
                    for part in ("packed", "scale")
                )
                value = decode(words, scale).view(np.uint16)
                same += int((value == reader.read_rows(weight, start, stop).view(np.uint16)).sum())
                total += value.size
    return same / total


def check_listing(build: Path) -> None:
    """Stop unless an uncut E2B build holds exactly the tensors of Google's, without the head."""
    listed = json.loads((DATA / "e2b_ct_tensors.json").read_text())
    found = {(t.name, t.dtype, t.shape) for t in Checkpoint.open(build).tensors.values()}
    if found != {(t["name"], t["dtype"], tuple(t["shape"])) for t in listed}:
        raise SystemExit(f"{build}: differs from e2b_ct_tensors.json")
    print(f"{len(found)} tensors, as in e2b_ct_tensors.json", file=sys.stderr)


def import_seconds() -> float:
    """Median of five fresh processes that import qatpack.cli, less those that import nothing."""
    times: dict[str, list[float]] = {"import qatpack.cli": [], "pass": []}
    for _ in range(5):
        for statement, taken in times.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            taken.append(time.perf_counter() - start)
    loaded, empty = map(statistics.median, times.values())
    return loaded - empty


def contenders(source: Path, out: Path, peer_python: str | None) -> list[Contender]:
    """Who repacks or copies `source` into `out`; the peer where its Python is given."""
    ours = [sys.executable, "-m", "qatpack.cli", "repack", str(source), str(out)]
    copy = ["cp", "-r", str(source), str(out)]
    found = [
        Contender("cp", copy),
        Contender("cp + sync", copy, sync=True),
        Contender("qatpack --no-hash", [*ours, "--no-hash"]),
        Contender("qatpack", ours),
    ]
    if peer_python:
        command = [peer_python, "-c", PEER, str(source), str(out)]
        found.append(Contender("model_free_ptq", command))
    return found


def report(found: Sequence[Contender], nbytes: int) -> list[tuple[str, ...]]:
    """The rows of the table; the first of `found` is the measure of the others."""
    base = statistics.median(found[0].seconds)
    rows = [("", "median s", "min..max", "x cp", "GB/s", "anon MB", "RSS MB", "identical")]
    for contender in found:
        median = statistics.median(contender.seconds)
        rows.append(
            (
                contender.name,
                f"{median:.1f}",
                f"{min(contender.seconds):.1f}..{max(contender.seconds):.1f}",
                f"{median / base:.2f}",
                f"{nbytes / median / 1e9:.2f}",
                f"{contender.anonymous / 1e6:.0f}",
                f"{contender.resident / 1e6:.0f}",
                "" if contender.identical is None else share(contender.identical, 1),
            )
        )
    return rows


def measure(found: Sequence[Contender], source: Path, out: Path, repeats: int) -> None:
    """Run all contenders in turn, `repeats` times."""
    for number in range(repeats):
        for contender in found:
            shutil.rmtree(out, ignore_errors=True)
            contender.run(source, out)
            print(
                f"round {number + 1}: {contender.name} {contender.seconds[-1]:.1f} s",
                file=sys.stderr,
            )
    shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for source and outputs")
    parser.add_argument("--config", default="E2B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-python", help="a python that has llmcompressor")
    options = parser.parse_args()
    cut = f"{options.config}-{options.layers or 'all'}-{options.vocab or 'all'}"
    source, out = options.work / cut, options.work / "out"
    if not source.exists():
        synthesize(options.config, source, layers=options.layers, vocab=options.vocab)
    nbytes = Checkpoint.open(source).tensor_bytes
    found = contenders(source, out, options.peer_python)
    measure(found, source, out, options.repeats)
    print(f"{cut}: {nbytes / 1e9:.2f} GB, {options.repeats} rounds, {os.cpu_count()} cores\n")
    print(table(report(found, nbytes)))
    imports = import_seconds()
    print(f"\nimport qatpack.cli: {imports:.2f} s")
    print(
        json.dumps(
            {
                "checkpoint": cut,
                "bytes": nbytes,
                "import_seconds": imports,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": {name: version(name) for name in ("qatpack", "jax", "numpy")},
                "runs": {
                    c.name: {
                        "seconds": c.seconds,
                        "anonymous_bytes": c.anonymous,
                        "resident_bytes": c.resident,
                        "identical": c.identical,
                    }
                    for c in found
                },
            }
        )
    )


if __name__ == "__main__":
    main()
