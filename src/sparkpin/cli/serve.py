"""`invoke serve`, `stop`."""

from __future__ import annotations

import contextlib
from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli.choose import choose_known, choose_recipe, require_recipe
from sparkpin.cli.client import told_context
from sparkpin.cli.notes import how_to_carry, say_overruled_of
from sparkpin.cli.options import Drain, KnownRecipe, Link, Machines, SharedLink, Stack
from sparkpin.cli.tasks import task
from sparkpin.core.errors import BusyError, InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.releases import current as retention
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve import linked, nodes, service
from sparkpin.serve import status as serving_tasks
from sparkpin.serve.address import UNCHANGED, AddressOptions
from sparkpin.serve.nodes import NodesOptions
from sparkpin.serve.served import FRONT, address_of, find, status
from sparkpin.serve.switching import Test
from sparkpin.serve.waiting import Detached
from sparkpin.smoke.server import clear_leftovers, is_testing

ANYWHERE = NodesOptions()


@task("serve")
def serve(
    tag: Annotated[str | None, "release to serve (default: the recipe's current one)"] = None,
    *,
    recipe: KnownRecipe = None,
    stack: Stack = None,
    port: Annotated[int | None, "port on this machine (default: the last one used, else the recipe's)"] = None,
    host: Annotated[
        str | None, "address to listen on (default: the last one used, else 127.0.0.1); others require an API key"
    ] = None,
    tls_cert: Annotated[
        str | None, "PEM file of a TLS certificate (default: the last one used; none: plain HTTP)", "FILE"
    ] = None,
    tls_key: Annotated[str | None, "PEM file of the certificate's key", "FILE"] = None,
    allow: Annotated[
        str | None, "more paths of vLLM to open, such as /v1/embeddings,/score (default: the last ones)", "PATHS"
    ] = None,
    limit: Annotated[
        str | None, "limits to override, such as requests=64,restarts=3 (default: the last ones)", "LIMITS"
    ] = None,
    nodes: Machines = None,
    link: Link = None,
    shared_link: SharedLink = False,
    drain: Drain = None,
    unit: Annotated[bool, "print a systemd unit that serves it after a reboot; serve nothing now"] = False,
) -> None:
    """Serve a release, replacing the recipe's running server.

    invoke serve v2 --port 8001
    invoke serve --host 0.0.0.0 --tls-cert spark.pem --tls-key spark.key
    """
    options = AddressOptions(port=port, host=host, tls_cert=tls_cert, tls_key=tls_key, allow=allow, limit=limit)
    where = NodesOptions(nodes, link, shared_link)
    if not unit:
        name = choose_recipe(Paths.from_env(), recipe, stack) if stack and not tag else recipe
        serve_release(recipe=name, release=tag, options=options, drain=drain, where=where)
        return
    paths = Paths.from_env()
    chosen = chosen_release(paths, recipe, tag)
    if tag:
        raise InputError(
            "--unit goes without a TAG: the unit serves what is current then",
            next_step=f"invoke promote {chosen.tag}, then invoke serve --unit --recipe {chosen.recipe}",
        )
    if where != NodesOptions():
        raise InputError(
            "--unit goes without --nodes, --link and --shared-link: the unit serves on the machines that it knows",
            next_step=f"invoke serve --recipe {chosen.recipe} --nodes ... once, which keeps them; then --unit",
        )
    serving_tasks.show_unit(paths, chosen.recipe, options)


def chosen_release(paths: Paths, recipe: str | None, tag: str | None) -> Release:
    """The one that is named, else the recipe's current one."""
    records = Releases(paths)
    if tag:
        return records.get(tag, recipe)
    name = choose_known(paths, recipe)
    require_recipe(paths, records, name)
    if records.current_tag(name) is None and is_testing(paths):
        raise BusyError(
            f"recipe {name!r} has no current release yet, and a smoke test is under way",
            next_step="wait until `invoke up` or ./install.sh has ended, then invoke serve",
        )
    return retention.require_current(records, name)


def serve_release(
    *,
    recipe: str | None = None,
    release: str | None = None,
    options: AddressOptions = UNCHANGED,
    drain: int | None = None,
    where: NodesOptions = ANYWHERE,
    test: Test | None = None,
    becomes_current: bool = False,
) -> None:
    """drain, test: as `service.start`; becomes_current: the caller makes it the current release next."""
    paths = Paths.from_env()
    records = Releases(paths)
    chosen = chosen_release(paths, recipe, release)
    engine = engine_of(paths)
    if why := obstacle(paths, engine, chosen, nodes=1):
        raise InputError(
            f"{chosen.tag} cannot be served here: {why}",
            next_step=f"where it can run: {how_to_carry(records, chosen)}",
        )
    if not chosen.smoke_passed and not test:
        say(f"warning: {chosen.tag} is {chosen.state}: no smoke test stands behind its answers")
    require_consistent(paths, chosen)
    say_overruled_of(paths, chosen)
    clear_leftovers(paths, engine)  # a killed smoke test's server has the memory that this one wants
    gpus, checkpoint = uses_gpu(paths, chosen), checkpoint_of(paths, chosen)
    try:
        served = service.start(
            paths, engine, chosen, checkpoint, options=options, gpus=gpus, drain=drain, where=where, test=test
        )
    except Detached as detached:
        show(f"detached: {detached}\nnext: invoke status, invoke logs --follow")
        return
    address = address_of(find(engine, served.container + FRONT))
    with contextlib.suppress(InputError):
        context = None
        context = told_context(paths, served, chosen)
    scripted = chosen.demands.scripted
    if not test:  # `up` shows this at its end, below the table
        for line in serving_tasks.told(paths, served, address.cert if address else "", context, scripted):
            show(line)
    current = records.current(chosen.recipe)
    if current and current.tag != chosen.tag and not becomes_current:
        show(f"note: current is {current.tag}, and rollback goes by that; this one: invoke promote {chosen.tag}")


@task("serve")
def stop(
    *, recipe: Annotated[str | None, "recipe whose server to stop (default: all of this data directory)"] = None
) -> None:
    """Stop what `serve` started."""
    paths = Paths.from_env()
    engine = engine_of(paths)
    known = [its for name in nodes.recipes_kept(paths) if recipe in (None, name) and (its := nodes.kept(paths, name))]
    with linked.reached(sorted({url for its in known for url in its.urls} - {nodes.HERE})) as (machines, _):
        clear_leftovers(paths, engine, [machine.engine for machine in machines])
    stopped = service.stop(paths, engine, recipe)
    for name in stopped:
        show(f"stopped {name}")
    if not stopped:
        show("nothing is served")
        for served in status(engine):
            show(f"not touched: {served.container}, {served.release} of the home {served.home or '(not known)'}")
