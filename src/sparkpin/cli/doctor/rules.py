"""From facts to findings, each with the command that mends it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkpin.build.model_needs import ModelNeeds
from sparkpin.cli.doctor.facts import MachineFacts
from sparkpin.core import terminal
from sparkpin.core.errors import ManifestError
from sparkpin.core.terminal import gib
from sparkpin.host.preflight import DiskRow
from sparkpin.pins.schema import KnownIssue
from sparkpin.recipes import known_issues

State = Literal["ok", "MISSING", "advice", "n/a"]
UPDATE = "sudo apt update && sudo apt dist-upgrade, then sudo reboot (DGX OS brings driver and firmware)"
TOOLKIT = "sudo apt install nvidia-container-toolkit"
RUNTIME = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
CDI = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
DROP = "sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"
NO_SWAP = "sudo swapoff -a, until the next start; for good, take the swap lines out of /etc/fstab"
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
DOCKER = (20, 10)
"""The oldest engine that sparkpin is tested with; `--gpus` is older (19.03)."""
DOCKER_CDI = (25, 0)
"""Docker Engine 25.0 release notes: devices of the Container Device Interface (an option until 28.3)."""
CACHE_SHARE = 0.05
"""Of all memory: page cache below that is not worth a line of advice."""
# Rows of a server that shares its memory with a GB10.
OF_A_SPARK = ("NVIDIA driver", "GPU", "GPU in containers", "page cache", "swap")
PLAN = "memory plan"
NO_GPU = {
    "page cache": "the kernel frees it by itself for a server without a GPU",
    "swap": "it is no harm to a server without a GPU",
}


@dataclass(frozen=True)
class MachineFinding:
    name: str
    state: State  # MISSING stops the work, advice does not, n/a is no matter on this machine
    detail: str
    fix: str = ""  # a command, "" for none


@dataclass(frozen=True)
class NeededMemory:
    recipe: str
    needed: int | None  # bytes at its start
    why: str = ""  # that is not known
    fix: str = ""  # the command that tells it
    command: str = "invoke plan"  # which plans for this recipe


def findings(facts: MachineFacts, memory: NeededMemory, cuda: str | None) -> list[MachineFinding]:
    """cuda: release of the stack's CUDA ("13.0"), None for a stack without."""
    if facts.docker.elsewhere:
        why = f"the engine runs on {facts.docker.elsewhere}, no server runs here: invoke doctor there"
        own = [MachineFinding(name, "n/a", why) for name in (*OF_A_SPARK, PLAN)]
        return [*own, *anywhere(facts)]
    if facts.host.is_spark and cuda:
        own = [*driver(facts, cuda), *containers(facts), page_cache(facts, memory), swap(facts)]
    else:
        where = "" if facts.host.is_spark else "not a DGX Spark: "
        why = "images for it are built here, not run" if cuda else "the stack uses no GPU"
        own = [MachineFinding(name, "n/a", f"{where}{NO_GPU.get(name, why)}") for name in OF_A_SPARK]
    if facts.host.is_spark or cuda is None:
        own.append(memory_plan(facts, memory))
    else:
        needs = f"{memory.recipe} needs {gib(memory.needed)} and" if memory.needed else memory.recipe
        why = f"{needs} runs on a DGX Spark, and this is none: {memory.command}"
        own.append(MachineFinding(PLAN, "n/a", why))
    return [*own, *anywhere(facts)]


def known(facts: MachineFacts, issues: Iterable[KnownIssue]) -> Iterator[MachineFinding]:
    """Of a Spark: what is known to break on a machine such as this one."""
    driver = facts.gpus[0].driver if facts.gpus else facts.module
    seen = {"kernel": facts.kernel, "driver": driver, "memory": f"{facts.host.memory_total / 1e9:.0f}"}
    for issue in issues if facts.host.is_spark and not facts.docker.elsewhere else ():
        if issue.when.keys() <= seen.keys() and known_issues.holds(issue, seen.get):
            yield MachineFinding(issue.name, "advice", known_issues.told(issue, seen.get), issue.do)


def lock_of(fault: ManifestError | None) -> list[MachineFinding]:
    """What keeps a stack from being built whatever the machine has; nothing where its lock is good."""
    if not fault:
        return []
    return [MachineFinding("lock", "advice", fault.fault, fault.next_step)]


