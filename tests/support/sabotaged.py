"""A server whose checkpoint holds the plugin of `sabotage/`: broken in one way at a time, and mended again."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from places import PROJECT

from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.container import ready_timeout
from sparkpin.releases.record import Release
from sparkpin.smoke import drafting
from sparkpin.smoke.checks import run_check
from sparkpin.smoke.client import Client
from sparkpin.smoke.drift import Reference
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.server import Server, started
from sparkpin.smoke.subject import SmokeSubject

PLUGIN = PROJECT / "tests/support/sabotage"
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: sparkpin-sabotage\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nsabotage = sparkpin_sabotage:register\n",
}
SECONDS = 300.0  # the engine looks for objects while it may be busy


def installed(release: Release, model: Path) -> Release:
    """The release with the plugin, in the folder of its checkpoint, which the container's user may read now."""
    plugin = model / "sabotage"
    (plugin / "sparkpin_sabotage-0.dist-info").mkdir(parents=True)
    for file in PLUGIN.glob("*.py"):
        shutil.copy(file, plugin)
    for name, text in INFO.items():
        (plugin / "sparkpin_sabotage-0.dist-info" / name).write_text(text)
    readable(model)
    return dataclasses.replace(release, env={**release.env, "PYTHONPATH": "/model/sabotage"})


def readable(model: Path) -> None:
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def switch(folder: Path, name: str) -> None:
    """Return once each process of the server says that it is so; "" mends it. No answer to an earlier call is taken.

    folder: of the server's socket.
    """
    wanted = f"{name} {time.monotonic_ns()}"
    new = folder / "sabotage.new"
    new.write_text(wanted)
    new.rename(folder / "sabotage")
    until = time.monotonic() + SECONDS
    for role in ("api", "engine"):
        done = folder / f"done-{role}"
        while not (said := done.read_text() if done.exists() else "").startswith(wanted):
            assert time.monotonic() < until, f"{role} did not do {wanted!r}: {said}"
            time.sleep(0.05)
        assert said == wanted, said


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
    with (
        started(own, Engine.connect(), release, model, gpus=False, timeout=ready_timeout(model), say=print) as server,
        Client.unix(server.socket, timeout=1200) as client,
    ):
        server.wait_ready(client)
        length = drafting.drafted(release)
        yield Broken(server, subject_of(release, client, server, length, reference=reference))
