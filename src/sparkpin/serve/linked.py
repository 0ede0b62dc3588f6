"""The containers of one model on several machines, as one: what is done to rank 0's is done to all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import BusyError, CheckpointError, EngineError, IntegrityError, SparkpinError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.ssh import engine_at, owner
from sparkpin.pins.nodes import NodeRank
from sparkpin.pins.nodes import nodes_of as nodes_in
from sparkpin.releases import compile_caches
from sparkpin.releases.container import CACHE_LABEL, HOME_LABEL, Node
from sparkpin.releases.current import GoneError
from sparkpin.releases.inside import STAYS_DOWN
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import crash_facts, keys, launch, nodes
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.nodes import HERE, Checked, Machine, Nodes, each, named
from sparkpin.serve.postmortem import report
from sparkpin.serve.served import LABEL, RELEASE_LABEL, find, is_running

NODES_LABEL = "sparkpin.nodes"  # of rank 0: its `Nodes`, as JSON
RANK_LABEL = "sparkpin.node.rank"  # of the others
OWNER_LABEL = "sparkpin.node.of"  # of the others: host and home of rank 0
RECIPE_LABEL = "sparkpin.node.recipe"
GROUP_LABEL = "sparkpin.node.group"  # of all that were made together
SHORT_SECONDS = 8  # for a machine that may be away


class Linked(Container):  # type: ignore[misc, unused-ignore]
    """Rank 0's container, with the others. A machine that has gone meanwhile is told of, and stops nothing."""

    def __init__(self, first: Container, peers: Sequence[tuple[Machine, Container]]) -> None:
        super().__init__(attrs=first.attrs, client=first.client, collection=first.collection)  # type: ignore[arg-type]
        self.peers = tuple(peers)

    def _peers(self, act: Callable[[Machine, Container], object]) -> None:
        def tried(pair: tuple[Machine, Container]) -> None:
            try:
                with named(pair[0]), engine_errors():
                    act(*pair)
            except SparkpinError as error:
                say(f"warning: {pair[0].where}: {pair[1].name}: {error.message}")

        each(self.peers, tried)

    def _all(self, own: Callable[[], object], act: Callable[[Container], object]) -> None:
        """All at once: one that sees another go ends itself, and Docker would start it again."""
        each([own, lambda: self._peers(lambda machine, peer: act(peer))], lambda step: step())  # type: ignore[no-untyped-call]

    def start(self, **options: Any) -> None:
        super().start(**options)
        for machine, peer in self.peers:
            with named(machine), engine_errors():
                peer.start(**options)

    def stop(self, **options: Any) -> None:
        self._all(lambda: super(Linked, self).stop(**options), lambda peer: peer.stop(**options))

    def remove(self, **options: Any) -> None:
        self._all(lambda: super(Linked, self).remove(**options), lambda peer: peer.remove(**options))

    def rename(self, name: str) -> None:
        super().rename(name)
        self._peers(lambda machine, peer: peer.rename(peer_name(name, machine.rank)))


def peer_name(name: str, rank: int) -> str:
    return f"{name}-{rank}"


def key_of(paths: Paths, recipe: str, *, new: bool) -> str:
    """What proves the containers of a model to one another: a file of the home that only its owner may read."""
    path = keys.path_of(paths, f"{recipe}.nodes")
    if new or not path.is_file():
        keys.write(path, secrets.token_hex(keys.BYTES))
    return path.read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Spread:
    """Where a model is served that needs several machines, and the key of its containers."""

    checked: Checked
    key: str = field(repr=False)


def create(engine: Engine, name: str, wanted: LaunchOrder, spread: Spread | None, folder: str) -> Container:
    """A container on each machine, none of them started. What was made is gone again when one cannot be."""
    if spread is None:
        return launch.create(engine, name, wanted, volume=name, folder=folder)
    checked = spread.checked
    group = secrets.token_hex(8)
    made: list[Container | None] = [None] * len(checked.machines)

    def make(machine: Machine) -> None:
        own = order_of(wanted, spread, machine, group)
        first = machine.where == HERE
        with named(machine), engine_errors():
            own_name = name if first else peer_name(name, machine.rank)
            if not first:
                clear(machine, own_name, str(own.labels[OWNER_LABEL]))
            made[machine.rank] = launch.create(
                machine.engine, own_name, own, volume=name if first else None, folder=folder
            )

    try:
        each(checked.machines, make)
    except BaseException:
        for container in made:
            if container is not None:
                with contextlib.suppress(SparkpinError):
                    launch.remove(container)
        raise
    first, *others = [container for container in made if container is not None]
    return Linked(first, list(zip(checked.machines[1:], others, strict=True)))


