"""A release as a service: one container for each recipe of a home, its port published on this machine only unless the
user says otherwise (docs/serving.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release
from sparkpin.serve import cluster, launch, linked, memory_limit
from sparkpin.serve import served as records
from sparkpin.serve.address import UNCHANGED, Address, AddressOptions, key_of, read_tls, require_free
from sparkpin.serve.cluster import Checked, ClusterOptions
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.linked import Part
from sparkpin.serve.memory_limit import Room
from sparkpin.serve.proxy import RULES
from sparkpin.serve.proxy import remove as remove_proxy
from sparkpin.serve.served import Served, Service, find, is_running
from sparkpin.serve.status import service_of
from sparkpin.serve.switching import DRAIN_SECONDS, Detached, Switch
from sparkpin.smoke.server import Asked, Place, Server


def start(
    paths: Paths,
    engine: Engine,
    release: Release,
    checkpoint: Path,
    *,
    options: AddressOptions = UNCHANGED,
    drain: float = DRAIN_SECONDS,
    where: ClusterOptions | None = None,
) -> Served:
    """Serve a release and return once it answers a real request. One that already runs is left alone; where only its
    address is to be another, or the key, its proxy is changed.

    Another release of the home's recipe is stopped first, and new requests wait. When the new one does not become
    ready, the former one answers again.

    options, where: what of address and machines is to be other than it was; drain: seconds that the former one has for
    requests under way.

    BusyError where someone else has the port, another home's server, too; InputError for an option that is none, or a
    certificate that does not fit; SmokeError with a post-mortem where it did not become ready; Detached on Ctrl-C while
    it started: it goes on.
    """
    running.require_readable(checkpoint)
    running.require_here(engine)
    running.require_image(engine, release)
    home, recipe = paths.home, release.recipe
    with files.lock(home / "serve" / f".{recipe}.lock", on_wait=f"waiting for another `invoke serve` of {recipe}"):
        record = records.read(home, recipe)
        together = (where or ClusterOptions()).applied(record.cluster, release)
        with cluster.connected(engine, together.urls if together else (), record.urls) as machines:
            there = linked.find_parts(str(home), recipe, machines.values())
            if record.former and there and linked.is_of(there, record.former) and not linked.is_of(there, record):
                record = record.former  # the switch was broken off before it began
            address = new_address(paths, engine, release, options, record, is_there=bool(there))
            checked = None
            if together:
                ends = {part.machine.where for part in there if is_running(part.container)}
                freed = {one.where: one.needed for one in record.orders if one.where in ends}
                checked = cluster.check(paths, machines, together, release, checkpoint, address.host, freed)
            key_of(paths, recipe, address)  # one that others can read is refused before anything begins
            answers = not record.former or (there and linked.is_of(there, record) and launch.asks(there[0].container))
            known = (record if answers else record.former or record).model_copy(update={"former": None})
            room, same = None, goes_on(there, release, record, checked)
            if same:
                orders = tuple(replace(one, restarts=address.limits.restarts) for one in record.orders)
            else:
                room = memory_limit.room_for(paths, engine, release, checkpoint)
                orders = linked.orders_of(order_of(paths, release, checkpoint, room, address.limits.restarts), checked)
            wanted = Service(
                address=address,
                cluster=checked.cluster if checked else record.cluster,
                orders=orders,
                former=known if known.orders and not (answers and same) else None,
            )
            return Switch(paths, engine, recipe, wanted, known, machines, there, same, room, drain).carry_out()


def new_address(
    paths: Paths, engine: Engine, release: Release, options: AddressOptions, record: Service, *, is_there: bool
) -> Address:
    """BusyError where somebody else has the port. is_there: the recipe has a server."""
    name, last = records.name_of(paths, release.recipe), record.address
    proxy = find(engine, name + records.PROXY)
    if last is None and (is_there or proxy):
        cause = f"{name} runs without a record: its address and options are not known"
        raise InputError(cause, next_step="invoke stop, then serve with the options that you want")
    if last and proxy is None:
        words = ", ".join(f"{name} {value}" for name, value in last.model_dump(exclude_defaults=True).items())
        say(f"the address is as it was before `invoke stop`: {words or 'as by default'}")
    address = options.applied(last or Address.of_command(release.argv))
    if address.cert:
        read_tls(address.cert, address.tls_key)
    if not (address.cert or address.is_local):
        say(f"warning: {address.host} without TLS: the key and all text travel in the clear (--tls-cert, --tls-key)")
    for why, risky in RULES["risks"].items():
        for path in set(address.allow).intersection(risky):
            say(f"warning: --allow {path}: {why}")
    if not (proxy and is_running(proxy) and (not last or last.port == address.port)):  # a new proxy waits for the old
        require_free(engine, address.host, address.port)
    return address


def goes_on(parts: Sequence[Part], release: Release, record: Service, checked: Checked | None) -> bool:
    """Whether what is to be served runs already: a release's tag has a hash of its image and command."""
    if not (record.orders and parts and parts[0].is_here and is_running(parts[0].container)):
        return False
    if not linked.is_of(parts, record) or record.orders[0].release.tag != release.tag:
        return False
    its = record.cluster if record.orders[1:] else None
    is_whole = linked.runs_everywhere(parts, len(record.orders)) and its == (checked.cluster if checked else None)
    if not is_whole:
        say(f"{release.tag} runs on other machines, or not on all of them")
    return is_whole


