"""Containers of a release for two machines, on this one: made as they are served, on a network of their own, and Docker
starts them again."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from docker.models.containers import Container
from docker.types import IPAMConfig, IPAMPool

from sparkpin.host.engine import Engine
from sparkpin.pins.nodes import NodeRank, spread
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.serve import launch
from sparkpin.serve.launch import LaunchOrder

QUICK = {"INTERVAL": 1, "FAILURES": 2}  # of `launch`
RESTARTS = f"print(open('{launch.FOLDER}/state/restarts').read(), end='')"


def for_nodes(release: Release, nodes: int = 2) -> Release:
    argv, env = spread(release.argv, release.env, nodes, gpu=False)
    return dataclasses.replace(release, argv=tuple(argv), env=env)


@dataclass(frozen=True)
class Pair:
    containers: Sequence[Container]

    def answers(self) -> bool:
        return all(launch.asks(container) for container in self.containers)

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
    engine: Engine, release: Release, checkpoint: Path, *, health: Mapping[str, float] = QUICK, restarts: int = 5
) -> Iterator[Pair]:
    made = list[Container]()
    name, subnet = f"sparkpin-test-pair-{secrets.token_hex(4)}", f"10.214.{secrets.randbelow(250)}"
    pool = IPAMConfig(pool_configs=[IPAMPool(subnet=f"{subnet}.0/24")])
    network = engine.client.networks.create(name, ipam=pool, internal=True)
    try:
        for rank in (0, 1):
            place = NodeRank(rank, f"{subnet}.{10 + rank}", f"{subnet}.10", "eth0")
            wanted = LaunchOrder(
                release=release,
                checkpoint=checkpoint,
                memory=None,
                gpus=False,
                labels={},
                timeout=running.ready_timeout(checkpoint),
                restarts=restarts,
                node=running.Node(place, "none"),
            )
            with mock.patch.multiple(launch, **health):
                made.append(launch.create(engine, f"{name}-{rank}", wanted, volume=None))
                launch.keep_up(made[rank], wanted)  # before its start: it puts the files anew, which a start would miss
            engine.client.networks.get("none").disconnect(made[rank])
            network.connect(made[rank], ipv4_address=place.address)
            made[rank].start()
        yield Pair(made)
    finally:
        for container in made:
            launch.remove(container)
        network.remove()
