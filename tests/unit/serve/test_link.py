"""The network between machines: which one is meant, and who else is on it; the program that looks at a host."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from heard import heard

from sparkpin.core.errors import HostError, InputError
from sparkpin.serve import inside_link
from sparkpin.serve.link import HostFacts, Interface, choose, require_own, require_same_gpus

ETH = Interface("eth0", IPv4Interface("192.0.2.1/24"), True)
CABLE = Interface("enp1s0f0np0", IPv4Interface("10.0.0.1/24"), True, ("rocep1s0f0",))
TWIN = Interface("enP2p1s0f0np0", IPv4Interface("10.0.1.1/24"), True, ("roceP2p1s0f0",))
OTHER_PORT = Interface("enp1s0f1np1", IPv4Interface("10.0.2.1/24"), True, ("rocep1s0f1",))
HERE = HostFacts(
    where="here",
    interfaces=(CABLE, ETH, TWIN, OTHER_PORT),
    default_routes=("eth0",),
    driver="580.95.05",
    memory_available=120 << 30,
    record="a" * 64,
    gpus=("NVIDIA GB10",),
)


def moved(face: Interface, **changes: Any) -> Interface:
    return replace(face, place=IPv4Interface(f"{face.place.ip + 1}/24"), **changes)


THERE = replace(
    HERE,
    where="ssh://b",
    interfaces=(moved(CABLE, name="enp9"), moved(ETH), moved(TWIN)),
)


@pytest.mark.parametrize("wanted", ["enp1s0f0np0", "10.0.0.0/24"])
def test_a_link_by_interface_or_network(wanted: str) -> None:
    link = choose([HERE, THERE], wanted)
    assert [face.name for face in link] == ["enp1s0f0np0", "enp9"]
    assert [face.address for face in link] == ["10.0.0.1", "10.0.0.2"]
    # Both halves of the port, and not the other port; where one machine lacks the half, one half on each.
    assert [face.rdma for face in link] == [("rocep1s0f0", "roceP2p1s0f0")] * 2
    without = replace(THERE, interfaces=THERE.interfaces[:2])
    assert [face.rdma for face in choose([HERE, without], wanted)] == [("rocep1s0f0",)] * 2
    none = replace(THERE, interfaces=(moved(CABLE, name="enp9", rdma=()),))
    assert [face.rdma for face in choose([HERE, none], wanted)] == [(), ()]
    require_own([HERE, THERE], link[0].place.network, "127.0.0.1", shared=False)
    require_same_gpus([HERE, THERE])


def test_a_link_that_is_not_there() -> None:
    for nowhere in ("", "eth7", "10.0.9.0/24"):
        with pytest.raises(InputError):
            choose([HERE, THERE], nowhere)
    with pytest.raises(InputError, match="ssh://b: "):
        choose([HERE, THERE], "enp1s0f1np1")
    down = replace(THERE, interfaces=(replace(THERE.interfaces[0], up=False),))
    with pytest.raises(InputError, match="ssh://b: "):
        choose([HERE, down], CABLE.name)
    with pytest.raises(InputError, match="ssh://b: "):
        choose([HERE, replace(THERE, interfaces=(CABLE,))], CABLE.name)
    with pytest.raises(InputError, match="ssh://b: "):
        choose([HERE, replace(THERE, interfaces=(*THERE.interfaces, moved(CABLE, name="enp8")))], CABLE.name)


@pytest.mark.parametrize("there", [{"driver": ""}, {"gpus": ("NVIDIA H200",)}])
def test_gpus_of_two_kinds_are_refused(there: dict[str, Any]) -> None:
    """Planted: one machine has no two."""
    with pytest.raises(HostError):
        require_same_gpus([HERE, replace(THERE, **there)])


@pytest.mark.parametrize(
    ("here", "there", "api"),
    [
        ({"default_routes": ("eth0", CABLE.name)}, {}, "127.0.0.1"),
        ({}, {"default_routes": ("enp9",)}, "127.0.0.1"),
        ({}, {}, "0.0.0.0"),
        ({}, {}, "10.0.0.1"),
    ],
)
def test_a_network_that_others_may_be_on(here: dict[str, Any], there: dict[str, Any], api: str) -> None:
    hosts = [replace(HERE, **here), replace(THERE, **there)]
    link, told = choose(hosts, CABLE.name)[0].place.network, heard()
    with pytest.raises(HostError):
        require_own(hosts, link, api, shared=False)
    require_own(hosts, link, api, shared=True)
    assert len(told) == 1


CHECKPOINT = '{"files": {"sub/config.json": {"size": 2}}}'


def test_what_is_read_of_a_spark(tmp_path: Path) -> None:
    """A made root: no machine of ours has a second route, an RDMA device, a driver."""
    for name, text in {
        "sys/class/infiniband_verbs/uverbs0/dev": "231:192\n",
        "sys/class/infiniband/rocep1s0f0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/rocep1s0f0/device/net/enp1/mtu": "9000\n",
        "sys/class/infiniband/rocep1s0f1/ports/1/state": "1: DOWN\n",
        "sys/class/infiniband/rocep1s0f1/device/net/enp1/mtu": "9000\n",
        "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\nenp1 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n",
        "proc/net/ipv6_route": f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} 0 0 0 0 wlan0\n"
        f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 1 0 200200 lo\n",
        "proc/driver/nvidia/gpus/000f:01:00.0/information": "Model: \t\t NVIDIA GB10\nIRQ:   \t\t 77\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release\n",
        "proc/meminfo": "MemTotal:       125000000 kB\nMemAvailable:   2048 kB\n",
        "sys/class/net/lo/operstate": "unknown\n",
        "model/sparkpin.json": CHECKPOINT,
        "model/sub/config.json": "{}",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert inside_link.rdma(tmp_path, "enp1") == ["rocep1s0f0"] and inside_link.rdma(tmp_path, "eth0") == []
    told = inside_link.look(tmp_path, tmp_path / "model")
    assert told["interfaces"] == [{"name": "lo", "place": "127.0.0.1/255.0.0.0", "up": True, "rdma": []}]
    assert told["default_routes"] == ["eth0", "wlan0"] and "580.95.05" in told["driver"]
    assert (told["gpus"], told["memory_available"]) == (["NVIDIA GB10"], 2 << 20)
    assert told["record"] == hashlib.sha256(CHECKPOINT.encode()).hexdigest() and inside_link.record(tmp_path) == ""
    (tmp_path / "model/sub/config.json").write_text("{")
    assert inside_link.record(tmp_path / "model") == "", "half a checkpoint"
