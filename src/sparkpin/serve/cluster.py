"""One model over several machines: which they are, their engines, and what each must have before anything starts.

Rank 0 is this machine: its container has the API's socket, which the proxy here hands out with port and key. The others
have Docker and an ssh server, nothing of ours: what has to run there runs in a short container of the release's image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from sparkpin.core.errors import BusyError, CheckpointError, HostError, InputError, IntegrityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.ssh import SECONDS, engine_at, errors_of
from sparkpin.pins.nodes import STORE_PORT, example, nodes_of
from sparkpin.pins.vllm_flags import MODEL_PATH
from sparkpin.releases import container as running
from sparkpin.releases import remote
from sparkpin.releases.current import GoneError
from sparkpin.releases.record import Release
from sparkpin.serve import inside_link
from sparkpin.serve import link as links
from sparkpin.serve.address import listeners
from sparkpin.serve.link import HostFacts, Interface

if TYPE_CHECKING:
    from sparkpin.serve.memory_limit import Room

HERE = "here"
LOOK_MEMORY = 1 << 29
LOOK_SECONDS = 90
SHORT_SECONDS = 8  # for a machine that may be away


@dataclass(frozen=True)
class Cluster:
    """The machines of a recipe, rank 0 first, and the network between them. urls: "here", then ssh://user@host;
    link: a network, "" where none was chosen yet; shared: it is taken though others are on it."""

    urls: tuple[str, ...]
    link: str = ""
    shared: bool = False


@dataclass(frozen=True)
class ClusterOptions:
    """The options of `serve`; None: as it was."""

    nodes: str | None = None
    link: str | None = None
    shared: bool = False

    def applied(self, known: Cluster | None, release: Release, command: str = "") -> Cluster | None:
        """The machines to serve a release on; None for one that is for this machine alone. InputError where their
        number is another than the release's. command: to type again, with --nodes."""
        count = nodes_of(release.argv)
        if count == 1:
            if self != ClusterOptions():
                raise InputError(
                    f"{release.tag} is for one machine; --nodes, --link and --shared-link are for several",
                    next_step="leave them out, or a recipe with `nodes: 2` (docs/nodes.md)",
                )
            return None
        before = known or Cluster(())
        urls = before.urls if self.nodes is None else urls_of(self.nodes)
        if len(urls) != count:
            raise InputError(
                f"{release.tag}: got {len(urls)} machines by --nodes (this one counts), expected {count}",
                next_step=f"{command or f'invoke serve --recipe {release.recipe}'} --nodes {example(count)}",
            )
        if urls != before.urls:  # what was said of other machines is not known of these
            before = Cluster(urls)
        return Cluster(urls, self.link or before.link, self.shared or (before.shared and not self.link))


def urls_of(text: str) -> tuple[str, ...]:
    """This machine first, whether it is named or not: its proxy has the port, and the API's socket is rank 0's."""
    words = [word.strip().rstrip("/") for word in text.split(",") if word.strip()]
    others = tuple(word for word in words if word != HERE)
    for word in others:
        if "://" not in word or others.count(word) > 1:
            raise InputError(
                f"--nodes: got {word!r}, expected {HERE} and ssh://user@host[:port], each once, with commas between",
                next_step=f"--nodes {HERE},ssh://{word.rpartition('://')[2]}",
            )
    return (HERE, *others)


@dataclass(frozen=True)
class Machine:
    """where: its URL, or "here"."""

    where: str
    engine: Engine

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of its engine name it."""
        with contextlib.nullcontext() if self.where == HERE else errors_of(self.where), engine_errors():
            yield


@contextlib.contextmanager
def reached(
    urls: Sequence[str], seconds: int = SHORT_SECONDS
) -> Iterator[tuple[list[Machine], dict[str, SparkpinError]]]:
    """Those other machines that answer within some seconds, and why each of the rest does not."""
    machines, away = list[Machine](), dict[str, SparkpinError]()
    with contextlib.ExitStack() as stack:
        for url in urls:
            try:
                if url != HERE:
                    engine = stack.enter_context(engine_at(url, seconds=seconds))
                    engine.client.api.timeout = 2 * seconds
                    machines.append(Machine(url, engine))
            except SparkpinError as error:
                away[url] = error
        yield machines, away


@contextlib.contextmanager
def connected(engine: Engine, urls: Sequence[str], former: Sequence[str] = ()) -> Iterator[dict[str, Machine]]:
    """The machines by URL, this one first. An error for one that is away; of those of the server before it is told."""
    with reached(tuple(dict.fromkeys((*urls, *former))), SECONDS if urls else SHORT_SECONDS) as (others, away):
        for url, error in away.items():
            if url in urls:
                raise error
            step = "remove what is there by `docker -H`" if urls else "`invoke stop` again removes what is there"
            say(f"warning: {url} is away ({error.message}); once it answers, {step}")
        yield {HERE: Machine(HERE, engine)} | {machine.where: machine for machine in others}


def require_model(machine: Machine, release: Release) -> str:
    """The checkpoint's folder on another machine. An error where that is not there, or the image."""
    step = f"invoke export {release.tag} {machine.where} --with-checkpoint"
    with machine.errors():
        info = machine.engine.image(release.tag)
    if info is None or info.config_digest != release.image:
        cause = f"image {release.tag}: got {info.config_digest if info else 'none'}, expected {release.image}"
        raise (IntegrityError if info else GoneError)(f"{machine.where}: {cause}", next_step=step)
    if folder := remote.checkpoint_at(machine.where, release):
        return folder
    raise CheckpointError(f"{machine.where}: no checkpoint of {release.tag} is there", next_step=step)


