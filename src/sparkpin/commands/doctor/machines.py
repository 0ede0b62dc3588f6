"""`invoke doctor --nodes`: the machines of a release that is for several, and the link between them."""

from __future__ import annotations

from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.pins.nodes import STORE_PORT, nodes_of
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import uses_gpu
from sparkpin.serve import link as links
from sparkpin.serve import nodes
from sparkpin.serve.address import Address
from sparkpin.serve.link import HostFacts
from sparkpin.serve.memory.plan import gib
from sparkpin.serve.ports import listeners
from sparkpin.serve.served import kept_address

COLUMNS = ("machine", "interface", "address", "MTU", "RDMA", "GPU, driver", "kernel", "memory free")


def machines(*, urls: str, link: str | None, recipe: str | None = None) -> None:
    """Look at each machine by a container of the newest release for that many. HostError, after all is told, where the
    link is not theirs alone or they differ; each machine that is away or has no image is named."""
    paths = Paths.from_env()
    wanted = nodes.urls_of(urls)
    release = release_for(paths, len(wanted), recipe)
    api = (kept_address(paths, release.recipe) or Address()).host
    with nodes.connected(engine_of(paths), wanted) as found:

        def look(machine: nodes.Machine) -> HostFacts:
            nodes.require_image(machine, release)
            return nodes.looked_at(machine, release, {})

        hosts = nodes.each(found, look)
        chosen = links.choose(hosts, link)
        rows = [
            (
                host.where,
                face.name,
                f"{face.address} ({face.network})",
                str(face.mtu),
                ", ".join(devices) or "-",
                ", ".join([*host.gpus, host.driver]).strip(", ") or "-",
                host.kernel,
                gib(host.memory_available),
            )
            for host, face, devices in zip(hosts, chosen.interfaces, chosen.rdma, strict=True)
        ]
        terminal.table(COLUMNS, rows)
        links.require_same(hosts, chosen, gpu=uses_gpu(paths, release))
        listening = [ip for ip, _ in listeners(STORE_PORT)]
        seconds = nodes.meet(chosen, found, release, busy=bool(listening))
        terminal.show(f"round trip over the link: {seconds * 1e6:.0f} microseconds; packets of MTU {chosen.mtu} arrive")
        if listening:
            terminal.show(f"port {STORE_PORT}, of torch's store, is listened on at {', '.join(listening)}")
        for line in links.exposed(hosts[0], chosen, listening):
            terminal.show(line)
        links.require_own(hosts, chosen, api, shared=False)
        terminal.show("nobody else is known on the link, and no default route leads through it")


def release_for(paths: Paths, count: int, recipe: str | None) -> Release:
    known = [one for one in Releases(paths).all() if nodes_of(one.argv) == count and recipe in (None, one.recipe)]
    if not known:
        raise InputError(
            f"no release here is for {count} machines, and an image of one looks at them",
            next_step="invoke up --recipe RECIPE, with `nodes` in the recipe (docs/nodes.md); then invoke export",
        )
    return max(known, key=lambda one: one.age)
