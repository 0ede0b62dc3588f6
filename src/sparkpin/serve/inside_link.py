"""Runs in a short container with the host's network, the image's Python and the standard library alone.

usage: inside_link.py look                       prints as JSON: its network, memory, GPUs, CPU, /model
       inside_link.py meet RANK OWN HEAD PORT NODES FREE...   talks to the others over the link; prints what came of it

The other machine has Docker and ssh; nothing of it but files of /proc and /sys is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
RECORD = "sparkpin.json"
WAIT_SECONDS = 20.0
BULK = 1 << 20  # bytes there and back: packets as large as the link allows
BULK_SECONDS = 5.0
ROUNDS = 20


def look(root: Path = Path("/"), model: Path = Path("/model")) -> dict[str, Any]:
    """root: of /proc and /sys; model: where the checkpoint is mounted."""
    return {
        "interfaces": interfaces(root),
        "default_routes": sorted(default_routes(root)),
        "neighbours": neighbours(root),
        "driver": driver(root),
        "gpus": gpus(root),
        "cpu": vectors(root),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "verbs": any((root / "sys/class/infiniband_verbs").glob("uverbs*")),
        **memory(root),
        **checkpoint(model),
    }


def interfaces(root: Path) -> list[dict[str, Any]]:
    """Those with an IPv4 address, the first one of each."""
    found = []
    for folder in sorted((root / "sys/class/net").iterdir()):
        with contextlib.suppress(OSError, ValueError):  # no address, or gone meanwhile
            row = {
                "name": folder.name,
                "address": asked(folder.name, SIOCGIFADDR),
                "mask": asked(folder.name, SIOCGIFNETMASK),
                "mtu": int((folder / "mtu").read_text()),
                "up": (folder / "operstate").read_text().strip() in ("up", "unknown"),
                "rdma": rdma(root, folder.name),
            }
            found.append(row)
    return found


def asked(name: str, request: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def rdma(root: Path, name: str) -> list[str]:
    """Devices of /sys/class/infiniband that are of this interface and have an active port."""
    found = []
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        states = [path.read_text() for path in device.glob("ports/*/state")]
        if (device / "device/net" / name).exists() and any("ACTIVE" in state for state in states):
            found.append(device.name)
    return found


def default_routes(root: Path) -> set[str]:
    """Interfaces that a default route leads through."""
    found = set()
    for line in lines(root / "proc/net/route")[1:]:
        words = line.split()
        if words[1] == words[7] == "00000000":
            found.add(words[0])
    for line in lines(root / "proc/net/ipv6_route"):
        words = line.split()
        if words[1] == "00" and not int(words[0], 16) and words[-1] != "lo":
            found.add(words[-1])
    return found


def neighbours(root: Path) -> list[list[str]]:
    """[address, interface] of those that answered."""
    rows = [line.split() for line in lines(root / "proc/net/arp")[1:]]
    return [[row[0], row[-1]] for row in rows if int(row[2], 16) & 2]


def lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


def driver(root: Path) -> str:
    """The NVIDIA driver's version; "" without one."""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)\s", "\n".join(lines(root / "proc/driver/nvidia/version")))
    return found[1] if found else ""


def gpus(root: Path) -> list[str]:
    """Models of the machine's GPUs, each once: nvidia-smi's names, but a container without a GPU has no nvidia-smi."""
    rows = [row for file in (root / "proc/driver/nvidia/gpus").glob("*/information") for row in lines(file)]
    return sorted({row.partition(":")[2].strip() for row in rows if row.startswith("Model:")})


def vectors(root: Path) -> list[str]:
    """The instructions by which programs choose how they compute: vLLM on a CPU the types of sums and states."""
    rows = [row.split() for row in lines(root / "proc/cpuinfo") if row.startswith(("flags", "Features"))]
    flags = {flag for row in rows for flag in row}
    return sorted(flag for flag in flags if re.match(r"avx|amx|fma|f16c|asimd|sve|bf16|i8mm", flag))


def memory(root: Path) -> dict[str, int]:
    rows = dict(line.split(":") for line in lines(root / "proc/meminfo"))
    return {name: int(rows[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")}


def checkpoint(folder: Path) -> dict[str, Any]:
    """record: SHA-256 of the checkpoint's own record, "" where there is none; lacking: files of another size."""
    try:
        data = (folder / RECORD).read_bytes()
        rows = json.loads(data)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {"record": "", "lacking": []}
    lacking = [name for name, row in sorted(rows.items()) if size(folder / name) != row["size"]]
    return {"record": hashlib.sha256(data).hexdigest(), "lacking": lacking}


def size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1


def meet(rank: int, own: str, head: str, port: int, nodes: int, *free: int) -> dict[str, Any]:
    """free: ports that rank 0 must have free on all addresses."""
    try:
        for one in free if rank == 0 else ():
            socket.create_server(("", one)).close()
        return accept(own, port, nodes - 1) if rank == 0 else call(head, port)
    except OSError as error:
        return {"error": os.strerror(error.errno) if error.errno else str(error) or type(error).__name__}


def accept(own: str, port: int, peers: int) -> dict[str, Any]:
    """Send back what each peer sends. Addresses of those whose bytes all came."""
    met: list[str] = []
    until = time.monotonic() + WAIT_SECONDS
    with socket.create_server((own, port)) as listener:
        while len(met) < peers and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            connection, where = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(BULK_SECONDS)
                for _ in range(ROUNDS):
                    connection.sendall(read(connection, 1))
                connection.sendall(read(connection, BULK))
                read(connection, 1)
                met.append(where[0])
    return {"met": met}


def call(head: str, port: int) -> dict[str, Any]:
    """seconds: the quickest round trip; bulk: whether large packets came through, too; own: the address that the
    route to rank 0 gives."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection = socket.create_connection((head, port), timeout=BULK_SECONDS)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for _ in range(ROUNDS):
            begin = time.monotonic()
            connection.sendall(b".")
            read(connection, 1)
            took.append(time.monotonic() - begin)
        found = {"own": connection.getsockname()[0], "seconds": min(took), "bulk": False}
        with contextlib.suppress(OSError):
            connection.sendall(bytes(BULK))
            read(connection, BULK)
            connection.sendall(b".")
            found["bulk"] = True
    return found


def read(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 16))
        if not part:
            raise ConnectionError("closed")
        parts += part
    return bytes(parts)


def main(task: str, *argv: str) -> None:
    found = look() if task == "look" else meet(int(argv[0]), argv[1], argv[2], *map(int, argv[3:]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
