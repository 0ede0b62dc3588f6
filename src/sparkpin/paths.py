"""Where things lie: the project (data that people edit), the cache (re-fetchable) and the home (precious)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def xdg(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "sparkpin"


@dataclass(frozen=True)
class Paths:
    """project: the checkout; cache: store and work folders; home: releases and checkpoints."""

    project: Path
    cache: Path
    home: Path

    @classmethod
    def from_env(cls, project: Path | None = None) -> Paths:
        """SPARKPIN_CACHE and SPARKPIN_HOME, else the XDG defaults. The project is the checkout of this file."""
        cache = os.environ.get("SPARKPIN_CACHE") or xdg("XDG_CACHE_HOME", ".cache")
        home = os.environ.get("SPARKPIN_HOME") or xdg("XDG_DATA_HOME", ".local/share")
        return cls((project or Path(__file__).resolve().parents[2]), Path(cache).absolute(), Path(home).absolute())

    @property
    def store(self) -> Path:
        return self.cache / "store"

    @property
    def work(self) -> Path:
        return self.cache / "work"

    @property
    def engine(self) -> Path:
        return self.cache / "engine"

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
