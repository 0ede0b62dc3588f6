"""What a build needs from this machine, what of it is missing, and how to get it: for `up` and `doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.core.files import existing_parent
from sparkpin.core.names import MACHINES
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, size
from sparkpin.host import buildkit, daemon, machine
from sparkpin.host.engine import Engine
from sparkpin.host.gpu import gpu_requirements, read_gpu_facts
from sparkpin.host.machine import Gpu, Host, Requirement, checked, find_program, search_path, text
from sparkpin.pins.schema import Stack

CERTIFICATES = ("etc/ssl/certs/ca-certificates.crt", "etc/pki/tls/certs/ca-bundle.crt", "etc/ssl/ca-bundle.pem")
MORE_DISK = "free space (`invoke prune --keep 2`), or set SPARKPIN_CACHE and SPARKPIN_HOME elsewhere"


@dataclass(frozen=True)
class Needs:
    """Bytes to have free in the cache, the home and the engine's data folder."""

    cache: int = 6 * 10**9
    home: int = 10**9
    engine: int = 12 * 10**9


MEMORY = 6 * 10**9  # bytes in all, to build; what a recipe's server needs is `plan`'s


def needs_for(stack: Stack) -> Needs:
    """With a GPU: 53 GB of disk at the peak of a first build of `spark` from nothing, of which the cache had up to
    16 GB; the engine keeps an image of 9 GB and BuildKit's copies. A model comes on top, as
    `invoke build --checkpoint-only --dry-run` prints."""
    return Needs(cache=16 * 10**9, engine=38 * 10**9) if stack.gpu else Needs()


def requirements(
    paths: Paths, host: Host, stack: Stack, *, published: bool = False, gpus: Sequence[Gpu] | None = None
) -> list[Requirement]:
    """Everything that a build needs from the machine, and on a Spark what a server does, met or not. Changes nothing,
    starts nothing.

    published: images are to come from a registry, too; gpus: where they have been read already.
    """
    bundle = next((str(machine.ROOT / name) for name in CERTIFICATES if (machine.ROOT / name).is_file()), None)
    docker, connected = engine(host)
    found = [docker, client(host)]
    found.append(program(host, "ca-certificates", bundle, "fetching over HTTPS requires them"))
    if published:
        found.append(program(host, "skopeo", find_program("skopeo"), "registries need it"))
    if MACHINES[stack.platform] != host.arch:
        found.append(emulation(host, MACHINES[stack.platform]))
    if host.is_spark and stack.gpu and not (connected and connected.elsewhere):
        facts = read_gpu_facts(connected.info if connected else {}, machine.read_gpus() if gpus is None else gpus)
        found += gpu_requirements(facts, stack.gpu.cuda)
    for row in disk_rows(folders_of(paths, needs_for(stack))):
        found.append(checked("disk space", not row.short, f"for images: {row.text}", MORE_DISK))
    if connected:
        found.append(memory_guard(connected.info))
    memory = f"{size(host.memory_total)}, {size(host.memory_available)} of it available; {size(MEMORY)} needed"
    return [*found, checked("memory", host.memory_total >= MEMORY, memory, "a larger machine")]


def memory_guard(info: Mapping[str, Any]) -> Requirement:
    """What keeps a server from freezing its machine: the limit of its container, which the kernel has to be able to
    set, and process 1 in it. info: the engine's."""
    lacks = [what for what in ("MemoryLimit", "SwapLimit") if not info.get(what)]
    text = f"containers have limits; a server on a GPU is ended below {size(machine.HOST_RESERVE)} of memory left"
    fix = "boot with cgroup_enable=memory swapaccount=1 on the kernel's command line, then restart Docker"
    return checked(
        "memory guard", not lacks, text if not lacks else f"docker info: no {', no '.join(lacks)}", fix, "advice"
    )


def missing(paths: Paths, host: Host, stack: Stack, *, published: bool = False) -> list[Requirement]:
    return [one for one in requirements(paths, host, stack, published=published) if one.state == "MISSING"]


def engine(host: Host) -> tuple[Requirement, Engine | None]:
    """The engine, where one answers. A stopped one is no lack for root, for whom building starts it."""
    name = "docker engine"
    try:
        found = Engine.connect()
        return Requirement(name, "ok", f"{found.version} at {daemon.named_engine() or daemon.OWN}"), found
    except HostError as error:
        return Requirement(name, "MISSING", error.message, error.next_step), None
    except SparkpinError:
        path = find_program("dockerd")
    if not path:
        return lacking(host, name, "no dockerd, and no engine answers", "docker.io"), None
    text = f"{path}, not running; a build by root starts it"
    return checked(name, host.is_root, text, daemon.start_command()), None


def client(host: Host) -> Requirement:
    try:
        return Requirement("docker client", "ok", f"{buildkit.builder()} can use BuildKit")
    except HostError as error:
        return lacking(host, "docker client", error.message, *client_packages(host))


def client_packages(host: Host) -> tuple[str, ...]:
    """Before Debian 13 docker.io holds a client with BuildKit inside; later the client, or its plugin, stands apart."""
    if (machine.ROOT / "var/lib/dpkg/info/docker-ce-cli.list").exists():
        return ("docker-buildx-plugin",)
    if host.distribution in ("debian 11", "debian 12"):
        return ("docker.io",)
    return ("docker-cli" if host.family[0] == "debian" else "docker.io", "docker-buildx")


