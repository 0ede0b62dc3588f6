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
from sparkpin.serve import cluster, keys, launch, linked, memory_limit, waiting
from sparkpin.serve.address import UNCHANGED, Address, AddressOptions, read_tls
from sparkpin.serve.cluster import Checked, ClusterOptions
from sparkpin.serve.launch import Health, LaunchOrder
from sparkpin.serve.ports import require_free
from sparkpin.serve.proxy import ProxyOrder, drop_sockets
from sparkpin.serve.rules import RISKS
from sparkpin.serve.served import (
    COMMAND_LABEL,
    FORMER,
    LABEL,
    MODEL_LABEL,
    PROXY,
    PROXY_LABEL,
    RELEASE_LABEL,
    Served,
    address_of,
    client_of,
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
    drain: float | None = None,
    where: ClusterOptions | None = None,
) -> Served:
    """Serve a release and return once it answers a real request. One that already runs is left alone; where only its
    address is to be another, or the key, its proxy is changed.

    Another release of the home's recipe is stopped first, and new requests wait. When the new one does not become
    ready, the former one answers again.

    Args:
        options: what of the address is to be other than it was. At first the port is the recipe's own (`--port` of its
            command, else 8000), the host 127.0.0.1.
        gpus: give the container all GPUs.
        where: the machines of a release that is for several; None: as before.
        drain: seconds that the former one has for requests under way; None: DRAIN_SECONDS.

    Raises:
        BusyError: someone else has the port; another home's server, too.
        InputError: an option that is none; a certificate that does not fit.
        SmokeError: the server did not become ready; with a post-mortem.
        Detached: Ctrl-C while it started; it goes on.
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
        proxy, former_proxy = recovered(engine, name + PROXY)
        if former_proxy is not None:
            launch.remove(former_proxy)
        server, former = recovered(engine, name)
        together = (where or ClusterOptions()).applied(cluster.remembered(paths, release.recipe), release)
        machines = connections.enter_context(cluster.connected(engine, together.urls)) if together else ()
        server = linked.join_peers(connections, paths, release.recipe, server, machines)
        address = new_address(paths, engine, release, options, proxy)
        pem = read_tls(address.cert, address.tls_key) if address.cert else None
        runs = server if server is not None and is_running(server) else None
        checked = None
        if together:
            freed = linked.freed_by(paths, runs) if runs is not None else {}
            checked = cluster.check(paths, machines, together, release, checkpoint, address.host, freed)
            cluster.remember(paths, release.recipe, checked.cluster)  # now, for a start that nobody waits for goes on
        key = key_of(paths, release, address.host)  # may make one, which a command that is refused is not to leave
        same = runs is not None and goes_on(runs, release, checked)
        space = None if same else memory_limit.room_for(paths, engine, release, checkpoint)
        if not same and server is not None and former is not None:
            server, former = one_of(name, server, former), None
        if space and space.why:
            say(f"no memory plan ({space.why}): its limit is an estimate")
        return Switch(
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
            running=runs if same else None,
            old=former if same else server,
            checked=checked,
            room=space,
            drain=DRAIN_SECONDS if drain is None else drain,
        ).carry_out()


def new_address(
    paths: Paths, engine: Engine, release: Release, options: AddressOptions, proxy: Container | None
) -> Address:
    """BusyError where somebody else has the port."""
    known = address_of(proxy)
    last = known or kept_address(paths, release.recipe)
    if last and not known:
        say(f"the address is as it was before `invoke stop`: {last.words}")
    address = options.applied(last or Address.of_command(release.argv))
    for path in set(address.allow) & RISKS.keys():
        say(f"warning: --allow {path}: {RISKS[path]}")
    if not (proxy and is_running(proxy) and known and known.port == address.port):  # a new proxy waits for the old one
        require_free(engine, address.host, address.port)
    return address


def goes_on(server: Container, release: Release, checked: Checked | None) -> bool:
    """Whether it is what is to be served."""
    if server.labels.get(RELEASE_LABEL) != release.tag:
        return False
    if not (linked.runs_everywhere(server) and linked.cluster_of(server) == (checked.cluster if checked else None)):
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
    given = flag_value(release.argv, "--api-key") or release.env.get("VLLM_API_KEY")
    return given or keys.key_for(paths, release.recipe, host)


def command_mark(release: Release) -> str:
    """Tells one command, environment and image from another, and where a server listens from where others did."""
    text = json.dumps([release.image, list(release.argv), release.env, launch.SOCKET_PATH], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recovered(engine: Engine, name: str) -> tuple[Container | None, Container | None]:
    """The container of that name, and the one before it where that is there still, after what a killed run left: one
    that was made and never started does not count."""
    found, former = find(engine, name), find(engine, name + FORMER)
    if found is not None and found.status == "created":
        launch.remove(found)
        found = None
    if found is None and former is not None:
        launch.rename(former, name)
        return former, None
    return found, former


def one_of(name: str, server: Container, former: Container) -> Container:
    """Of two that a switch left that was broken off: the one that answers. The other is removed."""
    if launch.asks(server):
        launch.remove(former)
        return server
    launch.remove(server)
    launch.rename(former, name)
    return former


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
                label = linked.RECIPE_LABEL
                peers = [(m, one) for m, one in others if one.labels.get(label) == container.labels[LABEL]]
                others = [pair for pair in others if pair not in peers]
                container = linked.Linked(container, peers) if peers else container
                say(f"stopping {container.name}{''.join(f', {peer.name} at {m.where}' for m, peer in peers)}")
                container.stop(timeout=STOP_SECONDS)
            launch.remove(container)
        for machine, other in others:  # an earlier `stop` could not reach it, or rank 0 was removed by hand
            say(f"stopping {other.name} at {machine.where}")
            launch.remove(other)
        for name in {name_of(paths, container.labels[LABEL]) for container in chosen}:
            drop_sockets(engine, name)
    return tuple(str(container.name) for container in chosen if PROXY_LABEL not in container.labels)