def order_of(paths: Paths, release: Release, checkpoint: Path, room: Room, restarts: int) -> LaunchOrder:
    """For this machine, or for what all have in common."""
    if room.why:
        say(f"no memory plan ({room.why}): its limit is an estimate")
    labels = {
        HOME_LABEL: str(paths.home),
        records.LABEL: release.recipe,
        records.RELEASE_LABEL: release.tag,
        records.MODEL_LABEL: served_name(release.argv),
    }
    return LaunchOrder(
        release=release,
        checkpoint=checkpoint.absolute(),
        memory=room.limit,
        compilers=room.compilers,
        gpus=room.has_gpu,
        labels=labels,
        timeout=running.ready_timeout(checkpoint),
        restarts=restarts,
    )


@contextlib.contextmanager
def started(paths: Paths, engine: Engine, release: Release, checkpoint: Path) -> Iterator[Asked]:
    """For a test of the server that stays, as `start` starts it, by a client of its address with its key. SmokeError
    where another run has taken it away meanwhile: that is no fault of the release."""
    try:
        served = start(paths, engine, release, checkpoint)
    except Detached:
        raise KeyboardInterrupt from None  # nobody is to go on with what was not tested
    if container := find(engine, served.container):
        with records.client_of(served, key_of(paths, release.recipe, served.address), timeout=120) as client:
            yield Server(release, {container: Place(engine, "", None)}), client
    runs = records.running_release(paths, engine, release.recipe)
    if not container or not find(engine, served.container + records.PROXY) or runs != release.tag:
        cause = f"{release.tag} was stopped or replaced while it was tested"
        raise SmokeError(cause, next_step=f"invoke smoke {release.tag}")


def stop(paths: Paths, engine: Engine, recipe: str | None) -> tuple[str, ...]:
    """Stop and remove the containers of a recipe of this home, or all of this home; returns their names.

    InputError for a recipe of which nothing is served.
    """
    here = {one.labels[records.LABEL] for one in records.services(engine, paths.home)}
    chosen = [recipe] if recipe else sorted(here | records.recorded(paths.home).keys())
    stopped = [name for one in chosen for name in stop_recipe(paths, engine, one)]
    if recipe and not stopped:
        service_of(paths, engine, recipe)  # an InputError, since there is none
    return tuple(stopped)


def stop_recipe(paths: Paths, engine: Engine, recipe: str) -> list[str]:
    name, ended = records.name_of(paths, recipe), {"orders": (), "former": None}
    # What is to be stopped is not started again, however this ends.
    record = records.change(paths.home, recipe, lambda record: record.model_copy(update=ended))
    with cluster.connected(engine, (), record.urls) as machines:
        is_there = remove_proxy(engine, name)  # nothing new comes in then
        there = linked.find_parts(str(paths.home), recipe, machines.values())
        for part in there:
            say(f"stopping {part.container.name}{'' if part.is_here else f' at {part.machine.where}'}")
        linked.stop(paths, recipe, there)
        remove_proxy(engine, name)
    return [name] if there or is_there else []
