"""The server that is measured: the one that serves the release already, or one that is started for the run."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkpin.core.errors import BusyError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host import machine
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.machine import read_gpus
from sparkpin.measure.bench.record import PeakMemory, Start
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, launch, memory_limit, served, waiting
from sparkpin.serve.cluster import HERE, Machine
from sparkpin.serve.launch import Health, LaunchOrder
from sparkpin.serve.linked import Part
from sparkpin.serve.proxy import requests_under_way
from sparkpin.smoke.server import LABEL, owner

PREFIX = "sparkpin-bench-"
UNWATCHED = Health(interval=86_400)
"""Docker's health check asks for a token each time; that would be part of what is measured."""
GPU_MEMORY = ("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits")
MIB = 1 << 20


@dataclass(frozen=True)
class BenchSubject:
    """A release as it is started here, and what it is served from."""

    release: Release
    checkpoint: Path
    gpus: bool


@dataclass(frozen=True)
class BenchTarget:
    """A server that answers."""

    subject: BenchSubject
    container: Container
    how: Literal["started", "served"]
    start: Start | None  # None where it was up before


@contextlib.contextmanager
def server_of(paths: Paths, engine: Engine, subject: BenchSubject) -> Iterator[BenchTarget]:
    """The release's service, which goes on afterwards, else a server of its own, which ends."""
    if (target := running_service(paths, engine, subject)) is not None:
        say(f"{subject.release.tag} is being served: that server is measured, and not restarted")
        proxy = served.proxy_of(engine, target.container)
        if proxy is not None and (under_way := requests_under_way(proxy)):
            raise BusyError(
                f"{target.container.name} answers {under_way} requests of others, which a benchmark would measure, too",
                next_step="wait until they are done, or invoke stop and then the same command again",
            )
        yield target
        return
    with started(paths, engine, subject) as target:
        yield target


def running_service(paths: Paths, engine: Engine, subject: BenchSubject) -> BenchTarget | None:
    release = subject.release
    container = served.find(engine, served.name_of(paths, release.recipe))
    if container is None or not served.is_running(container):
        return None
    known = served.describe(engine, container)
    if known.release != release.tag or not known.ready:
        return None
    return BenchTarget(subject, container, "served", None)


@contextlib.contextmanager
def started(paths: Paths, engine: Engine, subject: BenchSubject) -> Iterator[BenchTarget]:
    """A container without a proxy: nobody else reaches it. Gone in the end.

    Raises:
        HostError: its memory plan needs more than is free.
        SmokeError: it did not become ready; with a post-mortem.
    """
    release, checkpoint = subject.release, subject.checkpoint
    running.require_one_node(release)
    running.require_readable(checkpoint)
    running.require_image(engine, release)
    space = memory_limit.room_for(paths, engine, release, checkpoint)
    memory_limit.make_room(space, release, gpus=subject.gpus)
    wanted = LaunchOrder(
        release=release,
        checkpoint=checkpoint,
        memory=space.limit,
        gpus=subject.gpus,
        labels={LABEL: owner(paths)},
        timeout=running.ready_timeout(checkpoint),
        health=UNWATCHED,
    )
    with engine_errors():
        name = f"{PREFIX}{release.recipe}-{release.name}-{secrets.token_hex(3)}"  # a release may meet itself
        container = launch.create(engine, name, wanted, volume=None)
    try:
        with engine_errors():
            container.start()
        say(f"started a server of {release.tag}")
        folder = crash_facts.folder_of(paths, release.recipe, release.name)
        waiting.until_ready([Part(Machine(HERE, engine), container)], release, wanted.timeout, folder, fresh=True)
        last = waiting.last_start(folder)
        start = Start(seconds=last.seconds, began=last.began) if last else None
        if subject.gpus:
            memory_limit.forget_files(checkpoint)
        yield BenchTarget(subject, container, "started", start)
    finally:
        launch.remove(container)


def memory_of(target: BenchTarget, before: PeakMemory | None) -> PeakMemory:
    """What the server takes now, or took before if that was more."""
    with engine_errors():
        stats = target.container.stats(stream=False, one_shot=True)
    now = PeakMemory(container=container_bytes(stats), gpu=gpu_bytes() if target.subject.gpus else None)
    if before is None:
        return now
    return PeakMemory(container=most(before.container, now.container), gpu=most(before.gpu, now.gpu))


def slowed(subject: BenchSubject, before: Iterable[str]) -> tuple[str, ...]:
    """What holds the clocks of this machine's GPUs down now, or did before."""
    now = [reason for gpu in read_gpus() for reason in gpu.slowed] if subject.gpus else []
    return tuple(dict.fromkeys([*before, *now]))


def most(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def container_bytes(stats: Any) -> int | None:
    """As `docker stats` counts: without files that the kernel may drop. cgroup 1 calls them total_inactive_file."""
    memory = stats.get("memory_stats") or {}
    if "usage" not in memory:
        return None
    parts = memory.get("stats") or {}
    return int(memory["usage"]) - int(parts.get("total_inactive_file", parts.get("inactive_file", 0)))


def gpu_bytes() -> int | None:
    """Of all programs that compute on the GPUs of this machine."""
    lines = (machine.output(GPU_MEMORY) or "").split()
    found = [int(line) for line in lines if line.isdecimal()]
    return sum(found) * MIB if found else None
