"""The containers of one server, which may be on several machines: what is done to one is done to all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import engine_errors
from sparkpin.host.ssh import owner
from sparkpin.pins.nodes import NodeRank, nodes_of
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL, Node
from sparkpin.releases.record import Release
from sparkpin.serve import cluster, crash_facts, launch
from sparkpin.serve.cluster import HERE, Checked, Machine, reached
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.served import LABEL, RELEASE_LABEL, Service, base_name, find, is_running, try_read

STOP_SECONDS = 30


@dataclass(frozen=True)
class Part:
    """A server's container on one machine."""

    machine: Machine
    container: Container

    @property
    def is_here(self) -> bool:
        return self.machine.where == HERE

    def folder(self, of_server: Path) -> Path:
        """Where it leaves what is kept."""
        return of_server if self.is_here else of_server / self.machine.where.rpartition("//")[2].replace("/", "-")


def name_at(home: str, recipe: str, where: str) -> str:
    """The container's name: another machine may serve for two of us whose homes have one name."""
    return base_name(home if where == HERE else owner(home), recipe)


def find_parts(home: str, recipe: str, machines: Iterable[Machine]) -> list[Part]:
    """What is there of a recipe's server, in the order of the machines."""
    found = []
    for machine in machines:
        with machine.errors():
            if container := find(machine.engine, name_at(home, recipe, machine.where)):
                found.append(Part(machine, container))
    return found


def create(home: str, machines: Mapping[str, Machine], orders: Sequence[LaunchOrder], *, volume: str) -> list[Part]:
    """A container for each order, none of them started, instead of what is there under its name. What was made is gone
    again when one cannot be. machines: those that are reached, by URL; volume: on this machine, shared with the proxy.
    """
    if away := [order.where for order in orders if order.where not in machines]:
        cause = f"{away[0]} is away, and a part of {orders[0].release.tag} runs there"
        raise HostError(cause, next_step=f"once it answers: invoke serve {orders[0].release.tag}")
    parts = list[Part]()
    with contextlib.ExitStack() as undo:
        for order in orders:
            machine = machines[order.where]
            for left in find_parts(home, order.release.recipe, [machine]):
                launch.remove(left.container)
            name, shared = name_at(home, order.release.recipe, order.where), volume if order.where == HERE else None
            with machine.errors():
                container = launch.create(machine.engine, name, order, volume=shared)
            undo.callback(launch.remove, container)
            parts.append(Part(machine, container))
        undo.pop_all()
    return parts


def start(parts: Sequence[Part]) -> None:
    for part in parts:
        with part.machine.errors():
            part.container.start()


def for_all(parts: Sequence[Part], act: Callable[[Part], object]) -> None:
    """All at once: one that sees another go ends itself, and Docker would start it again. A machine that has gone
    meanwhile stops nothing: a warning."""

    def act_there(part: Part) -> None:
        try:
            with part.machine.errors():
                act(part)
        except SparkpinError as error:
            say(f"warning: {part.machine.where}: {part.container.name}: {error.message}")

    with ThreadPoolExecutor() as pool:
        there = pool.map(act_there, [part for part in parts if not part.is_here])  # which begins now
        for part in parts:
            if part.is_here:
                with engine_errors():
                    act(part)
        list(there)


def stop(paths: Paths, recipe: str, parts: Sequence[Part]) -> None:
    """They go, also where a person does not wait for the end of what they do."""
    try:
        for_all(parts, lambda part: part.container.stop(timeout=STOP_SECONDS))
    finally:
        remove(paths, recipe, parts)


def remove(paths: Paths, recipe: str, parts: Sequence[Part]) -> None:
    """What they left of a crash is kept before. Of which release is read here: other machines may be anybody's."""

    def remove_part(part: Part) -> None:
        death = last_death(paths, recipe, tag, part) if tag else ""
        if death:
            is_healthy = (part.container.status, part.container.health) == ("running", "healthy")
            say(f"{part.container.name} was stopped while healthy; before that, {death}" if is_healthy else death)
        launch.remove(part.container)

    tag = next((part.container.labels.get(RELEASE_LABEL, "") for part in parts if part.is_here), "")
    for_all(parts, remove_part)


