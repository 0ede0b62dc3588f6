"""The containers of one model on several machines, as one: what is done to rank 0's is done to all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine
from sparkpin.host.ssh import owner
from sparkpin.pins.nodes import NodeRank, nodes_of
from sparkpin.releases.container import HOME_LABEL, Node
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import cluster, crash_facts, launch
from sparkpin.serve.cluster import HERE, Checked, Cluster, Machine, reached
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.postmortem import report
from sparkpin.serve.served import LABEL, RELEASE_LABEL, is_running

CLUSTER_LABEL = "sparkpin.cluster"  # of rank 0: its `Cluster`, as JSON
OWNER_LABEL = "sparkpin.machine.of"  # of the others: host and home of rank 0
RECIPE_LABEL = "sparkpin.machine.recipe"
GROUP_LABEL = "sparkpin.machine.group"  # of all that were made together


class Linked(Container):  # type: ignore[misc, unused-ignore]
    """Rank 0's container, with the others. A machine that has gone meanwhile is told of, and stops nothing."""

    def __init__(self, first: Container, peers: Sequence[tuple[Machine, Container]]) -> None:
        super().__init__(attrs=first.attrs, client=first.client, collection=first.collection)  # type: ignore[arg-type]
        self.peers = tuple(peers)

    def start(self, **options: Any) -> None:
        super().start(**options)
        for machine, peer in self.peers:
            with machine.errors():
                peer.start(**options)

    def stop(self, **options: Any) -> None:
        self._all(lambda one: Container.stop(one, **options))

    def remove(self, **options: Any) -> None:
        self._all(lambda one: self._remove(one, **options))

    def _remove(self, one: Container, **options: Any) -> None:
        for machine, peer in self.peers:
            if peer is one and one.labels.get(GROUP_LABEL) == self.labels.get(GROUP_LABEL):  # else of an earlier start
                crash_facts.keep_evidence(one, self, folder_at(self, machine))
        Container.remove(one, **options)

    def _all(self, act: Callable[[Container], object]) -> None:
        """All at once: one that sees another go ends itself, and Docker would start it again."""

        def act_there(pair: tuple[Machine, Container]) -> None:
            machine, container = pair
            try:
                with machine.errors():
                    act(container)
            except SparkpinError as error:
                say(f"warning: {machine.where}: {container.name}: {error.message}")

        with ThreadPoolExecutor() as pool:
            there = pool.map(act_there, self.peers)  # which begins now
            act(self)
            list(there)


def folder_at(container: Container, machine: Machine) -> str:
    """Where what a machine's container left is kept, in the folder of rank 0's. By its rank: another may be away."""
    its = cluster_of(container)
    assert its
    return f"machine-{its.urls.index(machine.where)}"


def peers_of(container: Container) -> Sequence[tuple[Machine, Container]]:
    return container.peers if isinstance(container, Linked) else ()


def create(engine: Engine, name: str, wanted: LaunchOrder, checked: Checked | None, *, volume: str) -> Container:
    """A container on each machine, none of them started. What was made is gone again when one cannot be. volume: on
    this machine, shared with the proxy."""
    if checked is None:
        return launch.create(engine, name, wanted, volume=volume)
    group, made = secrets.token_hex(8), list[tuple[Machine, Container]]()
    with contextlib.ExitStack() as undo:
        for rank, machine in enumerate(checked.machines):
            order = order_of(wanted, checked, rank, group)
            own_name, shared = (f"{name}-{group}-{rank}", None) if rank else (name, volume)
            with machine.errors():
                container = launch.create(machine.engine, own_name, order, volume=shared)
            undo.callback(launch.remove, container)
            made.append((machine, container))
        undo.pop_all()
    return Linked(made[0][1], made[1:])


