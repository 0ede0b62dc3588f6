"""`invoke serve`, `stop`."""

from __future__ import annotations

import contextlib

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli.choose import choose_known, choose_recipe, require_recipe
from sparkpin.cli.client import told_context
from sparkpin.cli.notes import how_to_carry, say_overruled_of
from sparkpin.core.errors import BusyError, InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.releases import current as retention
from sparkpin.releases.record import Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve import linked, nodes, service
from sparkpin.serve import status as serving_tasks
from sparkpin.serve.address import UNCHANGED, AddressOptions
from sparkpin.serve.nodes import NodesOptions
from sparkpin.serve.served import FRONT, address_of, find, status
from sparkpin.serve.switching import Test
from sparkpin.serve.waiting import Detached
from sparkpin.smoke.server import clear_leftovers, is_testing


def serve(
    *,
    recipe: str | None,
    release: str | None,
    options: AddressOptions = UNCHANGED,
    stack: str | None = None,
    drain: int | None = None,
    unit: bool = False,
    where: tuple[str | None, str | None, bool] = (None, None, False),
    test: Test | None = None,
    becomes_current: bool = False,
) -> None:
    """unit: print a systemd unit that does so after a reboot, and serve nothing. drain, test: as `service.start`;
    where: the fields of `NodesOptions`; becomes_current: the caller makes it the current release next."""
    paths = Paths.from_env()
    records = Releases(paths)
    if release:
        chosen = records.get(release, recipe)
        if unit:
            raise InputError(
                "--unit goes without a TAG: the unit serves what is current then",
                next_step=f"invoke promote {chosen.tag}, then invoke serve --unit --recipe {chosen.recipe}",
            )
    else:
        name = choose_recipe(paths, recipe, stack) if stack else choose_known(paths, recipe)
        require_recipe(paths, records, name)
        if records.current_tag(name) is None and is_testing(paths):
            raise BusyError(
                f"recipe {name!r} has no current release yet, and a smoke test is under way",
                next_step="wait until `invoke up` or ./install.sh has ended, then invoke serve",
            )
        chosen = retention.require_current(records, name)
    if unit and where != (None, None, False):
        raise InputError(
            "--unit goes without --nodes, --link and --shared-link: the unit serves on the machines that it knows",
            next_step=f"invoke serve --recipe {chosen.recipe} --nodes ... once, which keeps them; then --unit",
        )
    if unit:
        serving_tasks.show_unit(paths, chosen.recipe, options)
        return
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
    clear_leftovers(paths, engine, say)  # a killed smoke test's server has the memory that this one wants
    gpus, checkpoint = uses_gpu(paths, chosen), checkpoint_of(paths, chosen)
    try:
        asked = NodesOptions(*where)
        served = service.start(
            paths, engine, chosen, checkpoint, options=options, gpus=gpus, drain=drain, say=say, where=asked, test=test
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


def stop(*, recipe: str | None) -> None:
    paths = Paths.from_env()
    engine = engine_of(paths)
    known = [its for name in nodes.recipes_kept(paths) if recipe in (None, name) and (its := nodes.kept(paths, name))]
    with linked.reached(sorted({url for its in known for url in its.urls} - {nodes.HERE})) as (machines, _):
        clear_leftovers(paths, engine, say, [machine.engine for machine in machines])
    stopped = service.stop(paths, engine, recipe, say)
    for name in stopped:
        show(f"stopped {name}")
    if not stopped:
        show("nothing is served")
        for served in status(engine):
            show(f"not touched: {served.container}, {served.release} of the home {served.home or '(not known)'}")
