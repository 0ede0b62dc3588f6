"""What the machine is, what it lacks, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.core.files import existing_parent
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host import buildkit, daemon, endpoint

if TYPE_CHECKING:  # ./install.sh imports this before .venv exists, with the standard library alone
    from sparkpin.pins.schema import Stack

ARCHITECTURES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
ROOT = Path("/")
GPU_RUNTIME = "GPU runtime"


@dataclass(frozen=True)
class Host:
    """Facts, each read from one file. arch: as `uname -m`; distribution: /etc/os-release's ID and VERSION_ID;
    family: ID and ID_LIKE; memory in bytes."""

    is_spark: bool
    arch: str
    distribution: str
    family: tuple[str, ...]
    is_root: bool
    has_gpu: bool
    has_systemd: bool
    memory_total: int
    memory_available: int

    @property
    def has_apt(self) -> bool:
        return bool({"debian", "ubuntu"} & set(self.family))

    @property
    def summary(self) -> str:
        """One line for people. What a record keeps is `fingerprint.Fingerprint`."""
        name = "DGX Spark" if self.is_spark else "with GPU" if self.has_gpu else "no GPU"
        return f"{self.distribution}, {self.arch}, {name}, {self.memory_total / 1e9:.0f} GB"


def read_host(root: Path = ROOT) -> Host:
    """Read the facts below `root`. Architecture and user are those of this process."""
    release = os_release(root / "etc/os-release")
    memory = meminfo(root / "proc/meminfo")
    gpus = [text(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    return Host(
        is_spark=is_spark(root, gpus),
        arch=platform.machine(),
        distribution=" ".join(filter(None, (release.get("ID", "unknown"), release.get("VERSION_ID")))),
        family=(release.get("ID", ""), *release.get("ID_LIKE", "").split()),
        is_root=os.geteuid() == 0,
        has_gpu=bool(gpus) or (root / "dev/nvidia0").exists(),
        has_systemd=(root / "run/systemd/system").is_dir(),  # as sd_booted(3)
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
    )


def is_spark(root: Path, gpus: Sequence[str]) -> bool:
    """By the firmware's product name, NVIDIA's release file or, for other makers' machines, the GB10 chip itself."""
    names = [*product_names(root), text(root / "etc/dgx-release")]
    return any("DGX SPARK" in name.upper().replace("_", " ") for name in names) or any("GB10" in gpu for gpu in gpus)


def product_names(root: Path) -> list[str]:
    """The machine's kind by its firmware. A name that somebody gave to this one machine is not in these files."""
    files = ("sys/class/dmi/id/product_name", "sys/firmware/devicetree/base/model")
    return [name for file in files if (name := text(root / file).strip("\0 \n"))]


def text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def os_release(path: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in text(path).splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): "".join(shlex.split(value)[:1]) for key, _, value in pairs}


