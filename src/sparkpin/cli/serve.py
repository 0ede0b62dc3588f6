"""`invoke serve`, `stop`."""

from __future__ import annotations

from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli.choose import current_of
from sparkpin.cli.client import told_context
from sparkpin.cli.notes import how_to_carry
from sparkpin.cli.options import KnownRecipe, Link, Machines, SharedLink
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.releases.record import Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve import nodes, service
from sparkpin.serve import status as serving_tasks
from sparkpin.serve.address import UNCHANGED, AddressOptions
from sparkpin.serve.nodes import NodesOptions
from sparkpin.serve.served import FRONT, address_of, find
from sparkpin.serve.waiting import Detached
from sparkpin.smoke.server import clear_leftovers

ANYWHERE = NodesOptions()


@task("serve")
def serve(
    paths: Paths,
    tag: Annotated[str | None, "release to serve (default: the recipe's current one)"] = None,
    *,
    recipe: KnownRecipe = None,
    port: Annotated[int | None, "port on this machine (default: the last one used, else the recipe's)"] = None,
    host: Annotated[str | None, "address (default: the last, else 127.0.0.1; others require a key)"] = None,
    tls_cert: Annotated[str | None, "PEM file of a TLS certificate (default: the last one; none: HTTP)", "FILE"] = None,
    tls_key: Annotated[str | None, "PEM file of the certificate's key", "FILE"] = None,
    allow: Annotated[str | None, "more paths of vLLM, such as /score,/v1/embeddings (default: the last)"] = None,
    limit: Annotated[str | None, "other limits, such as requests=64,restarts=3 (default: the last)"] = None,
    nodes: Machines = None,
    link: Link = None,
    shared_link: SharedLink = False,
    drain: Annotated[int | None, "seconds that requests get to finish before it is replaced (default: 30)"] = None,
    unit: Annotated[bool, "print a systemd unit that serves it after a reboot; serve nothing now"] = False,
) -> None:
    """Serve a release, replacing the recipe's running server.

    invoke serve v2 --port 8001
    invoke serve --host 0.0.0.0 --tls-cert spark.pem --tls-key spark.key
    """
    options = AddressOptions(port=port, host=host, tls_cert=tls_cert, tls_key=tls_key, allow=allow, limit=limit)
    where = NodesOptions(nodes, link, shared_link)
    if not unit:
        return serve_release(paths, recipe=recipe, release=tag, options=options, drain=drain, where=where)
    if tag or where != ANYWHERE:
        cause = "--unit goes without TAG and machines: it serves what is current then, on the machines that it knows"
        raise InputError(cause, next_step="first invoke promote TAG, or invoke serve --nodes ..., which keeps them")
    serving_tasks.show_unit(paths, current_of(paths, recipe).recipe, options)


def serve_release(
    paths: Paths,
    *,
    recipe: str | None = None,
    release: str | None = None,
    options: AddressOptions = UNCHANGED,
    drain: int | None = None,
    where: NodesOptions = ANYWHERE,
) -> None:
    """By default the recipe's current one. drain: as of `service.start`."""
    chosen = Releases(paths).get(release, recipe) if release else current_of(paths, recipe)
    engine = engine_of(paths)
    if why := obstacle(paths, engine, chosen, nodes=1):
        step = f"where it can run: {how_to_carry(Releases(paths), chosen)}"
        raise InputError(f"{chosen.tag} cannot be served here: {why}", next_step=step)
    if not chosen.smoke_passed:
        say(f"warning: {chosen.tag} is {chosen.state}: no smoke test stands behind its answers")
    require_consistent(paths, chosen)
    clear_leftovers(paths, engine)  # a killed smoke test's server has the memory that this one needs
    gpus, checkpoint = uses_gpu(paths, chosen), checkpoint_of(paths, chosen)
    try:
        served = service.start(paths, engine, chosen, checkpoint, options=options, gpus=gpus, drain=drain, where=where)
    except Detached as detached:
        show(f"detached: {detached}\nnext: invoke status, invoke logs --follow")
        return
    address, context = address_of(find(engine, served.container + FRONT)), told_context(paths, served, chosen)
    cert = address.cert if address else ""
    for line in serving_tasks.told(paths, served, cert, context, scripted=chosen.demands.scripted):
        show(line)


@task("serve")
def stop(
    paths: Paths, *, recipe: Annotated[str | None, "recipe whose server to stop (default: all servers)"] = None
) -> None:
    """Stop what `serve` started."""
    engine = engine_of(paths)
    with nodes.reached(nodes.urls_kept(paths, recipe)) as (machines, _):
        clear_leftovers(paths, engine, [machine.engine for machine in machines])
    stopped = service.stop(paths, engine, recipe)
    show("\n".join(f"stopped {name}" for name in stopped) or "nothing is served")
