"""Runs in a short container with the host's network, the image's Python and the standard library alone; prints as JSON
what there is of the network, of memory, of GPUs and of /model.

The other machine has Docker and ssh; nothing of it but files of /proc and /sys is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import socket
import struct
from pathlib import Path
from typing import Any

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
RECORD = "sparkpin.json"


def look(root: Path = Path("/"), model: Path = Path("/model")) -> dict[str, Any]:
    """root: of /proc and /sys; model: where the checkpoint is mounted. The driver's line has its version and more."""
    memory = dict(line.split(":") for line in lines(root / "proc/meminfo"))
    return {
        "interfaces": interfaces(root),
        "default_routes": sorted(default_routes(root)),
        "driver": "".join(lines(root / "proc/driver/nvidia/version")[:1]),
        "gpus": gpus(root),
        "memory_available": int(memory["MemAvailable"].split()[0]) << 10,
        "record": record(model),
    }


def interfaces(root: Path) -> list[dict[str, Any]]:
    """Those with an IPv4 address, the first one of each."""
    found = []
    for folder in sorted((root / "sys/class/net").iterdir()):
        name = folder.name
        with contextlib.suppress(OSError):  # no address, or gone meanwhile
            place = f"{asked(name, SIOCGIFADDR)}/{asked(name, SIOCGIFNETMASK)}"
            up = (folder / "operstate").read_text().strip() in ("up", "unknown")
            found.append({"name": name, "place": place, "up": up, "rdma": rdma(root, name)})
    return found


def asked(name: str, request: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def rdma(root: Path, name: str) -> list[str]:
    """Devices of /sys/class/infiniband that are of this interface and have an active port, where programs can use them
    (ib_uverbs is loaded)."""
    if not any((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        return []
    devices = sorted(path.parents[2] for path in (root / "sys/class/infiniband").glob(f"*/device/net/{name}"))
    return [one.name for one in devices if any("ACTIVE" in path.read_text() for path in one.glob("ports/*/state"))]


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


def lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


def gpus(root: Path) -> list[str]:
    """Models of the machine's GPUs, each once: nvidia-smi's names, but a container without a GPU has no nvidia-smi."""
    rows = [row for file in (root / "proc/driver/nvidia/gpus").glob("*/information") for row in lines(file)]
    return sorted({row.partition(":")[2].strip() for row in rows if row.startswith("Model:")})


def record(folder: Path) -> str:
    """SHA-256 of the checkpoint's own record, "" where there is none, or a file is not there or of another size."""
    with contextlib.suppress(OSError):
        data = (folder / RECORD).read_bytes()
        if all((folder / name).stat().st_size == row["size"] for name, row in json.loads(data)["files"].items()):
            return hashlib.sha256(data).hexdigest()
    return ""


if __name__ == "__main__":
    print(json.dumps(look()))
