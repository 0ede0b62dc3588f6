"""The mods' GPU kernels: where they came from, and whether they compute what they should.

mods/modkit (`sparkpin_modkit.kernels`) writes one line in the server's log for each process that loads kernels, and one
more for each kernel that is compiled after that. `compare` needs no server: `sparkpin_modkit.selfcheck` in the image.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sparkpin.core.errors import HostError, InspectionError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import obstacle
from sparkpin.smoke.mods import MARKER, lines
from sparkpin.smoke.server import alone, container_of

LIMIT_SECONDS = 600.0
NOTHING = 69  # of sparkpin_modkit.selfcheck: no GPU, or no mod that has anything to compare


def summaries(log: bytes) -> dict[str, str]:
    """Mod -> "8 of 8 kernels from the image", as the last process said it."""
    found = {}
    for _, value in lines(log):
        if value.get("event") == "kernels":
            found[str(value.get("mod"))] = f"{value.get('image')} of {value.get('total')} kernels from the image"
    return found


def faults(log: bytes, wanted: Iterable[str]) -> list[str]:
    """What is wrong: a mod that says nothing, or has a kernel that was not compiled when the image was built."""
    found, told = [], set()
    for _, value in lines(log):
        mod, event, total = str(value.get("mod")), value.get("event"), value.get("total")
        if event == "kernels":
            told.add(mod)
            if not total or value.get("image") != total:
                names = ", ".join(dict.fromkeys(map(str, value.get("compiled") or ()))) or "none"
                came = f"{value.get('image')} of {total} kernels from the image"
                found.append(f"mod {mod}: {came}; compiled now: {names}")
        elif event == "compiled":
            found.append(f"mod {mod}: kernel {value.get('kernel')} was compiled after the start")
    silent = sorted(set(wanted) - told)
    return [*dict.fromkeys(found), *(f"mod {mod} does not say where its kernels came from" for mod in silent)]


def require_kernels(release: Release) -> None:
    """UntoldError for a release whose mods have no GPU kernels, or whose stack has no GPU."""
    if not release.demands.kernels:
        mods = ", ".join(release.demands.mods) or "none"
        raise UntoldError(
            f"{release.tag} has no GPU kernels to compare: stack {release.stack}, mods {mods}",
            next_step="invoke smoke --kernels TAG, of stage v2 or above and of a stack with a GPU (invoke images)",
        )


def compare(paths: Paths, engine: Engine, release: Release, *, limit: float = LIMIT_SECONDS) -> str:
    """The table of `sparkpin_modkit.selfcheck`, run in the release's image on the GPU, with the image's digest above.

    Args:
        limit: seconds.

    Raises:
        UntoldError: see `require_kernels`.
        HostError: no server of it can run here, or the container has no GPU.
        InspectionError: a kernel computes something else, or the table did not come to its end; has what came.
    """
    require_kernels(release)
    running.require_here(engine)
    if why := obstacle(paths, engine, release, nodes=1):
        raise HostError(f"the kernels of {release.tag} cannot run here: {why}", next_step="invoke doctor")
    running.require_image(engine, release)
    with alone(paths, engine):
        say(f"{release.tag}: comparing the kernels of {', '.join(release.demands.kernels)}")
        settings: dict[str, Any] = running.apart(running.sandbox(release.env, memory=None)) | running.all_gpus()
        volumes = {running.cache_volume(engine, release): {"bind": running.HOME, "mode": "rw"}}
        settings |= {"entrypoint": ["python"], "command": ["-m", "sparkpin_modkit.selfcheck"]}
        with container_of(paths, engine, release, "kernels", volumes=volumes, **settings) as container, engine_errors():
            until = time.monotonic() + limit
            while not (ended := running.exit_reason(container)) and time.monotonic() < until:
                time.sleep(0.2)
            log, code = running.log_of(container), container.attrs["State"]["ExitCode"]
    came = [line for line in log.decode(errors="replace").splitlines() if MARKER.decode() not in line]
    table = "\n".join([f"{'image':15}{release.tag}, {release.image}", *came])
    if ended and code == NOTHING:
        raise HostError(f"{release.tag}: {came[-1] if came else 'no GPU'}", next_step="invoke doctor --fix")
    if not ended or code:
        what = "computes something else than its specification" if " FAILED" in table else "did not come to an end"
        raise InspectionError(
            f"{release.tag}: a kernel {what} ({ended or f'stopped after {limit:.0f} s'})\n{table}",
            next_step="send this table with the report of a bug; until then serve the stage below: invoke rollback",
        )
    return table
