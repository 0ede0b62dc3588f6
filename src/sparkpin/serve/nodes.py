"""One model over several machines: their engines, what each must have before anything starts, their containers as one.

Rank 0 is this machine: its container has the API's socket, which the front here hands out with port and key. The others
have Docker and an ssh server, nothing of ours: what has to run there runs in a short container of the release's image.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from sparkpin.core.errors import (
    BusyError,
    CheckpointError,
    HostError,
    InputError,
    IntegrityError,
    SparkpinError,
)
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.ssh import engine_at, errors_of
from sparkpin.pins.nodes import MEETING_PORT, STORE_PORT, example, nodes_of
from sparkpin.pins.vllm_flags import MODEL_PATH
from sparkpin.releases import container as running
from sparkpin.releases.current import GoneError
from sparkpin.releases.record import Release
from sparkpin.serve import inside_link
from sparkpin.serve import link as links
from sparkpin.serve.link import HostFacts, Link
from sparkpin.serve.ports import listeners

if TYPE_CHECKING:
    from sparkpin.serve.memory_limit import Room  # slow to import, and `status` plans nothing

HERE = "here"
NODES_FILE = ".nodes.json"
LOOK_LABEL = "sparkpin.look"
LOOK_MEMORY = 1 << 29
LOOK_SECONDS = 90
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Nodes:
    """The machines of a recipe, rank 0 first, and the network between them. urls: "here", then ssh://user@host;
    link: a network, "" where none was chosen yet; shared: it is taken though others are on it."""

    urls: tuple[str, ...]
    link: str = ""
    shared: bool = False

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str) -> Nodes:
        value = json.loads(text)
        return cls(tuple(value["urls"]), str(value["link"]), bool(value["shared"]))


@dataclass(frozen=True)
class NodesOptions:
    """The options of `serve`; None: as it was."""

    nodes: str | None = None
    link: str | None = None
    shared: bool = False

    def applied(self, known: Nodes | None, release: Release, command: str = "") -> Nodes | None:
        """The machines to serve a release on; None for one that is for this machine alone. InputError where their
        number is another than the release's. command: to type again, with --nodes."""
        count = nodes_of(release.argv)
        if count == 1:
            if self != NodesOptions():
                raise InputError(
                    f"{release.tag} is for one machine; --nodes, --link and --shared-link are for several",
                    next_step="leave them out, or a recipe with `nodes: 2` (docs/nodes.md)",
                )
            return None
        urls = urls_of(self.nodes) if self.nodes is not None else known.urls if known else ()
        if len(urls) != count:
            said = f"--nodes names {len(urls)}" if urls else "none are named"
            raise InputError(
                f"{release.tag} is for {count} machines, and {said} (this one counts)",
                next_step=f"{command or f'invoke serve --recipe {release.recipe}'} --nodes {example(count)}",
            )
        new = self.nodes is not None and (known is None or known.urls != urls)
        before = Nodes(urls) if new or known is None else known
        return replace(
            before, urls=urls, link=self.link or before.link, shared=self.shared or (before.shared and not self.link)
        )


def urls_of(text: str) -> tuple[str, ...]:
    """This machine first, whether it is named or not: its front has the port, and the API's socket is rank 0's."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    others = tuple(word.rstrip("/") for word in words if word != HERE)
    if twice := [word for word in others if others.count(word) > 1]:
        raise InputError(f"--nodes: {twice[0]} is named twice", next_step="name each machine once")
    for word in others:
        if "://" not in word:
            raise InputError(
                f"--nodes: got {word!r}, expected {HERE} or ssh://user@host[:port], with commas between",
                next_step=f"--nodes {HERE},ssh://{word}",
            )
    return (HERE, *others)


def path_of(paths: Paths, recipe: str) -> Path:
    return paths.home / "serve" / f"{recipe}{NODES_FILE}"


def kept(paths: Paths, recipe: str) -> Nodes | None:
    """The machines that the recipe was last served on. InputError for a file that is damaged."""
    path = path_of(paths, recipe)
    try:
        return Nodes.read(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {error}", next_step=f"rm {path}, then invoke serve --nodes ...") from None


def recipes_kept(paths: Paths) -> list[str]:
    """Those that were last served on several machines."""
    return sorted(path.name.removesuffix(NODES_FILE) for path in (paths.home / "serve").glob(f"*{NODES_FILE}"))


def keep(paths: Paths, recipe: str, nodes: Nodes) -> None:
    path = path_of(paths, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, mode=0o600) as file:
        file.write(f"{nodes.text}\n".encode())


def each(items: Sequence[T], act: Callable[[T], R]) -> list[R]:
    """`act` on all at once. What went wrong with any, with all of them told."""
    results: list[R] = []
    errors: list[SparkpinError] = []
    with ThreadPoolExecutor(max(len(items), 1)) as pool:
        for future in [pool.submit(act, item) for item in items]:
            try:
                results.append(future.result())
            except SparkpinError as error:
                errors.append(error)
    raise_all(errors)
    return results


def raise_all(errors: Sequence[SparkpinError]) -> None:
    """The error, or one that tells them all, with the exit code of the first."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        steps = dict.fromkeys(error.next_step for error in errors if error.next_step)
        first, text = errors[0], "\n".join(error.message for error in errors)
        first.message, first.next_step, first.args = text, "\n  then: ".join(steps), (text,)
        raise first


