"""Memory for a server: its limit, whether two fit at once, and the page cache, which counts as taken where a GPU shares
the memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib, say
from sparkpin.host import machine as hosts
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.releases import container as running
from sparkpin.releases.container import GIB, TMPFS_BYTES
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release
from sparkpin.serve.memory import recipe as planning
from sparkpin.serve.memory.plan import MemoryPlan

HOST_RESERVE = 2 * GIB
"""Kept from every server, so that the engine, ssh and a shell go on when it wants all there is."""
SLACK = 2 * GIB
"""On top of the plan: what compiles, tokenizes and parses, which no plan counts."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Room:
    """On one machine.

    needed: bytes that the server takes by its plan (an estimate without one); limit: what it may take; plan: None
    where none could be made, why: then the reason."""

    needed: int
    limit: int
    plan: MemoryPlan | None
    why: str = ""


def room_for(paths: Paths, engine: Engine, release: Release, checkpoint: Path) -> Room:
    """The limit is what the plan needs, the checkpoint once more (it is read and repacked, and its page cache counts),
    /tmp and some slack, and never all of the machine.
    """
    total = int(engine.client.info()["MemTotal"])
    most = max(total - HOST_RESERVE, total // 2)
    is_here = total == hosts.read_host().memory_total
    try:
        plan = plan_of(paths, release, "" if is_here else f"{total} B")
    except SparkpinError as error:
        needed = running.memory_limit(engine, checkpoint)
        return Room(needed, min(needed, most), None, str(error.message))
    extra = running.folder_size(checkpoint) + TMPFS_BYTES + SLACK
    return Room(plan.needed, min(plan.needed + extra, most), plan)


def plan_of(paths: Paths, release: Release, memory: str = "") -> MemoryPlan:
    """Of the release as it was made, whatever the pins say by now. SparkpinError where that cannot be told.

    memory: of another machine; "": this one's. Of a release for several nodes the plan of each: `needed` are bytes of
    one.
    """
    with project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack = manifests.load_stack(project, release.stack)
        chain = manifests.load_chain(project, release.stage)
        machine = planning.machine_for(stack, memory, "")
        return planning.plan_recipe(replace(paths, project=project), recipe, stack, chain, machine)


def available() -> int:
    """Bytes that a new program could have, as the kernel estimates it."""
    return hosts.read_host().memory_available


def fits_beside(room: Room) -> bool:
    """Whether the server fits beside all that runs now. Without a plan nobody knows, and a wedged host is worse than a
    pause."""
    return room.plan is not None and room.needed + SLACK + HOST_RESERVE <= available()


def require_room(room: Room, release: Release, free: int | None = None, freed: int = 0, where: str = "") -> None:
    """HostError when the plan needs more than is free: on unified memory vLLM would take the machine with it.

    free: bytes, of another machine; None: of this one, as it is now. freed: bytes that a server gives back that runs.
    where: goes before the message.
    """
    free = available() if free is None else free
    if room.plan is None or room.needed <= free + freed:
        return
    hints = "; ".join(room.plan.hints)
    more = f", and {gib(freed)} once it is stopped that runs now" if freed else ""
    raise HostError(
        f"{where}{release.tag} needs {gib(room.needed)}, and {gib(free)} are free{more}",
        next_step=f"end what else takes memory{f', or: {hints}' if hints else ''} (invoke plan says more)",
    )


def make_room(paths: Paths, engine: Engine, release: Release, checkpoint: Path) -> None:
    """For a server on this machine's GPU, before it is started; HostError where it does not fit. A server that ended a
    moment ago may still have its files in the page cache, which counts as taken."""
    drop_page_cache()
    require_room(room_for(paths, engine, release, checkpoint), release)


def drop_page_cache(switch: Path = DROP_CACHES) -> bool:
    """Free the machine's page cache where this user may; whether it was."""
    try:
        os.sync()
        switch.write_text("1\n")
    except OSError:
        say("the page cache stays (only root may drop it): sudo sh -c 'echo 1 > /proc/sys/vm/drop_caches'")
        return False
    say("dropped the page cache, which the GPU's memory is taken from")
    return True


def forget_files(folder: Path) -> None:
    """Drop the page cache of a folder's files, which everybody may who can read them: the weights are loaded."""
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
