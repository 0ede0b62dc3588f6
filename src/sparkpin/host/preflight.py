"""What a build needs from this machine, what of it is missing, and how to get it: for ./install.sh, `up` and `doctor`.

./install.sh runs it before .venv exists, so it and all that it imports use the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.core.files import existing_parent
from sparkpin.core.names import MACHINES, choose
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say, size
from sparkpin.host import buildkit, daemon
from sparkpin.host.machine import ROOT, Host, default_stack, find_program, read_host, text

if TYPE_CHECKING:
    from sparkpin.pins.schema import Stack

GPU_RUNTIME = "GPU runtime"
PACKAGES = (
    # name, Debian's package, what for, files below the root of which one is to be there (none: the program `name`)
    ("iptables", "iptables", "the engine's network"),
    (
        *("ca-certificates", "ca-certificates", "fetching over HTTPS", "etc/ssl/certs/ca-certificates.crt"),
        *("etc/pki/tls/certs/ca-bundle.crt", "etc/ssl/ca-bundle.pem"),
    ),
)


@dataclass(frozen=True)
class StackFacts:
    """Read before there is a reader of YAML. `up` reads the same file with all its checks."""

    platform: str
    gpu: bool

    @classmethod
    def read(cls, path: Path) -> StackFacts:
        return cls(platform=value_of("platform", path) or "", gpu=value_of("gpu", path) is not None)


def value_of(key: str, path: Path) -> str | None:
    """The first word of a key at the top of a YAML file; None where it is not there."""
    found = re.search(rf"""^{key}:[ "']*([^ "'#\n]*)""", text(path), re.M)
    return found[1] if found else None


@dataclass(frozen=True)
class Needs:
    """Bytes to have free in the cache, the home and the engine's data folder, and bytes of memory in all."""

    cache: int = 6 * 10**9
    home: int = 10**9
    engine: int = 12 * 10**9
    memory: int = 6 * 10**9


GPU_NEEDS = Needs(cache=16 * 10**9, home=10**9, engine=38 * 10**9)
"""For a stack with a GPU: 53 GB of disk at the peak of a first build of `spark` from nothing, of which the cache had
up to 16 GB; the engine keeps an image of 9 GB and BuildKit's copies. A model comes on top, as
`invoke build --checkpoint-only --dry-run` prints."""
SPARK_MEMORY = 100 * 10**9


def needs_for(host: Host, stack: Stack | StackFacts) -> Needs:
    """A Spark's memory is needed where the images run, not where they are built."""
    needs = GPU_NEEDS if host.is_spark or stack.gpu else Needs()
    return replace(needs, memory=SPARK_MEMORY) if host.is_spark else needs


@dataclass(frozen=True)
class Requirement:
    """fix: the exact command, empty when `ok` or when only a person can help; packages: Debian's names for it; then: a
    command for root, once they are there."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    packages: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


def requirements(paths: Paths, host: Host, stack: Stack | StackFacts, *, published: bool = False) -> list[Requirement]:
    """Everything that a build needs from the machine, met or not. Changes nothing, starts nothing.

    published: images are to come from a registry, too.
    """
    needs, arch = needs_for(host, stack), MACHINES.get(stack.platform, host.arch)
    rows = [*PACKAGES, ("skopeo", "skopeo", "registries")] if published else PACKAGES
    found = [engine(paths, host), client(host), *(of_package(host, *row) for row in rows), venv(host)]
    if arch != host.arch:
        found.append(emulation(host, arch, ROOT))
    if host.is_spark:  # elsewhere the stack is `cpu`, which uses no GPU that there may be
        found.append(gpu_runtime())
    return [*found, *disk(paths, needs), memory(host, needs)]


def missing(paths: Paths, host: Host, stack: Stack | StackFacts, *, published: bool = False) -> list[Requirement]:
    return [requirement for requirement in requirements(paths, host, stack, published=published) if not requirement.ok]


def engine(paths: Paths, host: Host) -> Requirement:
    """A stopped engine is no lack for root, for whom building starts it."""
    named = daemon.named_engine()
    url, name = named or f"unix://{daemon.SOCKET}", "docker engine"
    try:
        version = daemon.ask(url, timeout=5)
    except PermissionError:
        return Requirement(name, False, f"no permission at {url}", daemon.JOIN_GROUP)
    if version:
        return Requirement(name, True, f"{version} at {url}")
    if named:
        return Requirement(name, False, f"{url}: no answer", daemon.NAMED_NEXT)
    if path := find_program("dockerd"):
        if not host.is_root:
            fix = daemon.start_command(host.has_systemd)
            return Requirement(name, False, f"{path}, not running; only root may start it", fix)
        return Requirement(name, True, f"{path}, not running (a build starts it)")
    return lacking(host, name, "no dockerd, and no engine answers", "docker.io")


def client(host: Host) -> Requirement:
    try:
        return Requirement("docker client", True, f"{buildkit.builder()} can use BuildKit")
    except HostError as error:
        return lacking(host, "docker client", error.message, *client_packages(host))


def client_packages(host: Host, root: Path = ROOT) -> tuple[str, ...]:
    """Before Debian 13 docker.io holds a client with BuildKit inside; later the client, or its plugin, stands apart."""
    if (root / "var/lib/dpkg/info/docker-ce-cli.list").exists():
        return ("docker-buildx-plugin",)
    if host.distribution in ("debian 11", "debian 12"):
        return ("docker.io",)
    return ("docker-cli" if host.family[0] == "debian" else "docker.io", "docker-buildx")


def of_package(host: Host, name: str, package: str, purpose: str, *places: str) -> Requirement:
    """A row of PACKAGES."""
    paths = [ROOT / place for place in places]
    found = next(filter(Path.is_file, paths), None) if paths else find_program(name)
    if found:
        return Requirement(name, True, str(found))
    return lacking(host, name, f"no {paths[0] if paths else name}; for {purpose}", package)


def venv(host: Host) -> Requirement:
    """Debian splits ensurepip off Python; a virtual environment in use shows that it can be made."""
    if sys.prefix != sys.base_prefix or importlib.util.find_spec("ensurepip"):
        return Requirement("python venv", True, f"Python {platform.python_version()} at {sys.prefix}")
    return lacking(host, "python venv", "this Python cannot make virtual environments", "python3-venv")


def emulation(host: Host, arch: str, root: Path) -> Requirement:
    name = f"{arch} emulation"
    registered = text(root / f"proc/sys/fs/binfmt_misc/qemu-{arch}").startswith("enabled")
    if registered:
        return Requirement(name, True, f"binfmt_misc: qemu-{arch}")
    detail = f"this machine is {host.arch}, the stack is for {arch}: its root file system is made under emulation"
    enable = ("update-binfmts", "--enable", f"qemu-{arch}")  # where no systemd starts services, nothing else does
    if all(map(find_program, (enable[0], f"qemu-{arch}-static"))):
        return Requirement(name, False, f"{detail}, which is not switched on", as_root(host, enable), then=enable)
    found = lacking(host, name, detail, "qemu-user-static", "binfmt-support")
    return replace(found, fix=f"{found.fix} && {as_root(host, enable)}", then=enable) if host.has_apt else found


def gpu_runtime() -> Requirement:
    """NVIDIA's packages come from NVIDIA's repository, which is not ours to add."""
    if path := find_program("nvidia-ctk"):
        return Requirement(GPU_RUNTIME, True, path)
    lack = "no nvidia-ctk: containers do not see the GPU"
    return Requirement(GPU_RUNTIME, False, lack, "install nvidia-container-toolkit (NVIDIA)")


@dataclass(frozen=True)
class DiskRow:
    """Bytes on one file system. folders: with what each needs; there: the first of them, or its nearest parent; used:
    what may lie there of it already."""

    folders: tuple[tuple[Path, int], ...]
    free: int
    there: Path
    used: int = 0

    @property
    def needed(self) -> int:
        return sum(count for _, count in self.folders)

    @property
    def is_enough(self) -> bool:
        return self.free + self.used >= self.needed

    @property
    def text(self) -> str:
        there = f", {size(self.used)} of it may lie there" if self.used else ""
        return (
            f"{size(self.needed)} needed at {self.there}{there}, {size(self.free)} free"
            f"{'' if self.is_enough else ': NOT ENOUGH'}"
        )


def disk_rows(folders: Iterable[tuple[Path, int]]) -> list[DiskRow]:
    """One row for each file system."""
    systems: dict[int, list[tuple[Path, int]]] = {}
    for folder, count in folders:
        systems.setdefault(existing_parent(folder).stat().st_dev, []).append((folder, count))
    parents = [(tuple(rows), existing_parent(rows[0][0])) for rows in systems.values()]
    return [DiskRow(rows, shutil.disk_usage(there).free, there) for rows, there in parents]


def folders_of(paths: Paths, needs: Needs) -> list[tuple[Path, int]]:
    """Where a build takes disk, and the bytes; not on the machine of another engine."""
    found = [(paths.cache, needs.cache), (paths.home, needs.home)]
    if not (daemon.named_engine() or "").startswith(("tcp:", "ssh:", "http")):
        found.append((daemon.Daemon.system(paths).data_root, needs.engine))
    return found


def disk(paths: Paths, needs: Needs, *, on_top: bool = False) -> list[Requirement]:
    """One requirement for each file system. on_top: of what lies there."""
    found = []
    for row in disk_rows(folders_of(paths, needs)):
        if not (on_top or row.is_enough):
            row = replace(row, used=sum(size_of(*folder) for folder in row.folders))
        fix = "free space (`invoke prune --keep 2`), or set SPARKPIN_CACHE and SPARKPIN_HOME elsewhere"
        found.append(Requirement("disk space", row.is_enough, row.text, "" if row.is_enough else fix))
    return found


def size_of(folder: Path, limit: int) -> int:
    """Bytes that the folder holds already, at most `limit`: a second build does not need its space twice.

    Whose they are nobody can know here: what another stack left is counted, too.
    """
    done = subprocess.run(["du", "-skx", folder], capture_output=True, text=True, check=False)
    return min(1024 * int(done.stdout.split()[0]), limit) if done.stdout else 0


def memory(host: Host, needs: Needs) -> Requirement:
    detail = f"{host.memory_total / 1e9:.0f} GB, {host.memory_available / 1e9:.0f} GB of it available"
    ok = host.memory_total >= needs.memory
    return Requirement("memory", ok, f"{detail}; {needs.memory / 1e9:.0f} GB needed", "" if ok else "a larger machine")


def lacking(host: Host, name: str, detail: str, *packages: str) -> Requirement:
    """An unmet requirement that packages meet: the command where apt is known, else only what to look for."""
    by_hand = f"install {', '.join(packages)} with the package manager"
    fix = as_root(host, *commands_for(packages)) if host.has_apt else by_hand
    return Requirement(name, False, detail, fix, packages)


def commands_for(packages: Sequence[str]) -> list[Sequence[str]]:
    """Root's. apt waits for another (a fresh machine updates itself) instead of failing at its lock."""
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
    return [[*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", *packages]] if packages else []


def as_root(host: Host, *commands: Sequence[str]) -> str:
    sudo = [] if host.is_root else ["sudo"]
    return " && ".join(shlex.join([*sudo, *command]) for command in commands)


def fixes(lacks: Sequence[Requirement], host: Host) -> tuple[list[Sequence[str]], list[Requirement]]:
    """Root's commands, and what they do not fix."""
    ours = [lack for lack in lacks if lack.then or (lack.packages and host.has_apt)]
    packages = sorted({package for lack in ours for package in lack.packages})
    return [*commands_for(packages), *(lack.then for lack in ours if lack.then)], [x for x in lacks if x not in ours]


def install(lacks: Sequence[Requirement], host: Host, say: Say) -> None:
    """Install the packages of what is missing. HostError, and nothing changed, where that cannot help.

    That is: no root, no apt, or a lack that no package meets. say: gets each command before it runs.
    """
    if not lacks:
        return
    listed = "".join(f"\n  {lack.name}: {lack.detail}" for lack in lacks)
    commands, others = fixes(lacks, host)
    steps = [as_root(host, *commands), *(lack.fix for lack in others)]
    if others:
        raise HostError(f"this machine lacks:{listed}", next_step="; then ".join(dict.fromkeys(filter(None, steps))))
    if not host.is_root:
        raise HostError(f"this machine lacks:{listed}\nand only root may fix that", next_step=steps[0])
    for command in commands:
        say(shlex.join(command))
        done = subprocess.run(
            [find_program(command[0]) or command[0], *command[1:]],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).splitlines()[-15:])
            raise HostError(
                f"`{shlex.join(command)}` failed with exit code {done.returncode}:\n{last}",
                next_step="fix what these lines name, then the same command again",
            )
    buildkit.builder.cache_clear()


def stack_of(project: Path, host: Host, *, stack: str | None, recipe: str | None, stage: str | None) -> Path:
    """The file of the stack that `up` would take with these options. InputError for a name that is none."""
    if stage:
        choose(project / "stages", stage, "stage")
    if recipe:
        path = choose(project / "recipes", recipe, "recipe")
        stack = stack or value_of("stack", path)
    return choose(project / "pins/stacks", stack or default_stack(project, host), "stack")


def main(arguments: list[str]) -> int:
    """`python -m sparkpin.host.preflight`, with the options of `invoke up`: show what is missing, install it."""
    parser = argparse.ArgumentParser(prog="sparkpin.host.preflight", allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    for name in ("stack", "recipe", "stage", "from"):
        parser.add_argument(f"--{name}")
    options, _ = parser.parse_known_args(arguments)  # the others are for `up`; ./install.sh has looked at their names
    ran: list[str] = []

    def say(line: str) -> None:
        ran.append(line)
        print(line, flush=True)

    try:
        paths, host = Paths.from_env(), read_host()
        path = stack_of(paths.project, host, stack=options.stack, recipe=options.recipe, stage=options.stage)
        print(f"This machine: {host.summary}. Stack: {path.stem}.", flush=True)
        lacks = missing(paths, host, StackFacts.read(path), published=getattr(options, "from") is not None)
        show(lacks, host)
        if not options.dry_run:
            install(lacks, host, say)
    except SparkpinError as error:
        print(f"error: {error}", *([] if ran else ["Nothing was changed."]), sep="\n", file=sys.stderr)
        return error.exit_code
    return 0


def show(lacks: Sequence[Requirement], host: Host) -> None:
    commands, others = fixes(lacks, host)
    lines = [f"  missing: {lack.name}: {lack.detail}" for lack in lacks]
    lines += [f"To be run: {as_root(host, *commands)}"] if commands else []
    lines += [f"To be done by you: {lack.name}: {lack.fix}" for lack in others if lack.fix]
    print(*(lines or ["It has what is needed; nothing to install."]), sep="\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
