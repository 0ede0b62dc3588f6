"""Where things lie: the project (data that people edit), the cache (re-fetchable) and the home (precious)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import InputError


def xdg(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "sparkpin"


def folder_of(variable: str, default: Path) -> Path:
    """What a variable names, else the default: a folder, which need not be there yet. InputError for what is none."""
    name = os.environ.get(variable)
    path = Path(name or default).absolute()
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if there.is_dir():
        return path
    raise InputError(
        f"{variable}{'' if name else ' (not set)'}: got {path}, expected a folder; {there} is none",
        next_step=f"export {variable}=FOLDER{f', or unset {variable}' if name else ''}",
    )


def project_folder() -> Path:
    """SPARKPIN_PROJECT (`sparkpin --project` sets it), else the nearest folder from the current one upwards that is a
    project, else the checkout of this file. InputError for none, and for one that is nearest and another user's: nobody
    named it, and its recipes say what runs (a folder /tmp/pins is quickly made)."""
    if os.environ.get(PROJECT):
        folder = folder_of(PROJECT, Path())
        if not is_project(folder):
            raise InputError(f"{folder} is not a sparkpin project: it has no folder pins", next_step=NEXT)
        return folder
    here, checkout = Path.cwd(), Path(__file__).resolve().parents[3]
    for folder in (here, *here.parents, checkout):
        if is_project(folder):
            owners = (str(os.geteuid()), "0", os.environ.get("SUDO_UID"))  # under sudo its caller's is trusted, too
            if folder != checkout and str(folder.stat().st_uid) not in owners:
                raise InputError(f"{folder} is another user's project", next_step=f"sparkpin --project {folder} TASK")
            return folder
    raise InputError(f"no sparkpin project: neither {here} nor a folder above it has a folder pins", next_step=NEXT)


PROJECT = "SPARKPIN_PROJECT"
NEXT = "go to a folder with the project's files, such as a clone of sparkpin, or sparkpin --project FOLDER TASK"


def is_project(folder: Path) -> bool:
    """That of the sources with this name holds code."""
    return (folder / "pins").is_dir() and not (folder / "pins/__init__.py").exists()


@dataclass(frozen=True)
class Paths:
    """project: what people edit; cache: store and work folders; home: releases and checkpoints."""

    project: Path
    cache: Path
    home: Path

    @classmethod
    def from_env(cls, project: Path | None = None) -> Paths:
        """SPARKPIN_CACHE and SPARKPIN_HOME, else the XDG defaults; the project as `project_folder` finds it.

        InputError where something else than a folder is in the way, before a command takes it for an empty one.
        """
        cache = folder_of("SPARKPIN_CACHE", xdg("XDG_CACHE_HOME", ".cache"))
        home = folder_of("SPARKPIN_HOME", xdg("XDG_DATA_HOME", ".local/share"))
        return cls(project or project_folder(), cache, home)

    @property
    def store(self) -> Path:
        return self.cache / "store"

    @property
    def work(self) -> Path:
        return self.cache / "work"

    @property
    def releases(self) -> Path:
        return self.home / "releases"

    @property
    def images(self) -> Path:
        """Build records: what each image was made from and what came out."""
        return self.home / "images"

    @property
    def inputs(self) -> Path:
        """A store of what no lock names and nobody can fetch again: project files, wheels of mods, tools."""
        return self.home / "inputs"

    @property
    def layers(self) -> Path:
        """What each sealed layer holds, file by file."""
        return self.home / "layers"

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    @property
    def models(self) -> Path:
        """Fetched model repositories: they can be fetched again."""
        return self.cache / "models"

    @property
    def locks(self) -> Path:
        return self.cache / "locks"
