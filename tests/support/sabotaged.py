"""A server whose checkpoint holds the plugin of `sabotage/`: broken in one way at a time, and mended again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpu_stages import ready
from places import PROJECT, SUPPORT

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release
from sparkpin.serve.proxy import before
from sparkpin.smoke.checks import run_check
from sparkpin.smoke.logprobs import Reference
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.server import Server
from sparkpin.smoke.subject import SmokeSubject

sys.path.append(str(SUPPORT / "sabotage"))

from sparkpin_sabotage import install, switch


def installed(release: Release, model: Path) -> Release:
    """The release with the plugin, in the folder of its checkpoint, which the container's user may read now."""
    install(model / "sabotage")
    readable(model)
    return dataclasses.replace(release, env={**release.env, "PYTHONPATH": "/model/sabotage"})


def readable(model: Path) -> None:
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@dataclass(frozen=True)
class Broken:
    """A server that can be broken."""

    server: Server
    subject: SmokeSubject

    def by(self, name: str) -> None:
        """Until it is so; "" mends it."""
        switch(self.server.socket.parent, name)

    def verdicts(self, *names: str) -> dict[str, str]:
        results = [run_check(name, self.subject) for name in names]
        print("\n".join(f"{result.name}: {result.verdict}, {result.detail}" for result in results))
        return {result.name: "ok" if result.passed else result.detail for result in results}


@contextmanager
def serving(release: Release, model: Path, home: Path, reference: Reference | None) -> Iterator[Broken]:
    """home: of the test's own, so that its containers are no leftovers of the machine's."""
    readable(model)
    own = dataclasses.replace(Paths.from_env(PROJECT), home=home)
    with before(own, ready(own, release, model)) as (server, client):
        yield Broken(server, subject_of(release, client, server, reference=reference))
