"""Memory of a push: a folder with one large file, to a Hub on loopback in another process.

    python benchmarks/push_memory.py --work DIR --gb 5

Makes a small build from the embedded checkpoint, puts a file of the given size into its manifest,
and pushes it as `qatpack push` does, but for the readers' checks (they open no file that large).
The file is random where it is not a hole, so that neither side can compress it. Prints seconds and
the peak of the client's anonymous memory, sampled from /proc; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from importlib.resources import as_file, files
from pathlib import Path

SERVER = """
import sys, time
from pathlib import Path
from hub import Account, Hub
with Hub({}, accounts={"hf_benchmark": Account("bench")}, storage=Path(sys.argv[1])) as hub:
    print(hub.url, flush=True)
    time.sleep(3600)
"""
HOLE, BLOCK = 64 << 20, 1 << 20


def anonymous() -> int:
    """Anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The highest anonymous memory while inside, sampled every 10 ms; also what it was before."""

    def __enter__(self) -> Peak:
        self.before = self.highest = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.01):
            self.highest = max(self.highest, anonymous())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def make_folder(work: Path, nbytes: int) -> Path:
    """A build with `large.safetensors` of `nbytes` in its manifest."""
    from qatpack.checkpoint.hashing import hash_file
    from qatpack.checkpoint.source import Source
    from qatpack.repack.job import repack

    folder = work / "build"
    with as_file(files("qatpack.demo") / "checkpoint") as embedded:
        manifest = dict(repack(Source(embedded), folder))
    large = folder / "large.safetensors"
    with open(large, "wb") as file:
        file.truncate(nbytes)
        for offset in range(0, nbytes - BLOCK, HOLE):
            file.seek(offset)
            file.write(os.urandom(BLOCK))
    record = {"name": large.name, "bytes": nbytes, "sha256": hash_file(large)}
    manifest["files"] = [*manifest["files"], record]
    (folder / "repack_report.json").write_text(json.dumps(manifest))
    return folder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=Path, help="folder for both sides; default: a new one")
    parser.add_argument("--gb", type=float, default=5.0)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        work = Path(name)
        storage = work / "storage"
        storage.mkdir()
        tests = Path(__file__).parents[1] / "tests"
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(storage)],
            env=os.environ | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            os.environ |= {
                "HF_ENDPOINT": server.stdout.readline().strip(),
                "HF_HOME": str(work / "home"),
                "HF_TOKEN": "hf_benchmark",
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            }
            measure(make_folder(work, int(arguments.gb * 1e9)))
        finally:
            server.terminate()
            server.wait()


def measure(folder: Path) -> None:
    """Push the folder, and print seconds and the highest anonymous memory."""
    from qatpack.push import job

    job.conformance = lambda payload: None
    job.open_api()  # its import is not the push
    with Peak() as peak:
        start = time.perf_counter()
        plan = job.plan_push(folder, "bench/large", job.Options(), tell=print)
        planned = time.perf_counter()
        pushed = job.push(plan, tell=print)
        done = time.perf_counter()
    assert pushed.sent
    nbytes = plan.payload.bytes
    print(f"{nbytes / 1e9:.2f} GB: checked in {planned - start:.1f} s, sent and read back in "
          f"{done - planned:.1f} s")  # fmt: skip
    print(
        f"anonymous memory {peak.before / 1e6:.0f} MB before, {peak.highest / 1e6:.0f} MB at most"
    )
    memory = {"anonymous_before": peak.before, "anonymous_peak": peak.highest}
    seconds = {"check_s": planned - start, "push_s": done - planned}
    print(json.dumps({"bytes": nbytes, **seconds, **memory}))


if __name__ == "__main__":
    main()
