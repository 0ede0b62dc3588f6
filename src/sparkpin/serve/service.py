"""A release as a service: one container for each recipe of a home, its port published on this machine only unless the
user says otherwise (docs/serving.md)."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkpin.core import files
from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.vllm_flags import flag_value, served_name
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, fronts, keys, launch, linked, memory_limit, nodes, tls, waiting
from sparkpin.serve.address import UNCHANGED, Address, AddressOptions
from sparkpin.serve.fronts import FrontOrder
from sparkpin.serve.launch import SOCKET_LABEL, Health, LaunchOrder
from sparkpin.serve.nodes import Checked, NodesOptions
from sparkpin.serve.ports import require_free
from sparkpin.serve.rules import RISKS
from sparkpin.serve.served import (
    ADDRESS_LABEL,
    COMMAND_LABEL,
    FORMER,
    FRONT,
    LABEL,
    MODEL_LABEL,
    NEXT,
    RELEASE_LABEL,
    Served,
    address_of,
    address_path,
    client_of,
    describe,
    find,
    is_running,
    keep_address,
    kept_address,
    name_of,
    parts,
    running_release,
)
from sparkpin.serve.status import how_to_serve
from sparkpin.serve.switching import DRAIN_SECONDS, STOP_SECONDS, answered, launched, replaced, taken_over, told

if TYPE_CHECKING:
    from sparkpin.smoke.client import Client


def start(
    paths: Paths,
    engine: Engine,
    release: Release,
    checkpoint: Path,
    *,
    options: AddressOptions = UNCHANGED,
    gpus: bool = False,
    health: Health | None = None,
    beside: bool | None = None,
    drain: float | None = None,
    where: NodesOptions | None = None,
) -> Served:
    """Serve a release and return once it answers a real request. One that already runs is left alone; where only its
    address is to be another, or the key, its front is replaced.

    Another release of the home's recipe goes on answering until the new one does, where memory is enough for both; else
    it is stopped first. When the new one does not become ready, the former one answers again, or still.

    Args:
        options: what of the address is to be other than it was. At first the port is the recipe's own (`--port` of its
            command, else 8000), the host 127.0.0.1.
        gpus: give the container all GPUs.
        beside: start it while the former one runs; None: if memory allows.
        where: the machines of a release that is for several; None: as before.
        drain: seconds that the former one has for requests under way; None: DRAIN_SECONDS.

    Raises:
        BusyError: someone else has the port; another home's server, too.
        InputError: an option that is none; a certificate that does not fit.
        SmokeError: the server did not become ready; with a post-mortem.
        Detached: Ctrl-C while it started; it goes on. (Not beside a former one: that is what goes on then.)
    """
    running.require_readable(checkpoint)
    running.require_here(engine)
    running.require_image(engine, release)
    with (
        files.lock(
            paths.home / "serve" / f".{release.recipe}.lock",
            on_wait=f"waiting for another `invoke serve` of {release.recipe}",
        ),
        contextlib.ExitStack() as connections,
    ):
        name, drain = name_of(paths, release.recipe), DRAIN_SECONDS if drain is None else drain
        old, front = tidy(engine, name)
        together = (where or NodesOptions()).applied(nodes.kept(paths, release.recipe), release)
        machines = connections.enter_context(nodes.connected(engine, together.urls)) if together else ()
        old = linked.rejoined(connections, paths, release.recipe, old, machines)
        known, kept = address_of(front), kept_address(paths, release.recipe)
        address = options.applied(known or kept or Address.of_command(release.argv))
        if kept and not known:
            say(f"the address is as it was before `invoke stop`: {' '.join(kept.options.words)}")
        for path in set(address.allow) & RISKS.keys():
            say(f"warning: --allow {path}: {RISKS[path]}")
        keys.is_local(address.host)  # InputError for what is no address
        pair = tls.read(address.cert, address.tls_key) if address.cert else None
        if not (front and is_running(front) and known and known.port == address.port):  # a new front waits for the old
            require_free(engine, address.host, address.port)
        runs = old if old is not None and is_running(old) else None
        checked = None
        if together:
            freed = linked.freed_by(paths, runs) if runs is not None else {}
            checked = nodes.check(paths, machines, together, release, checkpoint, address.host, freed)
        key = key_of(paths, release, address.host)  # may make one, which a command that is refused is not to leave
        order = FrontOrder(name, str(paths.home), release.recipe, release.tag, address, key, pair)
        same = runs if runs is not None and runs.labels.get(RELEASE_LABEL) == release.tag else None
        if same and not (linked.whole(same) and linked.nodes_of(same) == (checked.nodes if checked else None)):
            say(f"{name} runs on other machines, or not on all of them")
            same = None
        if same and same.labels.get(COMMAND_LABEL) != command_mark(release):
            say(f"{same.name} runs {release.tag} with another command or environment than its record has")
            same = None
        space = None if same else memory_limit.room_for(paths, engine, release, checkpoint)
        if space and space.why:
            say(f"no memory plan ({space.why}): its limit is an estimate")
        wanted = LaunchOrder(
            release=release,
            checkpoint=checkpoint,
            memory=space.limit if space else None,
            gpus=gpus,
            labels={
                HOME_LABEL: str(paths.home),
                LABEL: release.recipe,
                RELEASE_LABEL: release.tag,
                COMMAND_LABEL: command_mark(release),
                MODEL_LABEL: served_name(release.argv),
            },
            timeout=running.ready_timeout(checkpoint),
            health=health or Health(),
            limits=address.limits,
        )
        if checked:
            nodes.keep(paths, release.recipe, checked.nodes)  # now, for a start that nobody waits for goes on
        if same:
            served = resumed(paths, engine, order, same, wanted, checked)
        else:
            assert space is not None
            ready = old is not None and describe(old, front).ready
            with engine_errors():
                alone = not checked and not linked.nodes_of(old)  # else both want the link's ports
                if (
                    old is not None
                    and ready
                    and alone
                    and (memory_limit.fits_beside(space) if beside is None else beside)
                ):
                    served = taken_over(paths, engine, order, old, wanted, drain)
                else:
                    with replaced(engine, name, old, release, drain):
                        memory_limit.make_room(space, release, gpus=gpus)
                        served = launched(paths, engine, order, old, wanted, checked)
        # The front has it now. Should that go without `stop`, an older address must not open the server again.
        address_path(paths, release.recipe).unlink(missing_ok=True)
        return served


@contextlib.contextmanager
def started(
    paths: Paths, engine: Engine, release: Release, checkpoint: Path, *, gpus: bool
) -> Iterator[tuple[Container, Client]]:
    """For a test of the server that stays, as `start` starts it, by a client of its address with its key. SmokeError
    where another run has taken it away meanwhile: that is no fault of the release."""
    try:
        served = start(paths, engine, release, checkpoint, gpus=gpus)
    except waiting.Detached:
        raise KeyboardInterrupt from None  # nobody is to go on with what was not tested
    container = find(engine, served.container)
    assert container is not None
    with client_of(served, key_of(paths, release, served.host), timeout=120) as client:
        yield container, client
    if not find(engine, served.container + FRONT) or running_release(paths, engine, release.recipe) != release.tag:
        cause = f"{release.tag} was stopped or replaced while it was tested"
        raise SmokeError(cause, next_step=f"invoke smoke {release.tag}")


def key_of(paths: Paths, release: Release, host: str) -> str | None:
    """The recipe's own key, if it brings one, else the home's for a server that others can reach."""
    own = flag_value(release.argv, "--api-key") or release.env.get("VLLM_API_KEY")
    return own or keys.key_for(paths, release.recipe, host)


def command_mark(release: Release) -> str:
    """Tells one command, environment and image from another."""
    text = json.dumps([release.image, list(release.argv), release.env], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tidy(engine: Engine, name: str) -> tuple[Container | None, Container | None]:
    """The recipe's server and its front, after what a killed run left: the one that was there counts, and none that was
    made and never started."""
    front = settled(engine, name + FRONT, (FORMER,))

    def answer_clients(old: Container) -> None:
        """The front may have been told already of the one that goes."""
        if front and is_running(front) and (folder := old.labels.get(SOCKET_LABEL)):
            fronts.use(front, folder)

    return settled(engine, name, (FORMER, NEXT), answer_clients), front


def settled(
    engine: Engine, name: str, ends: tuple[str, ...], before: Callable[[Container], None] = lambda chosen: None
) -> Container | None:
    """before: is called before another than the chosen one goes."""
    with engine_errors():
        found = [find(engine, name + end) for end in ("", *ends)]
        chosen = next((container for container in found if container and container.status != "created"), None)
        for container in found:
            if container is not None and container is not chosen:
                if chosen is not None:
                    before(chosen)
                launch.remove(container)
        if chosen is not None and chosen.name != name:
            chosen.rename(name)
            chosen.reload()
    return chosen


def resumed(
    paths: Paths,
    engine: Engine,
    order: FrontOrder,
    old: Container,
    wanted: LaunchOrder,
    checked: Checked | None = None,
) -> Served:
    """The release runs; its front may have to be another one."""
    say(f"{wanted.release.tag} already runs as {old.name}")
    if not launch.asks(old)[0]:
        folder = crash_facts.folder_of(paths, wanted.release.recipe, wanted.release.name)
        waiting.until_ready(old, wanted.release, wanted.timeout, folder, fresh=False)
    linked.keep_up(old, wanted, checked)  # a run that was killed while it waited did not get to it
    folder_name = old.labels[SOCKET_LABEL]
    with fronts.opened(engine, order, folder_name) as front:
        fronts.use(front, folder_name)
        if not told(old, front).ready:
            answered(old, front, order.key)
    return told(old, front)


def stop(paths: Paths, engine: Engine, recipe: str | None) -> tuple[str, ...]:
    """Stop and remove the container of a recipe of this home, or all of this home; returns their names.

    InputError for a recipe of which nothing is served.
    """
    with contextlib.ExitStack() as connections, engine_errors():
        every = [container for container in parts(engine) if container.labels.get(HOME_LABEL) == str(paths.home)]
        chosen = [c for c in every if recipe in (None, c.labels[LABEL])]
        others = connections.enter_context(linked.elsewhere(paths, recipe, chosen))
        if recipe is not None and not chosen and not others:
            known = ", ".join(sorted({c.labels[LABEL] for c in every}))
            raise InputError(
                f"no service of recipe {recipe!r} runs",
                next_step=f"choose one of: {known}" if known else f"{how_to_serve(paths, recipe)} (nothing is served)",
            )
        chosen.sort(key=lambda container: ADDRESS_LABEL not in container.labels)  # nothing new comes in then
        for container in chosen:
            if ADDRESS_LABEL in container.labels and container.status != "created":
                keep_address(paths, container.labels[LABEL], container.labels[ADDRESS_LABEL])
            if ADDRESS_LABEL not in container.labels:
                its = linked.RECIPE_LABEL
                own = [(m, one) for m, one in others if one.labels.get(its) == container.labels[LABEL]]
                others = [pair for pair in others if pair not in own]
                container = linked.Linked(container, own) if own else container
                say(f"stopping {container.name}{''.join(f', {other.name} at {m.where}' for m, other in own)}")
                container.stop(timeout=STOP_SECONDS)
            launch.remove(container)
        for machine, other in others:  # an earlier `stop` could not reach it, or rank 0 was removed by hand
            say(f"stopping {other.name} at {machine.where}")
            launch.remove(other)
        for name in {name_of(paths, container.labels[LABEL]) for container in chosen}:
            fronts.drop_sockets(engine, name)
    for name in sorted({container.labels[LABEL] for container in chosen}):
        if kept := kept_address(paths, name):
            say(f"kept for the next `invoke serve --recipe {name}`: {' '.join(kept.options.words)}")
    return tuple(str(container.name) for container in chosen if ADDRESS_LABEL not in container.labels)