def program(host: Host, name: str, found: str | None, purpose: str) -> Requirement:
    """Of which the package has the name."""
    return Requirement(name, "ok", found) if found else lacking(host, name, f"not there; {purpose}", name)


def emulation(host: Host, arch: str) -> Requirement:
    name = f"{arch} emulation"
    if text(f"proc/sys/fs/binfmt_misc/qemu-{arch}").startswith("enabled"):
        return Requirement(name, "ok", f"binfmt_misc: qemu-{arch}")
    # The packages switch it on where systemd starts services; elsewhere nothing else does.
    lack = lacking(host, name, f"this machine is {host.arch}, the stack {arch}", "qemu-user-static", "binfmt-support")
    enable = f"{'' if host.is_root else 'sudo '}update-binfmts --enable qemu-{arch}"
    return replace(lack, fix=f"{lack.fix} && {enable}")


@dataclass(frozen=True)
class DiskRow:
    """Bytes on the file system of the folder `there`: needed, free, and used by what is counted as needed."""

    there: Path
    needed: int
    free: int
    used: int = 0

    @property
    def short(self) -> int:
        """Bytes that are still to be freed."""
        return max(0, self.needed - self.used - self.free)

    @property
    def text(self) -> str:
        there = f", {size(self.used)} of it is there" if self.used else ""
        lack = f": {size(self.short)} MORE NEEDED" if self.short else ""
        return f"{size(self.needed)} needed at {self.there}{there}, {size(self.free)} free{lack}"


def disk_rows(images: Sequence[tuple[Path, int]], model: Sequence[tuple[Path, int]] = ()) -> list[DiskRow]:
    """One row for each file system. images: folders with the bytes of what lies there once the images are built; model:
    with those that are to come."""
    systems: dict[int, list[tuple[Path, int]]] = {}
    for folder, count in (*model, *images):
        systems.setdefault(existing_parent(folder).stat().st_dev, []).append((folder, count))
    found = []
    for folders in systems.values():
        there = existing_parent(folders[0][0])
        row = DiskRow(there, sum(count for _, count in folders), shutil.disk_usage(there).free)
        if row.short:  # only then is it worth the time to look
            row = replace(row, used=sum(size_of(*one) for one in folders if one in images))
        found.append(row)
    return found


def folders_of(paths: Paths, needs: Needs) -> list[tuple[Path, int]]:
    """Where a build takes disk, and the bytes; not on the machine of another engine. What models have there is no part
    of it."""
    found = [(paths.store, needs.cache), (paths.inputs, needs.home)]
    if not (daemon.named_engine() or "").startswith(("tcp:", "ssh:", "http")):
        found.append((engine_folder(), needs.engine))
    return found


def engine_folder() -> Path:
    """Where the machine's own engine keeps images, whether or not it runs."""
    with contextlib.suppress(ValueError, KeyError):
        return Path(json.loads(text("etc/docker/daemon.json"))["data-root"])
    return Path("/var/lib/docker")


def size_of(folder: Path, limit: int) -> int:
    """Bytes that the folder holds already, at most `limit`: a second build does not need its space twice.

    Whose they are nobody can know here: what another stack left is counted, too.
    """
    done = subprocess.run(["du", "-skx", folder], capture_output=True, text=True, check=False)
    return min(1024 * int(done.stdout.split()[0]), limit) if done.stdout else 0


def lacking(host: Host, name: str, detail: str, *packages: str) -> Requirement:
    """An unmet requirement that packages meet: the command where apt is known, else only what to look for."""
    if not {"debian", "ubuntu"} & {*host.family}:
        return Requirement(name, "MISSING", detail, f"install {', '.join(packages)} with the package manager")
    # apt waits for another (a fresh machine updates itself) instead of failing at its lock
    apt = f"{'' if host.is_root else 'sudo '}apt-get -o DPkg::Lock::Timeout=300"
    fix = f"{apt} update && {apt} install -y --no-install-recommends {' '.join(packages)}"
    return Requirement(name, "MISSING", detail, fix, runnable=True)


def install(lacks: Sequence[Requirement], host: Host) -> None:
    """Run what meets them. HostError, and nothing changed, where that cannot help: no root, or a lack that only a
    person can meet. Each command is printed before it runs."""
    if lacks and not (host.is_root and all(lack.runnable for lack in lacks)):
        listed = "".join(f"\n  {lack.name}: {lack.detail}" for lack in lacks)
        steps = dict.fromkeys(lack.fix for lack in lacks)
        raise HostError(f"this machine lacks:{listed}\nNothing was changed.", next_step="; then ".join(steps))
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l", "PATH": search_path()}
    for command in dict.fromkeys(lack.fix for lack in lacks):
        say(command)
        done = subprocess.run(
            ["sh", "-c", f"exec 2>&1; {command}"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            last = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-15:])
            raise HostError(
                f"`{command}` failed with exit code {done.returncode}:\n{last}",
                next_step="fix what these lines name, then the same command again",
            )
    buildkit.builder.cache_clear()
