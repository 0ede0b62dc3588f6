"""Wheels by pip, from the index that the user's pip is configured for, for another Python than the one running here."""

from __future__ import annotations

import contextlib
import email.parser
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.core.errors import HostError, IntegrityError, ManifestError, NetworkError
from sparkpin.core.files import CHUNK, disk_errors
from sparkpin.core.terminal import Say
from sparkpin.fetch.debs import HowToGet, raise_no_space, tail
from sparkpin.pins.schema import MACHINES, LockedFile, Stack

LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
TICK = 5.0  # seconds between two lines of progress
CONFIG = "look at `pip config list` and the network, then run the command again"
HTTP_GONE = re.compile(r"HTTP error (?:404|410) while getting (?P<url>[^\s#?]+)")
NO_VERSIONS = re.compile(r"\(from versions: none\)")


@dataclass(frozen=True)
class WheelTarget:
    """The Python that wheels are for. python: full version; machine: as uname says it; glibc: minor version of 2.x."""

    python: str
    machine: str
    glibc: int

    def platforms(self) -> list[str]:
        """Wheel platforms that run there, best first, as pip ranks them on such a machine (PEP 600)."""
        oldest = 5 if self.machine == "x86_64" else 17
        found = []
        for minor in range(self.glibc, oldest - 1, -1):
            found.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in LEGACY:
                found.append(f"{LEGACY[minor]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]

    def environment(self) -> dict[str, str]:
        """The values of requirement markers there (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": ".".join(self.python.split(".")[:2]),
            "sys_platform": "linux",
        }


def target_of(stack: Stack, debs: Iterable[LockedFile]) -> WheelTarget:
    """The target, read from the locked Debian packages or the stack's base: its Python's full version and its glibc."""
    if stack.base:
        return WheelTarget(stack.base.python, MACHINES[stack.platform], stack.base.glibc)
    versions = {deb.name: deb.version for deb in debs}
    python, glibc = versions.get(f"python{stack.python.version}-minimal"), versions.get("libc6")
    if not python or not glibc:
        raise ManifestError(
            f"pins/stacks/{stack.name}.yaml",
            "python.version",
            stack.python.version,
            f"a Python that Debian {stack.system.suite} has, with python3 in debian.packages",
        )
    full, minor = re.match(r"[\d.]+", python), re.match(r"2\.(\d+)", glibc)
    assert full and minor, (python, glibc)
    return WheelTarget(full[0], MACHINES[stack.platform], int(minor[1]))


def pip(target: WheelTarget, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """`pip download` of wheels for the target into `folder`. Its scratch files stay in `folder` too."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-P", "-m", "sparkpin.fetch.target_pip", json.dumps(target.environment())),
        *("download", "--no-cache-dir", "--no-input", "--progress-bar=off", "--disable-pip-version-check"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={target.python}"),
        *(f"--platform={platform}" for platform in target.platforms()),
        *("--dest", str(folder), *argv),
    ]
    env = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8", "PIP_REQUIRE_VIRTUALENV": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 70:
        raise HostError(done.stderr.strip().splitlines()[-1], next_step="./install.sh makes the environment anew")
    if done.returncode and "No space left on device" in done.stderr:
        raise_no_space(folder)
    return done


def download_closure(stack: Stack, target: WheelTarget, folder: Path, keep: Sequence[LockedFile], say: Say) -> None:
    """Every wheel that `python.requirements` needs, excluded ones too, into `folder`. Raises NetworkError.

    keep: wheels whose versions stay, where the requirements leave that open and where all of them fit together.
    """
    named = {canonicalize_name(Requirement(row).name) for row in stack.python.requirements}
    versions = [f"{wheel.name}=={wheel.version}\n" for wheel in keep if wheel.name not in named]
    (folder / "keep.txt").write_text("".join(versions))
    done = resolve(stack, target, folder, "--constraint", str(folder / "keep.txt"))
    if done.returncode and versions:
        say("  the former versions do not fit the requirements, or are gone: all are resolved anew")
        done = resolve(stack, target, folder)
    if done.returncode:
        raise NetworkError(f"pip could not resolve {stack.python.requirements}:\n{tail(done)}", next_step=CONFIG)


