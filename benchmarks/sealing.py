"""How fast a layer is sealed, beside what no sealing can beat: writing as many bytes to the same disk; hashing them.

usage: .venv/bin/python benchmarks/sealing.py [--folder FOLDER] [--runs 7] [--scale 1]

The layer is made up after a real one (wheels of an inference stack: 28 files a megabyte, a fifth of the bytes in files
below 64 KiB, the rest in large libraries). Another process writes its tar, as an engine does, and a build reads the
headers meanwhile. Sealing begins when that process ends, with the tar in the page cache and on the disk (or its way
there would slow down what is measured): it waits for the last headers, plans, hashes the layer and writes the archive.
Sealing and the plain write go to the disk in the same way, and end when all is there. Runs are interleaved. Goal: 0.8
of the slower of the two, by medians; below it the exit status is 1. "Both at once" tells what two cores are good for:
the disk needs some of them, too. The listing of the files with their hashes is made while the engine unpacks.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.files import CHUNK
from sparkpin.image.layer_tar import read_layer, read_layer_of
from sparkpin.image.listing import contents_of
from sparkpin.image.seal import SealedLayer, seal

SMALL_FILES, SMALL_BYTES = 12_500, 8_000  # number, mean
LARGE_BYTES = [180_000_000, 90_000_000, 50_000_000, 20_000_000] + 8 * [5_000_000] + 100 * [300_000]
GOAL = 0.8
PIECE = 4 << 20  # bytes of a write
DEPTH, BUFFERS = 3, 8  # pieces that the disk has at once, and that there are


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


class Disk:
    """Writes a file past the page cache, in DEPTH pieces at once: what the disk takes, for little of the processor.

    The writing is a process of its own, as an engine is, and gets the pieces in shared memory.
    Where the file system has no O_DIRECT, the same through the page cache, with fsync at the end.
    """

    def __init__(self, path: Path) -> None:
        self.shared = [mmap.mmap(-1, PIECE) for _ in range(BUFFERS)]  # aligned, as O_DIRECT wants it
        self.free = list(range(BUFFERS))
        self.filled = self.size = 0
        self.done, done = os.pipe()
        todo, self.todo = os.pipe()
        self.writer = os.fork()
        if self.writer == 0:
            os.close(self.todo)
            status = 1
            try:
                self.write_pieces(path, todo, done)
                status = 0
            finally:
                os._exit(status)
        os.close(todo)
        os.close(done)

    def write_pieces(self, path: Path, todo: int, done: int) -> None:
        """Write the pieces that `todo` names, one after another; tell `done` which are free again."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            file = os.open(path, flags | os.O_DIRECT)
        except OSError:
            file = os.open(path, flags)

        def put(index: int, offset: int) -> None:
            if os.pwrite(file, self.shared[index], offset) != PIECE:
                raise OSError(f"{path}: the disk is full")
            os.write(done, bytes([index]))

        with ThreadPoolExecutor(DEPTH) as pool:
            pending: list[Future[None]] = []
            while len(token := os.read(todo, 1)) == 1:
                pending.append(pool.submit(put, token[0], len(pending) * PIECE))
            for piece in pending:
                piece.result()
        os.fsync(file)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            part, view = view[: PIECE - self.filled], view[PIECE - self.filled :]
            self.shared[self.free[-1]][self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            if self.filled == PIECE:
                self.flush()

    def flush(self) -> None:
        os.write(self.todo, bytes([self.free.pop()]))
        self.size, self.filled = self.size + self.filled, 0
        if not self.free:
            self.free.extend(os.read(self.done, BUFFERS))

    def close(self, path: Path) -> None:
        if self.filled:
            self.flush()
        os.close(self.todo)
        if os.waitpid(self.writer, 0)[1]:
            raise OSError(f"{path}: could not be written; is the disk full?")
        os.truncate(path, self.size)
        os.close(self.done)
        for piece in self.shared:
            piece.close()


def measure(folder: Path, runs: int, scale: float) -> float:
    source, tree, target = folder / "layer.tar", folder / "tree.tar", folder / "out.tar"
    make_layer(source, scale)
    size = source.stat().st_size
    chunk = random.Random(1).randbytes(CHUNK)

    def to_disk(act: Callable[[Callable[[bytes | memoryview], object]], object]) -> None:
        disk = Disk(target)
        act(disk.write)
        disk.close(target)

    def disk() -> None:
        to_disk(lambda write: [write(chunk) for _ in range(size // CHUNK)])

    def sha256() -> None:
        digest = hashlib.sha256()
        for _ in range(size // CHUNK):
            digest.update(chunk)

    def both() -> None:
        with ThreadPoolExecutor(1) as beside:
            hashed = beside.submit(sha256)
            disk()
            hashed.result()

    def headers() -> None:
        with source.open("rb", buffering=0) as file:
            read_layer(file)

    def sealing() -> float:
        ended = 0.0

        def engine() -> None:
            nonlocal ended
            subprocess.run(["sh", "-c", 'cp "$0" "$1" && sync "$1"', source, tree], check=True)
            ended = time.perf_counter()

        parts = [SealedLayer(layer=read_layer_of(tree, engine))]
        to_disk(lambda write: seal(write, parts, {}, os="linux", architecture="amd64", tag="sparkpin-bench/x:1"))
        return ended

    def listing() -> None:
        with source.open("rb", buffering=0) as file:
            contents_of(read_layer(file))

    tasks: dict[str, Callable[[], float | None]] = {
        "disk write": disk,
        "SHA-256": sha256,
        "both at once": both,
        "sealing": sealing,
        "reading headers (before)": headers,
        "listing (later)": listing,
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    load = os.getloadavg()[0]
    for _ in range(runs):
        for name, act in tasks.items():
            begin, used = time.perf_counter(), time.process_time()
            begin = act() or begin
            times[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - used)
    medians = {name: statistics.median(values) for name, values in times.items()}
    terminal.show(f"{platform.machine()}, {os.cpu_count()} cores; a layer of {size / 1e6:.0f} MB, {runs} runs")
    terminal.show(f"load average before and after: {load:.1f}, {os.getloadavg()[0]:.1f}")
    rows = []
    for name, value in medians.items():
        ends = (f"{min(times[name]):.2f} s", f"{max(times[name]):.2f} s")
        rows.append(
            (name, f"{value:.2f} s", f"{size / 1e6 / value:.0f}", *ends, f"{statistics.median(cpu[name]):.2f} s")
        )
    terminal.table(("what", "median", "MB/s", "fastest", "slowest", "CPU"), rows)
    limit = max(medians["disk write"], medians["SHA-256"])
    ratio = limit / medians["sealing"]
    terminal.show(f"sealing at {ratio:.2f} of the slower of disk write and SHA-256 (goal: {GOAL})")
    terminal.show(f"two plain loops that do both at once come to {limit / medians['both at once']:.2f}")
    return ratio


if __name__ == "__main__":
    main()
