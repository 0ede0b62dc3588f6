"""What an image is made from, to the byte, and what came out: rendered before the build, recorded after it.

    images/<stack>-<stage>-<key12>.json            a build record
    images/<stack>-<stage>-<key12>.json.imported   empty: another machine made the record
    images/<stack>-<stage>-<key12>.json.begun      empty: a build of it runs, or was killed

A record is enough to make the image again without the project: the Dockerfile's text, every file of the context by
SHA-256, the root file system's packages and arguments. The bytes lie in the stores (`releases/kept_inputs`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from sparkpin.build.rootfs import RootfsSpec
from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import EPOCH, write_json
from sparkpin.core.models import Sha256, Size, StrictModel
from sparkpin.core.paths import Paths
from sparkpin.image import seal
from sparkpin.pins.mods import Mod
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.record import Digest, Release

LOCKED = "wheel "  # how `what` begins of files that a lock names
SHARED = ("stack", "stage", "key", "parent_key", "ref", "parent_ref", "platform", "rootfs", "dockerfile")


@dataclass(frozen=True)
class ContextFile:
    """One file that a build sees. path: below the context; what: what a person calls it, as "wheel numpy 2.4.0".

    source: a file of the stores, a mod (whose wheel is built then; `sha256` is its sources' key, `size` their bytes),
    a path on this machine, or a text. identity: stands for the file in keys, where machines have different files that
    do the same; `sha256` may be "" then.
    """

    path: str
    sha256: str
    size: int
    what: str
    source: LockedFile | Mod | Path | str
    executable: bool = False
    identity: str = ""


@dataclass(frozen=True)
class RenderedImage:
    """One stage's image, before it is built.

    key: build key (hex); parent_key: None for the first stage; ref: the internal tag; parent_ref: what it is built on;
    rootfs: what the first stage stands on, None for the others;
    layers: (name, key) of each layer that it adds, where the key is over all that decides the layer;
    builder: of an image for another architecture, where its steps ran before; None where the project's pins say it.
    """

    stage: str
    stack: str
    key: str
    parent_key: str | None
    ref: str
    parent_ref: str
    platform: str
    rootfs: RootfsSpec | None
    dockerfile: str
    context: tuple[ContextFile, ...]
    layers: tuple[tuple[str, str], ...] = ()
    builder: RootfsSpec | None = None


class BuildInput(StrictModel):
    """One file of a build's context as the builder saw it. path, what: as of a `ContextFile`."""

    path: str
    sha256: Sha256
    size: Size
    executable: bool = False
    what: str

    @property
    def locked(self) -> LockedFile:
        return LockedFile(name=self.what, file=Path(self.path).name, size=self.size, sha256=self.sha256)


class LayerRecord(StrictModel):
    """name: of the Dockerfile's tree; key: over all that decides the layer; diff_id: of the sealed layer, None where
    the tree is empty."""

    name: str
    key: Sha256
    diff_id: Digest | None


class BuildRecord(StrictModel):
    """layers: those that this stage adds, lowest first (none of a stage that only changes labels).

    config: the image's configuration (JSON), whose SHA-256 is config_digest; diff_ids: of the whole image, of which the
    lowest is the root file system; size: bytes of all layers; seconds: what the build took; epoch, seal: of the
    canonical form; builder: of an image for another architecture, the root file system that its steps ran in, None
    where they ran in the image's own.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    stack: str
    stage: str
    key: Sha256
    parent_key: Sha256 | None
    ref: str
    parent_ref: str
    platform: str
    epoch: int = EPOCH
    seal: int = seal.VERSION
    rootfs: RootfsSpec | None
    builder: RootfsSpec | None = None
    dockerfile: str
    context: list[BuildInput]
    layers: list[LayerRecord]
    config: str
    config_digest: Digest
    diff_ids: list[Digest]
    size: Size
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def root_file_systems(self) -> tuple[RootfsSpec, ...]:
        """That of the image, and that in which its steps ran."""
        return tuple(filter(None, (self.rootfs, self.builder)))

    @property
    def rendered(self) -> RenderedImage:
        """What a build needs, from the record alone."""
        return RenderedImage(
            **shared_fields(self),
            context=tuple(ContextFile(**dict(row), source=row.locked) for row in self.context),
            layers=tuple((layer.name, layer.key) for layer in self.layers),
            builder=self.builder,
        )


def shared_fields(image: RenderedImage | BuildRecord) -> dict[str, Any]:
    """What a rendered image and its record have in common."""
    return {name: getattr(image, name) for name in SHARED}


def record_file(paths: Paths, image: RenderedImage | BuildRecord) -> Path:
    return record_path(paths, image.stack, image.stage, image.key)


def record_path(paths: Paths, stack: str, stage: str, key: str) -> Path:
    return paths.images / f"{stack}-{stage}-{key[:12]}.json"


def layer_file(paths: Paths, diff_id: str) -> Path:
    return paths.layers / f"{diff_id.removeprefix('sha256:')}.jsonl.gz"


def imported_mark(record: Path) -> Path:
    """Beside a record that another machine made: nobody computed here that its inputs have its key."""
    return record.with_name(f"{record.name}.imported")


def begun_mark(record: Path) -> Path:
    """Where a record will be once its build has ended."""
    return record.with_name(f"{record.name}.begun")


def is_imported(paths: Paths, image: RenderedImage | BuildRecord) -> bool:
    return imported_mark(record_file(paths, image)).is_file()


def write_record(paths: Paths, record: BuildRecord, *, imported: bool = False) -> None:
    """imported: from another machine. That mark is there before the record, and goes after it was written again."""
    path = record_file(paths, record)
    path.parent.mkdir(parents=True, exist_ok=True)
    if imported:
        imported_mark(path).touch()
    write_json(path, record.model_dump(mode="json", by_alias=True))
    begun_mark(path).unlink(missing_ok=True)
    if not imported:
        imported_mark(path).unlink(missing_ok=True)


def keys_here(paths: Paths) -> frozenset[str]:
    """The first 12 digits of the keys of all images and root file systems that this data directory and this cache
    built, imported or began to build: they may share the engine with others, and each removes its own."""
    found = {path.name.partition(".json")[0][-12:] for path in paths.images.glob("*.json*")}
    found |= {path.stem[:12] for path in (paths.cache / "rootfs").glob("*.tar")}
    for path in paths.images.glob("*.json"):
        with contextlib.suppress(IntegrityError, FileNotFoundError):
            found |= {spec.key[:12] for spec in read_record(path).root_file_systems}
    return frozenset(found)


def records_with_key(paths: Paths, stack: str, key: str) -> list[tuple[Path, BuildRecord]]:
    """Whatever their stage. Raises what `read_record` raises for what could be one of them and is no record."""
    found = [(path, read_record(path)) for path in sorted(paths.images.glob(f"{stack}-*-{key[:12]}.json"))]
    return [(path, record) for path, record in found if record.key == key]


def read_record(path: Path) -> BuildRecord:
    """Raises FileNotFoundError; IntegrityError for what is no record."""
    try:
        return BuildRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        step = "import a bundle of a release that has it (`invoke import FILE`), or build the image again"
        raise IntegrityError(f"{path}: not a build record: {error}", next_step=step) from None


def records_of(paths: Paths, release: Release) -> tuple[BuildRecord, ...]:
    """The build records of a release's image and of those it stands on, first stage first.

    IntegrityError when one is gone, or is of other bytes than the release: a build that came out otherwise later.
    """
    found: list[BuildRecord] = []
    key: str | None = release.build_key
    while key is not None:
        rows = [record for _, record in records_with_key(paths, release.stack, key)]
        if len(rows) != 1:
            got = f"got {len(rows)} records of how its image was built (build key {key[:12]}) in {paths.images}"
            step = f"invoke build --stage {release.stage} makes a lost one again, with the same pins"
            raise IntegrityError(f"{release.tag}: {got}, expected one", next_step=step)
        found.insert(0, rows[0])
        key = rows[0].parent_key
    diff_ids = list(release.diff_ids)
    for record in found:
        if record.diff_ids != diff_ids[: len(record.diff_ids)] or found[-1].config_digest != release.image:
            cause = f"the record of {record.ref} is of another image: a later build gave other bytes"
            step = "import a bundle of the release (`invoke import FILE`)"
            raise IntegrityError(f"{release.tag}: {cause}", next_step=step)
    return tuple(found)