def last_death(paths: Paths, recipe: str, tag: str, part: Part) -> str:
    """As `crash_facts.keep_evidence`."""
    folder = part.folder(crash_facts.folder_of(paths, recipe, tag.rpartition(":")[2]))
    return crash_facts.keep_evidence(part.container, folder, recipe, tag, here=part.is_here)


def orders_of(wanted: LaunchOrder, checked: Checked | None) -> tuple[LaunchOrder, ...]:
    """One for each machine: its addresses, its checkpoint, its memory."""
    if checked is None:
        return (wanted,)
    found = []
    for rank, machine in enumerate(checked.machines):
        room, (node, env) = checked.rooms[rank], node_at(checked, rank)
        labels = dict(wanted.labels)
        if rank:  # else `status` there took it for a service
            del labels[HOME_LABEL], labels[LABEL]
        order = replace(
            wanted,
            release=replace(wanted.release, env={**wanted.release.env, **env}),
            checkpoint=Path(checked.folders[rank]),
            memory=room.limit,
            needed=room.needed,
            compilers=room.compilers,
            labels=labels,
            node=node,
            where=machine.where,
        )
        found.append(order)
    return tuple(found)


def node_at(checked: Checked, rank: int) -> tuple[Node, dict[str, str]]:
    """The container of one machine, and what it adds to the release's environment: NCCL takes every device that it
    finds, also those of other networks, unless it is told."""
    face, devices = checked.faces[rank], checked.faces[rank].rdma
    place = NodeRank(rank, face.address, checked.faces[0].address, face.name)
    env = {"NCCL_IB_HCA": "=" + ",".join(devices)} if devices else {"NCCL_IB_DISABLE": "1"}
    if devices[1:]:
        env["NCCL_IB_MERGE_NICS"] = "1"
    return Node(place, rdma=bool(devices)), env


def keep_up(parts: Sequence[Part], orders: Sequence[LaunchOrder]) -> None:
    """As `launch.keep_up`, on each machine. Docker also starts the others at boot: vLLM waits for rank 0 there, which
    the unit of this machine starts."""
    for part, order in zip(parts, orders, strict=True):
        with part.machine.errors():
            launch.keep_up(part.container, order)


def runs_everywhere(parts: Sequence[Part], machines: int) -> bool:
    """Whether a server runs on each of so many machines."""
    run = (is_running(part.container) and not running.stays_down(part.container) for part in parts)
    return all(run) and len(parts) == machines


def is_of(parts: Sequence[Part], service: Service) -> bool:
    """Whether these are the containers that the record orders."""
    tags = [order.release.tag for order in service.orders[:1]]
    return not tags or all(part.container.labels.get(RELEASE_LABEL) in tags for part in parts)


def require_there(paths: Paths, release: Release) -> None:
    """An error where one of the kept machines cannot serve the release: it is away, or has not got it."""
    its = try_read(paths.home, release.recipe).cluster
    if its is None or nodes_of(release.argv) == 1:
        return
    with reached(its.urls) as (machines, away):
        if away:
            raise next(iter(away.values()))
        for machine in machines:
            cluster.require_model(machine, release)


def states(home: str, recipe: str) -> dict[str, str]:
    """Of the other machines of a server, by URL, asked now and for a few seconds at most: Docker's word for the
    container there, "down" where that has failed too often, "gone" where there is none; "away" and why where a machine
    does not answer."""
    urls = try_read(Path(home), recipe).others
    with reached(urls) as (machines, away):
        found = {url: f"away: {error.message}" for url, error in away.items()}
        for machine in machines:
            try:
                found[machine.where] = "gone"
                for part in find_parts(home, recipe, [machine]):
                    is_down = is_running(part.container) and running.stays_down(part.container)
                    found[machine.where] = "down" if is_down else str(part.container.status)
            except SparkpinError as error:  # it answered at first, and not any more
                found[machine.where] = f"away: {error.message}"
    return {url: found[url] for url in urls}
