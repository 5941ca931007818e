"""Speed of the grid recovery against plain C and memcpy, in GB/s of bf16 input.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --megabytes 256 --repeats 15

Each way of doing it runs in a process of its own, pinned to its cores before anything is
imported; all take turns within every repeat, so that a busy machine slows them alike. Compilation
and start-up stay outside the clock. The C program must give the same statuses, levels and scales.
A table goes to stdout, and one line of JSON last; `cpu` is GB per second of processor time, which
other programs on the machine disturb less than the clock.
"""

import argparse
import ctypes
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COLUMNS = ("median", "min", "max", "cpu")
WAYS = [
    ("ours bfloat16", "ours", 1, "bfloat16"),
    ("ours float32", "ours", 1, "float32"),
    ("C bfloat16", "c", 1, "bfloat16"),
    ("C float32", "c", 1, "float32"),
    ("memcpy", "memcpy", 1, "-"),
    ("ours bfloat16", "ours", 2, "bfloat16"),
    ("ours float32", "ours", 2, "float32"),
    ("C bfloat16", "c", 2, "bfloat16"),
    ("C float32", "c", 2, "float32"),
    ("memcpy", "memcpy", 2, "-"),
]


def synthesize(path: Path, megabytes: int) -> None:
    """Gaussian weights on grids with float32 steps; 1 group in 1,000 spoilt, one in 5,000 zero."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    groups = megabytes * 2**20 // 64
    weights = rng.standard_normal((groups, 32), np.float32)
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(1)[:, None], 1)
    step = np.abs(extreme) / np.float32(8) * rng.uniform(0.9, 1.1, (groups, 1)).astype(np.float32)
    weights *= -np.sign(extreme) / step
    levels = np.clip(np.rint(weights), -8, 7) + np.float32(0)
    bits = (levels * step).astype(ml_dtypes.bfloat16).view(np.uint16)
    bits[::1000, 5] += np.uint16(1)
    bits[1::5000] = 0
    bits.tofile(path)


def load(path: str):
    """The data at 64-byte alignment, where XLA uses it without a copy."""
    import numpy as np

    bits = np.memmap(path, np.uint16, "r").reshape(-1, 32)
    buffer = np.empty(bits.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    aligned = buffer[start : start + bits.nbytes].view(np.uint16).reshape(bits.shape)
    aligned[:] = bits
    return aligned


def ours(bits, cores: int, scale_dtype: str, out: str | None) -> Callable[[], None]:
    """Blocks as the repacking job runs them: the next is on its way while one is read."""
    import numpy as np

    from qatpack.repack.grid import BLOCK_GROUPS, dispatch

    def run(keep=None) -> None:
        waiting = None
        for start in range(0, len(bits), BLOCK_GROUPS):
            pending = dispatch(bits[start : start + BLOCK_GROUPS], scale_dtype)
            if waiting is not None:
                result = waiting.result()
                if keep is not None:
                    keep.append(result)
            waiting = pending
        result = waiting.result()
        if keep is not None:
            keep.append(result)

    kept = []
    run(kept)
    if out:
        np.savez(
            out,
            status=np.concatenate([r.status for r in kept]),
            packed=np.concatenate([r.packed for r in kept]),
            scale=np.concatenate([r.scale for r in kept]).view(
                np.uint16 if scale_dtype == "bfloat16" else np.uint32
            ),
        )
    return run


def in_threads(work: Callable[[int, int], None], groups: int, cores: int) -> None:
    """Call `work(start, stop)` on one slice a core; ctypes and numpy let go of the lock."""
    ends = [groups * i // cores for i in range(cores + 1)]
    threads = [threading.Thread(target=work, args=pair) for pair in itertools.pairwise(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plain_c(bits, cores: int, scale_dtype: str, out: str | None) -> Callable[[], None]:
    """One pass, to be called: recovery.c over the groups `bits`, on `cores` threads."""
    import numpy as np

    library = ctypes.CDLL(os.environ["RECOVERY_LIBRARY"])
    pointer = ctypes.c_void_p
    library.recover.argtypes = (pointer, ctypes.c_int64, ctypes.c_int, pointer, pointer, pointer)
    library.recover.restype = None
    packed = np.zeros((len(bits), 16), np.uint8)
    scale = np.zeros(len(bits), np.uint16 if scale_dtype == "bfloat16" else np.uint32)
    status = np.zeros(len(bits), np.uint8)

    def work(a: int, b: int) -> None:
        arrays = (x[a:b].ctypes.data for x in (packed, scale, status))
        library.recover(bits[a:b].ctypes.data, b - a, scale_dtype == "bfloat16", *arrays)

    def run() -> None:
        in_threads(work, len(bits), cores)

    run()
    if out:
        np.savez(out, status=status, packed=packed, scale=scale)
    return run


def memcpy(bits, cores: int, scale_dtype: str, out: str | None) -> Callable[[], None]:
    """One pass, to be called: a copy of `bits` on `cores` threads, which bounds any recovery."""
    import numpy as np

    target = np.zeros_like(bits)
    return lambda: in_threads(lambda a, b: np.copyto(target[a:b], bits[a:b]), len(bits), cores)


def worker(way: str, cores: int, scale_dtype: str, data: str, out: str | None) -> None:
    """Time one pass for every line on stdin, after a warm-up."""
    run = {"ours": ours, "c": plain_c, "memcpy": memcpy}[way](load(data), cores, scale_dtype, out)
    print("ready", flush=True)
    for _ in sys.stdin:
        start, used = time.perf_counter(), time.process_time()
        run()
        print(time.perf_counter() - start, time.process_time() - used, flush=True)


def compile_c(folder: Path) -> Path:
    """Compile recovery.c into the folder; returns the library."""
    library = folder / "recovery.so"
    subprocess.run(
        [os.environ.get("CC", "cc"), *FLAGS, str(SOURCE), "-o", str(library), "-lm"], check=True
    )
    return library


def check_agreement(folder: Path, scale_dtype: str) -> None:
    """Statuses of every group, levels and bfloat16 scales of the certified ones."""
    import numpy as np

    mine, theirs = (np.load(folder / f"{way}-{scale_dtype}.npz") for way in ("ours", "c"))
    good = mine["status"] == 1
    same = (mine["status"] == theirs["status"]).all()
    same &= (mine["packed"][good] == theirs["packed"][good]).all()
    if scale_dtype == "bfloat16":
        same &= (mine["scale"][good] == theirs["scale"][good]).all()
    if not same:
        sys.exit(f"ours and C disagree with {scale_dtype} scales: no speed is worth reporting")


def spawn(way: str, cores: int, scale_dtype: str, folder: Path) -> subprocess.Popen:
    """Start the process of one way, bound to its cores; it prints "ready" when it has compiled."""
    command = [sys.executable, __file__, "--worker", way, str(cores), scale_dtype]
    command += [str(folder / "data.bin")]
    if cores == 1 and way != "memcpy":
        command.append(str(folder / f"{way}-{scale_dtype}.npz"))
    available = sorted(os.sched_getaffinity(0))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "RECOVERY_LIBRARY": str(folder / "recovery.so")},
        preexec_fn=lambda: os.sched_setaffinity(0, available[:cores]),
    )


def measure(megabytes: int, repeats: int) -> list[dict]:
    """GB/s of every way, in turn, with the median, least and most of `repeats`."""
    cores = len(os.sched_getaffinity(0))
    ways = [w for w in WAYS if w[2] <= cores]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_c(folder)
        synthesize(folder / "data.bin", megabytes)
        workers = []
        for _, way, count, scale_dtype in ways:
            workers.append(spawn(way, count, scale_dtype, folder))
            if workers[-1].stdout.readline() != "ready\n":
                sys.exit(f"the worker for {way} did not start; its error is above")
        for scale_dtype in ("bfloat16", "float32"):
            check_agreement(folder, scale_dtype)
        rates = [[] for _ in ways]
        for _ in range(repeats):
            for process, rate in zip(workers, rates, strict=True):
                process.stdin.write("go\n")
                process.stdin.flush()
                seconds = map(float, process.stdout.readline().split())
                rate.append([megabytes * 2**20 / 1e9 / s for s in seconds])
        for process in workers:
            process.stdin.close()
            process.wait()
    return [
        {
            "name": label,
            "cores": count,
            "median": round(statistics.median(wall), 3),
            "min": round(min(wall), 3),
            "max": round(max(wall), 3),
            "cpu": round(statistics.median(cpu), 3),
        }
        for (label, _, count, _), (wall, cpu) in zip(
            ways, (zip(*r, strict=True) for r in rates), strict=True
        )
    ]


def machine() -> dict:
    """What ran this: processor, vector unit, load and versions."""
    import jax
    import numpy as np

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((x.split(":")[1].strip() for x in info.splitlines() if "model name" in x), "")
    flags = next((x.split() for x in info.splitlines() if x.startswith("flags")), [])
    vector = next((f for f in ("avx512f", "avx2", "sse4_2") if f in flags), platform.machine())
    cc = subprocess.run([os.environ.get("CC", "cc"), "--version"], capture_output=True, text=True)
    return {
        "processor": model or platform.processor(),
        "vector": vector,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "cc": cc.stdout.splitlines()[0],
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="size of the bf16 input")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    where = machine()
    rows = measure(options.megabytes, options.repeats)
    median = {(row["name"], row["cores"]): row["median"] for row in rows}
    print(f"{where['processor']}, {where['vector']}, {where['cores']} cores, load {where['load']}")
    print(f"{options.megabytes} MiB of bf16, {options.repeats} interleaved repeats, GB/s of input")
    print(f"{'':16}" + "".join(f"{x:>10}" for x in ("cores", *COLUMNS, "of C", "of memcpy")))
    for row in rows:
        kind, _, scale_dtype = row["name"].partition(" ")
        c = median["C " + scale_dtype, row["cores"]] if kind == "ours" else None
        row["of_c"] = round(row["median"] / c, 2) if c else None
        row["of_memcpy"] = round(row["median"] / median["memcpy", row["cores"]], 3)
        cells = (row["cores"], *(row[x] for x in COLUMNS), row["of_c"] or "", row["of_memcpy"])
        print(f"{row['name']:16}" + "".join(f"{x:>10}" for x in cells))
    print(json.dumps({"benchmark": "recovery", **vars(options), **where, "rows": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        way, cores, scale_dtype, data, *out = sys.argv[2:]
        worker(way, int(cores), scale_dtype, data, out[0] if out else None)
    else:
        main()
