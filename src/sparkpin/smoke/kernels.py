"""Whether the mods' GPU kernels compute what they should: `sparkpin_modkit.selfcheck` in the image; no server runs."""

from __future__ import annotations

import time
from typing import Any

from sparkpin.core.errors import HostError, InspectionError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import obstacle
from sparkpin.smoke.mods import MARKER
from sparkpin.smoke.server import alone, container_of

LIMIT_SECONDS = 600.0
NOTHING = 69  # of sparkpin_modkit.selfcheck: no GPU, or no mod that has anything to compare


def compare(paths: Paths, engine: Engine, release: Release, *, limit: float = LIMIT_SECONDS) -> str:
    """The table of `sparkpin_modkit.selfcheck`, run in the release's image on the GPU, with the image's digest above.

    Args:
        limit: seconds.

    Raises:
        UntoldError: its mods have no GPU kernels, or its stack has no GPU.
        HostError: no server of it can run here, or the container has no GPU.
        InspectionError: a kernel computes something else, or the table did not come to its end; has what came.
    """
    if not release.demands.kernels:
        mods = ", ".join(release.demands.mods) or "none"
        raise UntoldError(
            f"{release.tag} has no GPU kernels to compare: stack {release.stack}, mods {mods}",
            next_step="invoke smoke --kernels TAG, of stage v2 or above and of a stack with a GPU (invoke images)",
        )
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
