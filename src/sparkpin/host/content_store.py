"""Archives that leave layers out, for engines that keep their images in containerd's content store.

Such an engine (26 and later with the feature containerd-snapshotter, new installations of 29) refuses a `docker save`
archive without all layers. It takes an OCI image index: its manifest names each layer by the digest and size of a
blob, and a blob that the store has need not be in the archive.

The engine shows a manifest only in a saved image, which comes at 50 MB/s. But an image's Id is the digest of its
manifest: when one that is worked out from noted sizes has that digest, it is the one. Else the image is read. A blob
may be compressed, when something else brought the image; then its digest is not the layer's diff ID.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core.errors import BuildError
from sparkpin.core.files import Joined, write_json
from sparkpin.image.seal import Sealed, SealedLayer, digest_of

# containerd gives these types to what it reads from a `docker save` archive: both ways lead to the same manifest.
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
SMALL = 1 << 20  # bytes; manifests and indexes are smaller


@dataclass(frozen=True)
class Blob:
    """A layer as a manifest names it. size: bytes as stored, which may be compressed."""

    media_type: str
    digest: str
    size: int

    def row(self) -> dict[str, object]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True)
class OciIndex:
    """The members that make an OCI image index of a sealed image's archive.

    digest: of the manifest, which is the Id that the image will have; blobs: the layers, lowest first.
    """

    digest: str
    blobs: list[Blob]
    members: dict[str, bytes]


@dataclass(frozen=True)
class Sizes:
    """Notes on how many bytes the tars of layers have, in a folder; without one nothing is known or kept."""

    folder: Path | None = None

    def get(self, diff_id: str) -> int | None:
        if self.folder is None:
            return None
        try:
            return int(json.loads(note_file(self.folder, diff_id).read_text(encoding="utf-8"))["size"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, diff_ids: Sequence[str], blobs: Sequence[Blob]) -> None:
        for diff_id, blob in zip(diff_ids, blobs, strict=True):
            if self.folder and blob.digest == diff_id and self.get(diff_id) != blob.size:
                write_json(note_file(self.folder, diff_id), {"diff_id": diff_id, "size": blob.size})


NO_SIZES = Sizes()


def note_file(folder: Path, diff_id: str) -> Path:
    return folder / f"{diff_id.removeprefix('sha256:')}.json"


def plain_blobs(diff_ids: Sequence[str], sizes: Sizes) -> list[Blob] | None:
    """The blobs of layers that are stored as they were sealed; None where a size is not known."""
    blobs = [Blob(LAYER_TYPE, diff_id, size) for diff_id in diff_ids if (size := sizes.get(diff_id)) is not None]
    return blobs if len(blobs) == len(diff_ids) else None


def image_manifest(config: bytes, layers: Sequence[Blob]) -> bytes:
    row = Blob(CONFIG_TYPE, digest_of(config), len(config)).row()
    rows = [blob.row() for blob in layers]
    return compact({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": row, "layers": rows})


def image_index(sealed: Sealed, parts: Sequence[SealedLayer], below: Sequence[Blob]) -> OciIndex:
    """below: what the store has for the parts that are left out, lowest first."""
    stored = iter(below)
    filled = [part for part in parts if not part.empty]
    blobs = [
        next(stored) if part.left_out else Blob(LAYER_TYPE, diff_id, part.size)
        for part, diff_id in zip(filled, sealed.diff_ids, strict=True)
    ]
    manifest = image_manifest(sealed.config, blobs)
    digest = digest_of(manifest)
    rows = [Blob(MANIFEST_TYPE, digest, len(manifest)).row()]
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}
    # The store takes every member for a blob, whatever its name, but for the last two.
    members = {
        "manifest": manifest,
        "index.json": compact(index),
        "oci-layout": compact({"imageLayoutVersion": "1.0.0"}),
    }
    return OciIndex(digest, blobs, members)


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def read_blobs(archive: Iterable[bytes]) -> list[Blob]:
    """The layers of an image, lowest first, from a `docker save` archive (25 and later) that comes in pieces."""
    small: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=Joined(archive), mode="r:") as tar:
            for member in tar:
                if member.isfile() and member.size < SMALL and (data := tar.extractfile(member)):
                    small[member.name] = data.read()
        document: dict[str, Any] = json.loads(small["index.json"])
        while "manifests" in document:  # an index may name another one
            names = (f"blobs/{row['digest'].replace(':', '/')}" for row in document["manifests"])
            document = json.loads(next(small[name] for name in names if name in small))
        return [Blob(row["mediaType"], row["digest"], row["size"]) for row in document["layers"]]
    except (tarfile.TarError, ValueError, KeyError, StopIteration) as error:
        raise BuildError(
            f"the archive that the engine saved cannot be read: {type(error).__name__} {error}",
            next_step="run the build again; if it stays so, report the engine's version",
        ) from None