def server(recipe: str, why: str) -> MachineFinding:
    """why: no server of the recipe can run here, "" where one can."""
    if not why:
        return MachineFinding("server", "ok", f"recipe {recipe} can be served here")
    return MachineFinding("server", "advice", f"images of recipe {recipe} can be built here, and not served: {why}")


def model(
    name: str, recipe: str, *, locked: bool, needs: ModelNeeds | None, disk: Sequence[DiskRow], served: bool
) -> list[MachineFinding]:
    """needs: None where headers, and so sizes, are not known; disk: with images to be built; served: whether this
    machine is to serve it, so that a lack of room stops the work."""
    up = f"invoke up --recipe {recipe}"
    if needs is None:
        fix = f"{up} {'fetches' if locked else 'locks'} it"
        return [MachineFinding("model", "advice", f"{name}: {'headers not here' if locked else 'not locked'}", fix)]
    size = f"{needs.fetch / 1e9:.1f} GB of {' and '.join(needs.repositories)}"
    if needs.fetch:
        found = [MachineFinding("model", "advice", f"{name}: {size} to be fetched", f"{up} asks, then fetches")]
    else:
        found = [MachineFinding("model", "ok", f"{name} is here")]
    for row in disk:
        short = row.free < row.needed
        fix = "free space, or set SPARKPIN_CACHE and SPARKPIN_HOME elsewhere" if short and served else ""
        state: State = "n/a" if not served else "MISSING" if short else "ok"
        text = row.text if served else f"{terminal.size(row.needed)} needed where it can be served"
        found.append(MachineFinding("disk in all", state, f"{text}; model, checkpoints, images", fix))
    return found


def anywhere(facts: MachineFacts) -> list[MachineFinding]:
    return [docker(facts), port(facts)]


def version(text: str) -> tuple[int, ...]:
    """The numbers at the start: 580.65.06 -> (580, 65, 6)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def driver_of(cuda: str) -> str:
    """That of the release itself, else of the nearest one below that is known."""
    known = sorted(MINIMUM_DRIVER, key=version)
    below = [release for release in known if version(release) <= version(cuda)] or known[:1]
    return MINIMUM_DRIVER[below[-1]]


def driver(facts: MachineFacts, cuda: str) -> Iterator[MachineFinding]:
    wanted = driver_of(cuda)
    seen = facts.gpus[0].driver if facts.gpus else facts.module
    name = "NVIDIA driver"
    if not seen:
        yield MachineFinding(name, "MISSING", f"none is loaded; CUDA {cuda} needs {wanted} or newer", UPDATE)
        return
    if version(seen) < version(wanted):
        yield MachineFinding(name, "MISSING", f"{seen}; the image's CUDA {cuda} needs {wanted} or newer", UPDATE)
    else:
        yield MachineFinding(name, "ok", f"{seen}; CUDA {cuda} needs {wanted} or newer")
    if not facts.gpus:
        why = f"the driver {seen} is loaded and nvidia-smi does not answer: as after an update without a restart"
        yield MachineFinding("GPU", "MISSING", why, "sudo reboot; if it stays so, nvidia-smi tells why")
        return
    gpu = facts.gpus[0]
    known = gpu.compute_capability == CAPABILITY
    other = f"; the images are made for {CAPABILITY}"
    detail = f"{gpu.name}, compute capability {gpu.compute_capability}{'' if known else other}"
    yield MachineFinding("GPU", "ok" if known else "advice", detail)


def containers(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Docker hands GPUs out by the toolkit's hook or runtime; by CDI only from 25.0 on."""
    name = "GPU in containers"
    if not (facts.toolkit or facts.hook):
        yield MachineFinding(name, "MISSING", "no nvidia-container-toolkit: containers do not see the GPU", TOOLKIT)
        return
    by_cdi = bool(facts.cdi) and version(facts.docker.version) >= DOCKER_CDI
    ways = [
        "the runtime nvidia" if "nvidia" in facts.docker.runtimes else "",
        "the toolkit's hook" if facts.hook else "",
        f"CDI ({', '.join(facts.cdi)})" if by_cdi else "",
    ]
    toolkit = f"nvidia-container-toolkit {facts.toolkit or '(version not told)'}"
    if found := [way for way in ways if way]:
        yield MachineFinding(name, "ok", f"{toolkit}, by {', '.join(found)}")
    elif not facts.docker.version:
        why = f"{toolkit}; no engine answers, so its runtimes are not known"
        yield MachineFinding(name, "advice", why, "invoke doctor --fix")
    else:
        yield MachineFinding(name, "MISSING", f"{toolkit}, and Docker knows neither its runtime nor its hook", RUNTIME)
    if not facts.cdi:
        why = "no CDI specification of NVIDIA's in /etc/cdi or /var/run/cdi; Docker's newer ways to a GPU want one"
        yield MachineFinding("CDI", "advice", why, CDI)