def order_of(wanted: LaunchOrder, spread: Spread, machine: Machine, group: str) -> LaunchOrder:
    """The order of one machine: its addresses, its checkpoint, its memory."""
    from sparkpin.releases.volumes import volume_name  # slow to import

    checked = spread.checked
    rank, release = machine.rank, wanted.release
    node, env = node_at(checked, rank, spread.key)
    labels: dict[str, str] = {**wanted.labels, GROUP_LABEL: group}
    checkpoint: Path | str = wanted.checkpoint
    if machine.where == HERE:
        labels[NODES_LABEL] = checked.nodes.text
    else:
        home, recipe = labels.pop(HOME_LABEL), labels.pop(LABEL)  # else `status` there took it for a service
        labels |= {RANK_LABEL: str(rank), OWNER_LABEL: owner(home), RECIPE_LABEL: recipe}
        checkpoint = volume_name(release.checkpoint_key)
    return replace(
        wanted,
        release=replace(release, env={**release.env, **env}),
        checkpoint=checkpoint,
        memory=checked.rooms[rank].limit,
        labels=labels,
        node=node,
    )


def node_at(checked: Checked, rank: int, key: str) -> tuple[Node, dict[str, str]]:
    """The container of one machine, and the variables that it adds to the release's."""
    faces, devices = checked.link.interfaces, checked.link.rdma[rank]
    place = NodeRank(rank, faces[rank].address, faces[0].address, faces[rank].name)
    return Node(place, key, rdma=bool(devices)), nccl_env(devices)


def nccl_env(devices: Sequence[str]) -> dict[str, str]:
    """NCCL takes every device that it finds, those of other networks, too, unless it is told."""
    if not devices:
        return {"NCCL_IB_DISABLE": "1"}
    return {"NCCL_IB_HCA": "=" + ",".join(devices)} | ({"NCCL_IB_MERGE_NICS": "1"} if devices[1:] else {})


def clear(machine: Machine, name: str, whose: str) -> None:
    """Remove what a killed run of this home left under a name. BusyError for another home's."""
    if left := find(machine.engine, name):
        if (seen := left.labels.get(OWNER_LABEL, "")) != whose:
            raise BusyError(
                f"{machine.where}: there is a container {name} of {seen or 'somebody else'}",
                next_step=f"invoke stop there where it was started, or there: docker rm -f {name}",
            )
        launch.remove(left)


def keep_up(container: Container, wanted: LaunchOrder, spread: Spread | None) -> None:
    """As `launch.keep_up`, on each machine. Docker starts the others at boot, too: they wait for rank 0, which the unit
    of this machine starts, and take no memory until they have met."""
    if not isinstance(container, Linked) or spread is None:
        launch.keep_up(container, wanted)
        return
    for machine, one in [(spread.checked.machines[0], container), *container.peers]:
        with named(machine):
            launch.keep_up(one, order_of(wanted, spread, machine, ""))


def nodes_of(container: Container | None) -> Nodes | None:
    """The machines of a server, None where it runs on this one alone."""
    text = container.labels.get(NODES_LABEL) if container is not None else None
    return Nodes.read(text) if text else None


def partners(machine: Machine, home: str, recipe: str | None = None) -> list[Container]:
    """Containers on another machine that belong to servers of a home here."""
    wanted = [f"{OWNER_LABEL}={owner(home)}"]
    wanted += [f"{RECIPE_LABEL}={recipe}"] if recipe else []
    with named(machine), engine_errors():
        return list(machine.engine.containers.list(all=True, filters={"label": wanted}, ignore_removed=True))


@contextlib.contextmanager
def reached(urls: Sequence[str]) -> Iterator[tuple[list[Machine], dict[str, SparkpinError]]]:
    """Those machines that answer within SHORT_SECONDS, and why each of the others does not."""
    machines: dict[str, Machine] = {}
    away: dict[str, SparkpinError] = {}
    with contextlib.ExitStack() as stack:

        def enter(place: tuple[int, str]) -> None:
            rank, url = place
            try:
                engine = stack.enter_context(engine_at(url, seconds=SHORT_SECONDS))
                engine.client.api.timeout = SHORT_SECONDS
                machines[url] = Machine(rank, url, engine)
            except SparkpinError as error:
                away[url] = error

        each([(rank, url) for rank, url in enumerate(urls) if url != HERE], enter)
        yield [machines[url] for url in urls if url in machines], away


