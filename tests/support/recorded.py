"""A home with one release that no engine has built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import made_releases

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases


@dataclass(frozen=True)
class Site:
    paths: Paths

    @classmethod
    def make(cls, where: Path) -> Site:
        return cls(Paths(where / "project", where / "cache", where / "home"))

    def first(self) -> Release:
        made = made_releases.release(1)
        Releases(self.paths).save(made)
        return made
