"""A release as a service: one container for each recipe of a home, its port published on this machine only unless the
user says otherwise (docs/serving.md)."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
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
from sparkpin.serve import keys, launch, linked, memory_limit, nodes, proxy, waiting
from sparkpin.serve.address import UNCHANGED, Address, AddressOptions, read_tls
from sparkpin.serve.launch import SOCKET_LABEL, Health, LaunchOrder
from sparkpin.serve.nodes import Checked, NodesOptions
from sparkpin.serve.ports import require_free
from sparkpin.serve.proxy import ProxyOrder
from sparkpin.serve.rules import RISKS
from sparkpin.serve.served import (
    COMMAND_LABEL,
    FORMER,
    LABEL,
    MODEL_LABEL,
    NEXT,
    PROXY,
    PROXY_LABEL,
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
from sparkpin.serve.switching import DRAIN_SECONDS, STOP_SECONDS, Switch

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
    address is to be another, or the key, its proxy is changed.

    Another release of the home's recipe goes on answering until the new one does, where memory is enough for both; else
    it is stopped first, and new requests wait. When the new one does not become ready, the former one answers again, or
    still.

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
        Detached: Ctrl-C while it started; it goes on. (Not together with a former one: that goes on then.)
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
        name = name_of(paths, release.recipe)
        old, former, front = tidy(engine, name, release)
        together = (where or NodesOptions()).applied(nodes.kept(paths, release.recipe), release)
        machines = connections.enter_context(nodes.connected(engine, together.urls)) if together else ()
        old = linked.rejoined(connections, paths, release.recipe, old, machines)
        address = new_address(paths, engine, release, options, front)
        pem = read_tls(address.cert, address.tls_key) if address.cert else None
        runs = old if old is not None and is_running(old) else None
        checked = None
        if together:
            freed = linked.freed_by(paths, runs) if runs is not None else {}
            checked = nodes.check(paths, machines, together, release, checkpoint, address.host, freed)
            nodes.keep(paths, release.recipe, checked.nodes)  # now, for a start that nobody waits for goes on
        key = key_of(paths, release, address.host)  # may make one, which a command that is refused is not to leave
        same = runs is not None and goes_on(runs, release, checked)
        space = None if same else memory_limit.room_for(paths, engine, release, checkpoint)
        if space and space.why:
            say(f"no memory plan ({space.why}): its limit is an estimate")
        if beside is None:
            beside = space is not None and memory_limit.fits_beside(space)
        # Several machines cannot have two: both want the link's ports.
        one_alone = same or checked or linked.nodes_of(old)
        both = beside and not one_alone and old is not None and describe(old, front).ready
        switch = Switch(
            paths,
            engine,
            ProxyOrder(name, str(paths.home), release.recipe, release.tag, address, key, pem),
            LaunchOrder(
                release=release,
                checkpoint=checkpoint,
                memory=space.limit if space else None,
                gpus=gpus,
                labels=labels_of(paths, release),
                timeout=running.ready_timeout(checkpoint),
                health=health or Health(),
                limits=address.limits,
            ),
            former if same else old,
            checked,
            space,
            both,
            DRAIN_SECONDS if drain is None else drain,
        )
        served = switch.resume(runs) if same and runs is not None else switch.carry_out()
        # The proxy has it now. Should that go without `stop`, an older address must not open the server again.
        address_path(paths, release.recipe).unlink(missing_ok=True)
        return served


def new_address(
    paths: Paths, engine: Engine, release: Release, options: AddressOptions, front: Container | None
) -> Address:
    """BusyError where somebody else has the port."""
    known, kept = address_of(front), kept_address(paths, release.recipe)
    address = options.applied(known or kept or Address.of_command(release.argv))
    if kept and not known:
        say(f"the address is as it was before `invoke stop`: {kept.words}")
    for path in set(address.allow) & RISKS.keys():
        say(f"warning: --allow {path}: {RISKS[path]}")
    keys.is_local(address.host)  # InputError for what is no address
    if not (front and is_running(front) and known and known.port == address.port):  # a new proxy waits for the old one
        require_free(engine, address.host, address.port)
    return address


def goes_on(server: Container, release: Release, checked: Checked | None) -> bool:
    """Whether it is what is to be served."""
    if server.labels.get(RELEASE_LABEL) != release.tag:
        return False
    if not (linked.whole(server) and linked.nodes_of(server) == (checked.nodes if checked else None)):
        say(f"{server.name} runs on other machines, or not on all of them")
        return False
    if server.labels.get(COMMAND_LABEL) != command_mark(release):
        say(f"{server.name} runs {release.tag} with another command or environment than its record has")
        return False
    return True


def labels_of(paths: Paths, release: Release) -> dict[str, str]:
    return {
        HOME_LABEL: str(paths.home),
        LABEL: release.recipe,
        RELEASE_LABEL: release.tag,
        COMMAND_LABEL: command_mark(release),
        MODEL_LABEL: served_name(release.argv),
    }


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
    if not find(engine, served.container + PROXY) or running_release(paths, engine, release.recipe) != release.tag:
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


def tidy(engine: Engine, name: str, release: Release) -> tuple[Container | None, Container | None, Container | None]:
    """The recipe's server, the one before it where that may have to answer again, and the proxy, after what a killed
    run left: none counts that was made and never started.

    A switch that was broken off leaves the former server. It is needed until the next one answers, so one that neither
    does nor is the wanted release gives way to it.
    """
    front, _ = settle(engine, name + PROXY, FORMER)
    old, others = settle(engine, name, FORMER, NEXT)
    former = next((other for other in others if str(other.name).endswith(FORMER)), None)
    if old is None or former is None:
        return old, None, front
    if launch.asks(old)[0]:
        launch.remove(former)
        return old, None, front
    if old.labels.get(RELEASE_LABEL) == release.tag and is_running(old):
        return old, former, front
    launch.remove(old)
    with engine_errors():
        former.rename(name)
        former.reload()
    return former, None, front


def settle(engine: Engine, name: str, *ends: str) -> tuple[Container | None, list[Container]]:
    """The first of those with these names that was ever started, which gets the first name; and what else there is of
    use: a server that another has taken the place of. The others are removed."""
    with engine_errors():
        found = [container for end in ("", *ends) if (container := find(engine, name + end))]
        chosen = next((container for container in found if container.status != "created"), None)
        rest = []
        for container in found:
            if container is chosen:
                continue
            if chosen and SOCKET_LABEL in chosen.labels and (front := find(engine, name + PROXY)):
                proxy.use(front, chosen.labels[SOCKET_LABEL])  # which may have been told already of one that goes
            if chosen and container.name == name + FORMER and container.status != "created" and NEXT in ends:
                rest.append(container)
            else:
                launch.remove(container)
        if chosen is not None and chosen.name != name:
            chosen.rename(name)
            chosen.reload()
    return chosen, rest


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
        chosen.sort(key=lambda container: PROXY_LABEL not in container.labels)  # nothing new comes in then
        for container in chosen:
            if PROXY_LABEL in container.labels:
                if address := address_of(container):
                    keep_address(paths, container.labels[LABEL], address)
            else:
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
            proxy.drop_sockets(engine, name)
    for name in sorted({container.labels[LABEL] for container in chosen}):
        if kept := kept_address(paths, name):
            say(f"kept for the next `invoke serve --recipe {name}`: {kept.words}")
    return tuple(str(container.name) for container in chosen if PROXY_LABEL not in container.labels)