def examined(machine: Machine, release: Release, checkpoint: str) -> HostFacts:
    """What `inside_link` prints there, in a container with the host's network that is gone afterwards. HostError for
    another answer: the machine may be anybody's. checkpoint: its folder there."""
    with machine.errors():
        container = machine.engine.client.containers.create(
            release.tag,
            entrypoint=[*running.PYTHON, "-c", Path(inside_link.__file__).read_text(encoding="utf-8")],
            command=[],
            network_mode="host",
            volumes={checkpoint: {"bind": MODEL_PATH, "mode": "ro"}},
            **running.sandbox({}, memory=LOOK_MEMORY),
        )
        try:
            container.start()
            container.wait(timeout=LOOK_SECONDS)
            log = running.log_of(container)
        finally:
            container.remove(force=True, v=True)
    try:
        return replace(TypeAdapter(HostFacts).validate_json(log.splitlines()[-1]), where=machine.where)
    except (ValueError, IndexError):
        cause = f"got {running.last_lines(log[-1000:], 3)!r}, expected the facts of the machine as JSON"
        raise HostError(f"{machine.where}: {cause}", next_step="find out what answers there") from None


@dataclass(frozen=True)
class Checked:
    """Machines that can serve a release together. faces: of the link between them; rooms: memory on each;
    folders: of the checkpoint on each."""

    cluster: Cluster
    machines: tuple[Machine, ...]
    faces: tuple[Interface, ...]
    rooms: tuple[Room, ...]
    folders: tuple[str, ...]


def check(
    paths: Paths,
    by_url: Mapping[str, Machine],
    cluster: Cluster,
    release: Release,
    checkpoint: Path,
    api: str,
    freed: Mapping[str, int],
) -> Checked:
    """All that can be known before anything starts. An error that names the machine that lacks something.

    api: the address that the proxy listens on; freed: bytes that a server of the recipe gives back before, by URL.
    """
    from sparkpin.releases.runs_here import uses_gpu  # slow to import, both
    from sparkpin.serve import memory_limit

    machines = tuple(by_url[url] for url in cluster.urls)
    folders = [str(checkpoint.absolute()), *(require_model(machine, release) for machine in machines[1:])]
    facts = [examined(machine, release, folder) for machine, folder in zip(machines, folders, strict=True)]
    for one in facts:
        if one.record != facts[0].record:
            raise CheckpointError(
                f"{one.where}: the checkpoint is half there, or another: got record {one.record or 'none'}, "
                f"expected {facts[0].record} as here",
                next_step=f"invoke export {release.tag} {one.where} --with-checkpoint",
            )
    faces = links.choose(facts, cluster.link)
    network = faces[0].place.network
    if uses_gpu(paths, release):
        links.require_same_gpus(facts)
    links.require_own(facts, network, api, shared=cluster.shared)
    say(f"link {links.listed(faces)}; RDMA by {', '.join(faces[0].rdma) or 'no device: TCP'}")
    rooms = []
    for machine, one in zip(machines, facts, strict=True):
        room = memory_limit.room_for(paths, machine.engine, release, checkpoint, one.memory_available)
        memory_limit.require_room(room, release, one.memory_available, freed.get(one.where, 0), f"{one.where}: ")
        rooms.append(room)
    if HERE not in freed and listeners(STORE_PORT):
        raise BusyError(
            f"here: port {STORE_PORT} is taken: a machine serves one such model at a time",
            next_step="invoke stop of the other one, or of its smoke test; ss -ltnp says who has it",
        )
    return Checked(replace(cluster, link=str(network)), machines, faces, tuple(rooms), tuple(folders))
