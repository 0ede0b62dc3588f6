"""The bytes that a recipe takes of its model before it can be served: from a Hub, and on which disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkpin.build.checkpoint import plan_checkpoint
from sparkpin.checkpoint.content import is_made_here
from sparkpin.checkpoint.steps import checkpoint_key, lock_for, used_repositories
from sparkpin.checkpoint.write import checkpoint_folder, disk_needed
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.fetch import model
from sparkpin.fetch.model_files import repository_folder
from sparkpin.host import preflight
from sparkpin.pins.schema import ModelLock, ModelPin

RATES = {"100 Mbit/s": 12_500_000, "1 Gbit/s": 125_000_000}
"""Bytes a second, assumed: nobody knows how fast the Hub answers before it is asked."""


@dataclass(frozen=True)
class ModelNeeds:
    """repositories: those that are read; fetch: bytes from a Hub; checkpoints: bytes of those to be made."""

    repositories: tuple[str, ...]
    fetch: int
    checkpoints: int

    def disk(self, paths: Paths, images: preflight.Needs | None = None) -> list[preflight.DiskRow]:
        """images: what building them takes, too, where they are to be built."""
        model = [(paths.models, self.fetch), (paths.checkpoints, self.checkpoints)]
        return preflight.disk_rows(preflight.folders_of(paths, images) if images else (), model)


def needs_of(paths: Paths, pin: ModelPin, lock: ModelLock, chain: Sequence[tuple[str, ...]]) -> ModelNeeds:
    """chain: the steps of each checkpoint. Fetches the headers that are not here."""
    steps = list(dict.fromkeys(chain))
    used = {name for one in steps for name in used_repositories(pin, one)}
    found = 0
    for one in steps:
        folder = checkpoint_folder(paths, pin, lock, one)
        if not is_made_here(folder, checkpoint_key(pin, lock, one)):
            base = repository_folder(paths, lock.repositories[pin.base])
            found += disk_needed(folder, base, plan_checkpoint(paths, pin, lock, one))
    fetch = model.absent_bytes(paths, pin, lock_for(pin, lock, steps[-1]), used)
    return ModelNeeds(tuple(sorted(pin.repositories[name].repo for name in used)), fetch, found)


def how_long(size: int) -> str:
    """To fetch so many bytes, at the assumed rates."""
    return ", ".join(f"{terminal.duration(size / rate)} at {name}" for name, rate in RATES.items())
