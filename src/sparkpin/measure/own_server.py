"""A server of a release whose answers are tested or measured: on a socket, alone on this machine, gone in the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sparkpin.build.make import checkpoint_of
from sparkpin.core import files
from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import obstacle
from sparkpin.serve import memory_limit
from sparkpin.smoke import server as tested
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import Client, Fault
from sparkpin.smoke.server import Server, exclusive_run

REQUEST_SECONDS = 600  # a long prompt's prefill on a slow machine
MEASURED_BYTES = 64 << 20  # more than the log-probabilities of all texts or prompts ever took


@contextlib.contextmanager
def own_server(
    paths: Paths, engine: Engine, release: Release, *, limit: int = REQUEST_SECONDS
) -> Iterator[tuple[Server, Client]]:
    """Once it answers. limit: seconds of an answer.

    Wrong and Fault within become a SmokeError, with the server's last words if it died.

    Raises:
        DiskError: what is measured would not fit on the disk.
        HostError: the release's memory plan needs more than is free.
        InputError: no server of the release can run on this machine.
        SmokeError: the server does not start.
    """
    if why := obstacle(paths, engine, release):
        raise InputError(
            f"{release.tag} cannot be asked here: {why}",
            next_step="run this where its server can run (invoke export takes the release there)",
        )
    checkpoint = checkpoint_of(paths, release)
    files.require_space(paths.cache, MEASURED_BYTES, "the measurements", "SPARKPIN_CACHE")
    with exclusive_run(paths, engine):
        place = memory_limit.place_for(paths, engine, release, checkpoint)
        say(f"{release.tag}: starting its server")
        with tested.own_server(paths, release, [place], limit=limit) as (server, client):
            try:
                if place.has_gpu:
                    memory_limit.forget_files(checkpoint)  # whose page cache a GPU cannot take
                yield server, client
            except (Wrong, Fault) as fault:
                died = f"; the container {reason}" if (reason := server.exit_reason(wait=2)) else ""
                raise SmokeError(
                    f"{release.tag}: {fault}{died}\n{running.last_lines(server.logs()[0]) if died else ''}".rstrip(),
                    next_step=f"invoke smoke {release.tag}",
                ) from None
