"""From facts to the rows of doctor's table: the rule, what it found, the command that fixes it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkpin.build.checkpoint import ModelNeeds
from sparkpin.cli.doctor.facts import MachineFacts
from sparkpin.core.terminal import gib, size
from sparkpin.host.preflight import MORE_DISK, DiskRow
from sparkpin.pins.schema import KnownIssue
from sparkpin.recipes import known_issues

State = Literal["ok", "MISSING", "advice"]
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
CAPABILITY = "12.1"
"""Of a GB10: NVIDIA's list of CUDA GPUs."""


@dataclass(frozen=True)
class MachineFinding:
    name: str
    state: State  # MISSING stops the work, advice does not
    detail: str
    fix: str = ""  # a command, "" for none


@dataclass(frozen=True)
class NeededMemory:
    """needed: bytes at its start, None where `why` says that it is not known, and `fix` how to know it; command: which
    plans for this recipe; stored: bytes of the weights in a checkpoint."""

    recipe: str
    needed: int | None
    why: str = ""
    fix: str = ""
    command: str = "invoke plan"
    stored: int = 0


def findings(facts: MachineFacts, memory: NeededMemory, cuda: str | None) -> list[MachineFinding]:
    """cuda: release of the stack's CUDA ("13.0"), None for a stack without. A machine that only builds, because the
    server's engine or GPU is elsewhere, is not judged as a server."""
    found = []
    if not facts.elsewhere:
        if facts.host.is_spark and cuda:
            found += [*driver(facts, cuda), containers(facts)]
        if facts.host.is_spark or cuda is None:
            found.append(memory_plan(facts, memory))
    return [*found, port(facts)]


def known(facts: MachineFacts, issues: Iterable[KnownIssue]) -> Iterator[MachineFinding]:
    """Of a Spark: what is known to break on a machine such as this one."""
    version = facts.gpus[0].driver if facts.gpus else facts.module
    seen = {"kernel": facts.kernel, "driver": version, "memory": f"{facts.host.memory_total / 1e9:.0f}"}
    for issue in issues if facts.host.is_spark and not facts.elsewhere else ():
        if issue.when.keys() <= seen.keys() and known_issues.holds(issue, seen.get):
            yield MachineFinding(issue.name, "advice", known_issues.told(issue, seen.get), issue.do)


def model(name: str, recipe: str, needs: ModelNeeds, disk: Sequence[DiskRow], *, served: bool) -> list[MachineFinding]:
    """disk: with images to be built; served: whether this machine is to serve it, so that a lack of room stops the
    work."""
    if needs.fetch:
        detail = f"{name}: {size(needs.fetch)} of {' and '.join(needs.repositories)} to be fetched"
        found = [MachineFinding("model", "advice", detail, f"invoke up --recipe {recipe} asks, then fetches")]
    else:
        found = [MachineFinding("model", "ok", f"{name} is here")]
    for row in disk if served else ():
        state: State = "MISSING" if row.short else "ok"
        fix = MORE_DISK if row.short else ""
        found.append(MachineFinding("disk in all", state, f"model, checkpoints, images: {row.text}", fix))
    return found


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the start: 580.65.06 -> (580, 65, 6)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def driver_of(cuda: str) -> str:
    """That of the release itself, else of the nearest one below that is known."""
    releases = sorted(MINIMUM_DRIVER, key=version_of)
    below = [release for release in releases if version_of(release) <= version_of(cuda)] or releases[:1]
    return MINIMUM_DRIVER[below[-1]]


def driver(facts: MachineFacts, cuda: str) -> Iterator[MachineFinding]:
    needed = driver_of(cuda)
    loaded = facts.gpus[0].driver if facts.gpus else facts.module
    is_new = version_of(loaded) >= version_of(needed)
    detail = f"got {loaded or 'none'}, expected {needed} or newer for CUDA {cuda}"
    yield MachineFinding("NVIDIA driver", "ok" if is_new else "MISSING", detail, "" if is_new else UPDATE)
    if facts.gpus:
        gpu = facts.gpus[0]
        detail = f"{gpu.name}, compute capability {gpu.compute_capability}; the images are made for {CAPABILITY}"
        yield MachineFinding("GPU", "ok" if gpu.compute_capability == CAPABILITY else "advice", detail)
    elif loaded:
        why = f"the driver {loaded} is loaded and nvidia-smi does not answer: as after an update without a restart"
        yield MachineFinding("GPU", "MISSING", why, "sudo reboot; if it stays so, nvidia-smi prints why")


def containers(facts: MachineFacts) -> MachineFinding:
    """Docker hands GPUs out by the toolkit's hook or runtime; by CDI only from 25.0 on."""
    if facts.ways:
        return MachineFinding("GPU in containers", "ok", f"by {', '.join(facts.ways)}")
    why = "Docker has neither NVIDIA's runtime nor its hook, nor from 25.0 on a CDI specification"
    return MachineFinding("GPU in containers", "MISSING", why, RUNTIME)


def memory_plan(facts: MachineFacts, memory: NeededMemory) -> MachineFinding:
    if memory.needed is None:
        return MachineFinding("memory plan", "advice", f"{memory.recipe}: {memory.why}", memory.fix)
    free = facts.host.memory_available
    detail = f"{memory.recipe} needs {gib(memory.needed)}, {gib(free)} are available"
    if memory.needed <= free:
        return MachineFinding("memory plan", "ok", detail)
    stop = "" if memory.needed > facts.host.memory_total else "invoke stop, if a server runs; "
    return MachineFinding("memory plan", "advice", detail, f"{stop}{memory.command} prints what would fit")


def port(facts: MachineFacts) -> MachineFinding:
    name = f"port {facts.port}"
    if not facts.holder or facts.holder.startswith("the container sparkpin-"):
        return MachineFinding(name, "ok", f"taken by {facts.holder}, a server of sparkpin" if facts.holder else "free")
    fix = f"stop that, or invoke serve --port {facts.port + 1}"
    return MachineFinding(name, "advice", f"taken by {facts.holder}", fix)
