"""A sealed image as files: the OCI layout that other tools read, and the archives that `docker load` takes.

All of it follows from the image's configuration, its tag and the sizes of its layers, so that whoever knows these can
compare the files of a layout byte for byte and need not read what a stranger wrote. Layers are plain tar files: a
layer's diff ID is its blob's digest, and there is nothing to unpack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkpin.image.archive import END, Slice, file_header, padded, padding

LAYOUT, INDEX = "oci-layout", "index.json"
ARCHIVE_MANIFEST = "manifest.json"  # of `docker save`
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"  # containerd tags what it takes in from an index with it


@dataclass(frozen=True)
class OciLayer:
    """A layer as a manifest names it. digest: SHA-256 of the blob ("sha256:..."), which is the diff ID of a plain tar;
    size: bytes of the blob."""

    digest: str
    size: int
    media_type: str = LAYER_TYPE


@dataclass(frozen=True)
class OciImage:
    """One image for `docker load`. config: the exact configuration, whose SHA-256 is the image's identity; diff_ids:
    its layers, lowest first."""

    config: bytes
    diff_ids: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def config_digest(self) -> str:
        return digest_of(self.config)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


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
    rows = [{"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size} for layer in layers]
    head = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE}
    return text({**head, "config": described(CONFIG_TYPE, config), "layers": rows})


def layout(config: bytes, layers: Sequence[OciLayer], tag: str) -> dict[str, bytes]:
    """Path -> content of a layout's files, all but the layers. manifest.json is for `docker load`, which needs it."""
    image, about = manifest(config, layers), json.loads(config)
    platform = {"architecture": about["architecture"], "os": about["os"]}
    row = {**described(MANIFEST_TYPE, image), "platform": platform, "annotations": {REF_NAME: tag}}
    names = [blob(layer.digest) for layer in layers]
    return {
        LAYOUT: LAYOUT_TEXT,
        INDEX: index_of([row]),
        ARCHIVE_MANIFEST: text([archive_row(blob(digest_of(config)), names, [tag])]),
        blob(digest_of(image)): image,
        blob(digest_of(config)): config,
    }


def archive_row(config: str, layers: Sequence[str], tags: Sequence[str]) -> dict[str, Any]:
    """An image in manifest.json. config, layers: names of members."""
    return {"Config": config, "Layers": list(layers), "RepoTags": list(tags)}


def load_archive(images: Sequence[OciImage], layers: Mapping[str, Slice]) -> Iterator[bytes]:
    """The bytes for `docker load` of images that share layers (diff ID -> tar), in pieces.

    A layer that is not in `layers` is left out: the engine has it.
    """
    rows = []
    for diff_id, tar in layers.items():
        yield file_header(blob(diff_id), tar.size)
        yield from tar.chunks()
        yield padding(tar.size)
    for image in images:
        name = f"{image.config_digest.removeprefix('sha256:')}.json"
        rows.append(archive_row(name, [blob(diff_id) for diff_id in image.diff_ids], image.tags))
        yield member(name, image.config)
    yield member(ARCHIVE_MANIFEST, text(rows)) + END


def member(name: str, data: bytes) -> bytes:
    return file_header(name, len(data)) + padded(data)


def index_members(image: OciImage, layers: Sequence[OciLayer]) -> Iterator[bytes]:
    """What makes an archive one that containerd's store takes: it names layers by blobs that the store may have.

    The store takes every other member for a blob, whatever its name, and does not read manifest.json then.
    """
    data = manifest(image.config, layers)
    names = [{CONTAINERD_NAME: f"docker.io/{tag}"} for tag in image.tags]
    yield member("manifest", data)
    yield member(INDEX, index_of([{**described(MANIFEST_TYPE, data), "annotations": name} for name in names]))
    yield member(LAYOUT, LAYOUT_TEXT)
