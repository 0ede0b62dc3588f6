"""How fast a layer is sealed, beside what no sealing can beat: writing as many bytes to the same disk; hashing them.

usage: .venv/bin/python benchmarks/sealing.py [--folder FOLDER] [--runs 7] [--scale 1]

The layer is made up after a real one (wheels of an inference stack: 28 files a megabyte, a fifth of the bytes in files
below 64 KiB, the rest in large libraries) and lies in the page cache, as what an engine has just written does. Sealing
reads its headers, hashes the layer and each file, and writes the archive. Both writings begin to reach the disk at once
(fdatasync in a thread beside) and end when all is there. Runs are interleaved. Goal: 0.8 of the slower of the two,
by medians; below it the exit status is 1. Sealing hashes each byte twice: measure where no other work runs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import random
import statistics
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparkpin import ui
from sparkpin.canonical import read_layer
from sparkpin.files import CHUNK
from sparkpin.seal import Part, seal

SMALL_FILES, SMALL_BYTES = 12_500, 8_000  # number, mean
LARGE_BYTES = [180_000_000, 90_000_000, 50_000_000, 20_000_000] + 8 * [5_000_000] + 100 * [300_000]
GOAL = 0.8


def members(scale: float) -> Iterator[tuple[str, bytes | None]]:
    """Path and data (None: a folder), as a package manager would write them: sorted, folders first."""
    dice = random.Random(0)
    noise = dice.randbytes(1 << 20)
    yield "opt", None
    for package in range(int(SMALL_FILES * scale) // 10):
        folder = f"opt/vllm/lib/python3.11/site-packages/package_{package:05}/some_module"
        yield folder, None
        for number in range(10):
            size = min(65_535, int(dice.expovariate(1 / SMALL_BYTES)))
            yield f"{folder}/a_file_{number}.py", noise[number : number + size]
    for number, size in enumerate(LARGE_BYTES):
        size = int(size * scale)
        yield f"opt/vllm/lib/zz_large/lib{number:03}.so", (noise * (size // len(noise) + 1))[:size]


def make_layer(path: Path, scale: float) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members(scale):
            info = tarfile.TarInfo(name)
            info.mtime = 1_700_000_000
            if data is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data or b""))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    options.add_argument("--runs", type=int, default=7)
    options.add_argument("--scale", type=float, default=1.0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        ratio = measure(Path(folder), given.runs, given.scale)
    sys.exit(ratio < GOAL)


def flush(file: int, done: threading.Event) -> None:
    while not done.wait(0.005):
        os.fdatasync(file)


def measure(folder: Path, runs: int, scale: float) -> float:
    source, target = folder / "layer.tar", folder / "out.tar"
    make_layer(source, scale)
    size = source.stat().st_size
    chunk = random.Random(1).randbytes(CHUNK)

    def to_disk(act: Callable[[Callable[[bytes], object]], object]) -> None:
        with target.open("wb", buffering=0) as file:
            done = threading.Event()
            with ThreadPoolExecutor(1) as beside:
                beside.submit(flush, file.fileno(), done)
                try:
                    act(file.write)
                finally:
                    done.set()
            os.fsync(file.fileno())
        target.unlink()

    def disk() -> None:
        to_disk(lambda write: [write(chunk) for _ in range(size // CHUNK)])

    def sha256() -> None:
        digest = hashlib.sha256()
        for _ in range(size // CHUNK):
            digest.update(chunk)

    def headers() -> None:
        with source.open("rb") as file:
            read_layer(file)

    def sealing() -> None:
        with source.open("rb") as file:
            parts = [Part(layer=read_layer(file))]
            to_disk(lambda write: seal(write, parts, {}, os="linux", architecture="amd64", tag="sparkpin-bench/x:1"))

    tasks = {"disk write, fsync": disk, "SHA-256": sha256, "sealing": sealing, "of it reading headers": headers}
    times: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    load = os.getloadavg()[0]
    for _ in range(runs):
        for name, act in tasks.items():
            begin, used = time.perf_counter(), time.process_time()
            act()
            times[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - used)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ui.show(f"{platform.machine()}, {os.cpu_count()} cores; a layer of {size / 1e6:.0f} MB, {runs} runs")
    ui.show(f"load average before and after: {load:.1f}, {os.getloadavg()[0]:.1f}")
    rows = []
    for name, value in medians.items():
        ends = (f"{min(times[name]):.2f} s", f"{max(times[name]):.2f} s")
        rows.append(
            (name, f"{value:.2f} s", f"{size / 1e6 / value:.0f}", *ends, f"{statistics.median(cpu[name]):.2f} s")
        )
    ui.table(("what", "median", "MB/s", "fastest", "slowest", "CPU"), rows)
    ratio, best = (
        max(value["disk write, fsync"], value["SHA-256"]) / value["sealing"]
        for value in (medians, {name: min(values) for name, values in times.items()})
    )
    cores = cpu["sealing"][times["sealing"].index(min(times["sealing"]))] / min(times["sealing"])
    ui.show(f"sealing at {ratio:.2f} of the slower of disk write and SHA-256 (goal: {GOAL})")
    ui.show(f"by the fastest runs, the least disturbed: {best:.2f}; sealing then had {cores:.1f} cores")
    return ratio


if __name__ == "__main__":
    main()
