"""An image as the engine saves it.

`docker save` writes folders and manifest.json (up to 24) or an OCI layout and manifest.json (from 25): manifest.json
names the parts in both.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparkpin.core.errors import BuildError
from sparkpin.image import oci
from sparkpin.image.archive import Joined, Slice
from sparkpin.image.oci import OciLayer

SMALL = 1 << 20  # bytes; manifests and indexes are smaller


@dataclass(frozen=True)
class Saved:
    """An opened `docker save` archive. layers: one uncompressed tar each, lowest first."""

    config: dict[str, Any]
    config_digest: str
    layers: list[Slice]

    @property
    def diff_ids(self) -> list[str]:
        return list(self.config["rootfs"]["diff_ids"])


@contextlib.contextmanager
def open_saved(archive: Path) -> Iterator[Saved]:
    """Read a `docker save` archive of one image that was loaded as sparkpin loads it: its layers are plain tars."""
    with archive.open("rb") as file:
        with unreadable(), tarfile.open(fileobj=file, mode="r:") as tar:

            def content(name: str) -> Slice:
                found = tar.getmember(name)
                if found.issym():  # a layer that an image has twice
                    found = tar.getmember(
                        posixpath.normpath(posixpath.join(posixpath.dirname(found.name), found.linkname))
                    )
                return Slice(file, found.offset_data, found.size)

            row = json.loads(content(oci.ARCHIVE_MANIFEST).read())[0]
            config = content(row["Config"]).read()
            saved = Saved(json.loads(config), oci.digest_of(config), [content(name) for name in row["Layers"]])
            if len(saved.diff_ids) != len(saved.layers):
                raise ValueError(f"{len(saved.layers)} layers and {len(saved.diff_ids)} diff IDs")
        yield saved


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, tarfile.TarError) as error:
        raise BuildError(
            f"the archive that the engine saved cannot be read: {type(error).__name__} {error}",
            next_step="run the build again; if it stays so, report the engine's version",
        ) from None


def read_blobs(archive: Iterable[bytes]) -> list[OciLayer]:
    """The layers of an image in containerd's store, lowest first, from a `docker save` archive that comes in pieces."""
    with unreadable(), tarfile.open(fileobj=cast(BinaryIO, Joined(archive)), mode="r:") as tar:
        small = {
            member.name: data.read()
            for member in tar
            if member.isfile() and member.size < SMALL and (data := tar.extractfile(member))
        }
        document = json.loads(small[oci.INDEX])
        while "manifests" in document:  # an index may name another one, or one that is not there (another platform's)
            names = (oci.blob(row["digest"]) for row in document["manifests"])
            document = json.loads(next((small[name] for name in names if name in small), b""))
        return [OciLayer(row["digest"], row["size"], row["mediaType"]) for row in document["layers"]]