def droppable(facts: MachineFacts) -> int:
    """Bytes that `drop_caches` would give back: pages of files (shared memory is none) and what is known of files."""
    value = facts.memory.get
    return max(0, value("Cached", 0) + value("Buffers", 0) + value("SReclaimable", 0) - value("Shmem", 0))


def page_cache(facts: MachineFacts, memory: NeededMemory) -> MachineFinding:
    """vLLM counts pages of files as free (vllm#35356), as the kernel does. CUDA has still run out of memory while
    weights were read beside a full cache (MiaAI-Lab/Qwen3.8-Flash-Next-Dual-DGX-Sparks#35)."""
    cached, free = droppable(facts), facts.memory.get("MemFree", 0)
    short = memory.needed is not None and memory.needed > free
    if cached > CACHE_SHARE * facts.host.memory_total and (short or memory.needed is None):
        wants = f", the plan needs {gib(memory.needed)}" if memory.needed is not None else ""
        why = f"{gib(cached)} cache files, {gib(free)} are free{wants}: CUDA has run out while weights were read"
        return MachineFinding("page cache", "advice", why, DROP)
    return MachineFinding("page cache", "ok", f"{gib(cached)} cache files, {gib(free)} are free")


def swap(facts: MachineFacts) -> MachineFinding:
    total = facts.memory.get("SwapTotal", 0)
    used = total - facts.memory.get("SwapFree", 0)
    if not total:
        return MachineFinding("swap", "ok", "none: a start that needs too much fails at once")
    why = f"{gib(total)}, {gib(used)} of it used: with unified memory the machine freezes before the start fails"
    return MachineFinding("swap", "advice", why, NO_SWAP)


def docker(facts: MachineFacts) -> MachineFinding:
    seen = facts.docker.version
    if not seen:
        return MachineFinding("Docker version", "advice", "no engine answers yet", "invoke doctor --fix")
    wanted = ".".join(map(str, DOCKER))
    if version(seen) < DOCKER:
        fix = "sudo apt install --only-upgrade docker-ce docker-ce-cli (Docker's packages) or docker.io"
        return MachineFinding("Docker version", "MISSING", f"{seen}; expected {wanted} or newer", fix)
    where = f", on {facts.docker.elsewhere} (DOCKER_HOST or a context)" if facts.docker.elsewhere else ""
    return MachineFinding("Docker version", "ok", f"{seen}{where}; expected {wanted} or newer")


def memory_plan(facts: MachineFacts, memory: NeededMemory) -> MachineFinding:
    if memory.needed is None:
        return MachineFinding(PLAN, "advice", f"{memory.recipe}: {memory.why}", memory.fix)
    free = facts.host.memory_available
    detail = f"{memory.recipe} needs {gib(memory.needed)}, {gib(free)} are available"
    if memory.needed <= free:
        return MachineFinding(PLAN, "ok", detail)
    fits = f"{memory.command} says what would fit"
    if memory.needed > facts.host.memory_total:
        return MachineFinding(PLAN, "advice", f"{detail}: more than this machine has", fits)
    return MachineFinding(PLAN, "advice", detail, f"invoke stop, if a server runs; {fits}")


def port(facts: MachineFacts) -> MachineFinding:
    name = f"port {facts.port}"
    if not facts.holder:
        return MachineFinding(name, "ok", "free")
    if facts.holder.startswith("the container sparkpin-"):
        return MachineFinding(name, "ok", f"taken by {facts.holder}, a server of sparkpin")
    fix = f"stop that, or invoke serve --port {facts.port + 1}"
    return MachineFinding(name, "advice", f"taken by {facts.holder}", fix)
