"""Runs inside a build step: make the venv, or a tree with exactly the wheels of a folder; the same bytes each time.

usage: install.py                  make the empty venv /opt/vllm
       install.py WHEELS ROOT FOR  install WHEELS (wheels and requirements.txt: name==version with hash) for the venv,
                                   below ROOT: the tree that becomes a layer. FOR: uv's name of the images' platform,
                                   which need not be this machine's: nothing that is installed is run

Where WHEELS has links.json (path -> target), ROOT gets these symbolic links.
"""

from __future__ import annotations

import compileall
import csv
import functools
import json
import os
import py_compile
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

VENV = Path("/opt/vllm")
UV = [str(Path(__file__).with_name("uv")), "--offline", "--no-config", "--no-cache", "--no-progress", "--quiet"]
# hardlink: out of uv's own temporary folder, which goes when it ends; a copy would write every byte twice.
EXACTLY = ["--no-index", "--no-deps", "--require-hashes", "--link-mode", "hardlink"]


def make_venv() -> None:
    """The same on every architecture: it holds links to the system's Python, and text."""
    subprocess.run([*UV, "venv", "--python", "/usr/bin/python3", VENV], check=True)
    (VENV / ".lock").unlink(missing_ok=True)


def install(wheels: Path, root: str, wheels_for: str) -> None:
    requirements = wheels / "requirements.txt"
    prefix = Path(f"{root}{VENV}")
    prefix.mkdir(parents=True)
    if not VENV.exists():  # a native stand-in for the parent image
        make_venv()
    if requirements.stat().st_size == 0:
        return
    subprocess.run(
        [
            *(*UV, "pip", "install", *EXACTLY),
            *("--python", VENV / "bin/python"),
            *("--prefix", prefix),
            *("--python-platform", wheels_for),
            *("--find-links", wheels),
            *("--requirements", requirements),
        ],
        check=True,
    )
    (prefix / ".lock").unlink(missing_ok=True)
    sources = [path for path in owners(prefix) if path.suffix == ".py" and path.is_file()]
    with ProcessPoolExecutor() as pool:
        list(pool.map(functools.partial(compile_file, root), sources, chunksize=64))


def owners(prefix: Path) -> dict[Path, str]:
    """The .dist-info folder that each installed file belongs to. Ends the build when a file belongs to two."""
    found: dict[Path, str] = {}
    for info in sorted(prefix.glob("lib/python3*/site-packages/*.dist-info")):
        for path in map(Path.resolve, tidy(info)):
            if (other := found.setdefault(path, info.name)) != info.name:
                sys.exit(f"{path} belongs to both {other} and {info.name}: which of them wins would be chance")
    return found


def tidy(info: Path) -> list[Path]:
    """Remove uv's note of when the wheel file changed, and its line in RECORD; return the distribution's files."""
    record = info / "RECORD"
    note = info / "uv_cache.json"
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    if note.exists():
        note.unlink()
        lines = [line for line in lines if not line.startswith(f"{info.name}/uv_cache.json,")]
        record.write_text("".join(lines), encoding="utf-8")
    return [info.parent / row[0] for row in csv.reader(lines)]


def compile_file(root: str, source: Path) -> None:
    """Bytecode that is checked against nothing: its header holds the source's hash and no time."""
    compileall.compile_file(
        source,
        quiet=2,  # some distributions ship files for other Pythons, which do not compile
        force=True,
        stripdir=root,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def link(links: Path, root: str) -> None:
    for path, target in json.loads(links.read_text(encoding="utf-8")).items():
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


def main(arguments: list[str]) -> None:
    if not arguments:
        make_venv()
    else:
        wheels, root, wheels_for = Path(arguments[0]), *arguments[1:]
        install(wheels, root, wheels_for)
        if (wheels / "links.json").exists():
            link(wheels / "links.json", root)


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1:])
