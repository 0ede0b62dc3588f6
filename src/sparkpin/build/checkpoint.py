"""Checkpoints of a model: what their sources lack is fetched, then they are planned or built; and the bytes that
this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.checkpoint import shapes, write
from sparkpin.checkpoint.content import Hashes, is_complete
from sparkpin.checkpoint.plan import CheckpointPlan, donor_tensors, make_plan
from sparkpin.checkpoint.steps import checkpoint_key, lock_for, used_repositories
from sparkpin.core.paths import Paths
from sparkpin.fetch import model
from sparkpin.fetch.model_files import repository_folder
from sparkpin.host import preflight
from sparkpin.pins.schema import ModelLock, ModelPin


def build_checkpoint(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> Path:
    """The folder of the checkpoint that `steps` make of the model; built if it is not there yet.

    Fetches what the steps use. Raises what `fetch_model` and `make_plan` raise, and DiskError if the disk cannot take
    it. Two runs at once build it once; what a killed run had finished, the next one goes on from.
    """
    key = checkpoint_key(pin, lock, steps)
    folder = write.checkpoint_folder(paths, pin, lock, steps)
    if is_complete(folder, key):
        return folder
    with write.hold_model(paths, pin.name):
        if is_complete(folder, key):
            return folder
        used = used_repositories(pin, steps)
        plan = make_plan(model.listings(paths, pin, lock, only=used), pin, steps)  # before 72 GB are fetched
        places = model.fetch_model(paths, pin, lock, only=used)
        write.write_checkpoint(folder, pin, lock, plan, places, Hashes.here(paths))
    return folder


def plan_checkpoint(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> CheckpointPlan:
    """What `build_checkpoint` would do; `summary` prints it. Fetches headers only; a model from
    a GGUF file has them once it is converted. Writes nothing else."""
    return make_plan(model.listings(paths, pin, lock, only=used_repositories(pin, steps)), pin, steps)


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
        folder = write.checkpoint_folder(paths, pin, lock, one)
        if not is_complete(folder, checkpoint_key(pin, lock, one)):
            base = repository_folder(paths, lock.repositories[pin.base])
            found += write.disk_needed(folder, base, plan_checkpoint(paths, pin, lock, one))
    fetch = model.absent_bytes(paths, pin, lock_for(pin, lock, steps[-1]), used)
    return ModelNeeds(tuple(sorted(pin.repositories[name].repo for name in used)), fetch, found)


def needs_ahead(paths: Paths, pin: ModelPin, chain: Sequence[tuple[str, ...]]) -> ModelNeeds | None:
    """As `needs_of`, of a model without a lock, by pins/shapes: nothing of it is here yet. None where they do not know
    it."""
    steps = list(dict.fromkeys(chain))
    known = shapes.shapes_of(paths.project, pin, {name for one in steps for name in used_repositories(pin, one)})
    if known is None:
        return None
    listings = {name: one.listing(name) for name, one in known.items()}
    plans = [make_plan(listings, pin, one) for one in steps]
    fetch = sum(listing.size for name, listing in listings.items() if pin.is_whole(name))
    fetch += sum(place.info.nbytes for places in donor_tensors(plans[-1]).values() for place in places)
    repositories = tuple(sorted(pin.repositories[name].repo for name in known))
    return ModelNeeds(repositories, fetch, sum(plan.written_bytes for plan in plans))
