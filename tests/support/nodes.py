"""Containers of a release for several machines, on this one: made as they are served, and Docker starts them again.

They share the network namespace of one more container, which is never started again: a new one of rank 0's would leave
the others in the old.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from docker.models.containers import Container

from sparkpin.host.engine import Engine
from sparkpin.pins.nodes import on_loopback, spread
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.serve import launch
from sparkpin.serve.launch import Health, LaunchOrder
from sparkpin.serve.rules import Limits

HOLD = "import signal; signal.pause()"
QUICK = Health(interval=1, timeout=5, failures=2)
RESTARTS = f"print(open('{launch.FOLDER}/state/restarts').read(), end='')"


def for_nodes(release: Release, nodes: int = 2) -> Release:
    argv, env = spread(release.argv, release.env, nodes, gpu=False)
    return dataclasses.replace(release, argv=tuple(argv), env=env)


@dataclass(frozen=True)
class Pair:
    containers: Sequence[Container]
    key: str

    def states(self) -> list[tuple[str, int, int]]:
        """Status, exit code and number of restarts of each."""
        found = []
        for container in self.containers:
            container.reload()
            state = container.attrs["State"]
            found.append((state["Status"], state["ExitCode"], container.attrs["RestartCount"]))
        return found

    def answers(self) -> bool:
        return all(launch.asks(container)[0] for container in self.containers)

    def lives(self) -> list[int]:
        """How often each has started its server."""
        return [container.logs().count(b"sparkpin: starting the server\n") for container in self.containers]

    def said(self, rank: int) -> str:
        return str(self.containers[rank].logs().decode(errors="replace"))

    def counted(self) -> list[str]:
        """Restarts that process 1 of each has counted."""
        return [container.exec_run([*launch.PYTHON, "-c", RESTARTS]).output.decode() for container in self.containers]


@contextlib.contextmanager
def pair(
    engine: Engine,
    releases: Sequence[Release],
    checkpoints: Sequence[Path],
    *,
    health: Health = QUICK,
    restarts: int = 5,
    keys: Sequence[str] = (),
) -> Iterator[Pair]:
    """releases, checkpoints: one for each node. keys: theirs, where they are not to have the same."""
    key, made = secrets.token_hex(32), list[Container]()
    name = f"sparkpin-test-node-{secrets.token_hex(4)}"
    box = running.apart(running.sandbox({}, memory=1 << 28)) | {"entrypoint": [*launch.PYTHON, "-c", HOLD]}
    holder = engine.client.containers.run(releases[0].tag, name=f"{name}-net", detach=True, command=[], **box)
    try:
        for rank, (release, checkpoint) in enumerate(zip(releases, checkpoints, strict=True)):
            own = keys[rank] if keys else key
            node = running.Node(on_loopback(rank), own, f"container:{holder.id}")
            wanted = LaunchOrder(
                release=release,
                checkpoint=checkpoint,
                memory=None,
                gpus=False,
                labels={},
                timeout=running.ready_timeout(checkpoint),
                health=health,
                limits=Limits(restarts=restarts),
                node=node,
            )
            made.append(launch.create(engine, f"{name}-{rank}", wanted, volume=None))
            launch.keep_up(made[rank], wanted)  # before its start: it puts the files anew, which a start would miss
            made[rank].start()
        yield Pair(made, key)
    finally:
        for container in (*made, holder):
            launch.remove(container)


def inspected(container: Container) -> str:
    container.reload()
    return json.dumps(container.attrs)
