"""What containerd's content store has of an image, so that layers can be left out of an archive.

Such an engine (26 and later with the feature containerd-snapshotter, new installations of 29) refuses a `docker save`
archive without all layers. It takes an OCI image index: its manifest names each layer by the digest and size of a
blob, and a blob that the store has need not be in the archive.

The engine shows a manifest only in a saved image, which it gives out at 50 MB/s. But an image's Id is the digest of its
manifest: when one that is worked out from noted sizes has that digest, it is the one. Else the image is read. A blob
may be compressed, when something else brought the image; then its digest is not the layer's diff ID.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.files import write_json
from sparkpin.host.images import ImageInfo
from sparkpin.image.oci import OciLayer, digest_of, manifest
from sparkpin.image.saved import read_blobs


@dataclass(frozen=True)
class Sizes:
    """Notes on how many bytes the tars of layers have, in a folder; without one nothing is known or kept."""

    folder: Path | None = None

    def file(self, diff_id: str) -> Path:
        return (self.folder or Path("/nonexistent")) / f"{diff_id.removeprefix('sha256:')}.json"

    def get(self, diff_id: str) -> int | None:
        file = self.file(diff_id)
        return int(json.loads(file.read_text(encoding="utf-8"))["size"]) if file.is_file() else None

    def add(self, diff_ids: Sequence[str], blobs: Sequence[OciLayer]) -> None:
        for diff_id, blob in zip(diff_ids, blobs, strict=True):
            if self.folder and blob.digest == diff_id and self.get(diff_id) != blob.size:
                write_json(self.file(diff_id), {"diff_id": diff_id, "size": blob.size})


NO_SIZES = Sizes()


def stored_layers(image: ImageInfo, sizes: Sizes, save: Callable[[str], Iterable[bytes]]) -> list[OciLayer]:
    """The layers of an image, lowest first. save: gives a `docker save` archive, which is slow."""
    noted = [OciLayer(diff_id, size) for diff_id in image.diff_ids if (size := sizes.get(diff_id)) is not None]
    if len(noted) == len(image.diff_ids) and digest_of(manifest(image.canonical, noted)) == image.id:
        return noted
    blobs = read_blobs(save(image.id))
    sizes.add(image.diff_ids, blobs)
    # BuildKit's image of the same tars gives them Docker's media type: by that ours had another manifest now and then.
    pairs = zip(image.diff_ids, blobs, strict=True)
    return [OciLayer(diff_id, blob.size) if blob.digest == diff_id else blob for diff_id, blob in pairs]
