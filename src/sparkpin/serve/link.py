"""The network that the machines of one model share: which interface it is on each, and who else is on it.

torch's store and the ports of its workers ask nobody for a key, and some take pickles: who can reach them runs code in
the containers. So a link has to be a network of its own (docs/nodes.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network, ip_address

from sparkpin.core.errors import HostError, InputError
from sparkpin.core.terminal import say


@dataclass(frozen=True)
class Interface:
    """place: its address and network; rdma: its active devices of /sys/class/infiniband."""

    name: str
    place: IPv4Interface
    up: bool
    rdma: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return str(self.place.ip)


@dataclass(frozen=True)
class HostFacts:
    """What `inside_link.look` tells of a machine. record: SHA-256 of the record of its checkpoint; gpus: models; where:
    its URL, or "here", which it does not know."""

    interfaces: tuple[Interface, ...]
    default_routes: tuple[str, ...]
    driver: str
    gpus: tuple[str, ...]
    memory_available: int
    record: str
    where: str = ""

    @property
    def usable(self) -> list[Interface]:
        return [face for face in self.interfaces if face.up and not face.place.network.is_loopback]

    def within(self, network: IPv4Network) -> list[Interface]:
        return [face for face in self.usable if face.place.network == network]


def listed(faces: Iterable[Interface]) -> str:
    return ", ".join(f"{face.address} ({face.name}, {face.place.network})" for face in faces) or "none"


def choose(hosts: Sequence[HostFacts], wanted: str) -> tuple[Interface, ...]:
    """The interface of the link that is meant on each host, with the RDMA devices that NCCL is to use. InputError for
    one that is not there on each.

    wanted: an interface of this machine (rank 0), or a network. A Spark's cable has two, so none is chosen by itself.
    """
    network = named(hosts[0], wanted)
    faces: list[Interface] = []
    for host in hosts:
        found = host.within(network)
        if len(found) != 1 or found[0].address in [face.address for face in faces]:
            raise InputError(
                f"{host.where}: expected one interface in {network}, with an address of its own; there: "
                f"{listed(host.usable)}",
                next_step="give each machine one address of the link's network, and name each machine once",
            )
        faces += found
    return tuple(replace(face, rdma=rdma) for face, rdma in zip(faces, devices(hosts, faces), strict=True))


def named(host: HostFacts, wanted: str) -> IPv4Network:
    for face in host.usable:
        if wanted == face.name:
            return face.place.network
    try:
        return IPv4Network(wanted)
    except ValueError:
        raise InputError(
            f"--link: got {wanted or 'none'}, expected a network, or an interface of this machine that is up, with "
            f"an IPv4 address; here: {listed(host.usable)}",
            next_step="--link INTERFACE, or --link 192.168.100.0/24",
        ) from None


def devices(hosts: Sequence[HostFacts], faces: Sequence[Interface]) -> list[tuple[str, ...]]:
    """NCCL's devices: those of the link, and the other half of the same port where it is up and has an address on every
    machine. A Spark shows that as a device of its own (rocep1s0f0 and roceP2p1s0f0). None unless each machine has some.
    """
    found = []
    for host, face in zip(hosts, faces, strict=True):
        ports = {port_of(device) for device in face.rdma}
        twins = [device for other in host.usable for device in other.rdma if port_of(device) in ports]
        found.append(tuple(dict.fromkeys((*face.rdma, *twins))))
    if len({len(some) for some in found}) > 1:
        found = [face.rdma for face in faces]
    return found if all(found) else [() for _ in hosts]


def port_of(device: str) -> str:
    return re.sub(r"P\d+(?=p\d)", "", device)


def require_same_gpus(hosts: Sequence[HostFacts]) -> None:
    """HostError where GPUs or their drivers differ: sums of two kinds would be in two precisions."""
    kinds = {(host.driver, host.gpus) for host in hosts}
    if len(kinds) > 1:
        shown = "; ".join(f"{host.where}: {', '.join(host.gpus)}, driver {host.driver or 'none'}" for host in hosts)
        raise HostError(
            f"GPU or NVIDIA driver differs: {shown}",
            next_step="use machines of one kind, with the same driver on each (docs/nodes.md, Limits)",
        )


def require_own(hosts: Sequence[HostFacts], link: IPv4Network, api: str, *, shared: bool) -> None:
    """HostError for a link that others may be on; a warning if it is to be taken all the same (`shared`). api: the
    address of the proxy."""
    routed = [host for host in hosts if any(face.name in host.default_routes for face in host.within(link))]
    found = [f"{host.where}: a default route leads through {link}" for host in routed]
    listens = ip_address(api)
    if listens in link or listens.is_unspecified:
        found.append(f"here: clients are served at {api}, which is also on the link")
    if found and not shared:
        raise HostError(
            f"{link} is no network of the machines' own: {'; '.join(found)}. torch's ports there ask nobody for a key, "
            "and who reaches them can run code in the containers",
            next_step="a cable between the machines with addresses of its own, and --link; --shared-link takes it as "
            "it is",
        )
    for one in found:
        say(f"warning: {one}; torch's ports are open to whoever is there (--shared-link)")
