"""Memory for a server: whether it fits, what its container may take, and the page cache, which counts as taken where a
GPU shares the memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib, say
from sparkpin.host.engine import Engine
from sparkpin.host.machine import HOST_RESERVE, read_host
from sparkpin.memory.inputs import machine_for, read_inputs
from sparkpin.memory.plan import Machine, MemoryPlan
from sparkpin.pins import manifests
from sparkpin.releases import container as running
from sparkpin.releases.container import GIB, TMPFS_BYTES
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import uses_gpu
from sparkpin.smoke.server import Place

SLACK = 2 * GIB
"""On top of the plan: what compiles, tokenizes and parses, which no plan counts."""
GPU_PROCESSES = 20 * GIB
"""Of a server, at most: what memory/rules.yaml has outside of vLLM's budget, as its own and as a loader's buffers (5, 8
and 5 GiB), and some slack."""
COMPILER = 8 * GIB
"""What one takes that compiles FlashInfer's kernels for SM120 (flashinfer-ai/flashinfer#3634)."""
BESIDE_COMPILERS = 16 * GIB  # for the system and the server: flashinfer-ai/flashinfer#3899
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Room:
    """On one machine. limit: bytes that the server's container may take; plan: None where none could be made; why: then
    the reason; compilers: at a time, at a first start; None without a GPU."""

    limit: int
    plan: MemoryPlan | None
    why: str = ""
    compilers: int | None = None

    @property
    def has_gpu(self) -> bool:
        return self.compilers is not None

    @property
    def needed(self) -> int:
        """Bytes that the server takes."""
        return self.plan.needed if self.plan else self.limit


def room_for(paths: Paths, engine: Engine, release: Release, checkpoint: Path, free: int | None = None) -> Room:
    """free: bytes, of the engine's machine where that is another; None: of this one.

    On a CPU the limit is what the plan needs, the checkpoint once more (it is read and repacked, and its page cache
    counts), /tmp and some slack; without a plan twice the checkpoint and 8 GiB.

    A GPU that shares the memory takes its own past every container (of 69 GiB allowed, one filled a Spark:
    AEON-7/vllm-ultimate-dgx-spark#9), so there the limit is what is left for processes, and for the compilers of a
    first start. It is never all of the machine.
    """
    total, weights = int(engine.info["MemTotal"]), running.folder_size(checkpoint)
    most = max(total - HOST_RESERVE, total // 2)
    machine = Machine(total, available() if free is None else free, "this machine", "measured")
    plan, why, compilers = None, "", None
    try:
        plan = plan_of(paths, release, machine)
        why = plan.unknown
    except SparkpinError as error:
        why = str(error.message)
    if plan.settings.platform == "cuda" if plan else uses_gpu(paths, release):
        # FlashInfer has ninja start one a core, and 20 of them took 91 GB (vllm-project/vllm#54237).
        left = min(total - weights - BESIDE_COMPILERS, most - GPU_PROCESSES - TMPFS_BYTES)
        compilers = max(1, min(int(engine.info["NCPU"]), left // COMPILER))
        wanted = GPU_PROCESSES + compilers * COMPILER
    else:
        wanted = plan.needed + weights + SLACK if plan else 2 * weights + 6 * GIB
    return Room(min(wanted + TMPFS_BYTES, most), plan, why, compilers)


def plan_of(paths: Paths, release: Release, machine: Machine | None = None) -> MemoryPlan:
    """Of the release as it was made, whatever the pins say by now. SparkpinError where that cannot be told.

    machine: None for this one. Of a release for several machines the plan of each: `needed` are bytes of one.
    """
    with project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack = manifests.load_stack(project, release.stack)
        chain = manifests.load_chain(project, release.stage)
        return read_inputs(replace(paths, project=project), recipe, stack, chain).plan(machine or machine_for(stack))


def available() -> int:
    """Bytes that a new program could have, as the kernel estimates it."""
    return read_host().memory_available


def make_room(room: Room, release: Release) -> None:
    """For a server on this machine, before it is started; HostError where it does not fit. A server that ended a moment
    ago may still have its files in the page cache, which a GPU cannot take."""
    if room.has_gpu:
        drop_page_cache()
    require_room(room, release)


def place_for(paths: Paths, engine: Engine, release: Release, checkpoint: Path) -> Place:
    """This machine, for a server that is tested: with the memory that `serve` would give it. HostError where it has no
    room: next to another one vLLM would not start, and the release would be at fault."""
    room = room_for(paths, engine, release, checkpoint)
    make_room(room, release)
    return Place(engine, checkpoint, room.limit, compilers=room.compilers)


def require_room(room: Room, release: Release, free: int | None = None, freed: int = 0, where: str = "") -> None:
    """HostError when the plan needs more than is free: on unified memory vLLM would take the machine with it.

    free: bytes, of another machine; None: of this one, as it is now. freed: bytes that a server gives back that runs.
    where: goes before the message.
    """
    free = available() if free is None else free
    if room.plan is None or room.plan.needed <= free + freed:
        return
    more = f", and {gib(freed)} once it is stopped that runs now" if freed else ""
    fitting = "; ".join(room.plan.hints)
    raise HostError(
        f"{where}{release.tag} needs {gib(room.plan.needed)}, and {gib(free)} are free{more}",
        next_step=f"end what else takes memory{f', or: {fitting}' if fitting else ''} (invoke plan has the details)",
    )


def drop_page_cache(switch: Path = DROP_CACHES) -> None:
    """Free the machine's page cache where this user may."""
    try:
        os.sync()
        switch.write_text("1\n")
    except OSError:
        say("the page cache stays (only root may drop it): sudo sh -c 'echo 1 > /proc/sys/vm/drop_caches'")
    else:
        say("dropped the page cache, which the GPU's memory is taken from")


def forget_files(folder: Path) -> None:
    """Drop the page cache of a folder's files, which everybody may who can read them: the weights are loaded."""
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