def resolve(stack: Stack, target: WheelTarget, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if stack.python.constraints:
        (folder / "constraints.txt").write_text("".join(f"{row}\n" for row in stack.python.constraints))
        options = (*options, "--constraint", str(folder / "constraints.txt"))
    done = pip(target, folder, *options, *stack.python.requirements)
    if done.returncode and stack.python.torch_backend and (name := no_such_file(done.stderr)):
        wanted = next((row for row in stack.python.requirements if row.partition("==")[0] == name), None)
        if wanted:
            extra = folder / "backend"
            extra.mkdir(exist_ok=True)
            for url, _, _ in backend_urls(stack, target, wanted):
                stream(url, extra / unquote(urlsplit(url).path).rpartition("/")[2])
            done = pip(target, folder, *options, "--find-links", str(extra), *stack.python.requirements)
    return done


def no_such_file(text: str) -> str | None:
    """The distribution that pip says the index does not have."""
    match = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)", text)
    return match[1] if match else None


def download(
    stack: Stack, target: WheelTarget, wanted: Sequence[LockedFile], folder: Path, how_to_get: HowToGet
) -> None:
    """Fetch locked wheels into `folder`, named as in the lock. Raises NetworkError or IntegrityError.

    how_to_get: what to do about files that are no longer offered.
    """
    lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in wanted]
    (folder / "wanted.txt").write_text("\n".join(lines) + "\n")
    done = pip(target, folder, "--no-deps", "--require-hashes", "--requirement", str(folder / "wanted.txt"))
    if done.returncode == 0:
        return
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise mismatch(wanted, done.stderr, how_to_get)
    missing = no_such_file(done.stderr)
    if missing and stack.python.torch_backend and len(wanted) == 1:
        download_from_backend(stack, target, wanted[0], folder, how_to_get)
        return
    raise not_fetched(wanted, done, how_to_get)


def not_fetched(
    wanted: Sequence[LockedFile], done: subprocess.CompletedProcess[str], how_to_get: HowToGet
) -> NetworkError:
    """Tell a file that is gone from an index that does not answer, as far as pip's words allow."""
    if gone := HTTP_GONE.search(done.stderr):
        lost = [wheel for wheel in wanted if wheel.file == unquote(gone["url"]).rpartition("/")[2]]
    else:
        lost = [wheel for wheel in wanted if wheel.name == canonicalize_name(no_such_file(done.stderr) or "")]
    if not lost or "Retrying (" in done.stderr:
        names = ", ".join(wheel.file for wheel in lost or wanted)
        return NetworkError(f"pip could not fetch {names}:\n{tail(done)}", next_step=CONFIG)
    file, advice = lost[0], how_to_get(lost)
    if gone or not NO_VERSIONS.search(done.stderr):
        return NetworkError(
            f"{file.file} (sha256={file.sha256}) is no longer offered by the index:\n{tail(done)}", next_step=advice
        )
    return NetworkError(
        f"pip could not fetch {file.file} (sha256={file.sha256}): the index does not answer, or has no "
        f"{file.name} any more:\n{tail(done)}",
        next_step=f"{CONFIG}; if it is gone: {advice}",
    )


def mismatch(wanted: Sequence[LockedFile], text: str, how_to_get: HowToGet) -> IntegrityError:
    """pip's own report of a wrong hash, with the lock's side of it."""
    expected, got = re.search(r"Expected sha256 ([0-9a-f]{64})", text), re.search(r"Got\s+([0-9a-f]{64})", text)
    file = next((wheel for wheel in wanted if expected and wheel.sha256 == expected[1]), wanted[0])
    return IntegrityError(
        f"integrity mismatch on {file.file} as the index has it: wanted size={file.size}, sha256={file.sha256}; "
        f"got sha256={got[1] if got else '(pip does not say)'}",
        next_step=f"nothing was stored. {how_to_get([file])}",
    )


def download_from_backend(
    stack: Stack, target: WheelTarget, wheel: LockedFile, folder: Path, how_to_get: HowToGet
) -> None:
    """A wheel that only PyTorch's own index has, by uv, which knows that index (`python.torch_backend`).

    The parsing is tested; the download was not run against the real index, which the development machine cannot reach.
    """
    for url, sha256, _ in backend_urls(stack, target, f"{wheel.name}=={wheel.version}"):
        if sha256 == wheel.sha256:
            stream(url, folder / wheel.file)
            return
    raise NetworkError(
        f"neither pip's index nor PyTorch's ({stack.python.torch_backend}) has {wheel.file} with sha256={wheel.sha256}",
        next_step=how_to_get([wheel]),
    )


def backend_urls(stack: Stack, target: WheelTarget, requirement: str) -> list[tuple[str, str, str]]:
    """(URL, SHA-256, distribution) of the wheels that uv would take for one requirement. Network."""
    done = compiled(stack, target, requirement, "--no-deps")
    if done.returncode:
        raise NetworkError(f"neither pip nor uv finds {requirement}; uv says:\n{tail(done)}", next_step=CONFIG)
    return parse_pylock(done.stdout)


