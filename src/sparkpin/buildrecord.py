"""Build records: what an image was made from, to the byte, and what came out.

    images/<stack>-<stage>-<key12>.json

A record is enough to make the image again without the project: the Dockerfile's text, every file of the context by
SHA-256, the root file system's packages and arguments. The bytes lie in the stores (`inputs`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from sparkpin import seal
from sparkpin.epoch import EPOCH
from sparkpin.errors import IntegrityError
from sparkpin.files import write_json
from sparkpin.paths import Paths
from sparkpin.releases import Digest, Release
from sparkpin.render import ContextFile, Rendered
from sparkpin.rootfs import RootfsSpec
from sparkpin.schema import LockedFile, Model, Sha256


class BuildInput(Model):
    """One file of a build's context as the builder saw it. path: below the context; what: as "wheel numpy 2.4.0"."""

    path: str
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]
    executable: bool = False
    what: str


class LayerRecord(Model):
    """name: of the Dockerfile's tree; key: over all that decides the layer.

    diff_id: of the sealed layer; None where the tree is empty, or where the layers were not made from trees.
    """

    name: str
    key: Sha256
    diff_id: Digest | None


class BuildRecord(Model):
    """layers: those that this stage adds, lowest first (none of a stage that only changes labels).

    config: the image's configuration (JSON), whose SHA-256 is config_digest; diff_ids: of the whole image, of which the
    lowest is the root file system; size: bytes of all layers; seconds: what the build took; epoch, seal: of the
    canonical form.
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
    dockerfile: str
    context: list[BuildInput]
    layers: list[LayerRecord]
    config: str
    config_digest: Digest
    diff_ids: list[Digest]
    size: int
    seconds: float

    @property
    def rendered(self) -> Rendered:
        """What a build needs, from the record alone."""
        return Rendered(
            stage=self.stage,
            stack=self.stack,
            key=self.key,
            parent_key=self.parent_key,
            ref=self.ref,
            parent_ref=self.parent_ref,
            platform=self.platform,
            rootfs=self.rootfs,
            dockerfile=self.dockerfile,
            context=tuple(map(kept_file, self.context)),
            layers=tuple((layer.name, layer.key) for layer in self.layers),
        )


def kept_file(row: BuildInput) -> ContextFile:
    locked = LockedFile(name=row.what, file=Path(row.path).name, size=row.size, sha256=row.sha256)
    return ContextFile(row.path, row.sha256, row.size, "kept", row.what, executable=row.executable, locked=locked)


def record_file(paths: Paths, rendered: Rendered) -> Path:
    return paths.images / f"{rendered.stack}-{rendered.stage}-{rendered.key[:12]}.json"


def layer_file(paths: Paths, diff_id: str) -> Path:
    """Where the contents of a sealed layer are listed."""
    return paths.layers / f"{diff_id.removeprefix('sha256:')}.jsonl.gz"


def write_record(paths: Paths, record: BuildRecord) -> None:
    path = paths.images / f"{record.stack}-{record.stage}-{record.key[:12]}.json"
    write_json(path, record.model_dump(mode="json", by_alias=True))


def read_record(path: Path) -> BuildRecord:
    """Raises FileNotFoundError; IntegrityError for what is no record."""
    try:
        return BuildRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, ValidationError) as error:
        raise IntegrityError(
            f"{path}: not a build record: {error}", next_step=f"rm {path}, then invoke build"
        ) from None


def records_of(paths: Paths, release: Release) -> tuple[BuildRecord, ...]:
    """The build records of a release's image and of those it stands on, first stage first.

    IntegrityError when one is gone.
    """
    found: list[BuildRecord] = []
    key: str | None = release.build_key
    while key is not None:
        paths_found = sorted(paths.images.glob(f"{release.stack}-*-{key[:12]}.json"))
        if not paths_found:
            raise IntegrityError(
                f"{release.tag}: the record of how its image was built (build key {key[:12]}) is not in {paths.images}",
                next_step=f"invoke build --stage {release.stage} makes it anew, if the pins are still the same",
            )
        found.append(read_record(paths_found[0]))
        key = found[-1].parent_key
    return tuple(reversed(found))


def check_form(records: Sequence[BuildRecord]) -> None:
    """IntegrityError for an image in another canonical form than this sparkpin writes."""
    for record in records:
        if (record.seal, record.epoch) != (seal.VERSION, EPOCH):
            raise IntegrityError(
                f"{record.ref} was sealed in form {record.seal} (epoch {record.epoch}); this sparkpin writes form "
                f"{seal.VERSION} (epoch {EPOCH})",
                next_step="use the version of sparkpin that built it",
            )
