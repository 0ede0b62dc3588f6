"""What a DGX Spark lacks to serve: its driver, its GPU, and the way by which Docker hands the GPU to a container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkpin.host import machine
from sparkpin.host.machine import CAPABILITY, Gpu, Requirement, checked

UPDATE = "sudo apt update && sudo apt dist-upgrade, then sudo reboot (DGX OS brings driver and firmware)"
RUNTIME = (
    "sudo apt install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker "
    "&& sudo systemctl restart docker"
)
# CUDA Toolkit release notes (13.2 Update 2, which lists all releases), table 3 "CUDA Toolkit and Corresponding Driver
# Versions", Linux: the rows "GA". An update's own driver is newer (13.0 Update 2: 580.95.05); its PTX is the release's.
MINIMUM_DRIVER = {
    "13.0": "580.65.06",
    "12.9": "575.51.03",
    "12.8": "570.26",
}
"""CUDA release -> the driver that has all of it. What the driver itself compiles (FA2's PTX) needs it, whatever "minor
version compatibility" allows for the rest."""
LIBRARY = re.compile(r"libcuda\.so\.(\d[\d.]*\d)")  # of a driver, in a CDI specification


@dataclass(frozen=True)
class GpuFacts:
    """driver: version of the loaded NVIDIA driver, "" for none; ways: by which Docker hands out the GPU; cdi: drivers
    whose files its specifications name, by their paths."""

    gpus: tuple[Gpu, ...]
    driver: str
    ways: tuple[str, ...]
    cdi: Mapping[str, str] = field(default_factory=dict)


def loaded_driver(gpus: Sequence[Gpu]) -> str:
    return gpus[0].driver if gpus else machine.text("sys/module/nvidia/version").strip()


def read_gpu_facts(engine: Mapping[str, Any], gpus: Sequence[Gpu]) -> GpuFacts:
    """engine: what Docker's engine prints of itself, empty where none answers."""
    ways = ["the runtime nvidia"] if "nvidia" in engine.get("Runtimes", ()) else []
    ways += ["the toolkit's hook"] if machine.find_program("nvidia-container-runtime-hook") else []
    specifications = dict[str, str]()
    # Docker Engine 25.0 release notes: devices of the Container Device Interface.
    if version_of(engine.get("ServerVersion", "")) >= (25,):
        files = [path for folder in ("etc/cdi", "var/run/cdi") for path in (machine.ROOT / folder).glob("*")]
        specifications = {str(path): read for path in files if "nvidia.com/gpu" in (read := machine.text(path))}
    cdi = {path: found[1] for path, read in specifications.items() if (found := LIBRARY.search(read))}
    ways += ["CDI"] if specifications else []
    return GpuFacts(tuple(gpus), loaded_driver(gpus), tuple(ways), cdi)


def gpu_requirements(facts: GpuFacts, cuda: str) -> Iterator[Requirement]:
    """cuda: release of the stack's CUDA ("13.0")."""
    needed, loaded = driver_of(cuda), facts.driver
    detail = f"got {loaded or 'none'}, expected {needed} or newer for CUDA {cuda}"
    yield checked("NVIDIA driver", version_of(loaded) >= version_of(needed), detail, UPDATE)
    if facts.gpus:
        gpu = facts.gpus[0]
        detail = f"{gpu.name}, compute capability {gpu.compute_capability}; the images are made for {CAPABILITY}"
        yield checked("GPU", gpu.compute_capability == CAPABILITY, detail, lack="advice")
    elif loaded:
        why = f"the driver {loaded} is loaded and nvidia-smi does not answer: as after an update without a restart"
        yield Requirement("GPU", "MISSING", why, "sudo reboot; if it stays so, nvidia-smi prints why")
    ways = ", ".join(facts.ways) or "neither NVIDIA's runtime nor its hook, nor from Docker 25.0 on a CDI specification"
    yield checked("GPU in containers", bool(facts.ways), f"Docker has {ways}", RUNTIME)
    for path, driver in facts.cdi.items():
        detail = f"{path} names files of driver {driver}; loaded is {loaded or 'none'}"
        yield checked(
            "CDI specification", driver == loaded, detail, f"sudo nvidia-ctk cdi generate --output={path}", "advice"
        )


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the start: 580.65.06 -> (580, 65, 6)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def driver_of(cuda: str) -> str:
    """That of the release itself, else of the nearest one below that is known."""
    releases = sorted(MINIMUM_DRIVER, key=version_of)
    below = [release for release in releases if version_of(release) <= version_of(cuda)] or releases[:1]
    return MINIMUM_DRIVER[below[-1]]