def rejoined(
    connections: contextlib.ExitStack,
    old: Container | None,
    machines: Sequence[Machine],
    recipe: str,
    home: str,
) -> Container | None:
    """A server with its containers on other machines; the same where it has none. What no server here belongs to is
    removed there: a killed run left it.

    machines: those that are connected already; the others of the server are tried.
    """
    its = nodes_of(old)
    more = [url for url in (its.urls if its else ()) if url not in {machine.where for machine in machines}]
    found, away = connections.enter_context(reached(more))
    for url, error in away.items():
        say(f"warning: {url} is away, and its container of {recipe} stays: {error.message}")
    group = old.labels.get(GROUP_LABEL, "") if old is not None else ""
    peers = []
    for machine in (*machines, *found):
        for one in partners(machine, home, recipe) if machine.where != HERE else ():
            if its is not None and one.labels.get(GROUP_LABEL) == group:
                peers.append((replace(machine, rank=int(one.labels[RANK_LABEL])), one))  # not where it is named now
            else:
                with named(machine):
                    launch.remove(one)
    return Linked(old, peers) if old is not None and its is not None else old


@contextlib.contextmanager
def elsewhere(
    paths: Paths, recipe: str | None, servers: Sequence[Container]
) -> Iterator[list[tuple[Machine, Container]]]:
    """The containers on other machines of a recipe, or of all of this home's. Machines that are away are told."""
    known = [nodes.kept(paths, name) for name in nodes.recipes_kept(paths) if recipe in (None, name)]
    known += [nodes_of(server) for server in servers]
    urls = dict.fromkeys(url for one in known if one for url in one.urls if url != HERE)
    with reached(list(urls)) as (machines, away):
        for url, error in away.items():
            say(f"warning: {url} is away ({error.message}): what is there goes with the next `invoke stop`")
        yield [(machine, one) for machine in machines for one in partners(machine, str(paths.home), recipe)]


def stays_down(other: Container) -> bool:
    """Whether process 1 on another machine waits without a server: it has failed too often."""
    with contextlib.suppress(SparkpinError), engine_errors():
        return is_running(other) and f"sparkpin: {STAYS_DOWN}".encode() in bytes(other.logs(tail=1))
    return False


def whole(container: Container | None) -> bool:
    """Whether a server runs on each of its machines."""
    its = nodes_of(container)
    if container is None or its is None:
        return container is not None and is_running(container)
    peers = container.peers if isinstance(container, Linked) else ()
    run = len(peers) == len(its.urls) - 1 and all(is_running(peer) and not stays_down(peer) for _, peer in peers)
    return is_running(container) and run


def peers_of(container: Container) -> Sequence[tuple[Machine, Container]]:
    return container.peers if isinstance(container, Linked) else ()


def deaths(container: Container, release: Release, folder: Path) -> list[str]:
    """A report for each other machine; its log is kept beside rank 0's. A machine that has gone is said."""
    found = []
    for machine, peer in peers_of(container):
        try:
            with named(machine), engine_errors():
                peer.reload()
                ended = crash_facts.how_ended(peer) or "still ran"
                death = replace(
                    crash_facts.examine(peer, release.recipe, f"{machine.where}: {release.tag}", ended), machine=()
                )
        except SparkpinError as error:
            found += ["", f"{machine.where}: {error.message}"]
            continue
        with atomic_file(folder / f"server-{machine.rank}.log", mode=0o600) as file:
            file.write(death.log[-crash_facts.LOG_BYTES :])
        found += ["", *report(death)]
    return found


def require_there(paths: Paths, release: Release) -> None:
    """EngineError that names each of the kept machines that cannot serve the release: it is away, or has not got it.
    GoneError where each answers."""
    its = nodes.kept(paths, release.recipe)
    if its is None or nodes_in(release.argv) == 1:
        return
    with reached(its.urls[1:]) as (machines, away):
        faults = list(away.values())
        for machine in machines:
            try:
                nodes.model_there(machine, release, None)
            except SparkpinError as error:
                faults.append(error)
    is_gone = all(isinstance(error, GoneError | CheckpointError | IntegrityError) for error in faults)
    kind = GoneError if is_gone else EngineError
    nodes.raise_all([kind(error.message, next_step=error.next_step) for error in faults])


