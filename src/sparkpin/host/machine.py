"""What this machine is: its kind, its memory, its GPUs, its stack."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkpin.core.errors import HostError
from sparkpin.core.names import MACHINES, platform_of

ROOT = Path("/")
HOST_RESERVE = 2 << 30
"""Bytes kept for the machine: Docker, ssh and a shell go on. Process 1 of a container ends its server below it."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SLOWED = {
    "sw_power_cap": "the power limit",
    "sw_thermal_slowdown": "heat, by the driver",
    "hw_thermal_slowdown": "heat, by the hardware",
    "hw_power_brake_slowdown": "the power supply",
}
FIELDS = (
    "name",
    "compute_cap",
    "driver_version",
    "utilization.gpu",
    *(f"clocks_event_reasons.{why}" for why in SLOWED),
)
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")

CAPABILITY = "12.1"
"""Of a GB10: NVIDIA's list of CUDA GPUs."""

State = Literal["ok", "MISSING", "advice"]


@dataclass(frozen=True)
class Requirement:
    """What a machine has to have: a row of `doctor`, and what `up` looks at before it begins.

    state: MISSING stops the work, advice does not; fix: the command or act that comes next, "" where there is nothing
    to do; runnable: `fix` is a command that root can run unattended.
    """

    name: str
    state: State
    detail: str
    fix: str = ""
    runnable: bool = False


def checked(name: str, is_met: bool, detail: str, fix: str = "", lack: State = "MISSING") -> Requirement:
    """lack: its state where it is not met."""
    return Requirement(name, "ok", detail) if is_met else Requirement(name, lack, detail, fix)


@dataclass(frozen=True)
class Host:
    """Facts, each read from one file. arch: as `uname -m`; distribution: /etc/os-release's ID and VERSION_ID;
    family: ID and ID_LIKE; memory in bytes."""

    is_spark: bool
    arch: str
    distribution: str
    family: tuple[str, ...]
    is_root: bool
    memory_total: int
    memory_available: int


def read_host() -> Host:
    """Architecture and user are those of this process."""
    release = dict(re.findall(r"""^(\w+)=["']?([^"'\n]*)""", text("etc/os-release"), re.M))
    memory = dict(re.findall(r"^(\w+): +(\d+) kB$", text("proc/meminfo"), re.M))  # units of 1024 bytes
    return Host(
        is_spark=is_spark(),
        arch=platform.machine(),
        distribution=" ".join(filter(None, (release.get("ID", "unknown"), release.get("VERSION_ID")))),
        family=(release.get("ID", ""), *release.get("ID_LIKE", "").split()),
        is_root=os.geteuid() == 0,
        memory_total=1024 * int(memory.get("MemTotal", 0)),
        memory_available=1024 * int(memory.get("MemAvailable", 0)),
    )


def is_spark() -> bool:
    """By the GPU's compute capability on an Arm CPU: makers give it names of their own. Before that by what can be read
    without the driver: the firmware's product name, NVIDIA's release file, the chip's usual name."""
    gpus = [text(path) for path in (ROOT / "proc/driver/nvidia/gpus").glob("*/information")]
    names = " ".join([*product_names(), text("etc/dgx-release"), *gpus]).upper().replace("_", " ")
    if "DGX SPARK" in names or "GB10" in names:
        return True
    arm = bool(gpus) and platform.machine() == "aarch64"
    return arm and any(gpu.compute_capability == CAPABILITY for gpu in read_gpus())


def product_names() -> list[str]:
    """The machine's kind by its firmware. A name that somebody gave to this one machine is not in these files."""
    files = ("sys/class/dmi/id/product_name", "sys/firmware/devicetree/base/model")
    return [name for file in files if (name := text(file).strip("\0 \n"))]


def text(path: str | Path) -> str:
    """Of a file of this machine, "" where there is none."""
    try:
        return (ROOT / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def this_platform() -> str:
    """As an image's: of this machine, whose engine may be another's."""
    return platform_of(platform.machine())


def default_stack(project: Path, host: Host | None = None) -> str:
    """The stack for this machine: `spark` on a DGX Spark, else `cpu`. HostError when the project has none for it."""
    host = host or read_host()
    name = "spark" if host.is_spark else "cpu"
    fits = host.is_spark or host.arch == MACHINES["linux/amd64"]
    if fits and (project / f"pins/stacks/{name}.yaml").is_file():
        return name
    kind = "a DGX Spark" if host.is_spark else f"an {host.arch} machine"
    step = "run ./install.sh on an x86-64 Linux machine, which takes the stack cpu"
    raise HostError(f"this is {kind}, and this version of sparkpin pins no stack for it yet", next_step=step)


def default_recipe(project: Path, stack: str | None = None) -> str:
    """That of a stack; None: of this machine's."""
    from sparkpin.pins import manifests  # slow to import, and `images` and `status` read no pins

    return manifests.load_stack(project, stack or default_stack(project)).default_recipe


@dataclass(frozen=True)
class Gpu:
    """utilization: percent, None where the driver does not report it. slowed: why its clocks are reduced."""

    name: str
    compute_capability: str
    driver: str
    utilization: float | None = None
    slowed: tuple[str, ...] = ()


def read_gpus() -> tuple[Gpu, ...]:
    """What is no row of a GPU (a message of nvidia-smi) is passed over."""
    found = []
    for line in (output(QUERY) or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS):
            name, capability, driver, busy, *states = cells
            slowed = tuple(words for words, state in zip(SLOWED.values(), states, strict=True) if state == "Active")
            is_number = busy.replace(".", "", 1).isdecimal()
            found.append(Gpu(name, capability, driver, float(busy) if is_number else None, slowed))
    return tuple(found)


def search_path() -> str:
    """PATH with the system's folders: a user's often lacks sbin."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"


def find_program(name: str) -> str | None:
    return shutil.which(name, path=search_path())


def require_program(name: str, package: str) -> str:
    if program := find_program(name):
        return program
    raise HostError(f"there is no {name} on this machine", next_step=f"apt-get install {package} (as root)")


def output(argv: Sequence[str]) -> str | None:
    """What a program prints; None when it is not there, fails, or takes longer than 20 seconds."""
    command = [find_program(argv[0]) or argv[0], *argv[1:]]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