def order_of(wanted: LaunchOrder, checked: Checked, rank: int, group: str) -> LaunchOrder:
    """The order of one machine: its addresses, its checkpoint, its memory."""
    release = wanted.release
    node, env = node_at(checked, rank)
    labels: dict[str, str] = {**wanted.labels, GROUP_LABEL: group}
    checkpoint: Path | str = wanted.checkpoint
    if rank == 0:
        labels[CLUSTER_LABEL] = checked.cluster.text
    else:
        home, recipe = labels.pop(HOME_LABEL), labels.pop(LABEL)  # else `status` there took it for a service
        labels |= {OWNER_LABEL: owner(home), RECIPE_LABEL: recipe}
        checkpoint = checked.folders[rank]
    return replace(
        wanted,
        release=replace(release, env={**release.env, **env}),
        checkpoint=checkpoint,
        memory=checked.limits[rank],
        labels=labels,
        node=node,
    )


def node_at(checked: Checked, rank: int) -> tuple[Node, dict[str, str]]:
    """The container of one machine, and what it adds to the release's environment: NCCL takes every device that it
    finds, also those of other networks, unless it is told."""
    face, devices = checked.faces[rank], checked.faces[rank].rdma
    place = NodeRank(rank, face.address, checked.faces[0].address, face.name)
    env = {"NCCL_IB_HCA": "=" + ",".join(devices)} if devices else {"NCCL_IB_DISABLE": "1"}
    if devices[1:]:
        env["NCCL_IB_MERGE_NICS"] = "1"
    return Node(place, rdma=bool(devices)), env


def keep_up(container: Container, wanted: LaunchOrder, checked: Checked | None) -> None:
    """As `launch.keep_up`, on each machine. Docker also starts the others at boot: vLLM waits for rank 0 there, which
    the unit of this machine starts."""
    if checked is None:
        launch.keep_up(container, wanted)
        return
    for machine, one in [(checked.machines[0], container), *peers_of(container)]:
        with machine.errors():
            launch.keep_up(one, order_of(wanted, checked, checked.cluster.urls.index(machine.where), ""))


def cluster_of(container: Container | None) -> Cluster | None:
    """The machines of a server, None where it runs on this one alone."""
    text = container.labels.get(CLUSTER_LABEL) if container is not None else None
    return Cluster.read(text) if text else None


def with_labels(machine: Machine, labels: Mapping[str, str]) -> list[Container]:
    filters = {"label": [f"{name}={value}" for name, value in labels.items()]}
    with machine.errors():
        return list(machine.engine.containers.list(all=True, filters=filters, ignore_removed=True))


def group_of(container: Container, machines: Sequence[Machine]) -> list[tuple[Machine, Container]]:
    """The containers on other machines that were made together with rank 0's."""
    group = {GROUP_LABEL: container.labels.get(GROUP_LABEL, "")}
    return [(machine, one) for machine in machines for one in with_labels(machine, group)]


def labels_of(paths: Paths, recipe: str | None) -> dict[str, str]:
    """Of the containers on other machines of a recipe, or of all of this home's."""
    return {OWNER_LABEL: owner(str(paths.home))} | ({RECIPE_LABEL: recipe} if recipe else {})


def newest_at(paths: Paths, recipe: str, machine: Machine) -> Container | None:
    found = with_labels(machine, labels_of(paths, recipe))
    return max(found, key=lambda one: str(one.attrs["Created"]), default=None)


@contextlib.contextmanager
def elsewhere(
    paths: Paths, recipe: str | None, servers: Sequence[Container], connected: Sequence[Machine] = ()
) -> Iterator[list[tuple[Machine, Container]]]:
    """The containers on other machines of a recipe, or of all of this home's. Machines that are away are told.

    connected: machines to which there is a connection already, this one or others."""
    urls = {url for server in servers if (its := cluster_of(server)) for url in its.urls}
    urls |= set(cluster.remembered_urls(paths, recipe))
    with reached(sorted(urls - {machine.where for machine in connected})) as (machines, away):
        for url, error in away.items():
            say(f"warning: {url} is away ({error.message}): what is there goes with the next `invoke stop`")
        labels = labels_of(paths, recipe)
        others = [*(machine for machine in connected if machine.where != HERE), *machines]
        yield [(machine, one) for machine in others for one in with_labels(machine, labels)]