def meminfo(path: Path) -> dict[str, int]:
    """Bytes by name; the file counts in units of 1024 bytes."""
    rows = (line.split() for line in text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def this_platform() -> str:
    """As an image's: of this machine, whose engine may be another's."""
    machine = platform.machine()
    return next((name for name, known in ARCHITECTURES.items() if known == machine), machine)


def default_stack(project: Path, host: Host | None = None) -> str:
    """The stack for this machine: `spark` on a DGX Spark, else `cpu`. HostError when the project has none for it."""
    host = host or read_host()
    name = "spark" if host.is_spark else "cpu"
    fits = host.is_spark or host.arch == ARCHITECTURES["linux/amd64"]
    if not fits or not (project / f"pins/stacks/{name}.yaml").is_file():
        kind = "a DGX Spark" if host.is_spark else f"an {host.arch} machine"
        raise HostError(
            f"this is {kind}, and this version of sparkpin pins no stack for it yet",
            next_step="run ./install.sh on an x86-64 Linux machine, which takes the stack cpu",
        )
    return name


def default_recipe(project: Path, stack: str | None = None) -> str:
    """That of a stack; None: of this machine's."""
    from sparkpin.pins import manifests  # ./install.sh has no YAML yet

    return manifests.load_stack(project, stack or default_stack(project)).default_recipe


def serve_command(project: Path, recipe: str) -> str:
    """What to type to serve a recipe, shown as a next step: `--recipe` only where it is not this machine's default."""
    try:
        default = default_recipe(project)
    except SparkpinError:  # whatever keeps the default from being known: the name serves in any case
        default = ""
    return "invoke serve" if recipe == default else f"invoke serve --recipe {recipe}"


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


@dataclass(frozen=True)
class Needs:
    """Bytes to have free in the cache, the home and the engine's data folder, and bytes of memory in all."""

    cache: int = 6 * 10**9
    home: int = 10**9
    engine: int = 12 * 10**9
    memory: int = 6 * 10**9


GPU_NEEDS = Needs(cache=16 * 10**9, home=10**9, engine=38 * 10**9)
"""For a stack with a GPU: 53 GB of disk at the peak of a first build of `spark` from nothing, of which the cache had
up to 16 GB; the engine keeps an image of 9 GB beside BuildKit's copies. A model comes on top, as
`invoke build --checkpoint-only --dry-run` tells."""

SPARK_MEMORY = 100 * 10**9


def needs_for(host: Host, stack: Stack | None) -> Needs:
    """A Spark's memory is only wanted where the images run, not where they are built."""
    needs = GPU_NEEDS if host.is_spark or (stack and stack.gpu) else Needs()
    return replace(needs, memory=SPARK_MEMORY) if host.is_spark else needs


def requirements(paths: Paths, host: Host, needs: Needs | None = None, stack: Stack | None = None) -> list[Requirement]:
    """Everything that a build needs from the machine, met or not. Changes nothing, starts nothing."""
    needs = needs or needs_for(host, stack)
    found = [
        engine_requirement(paths, host),
        client_requirement(host),
        program(host, "iptables", "iptables", "the engine's network"),
        one_of(host, "ca-certificates", CERTIFICATES, "ca-certificates", "fetching over HTTPS"),
        one_of(host, "Debian's keys", ARCHIVE_KEYS, "debian-archive-keyring", "locking and fetching .debs"),
        venv(host),
    ]
    if stack and ARCHITECTURES[stack.platform] != host.arch:
        found.append(emulation(host, ARCHITECTURES[stack.platform]))
    if host.is_spark:  # elsewhere the stack is `cpu`, which uses no GPU that there may be
        found.append(gpu_runtime())
    return [*found, *disk(paths, needs), memory(host, needs)]


def missing(
    paths: Paths, host: Host, needs: Needs | None = None, stack: Stack | None = None, *, published: bool = False
) -> list[Requirement]:
    """published: images are to come from a registry, too."""
    wanted = requirements(paths, host, needs, stack)
    if published:
        wanted.append(program(host, "skopeo", "skopeo", "registries"))
    return [requirement for requirement in wanted if not requirement.ok]


def commands_for(packages: Sequence[str], *then: Sequence[str]) -> list[Sequence[str]]:
    """Root's, to have these packages and then what they are for. apt waits for another (a fresh machine updates itself)
    instead of failing at its lock."""
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
    install = [*apt, "install", "-y", "--no-install-recommends", *packages]
    return [*([[*apt, "update"], install] if packages else []), *then]


def as_root(host: Host, *commands: Sequence[str]) -> str:
    sudo = [] if host.is_root else ["sudo"]
    return " && ".join(shlex.join([*sudo, *command]) for command in commands)


def from_packages(host: Host, name: str, detail: str, *packages: str) -> Requirement:
    """An unmet requirement that packages meet: the command where apt is known, else only what to look for."""
    if host.has_apt:
        return Requirement(name, False, detail, as_root(host, *commands_for(packages)), packages)
    return Requirement(name, False, detail, f"install {', '.join(packages)} with the package manager", packages)


def find_program(name: str) -> str | None:
    """System folders too: a user's PATH often lacks sbin."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{daemon.SYSTEM_PATH}")


def output(argv: Sequence[str], timeout: float = 20) -> str | None:
    """What a program prints; None when it is not there, fails, or takes longer than `timeout` seconds."""
    path = find_program(argv[0])
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *argv[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def program(host: Host, name: str, package: str, purpose: str) -> Requirement:
    path = find_program(name)
    return Requirement(name, True, path) if path else from_packages(host, name, f"not found; for {purpose}", package)


def engine_requirement(paths: Paths, host: Host) -> Requirement:
    """A stopped engine is no lack for root, for whom building starts it."""
    named = endpoint.named_engine()
    url = named or f"unix://{daemon.Daemon.system(paths).socket}"
    name = "docker engine"
    try:
        version = endpoint.ask(url, timeout=5)
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
    return from_packages(host, name, "no dockerd, and no engine answers", "docker.io")


def client_requirement(host: Host) -> Requirement:
    try:
        return Requirement("docker client", True, f"{buildkit.builder()[0]} can use BuildKit")
    except HostError as error:
        return from_packages(host, "docker client", error.message, *client_packages(host))


def client_packages(host: Host, root: Path = ROOT) -> tuple[str, ...]:
    """Before Debian 13 docker.io holds a client with BuildKit inside; later the client, or its plugin, stands apart."""
    if (root / "var/lib/dpkg/info/docker-ce-cli.list").exists():
        return ("docker-buildx-plugin",)
    if host.distribution in ("debian 11", "debian 12"):
        return ("docker.io",)
    return ("docker-cli" if host.family[0] == "debian" else "docker.io", "docker-buildx")


CERTIFICATES = ("etc/ssl/certs/ca-certificates.crt", "etc/pki/tls/certs/ca-bundle.crt", "etc/ssl/ca-bundle.pem")
ARCHIVE_KEYS = ("usr/share/keyrings/debian-archive-keyring.gpg",)  # Ubuntu has its own and not these


def one_of(host: Host, name: str, files: Sequence[str], package: str, purpose: str) -> Requirement:
    """files: below the root; the first is Debian's."""
    paths = [ROOT / file for file in files]
    if found := next((path for path in paths if path.is_file()), None):
        return Requirement(name, True, str(found))
    return from_packages(host, name, f"no {paths[0]}; for {purpose}", package)


def venv(host: Host) -> Requirement:
    """Debian splits ensurepip off Python; a virtual environment in use shows that it can be made."""
    if sys.prefix != sys.base_prefix or importlib.util.find_spec("ensurepip"):
        return Requirement("python venv", True, f"Python {platform.python_version()} at {sys.prefix}")
    return from_packages(host, "python venv", "this Python cannot make virtual environments", "python3-venv")


def emulation(host: Host, arch: str, root: Path = ROOT) -> Requirement:
    name = f"{arch} emulation"
    registered = text(root / f"proc/sys/fs/binfmt_misc/qemu-{arch}").startswith("enabled")
    if registered:
        return Requirement(name, True, f"binfmt_misc: qemu-{arch}")
    detail = f"this machine is {host.arch}, the stack is for {arch}: its root file system is made under emulation"
    enable = ("update-binfmts", "--enable", f"qemu-{arch}")  # where no systemd starts services, nothing else does
    if all(map(find_program, (enable[0], f"qemu-{arch}-static"))):
        return Requirement(name, False, f"{detail}, which is not switched on", as_root(host, enable), then=enable)
    lacking = from_packages(host, name, detail, "qemu-user-static", "binfmt-support")
    return replace(lacking, fix=f"{lacking.fix} && {as_root(host, enable)}", then=enable) if host.has_apt else lacking


def gpu_runtime() -> Requirement:
    """NVIDIA's packages come from NVIDIA's repository, which is not ours to add."""
    if path := find_program("nvidia-ctk"):
        return Requirement(GPU_RUNTIME, True, path)
    lack = "no nvidia-ctk: containers do not see the GPU"
    return Requirement(GPU_RUNTIME, False, lack, "install nvidia-container-toolkit (NVIDIA)")


def folders_of(paths: Paths, needs: Needs) -> dict[str, tuple[Path, int]]:
    """Where a build takes disk, and the bytes; not on the machine of another engine."""
    wanted = {"cache": (paths.cache, needs.cache), "home": (paths.home, needs.home)}
    if not (endpoint.named_engine() or "").startswith(("tcp:", "ssh:", "http")):
        wanted["engine"] = (daemon.Daemon.system(paths).data_root, needs.engine)
    return wanted


def disk(paths: Paths, needs: Needs, *, anew: bool = False) -> list[Requirement]:
    """One requirement per file system, with the sum of what is needed on it. anew: beside what lies there already."""
    wanted = folders_of(paths, needs)
    systems: dict[int, list[str]] = {}
    for use, (path, _) in wanted.items():
        systems.setdefault(existing_parent(path).stat().st_dev, []).append(use)
    found = []
    for uses in systems.values():
        path, need = wanted[uses[0]][0], sum(wanted[use][1] for use in uses)
        free = shutil.disk_usage(existing_parent(path)).free
        used = sum(size_of(wanted[use][0], wanted[use][1]) for use in uses if free < need and not anew)
        detail = f"{free / 1e9:.0f} GB free at {path}, {need / 1e9:.0f} GB wanted for {', '.join(uses)}"
        detail += f", of which {used / 1e9:.0f} GB may lie there" if used else ""
        ok = free + used >= need
        fix = "" if ok else "free space (`invoke prune --keep 2`), or set SPARKPIN_CACHE and SPARKPIN_HOME elsewhere"
        found.append(Requirement("disk space", ok, detail, fix))
    return found


def size_of(folder: Path, limit: int) -> int:
    """Bytes that the folder holds already, at most `limit`: a second build does not need its space twice.

    Whose they are nobody can tell here: what another stack left is counted, too.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
            if total >= limit:
                return limit
    return total


def memory(host: Host, needs: Needs) -> Requirement:
    detail = f"{host.memory_total / 1e9:.0f} GB, {host.memory_available / 1e9:.0f} GB of it available"
    ok = host.memory_total >= needs.memory
    return Requirement("memory", ok, f"{detail}; {needs.memory / 1e9:.0f} GB wanted", "" if ok else "a larger machine")


def mending(lacking: Sequence[Requirement], host: Host) -> tuple[list[Sequence[str]], list[Requirement]]:
    """Root's commands, and what they do not mend."""
    ours = [r for r in lacking if r.then or (r.packages and host.has_apt)]
    packages = sorted({package for requirement in ours for package in requirement.packages})
    return commands_for(packages, *(r.then for r in ours if r.then)), [r for r in lacking if r not in ours]


def install(lacking: Sequence[Requirement], host: Host, say: Say) -> None:
    """Install the packages of what is lacking. HostError, and nothing changed, where that cannot help.

    That is: no root, no apt, or a lack that no package meets.
    """
    if not lacking:
        return
    listed = "".join(f"\n  {r.name}: {r.detail}" for r in lacking)
    mended, others = mending(lacking, host)
    fixes = [as_root(host, *mended), *(r.fix for r in others)]
    if others:
        raise HostError(f"this machine lacks:{listed}", next_step="; then ".join(dict.fromkeys(filter(None, fixes))))
    if not host.is_root:
        raise HostError(f"this machine lacks:{listed}\nand only root may mend that", next_step=fixes[0])
    for command in mended:
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
                next_step="mend what these lines say, then the same command again",
            )
    buildkit.builder.cache_clear()
