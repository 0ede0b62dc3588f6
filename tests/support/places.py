"""Where the project's own files lie, for tests in any folder."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SUPPORT = PROJECT / "tests/support"
DATA = PROJECT / "tests/data"
NO_ENGINE = "no-engine"  # the socket that unit tests are given for Docker's
LINKED = dict[Path, tuple[int, int]]()
"""Files that copies of the project are links to: time and size. A test puts another in place and writes into none."""


def copied_to(copy: Path, *more: str) -> Path:
    """The project's data files, to edit and break; mods/ holds the sources. more: further folders."""
    for name in ("pins", "stages", "recipes", "dockerfiles", "mods", *more):
        ignore = shutil.ignore_patterns("__pycache__", *(["tests"] if name == "mods" else []))
        shutil.copytree(PROJECT / name, copy / name, ignore=ignore, copy_function=copied_or_linked)
    return copy


def copied_or_linked(source: str, copy: str) -> None:
    """A link for weights and for the sources of mods, which are many and which hardly a test edits."""
    path = Path(source)
    if path.suffix != ".safetensors" and not path.is_relative_to(PROJECT / "mods"):
        shutil.copy2(source, copy)
        return
    file = Path(folder().name) / path.relative_to(PROJECT)
    if file not in LINKED:
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, file)
        LINKED[file] = state(file)
    try:
        os.link(file, copy)
    except OSError:  # another file system
        shutil.copy2(source, copy)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Until the run ends, in the file system that has the tests' folders."""
    return tempfile.TemporaryDirectory(prefix="sparkpin-linked-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))


def state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size


def written_through() -> list[Path]:
    """Files that a test wrote into; each is told once, and is as it was for the next copy."""
    return [file for file, was in list(LINKED.items()) if state(file) != was and LINKED.pop(file)]


def rewrite(file: Path, text: str) -> None:
    """Another file in the place of one that may be a link."""
    file.unlink()
    file.write_text(text)
