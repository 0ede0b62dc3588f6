"""The network between machines: which one is meant, and what is wrong with it; the program that looks at a host."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkpin.core.errors import HostError, InputError
from sparkpin.serve import inside_link
from sparkpin.serve.link import HostFacts, Interface, choose, exposed, require_own, require_same, risks

ETH = Interface("eth0", "192.0.2.1", "255.255.255.0", 1500, True)
CABLE = Interface("enp1s0f0np0", "10.0.0.1", "255.255.255.0", 9000, True, ("rocep1s0f0",))
TWIN = Interface("enP2p1s0f0np0", "10.0.1.1", "255.255.255.0", 9000, True, ("roceP2p1s0f0",))
OTHER_PORT = Interface("enp1s0f1np1", "10.0.2.1", "255.255.255.0", 9000, True, ("rocep1s0f1",))
HERE = HostFacts(
    where="here",
    interfaces=(CABLE, ETH, TWIN, OTHER_PORT),
    default_routes=("eth0",),
    neighbours=(("10.0.0.2", CABLE.name),),
    driver="580.95.05",
    machine="aarch64",
    kernel="6.17",
    verbs=True,
    memory_total=128 << 30,
    memory_available=120 << 30,
    record="a" * 64,
    lacking=(),
    gpus=("NVIDIA GB10",),
    cpu=("avx2", "avx512_bf16", "avx512f"),
)


def moved(face: Interface, **changes: Any) -> Interface:
    return replace(face, address=face.address.removesuffix("1") + "2", **changes)


THERE = replace(
    HERE,
    where="ssh://b",
    interfaces=(moved(CABLE, name="enp9"), moved(ETH), moved(TWIN)),
    neighbours=(("10.0.0.1", "enp9"),),
)


@pytest.mark.parametrize("wanted", ["enp1s0f0np0", "10.0.0.0/24", "10.0.0.1", "10.0.0.2"])
def test_a_link_by_interface_or_network(wanted: str) -> None:
    link = choose([HERE, THERE], wanted)
    assert [face.name for face in link.interfaces] == ["enp1s0f0np0", "enp9"]
    assert [face.address for face in link.interfaces] == ["10.0.0.1", "10.0.0.2"]
    # Both halves of the port, and not the other port; where one machine lacks the half, one half on each.
    assert link.rdma == (("rocep1s0f0", "roceP2p1s0f0"),) * 2
    without = replace(THERE, interfaces=THERE.interfaces[:2])
    assert choose([HERE, without], wanted).rdma == (("rocep1s0f0",),) * 2
    assert choose([HERE, replace(THERE, verbs=False)], wanted).rdma == ((), ())
    assert require_own([HERE, THERE], link, "127.0.0.1", shared=False) == []
    require_same([HERE, THERE], link, gpu=True)


def test_a_link_that_nobody_named() -> None:
    only = [replace(HERE, interfaces=(CABLE, ETH)), replace(THERE, interfaces=THERE.interfaces[:2])]
    assert choose(only, None).interfaces[0] == CABLE
    with pytest.raises(InputError, match="several are without a default route"):
        choose([HERE, THERE], None)  # the twin's network, too
    with pytest.raises(InputError, match=r"eth0 \(192.0.2.0/24\); none of them is"):
        choose([replace(one, interfaces=tuple(f for f in one.interfaces if f.mtu == 1500)) for one in only], None)


def test_a_link_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"--link: saw 'eth7'.*eth0 \(192.0.2.0/24\)"):
        choose([HERE, THERE], "eth7")
    with pytest.raises(InputError, match=r"ssh://b: no interface in 10.0.2.0/24"):
        choose([HERE, THERE], "enp1s0f1np1")
    down = replace(THERE, interfaces=(replace(THERE.interfaces[0], up=False),))
    with pytest.raises(InputError, match=r"ssh://b: no interface in 10.0.0.0/24.*there: no address"):
        choose([HERE, down], CABLE.name)
    with pytest.raises(InputError, match=r"two machines have the address 10.0.0.1"):
        choose([HERE, replace(THERE, interfaces=(CABLE,))], CABLE.name)
    with pytest.raises(InputError, match="more than one interface"):
        choose([HERE, replace(THERE, interfaces=(*THERE.interfaces, moved(CABLE, name="enp8")))], CABLE.name)


@pytest.mark.parametrize(
    ("gpu", "there", "said"),
    [
        (None, {"interfaces": (moved(CABLE, name="enp9", mtu=1500),)}, "1500"),
        (True, {"driver": ""}, "NVIDIA driver differs: here: 580.95.05, ssh://b: none"),
        (True, {"gpus": ("NVIDIA H200",)}, "GPU differs: here: NVIDIA GB10, ssh://b: NVIDIA H200"),
        (False, {"cpu": ("avx2", "avx512f")}, "CPU differs: here: avx512_bf16, ssh://b: nothing more"),
    ],
)
def test_machines_of_two_kinds(gpu: bool | None, there: dict[str, Any], said: str) -> None:
    """Planted: one machine has no two. What a release does not compute on may differ."""
    other = replace(THERE, **there)
    link = choose([HERE, other], CABLE.name)
    with pytest.raises(HostError, match=said):
        require_same([HERE, other], link, gpu=bool(gpu))
    if gpu is not None:
        require_same([HERE, other], link, gpu=not gpu)


def test_where_torchs_store_can_be_reached() -> None:
    link = choose([HERE, THERE], CABLE.name)
    assert exposed(HERE, link, []) == exposed(HERE, link, ["10.0.0.1"]) == []
    for everywhere in ("0.0.0.0", "::"):
        (line,) = exposed(HERE, link, [everywhere])
        assert "192.0.2.1 (eth0)" in line and "10.0.1.1" in line and "10.0.0.1 " not in line
    assert "192.0.2.1 (eth0)," in exposed(HERE, link, ["192.0.2.1"])[0]
    assert exposed(replace(HERE, interfaces=(CABLE,)), link, ["::"]) == []


@pytest.mark.parametrize(
    ("here", "there", "api", "said"),
    [
        ({"default_routes": ("eth0", CABLE.name)}, {}, "127.0.0.1", "here: a default route leads through enp1s0f0np0"),
        ({}, {"default_routes": ("enp9",)}, "127.0.0.1", "ssh://b: a default route leads through enp9"),
        ({}, {"neighbours": (("10.0.0.9", "enp9"),)}, "127.0.0.1", "10.0.0.9 answered on enp9"),
        ({}, {}, "0.0.0.0", "clients are served at 0.0.0.0"),
    ],
)
def test_a_network_that_others_are_on(here: dict[str, Any], there: dict[str, Any], api: str, said: str) -> None:
    hosts = [replace(HERE, **here), replace(THERE, **there)]
    link = choose(hosts, CABLE.name)
    assert [said in one for one in risks(hosts, link, api)] == [True]
    with pytest.raises(HostError, match=r"(?s)no network of the machines' own.*--shared-link"):
        require_own(hosts, link, api, shared=False)
    assert len(require_own(hosts, link, api, shared=True)) == 1


def test_what_is_read_of_a_spark(tmp_path: Path) -> None:
    """A made root: no machine of ours has a second route, an RDMA device, a driver."""
    for name, text in {
        "sys/class/infiniband/rocep1s0f0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/rocep1s0f0/device/net/enp1/mtu": "9000\n",
        "sys/class/infiniband/rocep1s0f1/ports/1/state": "1: DOWN\n",
        "sys/class/infiniband/rocep1s0f1/device/net/enp1/mtu": "9000\n",
        "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\nenp1 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n",
        "proc/net/ipv6_route": f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} 0 0 0 0 wlan0\n"
        f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 1 0 200200 lo\n",
        "proc/net/arp": "IP address HW type Flags HW address Mask Device\n"
        "10.0.0.2 0x1 0x2 aa:bb * enp1\n10.0.0.7 0x1 0x0 00:00 * enp1\n",
        "proc/driver/nvidia/gpus/000f:01:00.0/information": "Model: \t\t NVIDIA GB10\nIRQ:   \t\t 77\n",
        "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd sve2 crc32 i8mm\nCPU part\t: 0xd85\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert inside_link.rdma(tmp_path, "enp1") == ["rocep1s0f0"] and inside_link.rdma(tmp_path, "eth0") == []
    assert inside_link.default_routes(tmp_path) == {"eth0", "wlan0"}
    assert inside_link.neighbours(tmp_path) == [["10.0.0.2", "enp1"]]
    assert inside_link.driver(tmp_path) == "580.95.05" and inside_link.gpus(tmp_path) == ["NVIDIA GB10"]
    assert inside_link.vectors(tmp_path) == ["asimd", "i8mm", "sve2"]


def test_a_checkpoint_that_is_half_there(tmp_path: Path) -> None:
    assert inside_link.checkpoint(tmp_path) == {"record": "", "lacking": []}
    (tmp_path / "sparkpin.json").write_text(json.dumps({"files": {"a": {"size": 3}, "b": {"size": 1}}}))
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("b")
    assert inside_link.checkpoint(tmp_path)["lacking"] == ["a"]


def test_two_ends_meet() -> None:
    """Over loopback, with addresses of their own, as three machines would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers: dict[int, dict[str, Any]] = {}

    def end(rank: int) -> None:
        answers[rank] = inside_link.meet(rank, "127.0.0.1", "127.0.0.1", port, 3)

    ends = [threading.Thread(target=end, args=(rank,)) for rank in (1, 0, 2)]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join()
    assert answers[0] == {"met": ["127.0.0.1"] * 2}
    assert all(answers[rank]["bulk"] and answers[rank]["own"] == "127.0.0.1" for rank in (1, 2))


def test_an_end_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside_link, "WAIT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert inside_link.meet(0, "127.0.0.1", "127.0.0.1", port, 2) == {"error": "Address already in use"}
        assert inside_link.meet(0, "127.0.0.1", "127.0.0.1", 0, 2, port) == {"error": "Address already in use"}
    assert inside_link.meet(1, "127.0.0.1", "127.0.0.1", port, 2) == {"error": "Connection refused"}
    assert inside_link.meet(0, "127.0.0.1", "127.0.0.1", port, 2)["error"]
