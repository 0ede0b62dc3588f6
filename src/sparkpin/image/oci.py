"""A sealed image as files: the OCI layout that other tools read, and the archive that `docker load` takes.

All of it follows from the image's configuration, its tag and the sizes of its layers, so that whoever knows these can
compare the files of a layout byte for byte and need not read what a stranger wrote. Layers are plain tar files: a
layer's diff ID is its blob's digest, and there is nothing to unpack.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkpin.image.layer_tar import BLOCK, END, Slice, block, padded
from sparkpin.image.seal import ARCHIVE_MANIFEST, digest_of

LAYOUT, INDEX = "oci-layout", "index.json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class OciLayer:
    """digest: SHA-256 of the tar ("sha256:..."), which is its diff ID; size: bytes of the tar."""

    digest: str
    size: int


@dataclass(frozen=True)
class OciImage:
    """One image for `docker load`. config: the exact configuration; diff_ids: its layers, lowest first."""

    config: bytes
    diff_ids: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def config_digest(self) -> str:
        return digest_of(self.config)


def blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


LAYOUT_TEXT = text({"imageLayoutVersion": "1.0.0"})


def described(kind: str, data: bytes) -> dict[str, Any]:
    """A descriptor. kind: the media type."""
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}


def index_of(rows: Sequence[dict[str, Any]]) -> bytes:
    """rows: descriptors of manifests."""
    return text({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows})


def manifest(config: bytes, layers: Sequence[OciLayer]) -> bytes:
    """OCI image specification, "Image Manifest"."""
    return text(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": described(CONFIG_TYPE, config),
            "layers": [{"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size} for layer in layers],
        }
    )


def layout(config: bytes, layers: Sequence[OciLayer], tag: str) -> dict[str, bytes]:
    """Path -> content of a layout's files, all but the layers. manifest.json is for `docker load`, which wants it."""
    image = manifest(config, layers)
    platform = json.loads(config)
    row = {
        **described(MANIFEST_TYPE, image),
        "platform": {"architecture": platform["architecture"], "os": platform["os"]},
        "annotations": {REF_NAME: tag},
    }
    docker = [
        {"Config": blob(digest_of(config)), "Layers": [blob(layer.digest) for layer in layers], "RepoTags": [tag]}
    ]
    return {
        LAYOUT: LAYOUT_TEXT,
        INDEX: index_of([row]),
        ARCHIVE_MANIFEST: text(docker),
        blob(digest_of(image)): image,
        blob(digest_of(config)): config,
    }


def load_archive(images: Sequence[OciImage], layers: Mapping[str, Slice]) -> Iterator[bytes]:
    """The bytes for `docker load` of images that share layers (diff ID -> tar), in pieces.

    A layer that is not in `layers` is left out: the engine has it.
    """
    rows = []
    for diff_id, tar in layers.items():
        yield block(blob(diff_id).encode(), b"0", size=tar.size)
        yield from tar.chunks()
        yield b"\0" * (-tar.size % BLOCK)
    for image in images:
        name = f"{image.config_digest.removeprefix('sha256:')}.json"
        rows.append(
            {"Config": name, "Layers": [blob(diff_id) for diff_id in image.diff_ids], "RepoTags": list(image.tags)}
        )
        yield block(name.encode(), b"0", size=len(image.config)) + padded(image.config)
    data = text(rows)
    yield block(ARCHIVE_MANIFEST.encode(), b"0", size=len(data)) + padded(data) + END