def join_peers(
    connections: contextlib.ExitStack,
    paths: Paths,
    recipe: str,
    server: Container | None,
    connected: Sequence[Machine] = (),
) -> Container | None:
    """A recipe's server with its containers on other machines; the same where it has none. What no server here belongs
    to is removed there: a killed run left it. connected: as of `elsewhere`."""
    group, peers = server.labels.get(GROUP_LABEL) if server else None, []
    found = elsewhere(paths, recipe, [server] if server else [], connected)
    for machine, one in connections.enter_context(found):
        if group and one.labels.get(GROUP_LABEL) == group:
            peers.append((machine, one))
        else:
            with machine.errors():
                launch.remove(one)
    return Linked(server, peers) if server and group else server


def runs_everywhere(container: Container) -> bool:
    """Whether a server runs on each of its machines."""
    its, peers = cluster_of(container), peers_of(container)
    run = all(is_running(peer) and not crash_facts.stays_down(peer) for _, peer in peers)
    return is_running(container) and run and len(peers) == (len(its.urls) - 1 if its else 0)


def deaths(container: Container, release: Release, folder: Path) -> list[str]:
    """A report for each other machine that answers; it is kept beside rank 0's, with the log."""
    found = []
    for machine, peer in peers_of(container):
        with contextlib.suppress(SparkpinError), machine.errors():
            peer.reload()
            ended = crash_facts.how_ended(peer) or "still ran"
            death = crash_facts.examine(peer, release.recipe, f"{machine.where}: {release.tag}", ended, here=False)
            crash_facts.keep(folder / folder_at(container, machine), death)
            found += ["", *report(death)]
    return found


def require_there(paths: Paths, release: Release) -> None:
    """An error where one of the kept machines cannot serve the release: it is away, or has not got it."""
    its = cluster.remembered(paths, release.recipe)
    if its is None or nodes_of(release.argv) == 1:
        return
    with reached(its.urls) as (machines, away):
        if away:
            raise next(iter(away.values()))
        for machine in machines:
            cluster.require_model(machine, release)


def states(container: Container) -> dict[str, str]:
    """Of the other machines of a server, by URL, asked now and for a few seconds at most; "away" and why where one does
    not answer."""
    its = cluster_of(container)
    if its is None:
        return {}
    with reached(its.urls) as (machines, away):
        found = {url: f"away: {error.message}" for url, error in away.items()}
        for machine in machines:
            try:
                found[machine.where] = state_at(machine, container)
            except SparkpinError as error:  # it answered at first, and not any more
                found[machine.where] = f"away: {error.message}"
    return {url: found[url] for url in its.urls[1:]}


def state_at(machine: Machine, first: Container) -> str:
    """Docker's word for the container there; "down" where that has failed too often, "gone" where there is none."""
    for _, peer in group_of(first, [machine]):
        return "down" if is_running(peer) and crash_facts.stays_down(peer) else peer.status
    return "gone"


def freed_by(paths: Paths, server: Container) -> dict[str, int]:
    """Bytes that a server gives back when it stops, by its plan, for each machine that it runs on by URL; where there
    is no plan, what its containers may take, which is an estimate of it then."""
    from sparkpin.serve import memory_limit  # slow to import

    planned = None
    with contextlib.suppress(SparkpinError):
        release = Releases(paths).get(server.labels.get(RELEASE_LABEL, ""))
        planned = memory_limit.plan_of(paths, release).needed
    parts = [(HERE, server), *((machine.where, peer) for machine, peer in peers_of(server))]
    return {where: planned or int(part.attrs["HostConfig"].get("Memory") or 0) for where, part in parts}
