"""What the images' bytecode saves each time a container starts: the same image with other kinds of .pyc.

usage: .venv/bin/python benchmarks/bytecode.py [--image sparkpin/scripted-tiny:v2-tq] [--runs 7]

The images hold "unchecked hash" bytecode: no times, so that the layers are the same each time, and nothing is compared
with the source at import. The others are made of it, by headers alone, and are found through PYTHONPYCACHEPREFIX:

    unchecked    the same files in the other place: what the place itself costs
    checked      each import reads and hashes the source
    times        times that match, as an installer leaves them: each import asks for the source's time
    stale        times that do not match, as when a build clamps the times of sources: each import compiles, and nothing
                 can be written to the read-only root
    none         no bytecode of the wheels at all

Containers run as those of `invoke serve` do: user 10001, read-only root, no capabilities; here also no network. Runs
are interleaved, after one of each that warms the page cache. Debian's own bytecode is the same in all of them. On a
machine that does other things, too, trust the CPU's seconds more than the wall's.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import uuid
from typing import Any

from sparkpin.core import terminal
from sparkpin.core.files import EPOCH
from sparkpin.host.engine import Engine
from sparkpin.releases.container import HOME, UID

PREFIX = "/pycache"
VARIANTS = ("unchecked", "checked", "times", "stale", "none")
COMMANDS = {
    "import torch, vllm": ["python3", "-c", "import torch, vllm"],
    "import the server": ["python3", "-c", "import vllm.entrypoints.openai.api_server"],
    "vllm serve --help": ["vllm", "serve", "--help"],
}
# Runs in the image. A .pyc starts with 4 bytes of magic, 4 of flags (1: hash, 2: checked), then the source's hash, or 4
# bytes of its time and 4 of its size (PEP 552).
MAKE = """
import os, shutil, sys
from pathlib import Path

epoch, prefix = int(sys.argv[1]), Path(sys.argv[2])
count = size = 0
for root in ("/opt/vllm", "/usr/lib/python3", "/usr/lib/python3.11"):
    for pyc in Path(root).rglob("__pycache__/*.cpython-311.pyc"):
        source = pyc.parents[1] / (pyc.name.split(".")[0] + ".py")
        data = pyc.read_bytes()
        places = {v: prefix / v / source.parent.relative_to("/") / pyc.name for v in sys.argv[3:]}
        if root == "/opt/vllm":
            assert data[4:8] == bytes([1, 0, 0, 0]), pyc
            if not source.exists():
                continue
            count, size = count + 1, size + len(data)
            assert int(source.stat().st_mtime) == epoch, source
            length = source.stat().st_size.to_bytes(4, "little")
            heads = {
                "unchecked": data[4:16],
                "checked": bytes([3, 0, 0, 0]) + data[8:16],
                "times": bytes(4) + epoch.to_bytes(4, "little") + length,
                "stale": bytes(4) + (epoch + 1).to_bytes(4, "little") + length,
            }
            places.pop("none")
        for variant, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data if root != "/opt/vllm" else data[:4] + heads[variant] + data[16:])
print(count, size)
"""
TIME = """
import resource, subprocess, sys, time
begin = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
wall, used = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
print(wall, used.ru_utime + used.ru_stime)
"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--image", default="sparkpin/scripted-tiny:v2-tq")
    options.add_argument("--runs", type=int, default=7)
    given = options.parse_args()
    engine = Engine.connect()
    name = f"bytecode-{uuid.uuid4().hex[:8]}"
    image = f"sparkpin-bench/{name}:1"
    engine.tag(given.image, image)  # its own tag moves when somebody builds meanwhile
    volume = engine.client.volumes.create(f"sparkpin-bench-{name}")
    try:
        measure(engine, image, volume.name, given.runs)
    finally:
        volume.remove()
        engine.untag(image)


def in_container(engine: Engine, image: str, command: list[str], **settings: Any) -> str:
    out: bytes = engine.client.containers.run(image, command, remove=True, network_mode="none", **settings)
    return out.decode()


def measure(engine: Engine, image: str, volume: str, runs: int) -> None:
    made = ["/usr/bin/python3", "-c", MAKE, str(EPOCH), PREFIX, *VARIANTS]
    mount = {volume: {"bind": PREFIX, "mode": "rw"}}
    count, size = map(int, in_container(engine, image, made, user="0:0", volumes=mount).split())

    def once(variant: str, command: list[str]) -> tuple[float, float]:
        """Seconds on the wall and of CPU, measured in the container."""
        out = in_container(
            engine,
            image,
            ["/usr/bin/python3", "-c", TIME, *command],
            user=f"{UID}:{UID}",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            read_only=True,
            tmpfs={"/tmp": "rw,exec,mode=1777", HOME: f"rw,uid={UID},gid={UID}"},
            volumes={volume: {"bind": PREFIX, "mode": "ro"}},
            environment={} if variant == "shipped" else {"PYTHONPYCACHEPREFIX": f"{PREFIX}/{variant}"},
            working_dir=HOME,
        )
        wall, cpu = map(float, out.split())
        return wall, cpu

    variants = ("shipped", *VARIANTS)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in range(runs + 1):
        for name, command in COMMANDS.items():
            for variant in variants:
                took = once(variant, command)
                if run:
                    times.setdefault((name, variant), []).append(took)
        terminal.say(f"run {run} of {runs}")
    terminal.show(f"{platform.machine()}; {count:,} files of bytecode, {size / 1e6:.0f} MB; medians of {runs} runs")
    rows = []
    for name in COMMANDS:
        shipped = [statistics.median(values) for values in zip(*times[name, "shipped"], strict=True)]
        for variant in variants:
            wall, cpu = (statistics.median(values) for values in zip(*times[name, variant], strict=True))
            extra = f"{wall - shipped[0]:+.2f} s"
            rows.append((name, variant, f"{wall:.2f} s", extra, f"{cpu:.2f} s", f"{cpu - shipped[1]:+.2f} s"))
    terminal.table(("what", ".pyc", "wall", "", "CPU", ""), rows)


if __name__ == "__main__":
    main()