@dataclass(frozen=True)
class Machine:
    """A machine of a pair. where: its URL, or "here"."""

    rank: int
    where: str
    engine: Engine


@contextlib.contextmanager
def connected(engine: Engine, urls: Sequence[str]) -> Iterator[list[Machine]]:
    """The machines, in the order of `urls`. An error that names all that are away, or that are one and the same."""
    with contextlib.ExitStack() as stack:
        found = each(urls, lambda url: engine if url == HERE else stack.enter_context(engine_at(url)))
        machines = [Machine(rank, url, one) for rank, (url, one) in enumerate(zip(urls, found, strict=True))]
        with engine_errors():
            told = [machine.engine.client.info() for machine in machines]
        ids = [tuple(str(info.get(key)) for key in ("ID", "Name", "DockerRootDir")) for info in told]
        for rank, one in enumerate(ids):
            if one in ids[:rank]:
                raise InputError(
                    f"--nodes: {urls[rank]} and {urls[ids.index(one)]} are one engine",
                    next_step="name each machine once; this one is one of them",
                )
        yield machines


def named(machine: Machine) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if machine.where == HERE else errors_of(machine.where)


def copy_line(release: Release, where: str) -> str:
    """What brings a machine the release."""
    if where == HERE:
        return f"invoke reproduce {release.tag} --keep"
    return f"invoke export {release.tag} {where} --with-checkpoint"


def model_there(machine: Machine, release: Release, checkpoint: Path | None) -> dict[str, dict[str, str]]:
    """The image is there, and the checkpoint; how to mount that. An error that names the machine where one is not.

    checkpoint: its folder on this machine; None: the machine is another, and has a volume.
    """
    require_image(machine, release)
    step = copy_line(release, machine.where)
    if checkpoint is not None:
        running.require_readable(checkpoint)
        return {str(checkpoint.absolute()): {"bind": MODEL_PATH, "mode": "ro"}}
    from sparkpin.releases.volumes import checkpoint_volume  # slow to import

    with named(machine):
        volume = checkpoint_volume(machine.engine, release)
    if volume is None:
        raise CheckpointError(
            f"{machine.where}: the checkpoint of {release.tag} ({release.checkpoint_key[:16]}) is not there, or half",
            next_step=step,
        )
    return {volume: {"bind": MODEL_PATH, "mode": "ro"}}


def require_image(machine: Machine, release: Release) -> None:
    step = copy_line(release, machine.where)
    with named(machine):
        info = machine.engine.image(release.tag)
    seen = info.config_digest if info else "none"
    if seen != release.image:
        kind = IntegrityError if info else GoneError
        raise kind(f"{machine.where}: image {release.tag}: got {seen}, expected {release.image}", next_step=step)


