"""A release on trial as a server: the smoke test's container, which has no network, behind a port of 127.0.0.1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.releases.container import ready_timeout, require_readable
from sparkpin.releases.record import Release
from sparkpin.serve.socket_port import listening
from sparkpin.smoke.client import Client
from sparkpin.smoke.server import WAITING, remove_leftovers, smoke_lock, started

HOST = "127.0.0.1"


@contextlib.contextmanager
def served(
    paths: Paths, engine: Engine, release: Release, checkpoint: Path, say: Say, *, gpus: bool, log: Path
) -> Iterator[str]:
    """The server's address, once it answers. StartFault where it does not. Its log is kept, however that ends.

    Waits for a smoke test of the same home to end, and removes what killed runs left.
    """
    require_readable(checkpoint)
    with files.lock(smoke_lock(paths), on_wait=lambda: say(WAITING)):
        remove_leftovers(paths, engine, say)
        timeout = ready_timeout(checkpoint)
        with started(paths, engine, release, checkpoint, gpus=gpus, timeout=timeout, say=say) as server:
            try:
                with Client.unix(server.socket) as client:
                    server.wait_ready(client)
                with listening(server.socket) as port:
                    yield f"http://{HOST}:{port}"
            finally:
                log.write_bytes(server.log())
