"""The network that the machines of one model share: which interface it is on each, and who else is on it. Pure.

torch's store and the ports of its workers ask nobody for a key, and some take pickles: who can reach them runs code in
the containers. So a link has to be a network of its own (docs/nodes.md).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparkpin.core.errors import HostError, InputError


@dataclass(frozen=True)
class Interface:
    """place: its address and network; rdma: its active devices of /sys/class/infiniband."""

    name: str
    place: ipaddress.IPv4Interface
    up: bool
    rdma: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return str(self.place.ip)

    @property
    def network(self) -> ipaddress.IPv4Network:
        return self.place.network


@dataclass(frozen=True)
class HostFacts:
    """What `inside_link.look` tells of a machine. where: its URL, or "here"; record: SHA-256 of the record of its
    checkpoint; gpus: models."""

    where: str
    interfaces: tuple[Interface, ...]
    default_routes: tuple[str, ...]
    driver: str
    gpus: tuple[str, ...]
    memory_available: int
    record: str


@dataclass(frozen=True)
class Link:
    """interfaces: of each machine, in the order of the ranks; rdma: of each, the devices that NCCL is to use."""

    network: ipaddress.IPv4Network
    interfaces: tuple[Interface, ...]
    rdma: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        ends = ", ".join(f"{one.address} ({one.name})" for one in self.interfaces)
        how = "RDMA by " + ", ".join(self.rdma[0]) if self.rdma[0] else "TCP, no RDMA device"
        return f"{self.network}: {ends}; {how}"


def choose(hosts: Sequence[HostFacts], wanted: str | None) -> Link:
    """The link that is meant. wanted: an interface of this machine (rank 0), or a network; None: the only one that
    could be. InputError for one that is not there on each machine."""
    if wanted is None:
        candidates = {face.network: face for face in usable(hosts[0])}
        common = [network for network in candidates if all(network in networks(host) for host in hosts)]
        own = [network for network in common if not any(routed(host, network) for host in hosts)]
        if len(own) != 1:
            found = ", ".join(f"{candidates[network].name} ({network})" for network in common) or "none"
            what = "none of them is" if not own else "several are"
            raise InputError(
                f"--link: networks that all machines are in: {found}; {what} without a default route",
                next_step="--link INTERFACE (of this machine) or --link NETWORK, such as 192.168.100.0/24",
            )
        network = own[0]
    else:
        network = named(hosts[0], wanted)
    faces = []
    for host in hosts:
        found_here = [face for face in usable(host) if face.network == network]
        if len(found_here) != 1:
            seen = ", ".join(f"{face.name} {face.address} ({face.network})" for face in usable(host)) or "no address"
            raise InputError(
                f"{host.where}: {'no interface' if not found_here else 'more than one interface'} in {network}, which "
                f"--link means; there: {seen}",
                next_step="give each machine one address of the same network on the interface of the link",
            )
        faces.append(found_here[0])
    if len({face.address for face in faces}) < len(faces):
        raise InputError(
            f"{network}: two machines have the address {faces[0].address}",
            next_step="give each machine an address of its own, and each machine's URL once",
        )
    return Link(network, tuple(faces), devices(hosts, faces))


def usable(host: HostFacts) -> list[Interface]:
    return [face for face in host.interfaces if face.up and not face.network.is_loopback]


def networks(host: HostFacts) -> list[ipaddress.IPv4Network]:
    return [face.network for face in usable(host)]


def routed(host: HostFacts, network: ipaddress.IPv4Network) -> bool:
    """Whether a default route leads through the interface that is in this network."""
    return any(face.name in host.default_routes for face in usable(host) if face.network == network)


def named(host: HostFacts, wanted: str) -> ipaddress.IPv4Network:
    for face in usable(host):
        if wanted == face.name:
            return face.network
    try:
        meant = ipaddress.IPv4Network(wanted)
        ends = [one for one in networks(host) if meant.prefixlen == 32 and meant.subnet_of(one)]
        return ends[0] if ends else meant
    except ValueError:
        known = ", ".join(f"{face.name} ({face.network})" for face in usable(host))
        raise InputError(
            f"--link: got {wanted!r}, expected an interface of this machine that is up and has an IPv4 address, an "
            f"address on the link, or a network; here: {known}",
            next_step="--link INTERFACE, or --link 192.168.100.0/24",
        ) from None


def devices(hosts: Sequence[HostFacts], faces: Sequence[Interface]) -> tuple[tuple[str, ...], ...]:
    """NCCL's devices: those of the link, and the other half of the same port where it is up and has an address on every
    machine. A Spark shows that as a device of its own (rocep1s0f0 and roceP2p1s0f0). None unless each machine has some.
    """
    found = []
    for host, face in zip(hosts, faces, strict=True):
        ports = {port_of(device) for device in face.rdma}
        twins = [device for other in usable(host) for device in other.rdma if port_of(device) in ports]
        found.append((*face.rdma, *sorted(set(twins) - set(face.rdma))))
    if not all(found):
        return tuple(() for _ in hosts)
    if len({len(devices) for devices in found}) > 1:
        return tuple(face.rdma for face in faces)
    return tuple(found)


def port_of(device: str) -> str:
    return re.sub(r"P\d+(?=p\d)", "", device)


def require_same_gpus(hosts: Sequence[HostFacts]) -> None:
    """HostError where GPUs or their drivers differ: sums of two kinds would be in two precisions."""
    kinds = {
        "NVIDIA driver": ([host.driver for host in hosts], "install the same driver on each, and reboot"),
        "GPU": ([", ".join(host.gpus) for host in hosts], "use machines of one kind (docs/nodes.md, Limits)"),
    }
    for what, (values, step) in kinds.items():
        if len(set(values)) > 1:
            seen = ", ".join(f"{host.where}: {value or 'none'}" for host, value in zip(hosts, values, strict=True))
            raise HostError(f"{what} differs: {seen}", next_step=step)


def require_own(hosts: Sequence[HostFacts], link: Link, api: str, *, shared: bool) -> list[str]:
    """What to say of a link that is taken though others may be on it. HostError for it, unless `shared`. api: the
    address of the front."""
    through = [host.where for host in hosts if routed(host, link.network)]
    found = [f"{where}: a default route leads through {link.network}" for where in through]
    listens = ipaddress.ip_address(api)
    if listens in link.network or listens.is_unspecified:
        found.append(f"here: clients are served at {api}, which is on the link, too")
    if found and not shared:
        raise HostError(
            f"{link.network} is no network of the machines' own: {'; '.join(found)}. torch's ports there ask nobody "
            "for a key, and who reaches them can run code in the containers",
            next_step="a cable between the machines with addresses of its own, and --link; --shared-link takes it as "
            "it is",
        )
    return [f"warning: {one}; torch's ports are open to whoever is there (--shared-link)" for one in found]
