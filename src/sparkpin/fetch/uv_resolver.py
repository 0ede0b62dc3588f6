"""A closure by uv, from what the index says of its files: nothing is downloaded. For stacks with `python.overrides`,
`python.as_of` or `python.source`.

pip cannot set aside what a distribution requires, nor what came later than a day; uv can, and its pylock.toml (PEP 751)
has every file's size and hash.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sparkpin.core.errors import ManifestError, NetworkError
from sparkpin.fetch.debs import tail
from sparkpin.fetch.wheels import CONFIG, WheelTarget, compiled, length
from sparkpin.pins.schema import LockedFile, Stack


def index_closure(stack: Stack, target: WheelTarget, keep: Sequence[LockedFile], file: str) -> list[LockedFile]:
    """Every wheel that the requirements need on the target, sorted by name. Network.

    keep: wheels whose versions stay where all of them fit together. `python.exclude` goes with what only it needs.
    Raises ManifestError (what is asked for does not fit together; an excluded distribution that nothing asks for) or
    NetworkError.
    """
    python = stack.python
    free = {canonicalize_name(row.partition("==")[0]) for row in (*python.requirements, *python.overrides)}
    kept = [f"{wheel.name}=={wheel.version}" for wheel in keep if canonicalize_name(wheel.name) not in free]
    done = resolved(stack, target, [*python.constraints, *kept])
    if done.returncode and kept:
        done = resolved(stack, target, list(python.constraints))
    if done.returncode:
        said = tail(done, 15)
        if "requirements are unsatisfiable" in " ".join(said.split()):  # uv breaks lines where COLUMNS says so
            raise ManifestError(
                file, "python.requirements", python.requirements, f"requirements that fit together; uv says:\n{said}"
            )
        raise NetworkError(f"uv could not resolve {python.requirements}:\n{said}", next_step=CONFIG)
    check_excluded(stack, target, file)
    return parse(done.stdout, target, file)


def check_excluded(stack: Stack, target: WheelTarget, file: str) -> None:
    """Each excluded distribution would come without being excluded. Says nothing where that does not resolve."""
    python = stack.python
    whole = resolved(stack, target, list(python.constraints), exclude=()) if python.exclude else None
    if whole is not None and whole.returncode == 0:
        names = {package["name"] for package in tomllib.loads(whole.stdout).get("packages", [])}
        for name in python.exclude:
            if name not in names:
                raise ManifestError(file, "python.exclude", name, "a distribution that the requirements would bring in")


def resolved(
    stack: Stack,
    target: WheelTarget,
    constraints: Iterable[str],
    *,
    requirements: Sequence[str] = (),
    exclude: Iterable[str] | None = None,
    options: Sequence[str] = (),
    only_binary: bool = True,
) -> subprocess.CompletedProcess[str]:
    """uv's pylock.toml. requirements, exclude: in place of the stack's own."""
    python = stack.python
    rows = {
        "constraints": constraints,
        "overrides": python.overrides,
        "excludes": python.exclude if exclude is None else exclude,
    }
    with tempfile.TemporaryDirectory(prefix="sparkpin-") as name:
        given = {option: Path(name, f"{option}.txt") for option in rows}
        for option, path in given.items():
            path.write_text("".join(f"{row}\n" for row in rows[option]), encoding="utf-8")
        argv = [*options, *(f"--{option}={path}" for option, path in given.items())]
        argv += [f"--exclude-newer={python.as_of}T00:00:00Z"] if python.as_of else []
        wanted = "\n".join(requirements or python.requirements)
        return compiled(stack, target, wanted, *argv, only_binary=only_binary, env=index_of_pip())


def index_of_pip() -> dict[str, str]:
    """uv's word for the index that the user's pip is configured for: `fetch` brings the files from there."""
    for key in (":env:.index-url", "global.index-url"):
        argv = [sys.executable, "-m", "pip", "config", "get", key]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode == 0 and (url := done.stdout.strip()):
            return {"UV_DEFAULT_INDEX": url}
    return {}


def parse(text: str, target: WheelTarget, file: str) -> list[LockedFile]:
    """Of each distribution in a pylock.toml the wheel that fits the target best."""
    tags = ranks(target)
    found = [best(package, tags, file) for package in tomllib.loads(text).get("packages", [])]
    return sorted(found, key=lambda wheel: wheel.name)


def best(package: Mapping[str, Any], tags: Mapping[Tag, int], file: str) -> LockedFile:
    ranked = []
    for wheel in package.get("wheels", []):
        name = unquote(urlsplit(wheel["url"]).path).rpartition("/")[2]
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
    if "sha256" not in wheel.get("hashes", {}):
        raise NetworkError(f"the index tells no SHA-256 of {name}", next_step=CONFIG)
    return LockedFile(
        name=canonicalize_name(package["name"]),
        version=package["version"],
        file=name,
        size=wheel["size"] if "size" in wheel else length(wheel["url"]),  # PyTorch's own index tells none
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
