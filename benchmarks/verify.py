"""Times `qatpack verify` against `cat` of both folders, in one run and in the same cache state.

    python benchmarks/verify.py REFERENCE BUILD

Prints a table and, last, one line of JSON. The comparison is timed without and with the checks of
compressed-tensors, which spend their time importing torch and transformers. Anonymous memory is
the peak of RssAnon, read from /proc while the command runs.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

COMPARE = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from qatpack.checkpoint.source import resolve_source
from qatpack.verify.job import Options, open_reference, verify
reference = open_reference(resolve_source(sys.argv[1]))
report = verify(resolve_source(sys.argv[2]), reference, Options(conformance=sys.argv[3] == "1"))
print(report.judgement.text)
"""


def run(command):
    """Seconds, CPU seconds, peak anonymous MB, peak RSS MB and stdout of a command."""
    begun = time.perf_counter()
    before = os.times()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peaks = {"RssAnon": 0, "VmHWM": 0}
    watcher = threading.Thread(target=_watch, args=(process, peaks))
    watcher.start()
    output = process.communicate()[0]
    watcher.join()
    seconds, after = time.perf_counter() - begun, os.times()
    cpu = (
        after.children_user - before.children_user + after.children_system - before.children_system
    )
    if process.returncode:
        raise SystemExit(f"{command} failed with {process.returncode}")
    anonymous, resident = (peaks[k] / 1e3 for k in ("RssAnon", "VmHWM"))
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "anonymous_mb": round(anonymous),
        "rss_mb": round(resident),
        "said": output.strip(),
    }


def _watch(process, peaks):
    path = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            return
        for line in lines:
            name, _, value = line.partition(":")
            if name in peaks:
                peaks[name] = max(peaks[name], int(value.split()[0]) * 1024 // 1000)
        time.sleep(0.02)


def cat(folders):
    """`cat` of every weight file to /dev/null."""
    files = [str(p) for f in folders for p in sorted(f.glob("*.safetensors"))]
    return run(["sh", "-c", 'cat "$@" > /dev/null', "sh", *files])


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time qatpack verify against cat of both folders.")
    parser.add_argument("reference", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    folders = (args.reference, args.build)
    size = sum(p.stat().st_size for p in args.reference.glob("*.safetensors"))
    compare = [sys.executable, "-c", COMPARE, str(args.reference), str(args.build)]
    runs = {"cat": [], "compare": [], "with conformance": []}
    for _ in range(args.repeats):
        runs["cat"].append(cat(folders))
        runs["compare"].append(run([*compare, "0"]))
        runs["with conformance"].append(run([*compare, "1"]))
    best = {name: min(found, key=lambda r: r["seconds"]) for name, found in runs.items()}
    for name, found in best.items():
        speed = size / found["seconds"] / 1e9
        core = size / max(found["cpu_seconds"], 1e-9) / 1e9
        print(
            f"{name:18} {found['seconds']:8.2f} s  {found['cpu_seconds']:8.2f} CPU s  "
            f"{speed:6.2f} GB/s  {core:6.2f} GB/s a core  {found['anonymous_mb']:6} MB anonymous"
        )
    print(best["compare"]["said"])
    print(json.dumps({"reference_bytes": size, "load": os.getloadavg(), "runs": runs}))


if __name__ == "__main__":
    main()
