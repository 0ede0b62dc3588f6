"""How fast a layer is sealed, and what bounds it: writing as many bytes to the same disk, and hashing them.

usage: .venv/bin/python benchmarks/sealing.py [--folder FOLDER] [--runs 5] [--scale 1]

The layer is made up after a real one (wheels of an inference stack: 28 files a megabyte, a fifth of the bytes in files
below 64 KiB, the rest in large libraries). Its tar is in the page cache, as after a build. Sealing reads the headers,
hashes layer and files, and writes the archive. Both ways to the disk end when all is there. Runs are interleaved.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import random
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.files import sha256_file, sync_file
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.seal import seal

SMALL_FILES, SMALL_BYTES = 12_500, 8_000  # number, mean
LARGE_BYTES = [180_000_000, 90_000_000, 50_000_000, 20_000_000] + 8 * [5_000_000] + 100 * [300_000]


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
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--scale", type=float, default=1.0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(Path(folder), given.runs, given.scale)


def measure(folder: Path, runs: int, scale: float) -> None:
    source, target = folder / "layer.tar", folder / "out.tar"
    make_layer(source, scale)
    size = source.stat().st_size

    def write() -> None:
        shutil.copyfile(source, target)
        sync_file(target)

    def headers() -> None:
        with source.open("rb") as file:
            read_layer(file)

    def sealing() -> None:
        with source.open("rb") as file, target.open("wb") as out:
            for piece in seal([read_layer(file)], {}, os="linux", architecture="amd64", tag="sparkpin-bench/x:1"):
                out.write(piece)
        sync_file(target)

    tasks: dict[str, Callable[[], object]] = {
        "write to the disk": write,
        "SHA-256": lambda: sha256_file(source),
        "reading headers": headers,
        "sealing": sealing,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    for _ in range(runs):
        for name, act in tasks.items():
            begin, used = time.perf_counter(), time.process_time()
            act()
            times[name].append((time.perf_counter() - begin, time.process_time() - used))
    terminal.show(f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    terminal.show(f"a layer of {size / 1e6:.0f} MB, {runs} runs")
    rows = []
    for name, pairs in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*pairs, strict=True))
        fastest, slowest = min(pairs)[0], max(pairs)[0]
        rows.append(
            (name, f"{wall:.2f} s", f"{size / 1e6 / wall:.0f}", f"{fastest:.2f} s", f"{slowest:.2f} s", f"{cpu:.2f} s")
        )
    terminal.table(("what", "median", "MB/s", "fastest", "slowest", "CPU"), rows)


if __name__ == "__main__":
    main()