def looked_at(machine: Machine, release: Release, volumes: Mapping[str, Any]) -> HostFacts:
    """What `inside_link` prints there, in a container with the host's network that is gone afterwards. HostError for
    another answer: the machine there may be anybody's."""
    from sparkpin.releases.volumes import sweep  # slow to import

    with named(machine), engine_errors():
        sweep(machine.engine, LOOK_LABEL)
        container = machine.engine.containers.create(
            release.tag,
            labels={LOOK_LABEL: ""},
            entrypoint=[*running.PYTHON, "-c", Path(inside_link.__file__).read_text(encoding="utf-8")],
            command=[],
            network_mode="host",
            volumes=dict(volumes),
            **running.sandbox({}, memory=LOOK_MEMORY),
        )
        try:
            container.start()
            code = int(container.wait(timeout=LOOK_SECONDS)["StatusCode"])
            log = running.log_of(container)
        finally:
            container.remove(force=True, v=True)
    if code:
        raise HostError(
            f"{machine.where}: it cannot be looked at from a container: {running.last_lines(log, 3)}",
            next_step="look what these lines say",
        )
    try:
        told = dict(json.loads(log.splitlines()[-1]))
        return TypeAdapter(HostFacts).validate_python(told | {"where": machine.where})
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise HostError(
            f"{machine.where}: the program that was sent there answered something else: {error!r}"[:1000],
            next_step="find out what answers there",
        ) from None


def examined(machine: Machine, release: Release, checkpoint: Path, platform: str) -> HostFacts:
    """What the machine has; an error that names it where image or checkpoint are not as they are here."""
    with named(machine):
        seen = machine.engine.platform
    if seen != platform:
        raise HostError(
            f"{machine.where} is {seen}, and this machine {platform}", next_step="machines of one kind serve one model"
        )
    volumes = model_there(machine, release, checkpoint if machine.where == HERE else None)
    return looked_at(machine, release, volumes)


@dataclass(frozen=True)
class Checked:
    """Machines that can serve a release together. link: between them; rooms: memory on each."""

    nodes: Nodes
    machines: tuple[Machine, ...]
    facts: tuple[HostFacts, ...]
    link: Link
    rooms: tuple[Room, ...]


def check(
    paths: Paths,
    machines: Sequence[Machine],
    nodes: Nodes,
    release: Release,
    checkpoint: Path,
    api: str,
    *,
    busy: bool,
) -> Checked:
    """All that can be known before anything starts; an error that names each machine that lacks something.

    api: the address that the front listens on; busy: a server of the recipe has memory and ports, and `check_freed` is
    to follow.
    """
    from sparkpin.releases.runs_here import uses_gpu  # slow to import, both
    from sparkpin.serve import memory_limit

    platform = machines[0].engine.platform
    facts = each(machines, lambda machine: examined(machine, release, checkpoint, platform))
    for one in facts:
        if one.record != facts[0].record:
            raise IntegrityError(
                f"{one.where}: the checkpoint's record is another: SHA-256 {one.record}, here {facts[0].record}",
                next_step=f"remove the volume there, then {copy_line(release, one.where)}",
            )
    found = links.choose(facts, nodes.link or None)
    if uses_gpu(paths, release):
        links.require_same_gpus(facts)
    for line in links.require_own(facts, found, api, shared=nodes.shared):
        say(line)
    say(f"link {found.text}")
    rooms = tuple(memory_limit.room_for(paths, machine.engine, release, checkpoint) for machine in machines)
    checked = Checked(replace(nodes, link=str(found.network)), tuple(machines), tuple(facts), found, rooms)
    if not busy:
        require_rooms(checked, release)
        require_ports()
    return checked


def check_freed(checked: Checked, release: Release) -> None:
    """What a former server had: memory on each machine, and the ports. HostError, or BusyError, where they are not
    free; nothing else is looked at, for nobody answers meanwhile."""
    facts = each(checked.machines, lambda machine: looked_at(machine, release, {}))
    require_rooms(replace(checked, facts=tuple(facts)), release)
    require_ports()


def require_ports() -> None:
    """BusyError where something listens on the ports of rank 0, which is this machine."""
    if taken := [str(port) for port in (STORE_PORT, MEETING_PORT) if listeners(port)]:
        raise BusyError(
            f"here: port {' and '.join(taken)} is taken: a machine serves one such model at a time",
            next_step="invoke stop of the other one, or of its smoke test; ss -ltnp says who has them",
        )


def require_rooms(checked: Checked, release: Release, freed: Mapping[str, int] | None = None) -> None:
    """HostError that names each machine without enough memory. freed: bytes that a former server gives back before, by
    the machine's URL."""
    from sparkpin.serve import memory_limit  # slow to import

    errors = []
    for facts, room in zip(checked.facts, checked.rooms, strict=True):
        try:
            memory_limit.require_room(room, release, facts.memory_available, (freed or {}).get(facts.where, 0))
        except HostError as error:
            errors.append(HostError(f"{facts.where}: {error.message}", next_step=error.next_step))
    raise_all(errors)