def compiled(
    stack: Stack,
    target: WheelTarget,
    requirements: str,
    *options: str,
    only_binary: bool = True,
    env: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """`uv pip compile` for the target, to a pylock.toml, of wheels alone or not. requirements: one a line. Network."""
    argv = [
        *("uv", "pip", "compile", "--no-config", "--quiet", "--format=pylock.toml"),
        *(["--only-binary=:all:"] if only_binary else []),
        *(f"--python-version={target.python}", f"--python-platform={target.machine}-manylinux_2_{target.glibc}"),
        *([f"--torch-backend={stack.python.torch_backend}"] if stack.python.torch_backend else []),
        *(*options, "-"),
    ]
    # uv lies beside the Python that runs this, whether or not its environment was activated.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    return subprocess.run(
        argv, input=requirements, env={**os.environ, **env, "PATH": path}, capture_output=True, text=True, check=False
    )


def parse_pylock(text: str) -> list[tuple[str, str, str]]:
    """(URL, SHA-256, distribution) of every wheel in a pylock.toml (PEP 751)."""
    return [
        (wheel["url"], wheel["hashes"]["sha256"], package["name"])
        for package in tomllib.loads(text).get("packages", [])
        for wheel in package.get("wheels", [])
        if "url" in wheel and "sha256" in wheel.get("hashes", {})
    ]


def stream(url: str, target: Path) -> None:
    """Fetch one URL to a file. Raises NetworkError. The caller verifies the bytes."""
    import httpx  # slow to import, and only the index of `python.torch_backend` needs it

    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as answer, disk_errors(target.parent):
            answer.raise_for_status()
            with target.open("wb") as file:
                for chunk in answer.iter_bytes(CHUNK):
                    file.write(chunk)
    except httpx.HTTPError as error:
        raise NetworkError(f"could not fetch {target.name}: {error}", next_step=CONFIG) from error


def length(url: str) -> int:
    """The size of what lies at a URL, in bytes. Raises NetworkError. A server that compresses would tell another."""
    import httpx

    try:
        plain = {"Accept-Encoding": "identity"}
        answer = httpx.head(url, headers=plain, follow_redirects=True, timeout=60).raise_for_status()
        return int(answer.headers["Content-Length"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise NetworkError(f"the index tells no size of {url}: {error}", next_step=CONFIG) from error


@dataclass(frozen=True)
class Dist:
    """A wheel's own account of itself. name, extras: canonical (PEP 503)."""

    name: str
    version: str
    requires: tuple[str, ...]
    extras: frozenset[str]
    path: Path


def read_dist(path: Path) -> Dist:
    """Name, version, requirements and extras from a wheel's METADATA."""
    with zipfile.ZipFile(path) as wheel:
        (member,) = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        message = email.parser.BytesParser().parsebytes(wheel.read(member), headersonly=True)
    requires = tuple(message.get_all("Requires-Dist", []))
    extras = frozenset(canonicalize_name(extra) for extra in message.get_all("Provides-Extra", []))
    return Dist(canonicalize_name(message["Name"]), message["Version"], requires, extras, path)


def reachable(dists: Mapping[str, Dist], roots: Sequence[str], exclude: Iterable[str], target: WheelTarget) -> set[str]:
    """The names that the roots need on the target when the excluded distributions, and what only they need, stay out.

    An extra that a distribution does not have is passed over, as pip does. Raises KeyError for a needed distribution
    that `dists` lacks.
    """
    left_out, environment = set(exclude), target.environment()
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(canonicalize_name(r.name), extra) for r in map(Requirement, roots) for extra in ("", *r.extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen or name in left_out:
            continue
        seen.add((name, extra))
        found.add(name)
        if extra and canonicalize_name(extra) not in dists[name].extras:
            continue
        for requirement in applicable(dists[name].requires, extra, environment):
            todo += [(canonicalize_name(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    return found


def applicable(requires: Iterable[str], extra: str, environment: Mapping[str, str]) -> Iterator[Requirement]:
    """The requirements whose markers hold on the target with one extra (or none, the empty string)."""
    for requirement in map(Requirement, requires):
        if requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra}):
            yield requirement


def arrived(folder: Path) -> int:
    """Bytes of unfinished downloads, as far as they can be seen: files come and go, and pip copies them, meanwhile."""
    sizes: dict[str, int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".whl", ".deb")):
                with contextlib.suppress(OSError):
                    sizes[name] = max(sizes.get(name, 0), (Path(where) / name).stat().st_size)
    return sum(sizes.values())