@dataclass(frozen=True)
class NodeState:
    """Another machine of a server. state: Docker's word for the container there, "down" where it has failed too often,
    "gone" where there is none, "away" where the machine does not answer, and why then."""

    where: str
    state: str
    restarts: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        again = f", restarts {self.restarts}" if self.restarts else ""
        return f"{self.where}: {self.state}{again}" + (f" ({self.why})" if self.why else "")


def states(container: Container | None) -> list[NodeState]:
    """Of the other machines of a server, asked now and for a few seconds at most."""
    its = nodes_of(container)
    if container is None or its is None:
        return []
    with reached(its.urls[1:]) as (machines, away):
        found = {url: NodeState(url, "away", why=error.message) for url, error in away.items()}
        for machine in machines:
            found[machine.where] = NodeState(machine.where, "gone")
            try:
                group = group_of(container, [machine])
            except SparkpinError as error:  # it answered at first, and not any more
                group, found[machine.where] = [], NodeState(machine.where, "away", why=error.message)
            for url, one in group:
                state = "down" if stays_down(one) else one.status
                found[url] = NodeState(url, state, int(one.attrs.get("RestartCount", 0)))
    return [found[url] for url in its.urls[1:]]


def group_of(container: Container, machines: Sequence[Machine]) -> list[tuple[str, Container]]:
    """The containers of a server on those machines, with their URLs."""
    group, home, recipe = (container.labels.get(label, "") for label in (GROUP_LABEL, HOME_LABEL, LABEL))
    found = [(machine.where, one) for machine in machines for one in partners(machine, home, recipe)]
    return [(url, one) for url, one in found if one.labels.get(GROUP_LABEL) == group]


def held(paths: Paths, server: Container) -> dict[str, int]:
    """Bytes that a server gives back when it stops, on each of its machines by URL: what its containers hold now, or
    what its plan says where that is more, for engines do not count what a GPU has."""
    from sparkpin.serve import memory_limit  # slow to import

    planned = 0
    with contextlib.suppress(SparkpinError):
        release = Releases(paths).get(server.labels.get(RELEASE_LABEL, ""))
        planned = memory_limit.plan_of(paths, release).needed

    def taken(place: tuple[str, Container]) -> int:
        with engine_errors():
            told: Any = place[1].stats(stream=False, one_shot=True)
        stats = told["memory_stats"].get("stats", {})
        return max(planned, int(stats.get("anon", stats.get("total_rss", 0))) + int(stats.get("shmem", 0)))

    places = [(HERE, server), *((machine.where, peer) for machine, peer in peers_of(server))]
    return dict(zip([where for where, _ in places], each(places, taken), strict=True))


def drop_volumes(paths: Paths, removed: Sequence[Release], remaining: Sequence[Release]) -> None:
    """Remove checkpoints and caches of releases that go from the machines that their recipes are served on; their
    images stay. What a container has stays, and what other releases need. A machine that is away is told of, with the
    command."""
    from sparkpin.releases.volumes import LABEL as CHECKPOINT  # slow to import
    from sparkpin.releases.volumes import require_own, volume_name

    checkpoints, builds = ({getattr(one, key) for one in remaining} for key in ("checkpoint_key", "build_key"))
    going: dict[str, dict[str, tuple[str, str]]] = {}  # by recipe and name: the label by which a volume is ours
    for one in removed:
        names = going.setdefault(one.recipe, {}) if nodes_in(one.argv) > 1 else {}
        if one.checkpoint_key not in checkpoints:
            names[volume_name(one.checkpoint_key)] = one.checkpoint_key, CHECKPOINT
        if one.build_key not in builds:
            names[compile_caches.volume_name(one.build_key)] = one.image, CACHE_LABEL
    for recipe, names in sorted(going.items()):
        its = nodes.kept(paths, recipe)
        if its is None or not names:
            continue
        with reached(its.urls[1:]) as (machines, away):
            for url in away:
                say(f"{url} is away, and keeps: {', '.join(names)}; docker -H {url} volume rm removes them")
            for machine in machines:
                for name, label in sorted(names.items()):
                    try:
                        with named(machine), engine_errors(), contextlib.suppress(NotFound):
                            volume = machine.engine.client.volumes.get(name)
                            require_own(name, volume.attrs, *label)
                            volume.remove()
                            say(f"removed {name} at {machine.where}")
                    except (EngineError, IntegrityError) as error:
                        say(f"kept {name}: {error.message}")
