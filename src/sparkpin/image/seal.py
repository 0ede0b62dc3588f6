"""Sealing: from what an engine built to the one archive that every engine's build of it comes to.

`docker save` writes folders and manifest.json (up to 24) or an OCI layout and manifest.json (from 25): manifest.json
tells where the parts lie in both. An engine on overlay2 already has the parent's layers and does not read them from the
archive of a `docker load`, so they may be left out; see `SealedLayer`.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import shutil
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import BuildError
from sparkpin.core.files import CHUNK, disk_errors
from sparkpin.image.layer_tar import BLOCK, END, ROOM, CanonicalLayer, Slice, block, padded, read_layer

BUFFERS = 16
VERSION = 1  # counts changes of the canonical form: it is a part of every build key
CREATED_BY = "sparkpin"
CREATED = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(EPOCH))
CONFIG_KEYS = (
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "Labels",
    "Shell",
    "StopSignal",
    "User",
    "Volumes",
    "WorkingDir",
)
ARCHIVE_CONFIG, ARCHIVE_MANIFEST = "config.json", "manifest.json"


@dataclass(frozen=True)
class SealedLayer:
    """One layer of a sealed image.

    diff_id: given for a layer that is sealed already, else found while the layer is written.
    layer: canonical content; raw: a sealed layer's bytes as they are; neither: the engine has the layer, leave it out.
    """

    diff_id: str = ""
    layer: CanonicalLayer | None = None
    raw: Slice | None = None

    @property
    def left_out(self) -> bool:
        return self.layer is None and self.raw is None

    @property
    def empty(self) -> bool:
        return self.layer is not None and not self.layer.members

    @property
    def size(self) -> int:
        """Bytes of the layer's tar; 0 where it is left out."""
        content = self.layer or self.raw
        return content.size if content else 0


@dataclass(frozen=True)
class Sealed:
    """config: the image's configuration, whose SHA-256 is the image's identity; diff_ids: its layers."""

    config: bytes
    diff_ids: tuple[str, ...]

    @property
    def config_digest(self) -> str:
        return digest_of(self.config)


@dataclass
class Saved:
    """An opened `docker save` archive. layers: one uncompressed tar each, bottom first; diff_ids: the engine's."""

    config: dict[str, Any]
    layers: list[Slice]
    diff_ids: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.diff_ids = list(self.config["rootfs"]["diff_ids"])
        if len(self.diff_ids) != len(self.layers):
            raise BuildError(
                f"the saved image has {len(self.layers)} layers and {len(self.diff_ids)} diff IDs",
                next_step="report this engine's version",
            )


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def image_config(config: Mapping[str, Any], *, os: str, architecture: str, diff_ids: Sequence[str]) -> bytes:
    """The canonical configuration: chosen keys that say something, and nothing about when, where and by what."""
    kept = {key: config[key] for key in CONFIG_KEYS if config.get(key)}
    event = {"created": CREATED, "created_by": CREATED_BY}
    value = {
        "architecture": architecture,
        "config": kept,
        "created": CREATED,
        "history": [event for _ in diff_ids],
        "os": os,
        "rootfs": {"diff_ids": list(diff_ids), "type": "layers"},
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@contextlib.contextmanager
def open_saved(archive: Path) -> Iterator[Saved]:
    """Read a `docker save` archive of one image. Compressed layers are unpacked beside it while it is open."""
    with archive.open("rb", buffering=0) as file, contextlib.ExitStack() as unpacked:
        try:
            config, layers = saved_members(file)
        except (KeyError, ValueError, IndexError, TypeError, tarfile.TarError) as error:
            raise unreadable(error) from None
        yield Saved(config, [uncompressed(layer, archive.parent, unpacked) for layer in layers])


def saved_members(file: BinaryIO) -> tuple[dict[str, Any], list[Slice]]:
    """The configuration and the layers' tars, as manifest.json names them."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = {member.name: member for member in tar}

        def content(name: str) -> Slice:
            found = members[name]
            if found.issym() or found.islnk():
                found = tar._find_link_target(found)  # type: ignore[attr-defined]
            return Slice(file, found.offset_data, found.size)

        manifest = json.loads(content(ARCHIVE_MANIFEST).read())[0]
        return json.loads(content(manifest["Config"]).read()), [content(name) for name in manifest["Layers"]]


def unreadable(error: Exception) -> BuildError:
    return BuildError(
        f"the archive that the engine saved cannot be read: {type(error).__name__} {error}",
        next_step="run the build again; if it stays so, report the engine's version",
    )


def uncompressed(layer: Slice, folder: Path, stack: contextlib.ExitStack) -> Slice:
    magic = layer.read(4)
    layer.seek(0)
    if magic == b"\x28\xb5\x2f\xfd":
        raise BuildError(
            "the engine saved a layer with zstd compression, which is not read here",
            next_step="set the engine's builder to gzip or no compression",
        )
    if magic[:2] != b"\x1f\x8b":
        return layer
    with disk_errors(folder):
        file = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile(dir=folder)))  # noqa: SIM115
        try:
            with gzip.GzipFile(fileobj=cast(BinaryIO, layer)) as plain:
                shutil.copyfileobj(plain, file, CHUNK)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise unreadable(error) from None
        return Slice(file, 0, file.tell())


def parts_of(saved: Saved, parent: Sequence[str]) -> list[SealedLayer]:
    """What becomes of each layer of a saved image: the parent's pass through, the others are made canonical.

    parent: the diff IDs of the sealed parent.
    """
    if list(parent) != saved.diff_ids[: len(parent)]:
        raise BuildError(
            "the built image does not stand on its parent's layers",
            next_step="run the build again; the parent may have been replaced meanwhile",
        )
    below = [SealedLayer(d, raw=tar) for d, tar in zip(parent, saved.layers, strict=False)]
    return below + [SealedLayer(layer=read_layer(cast(BinaryIO, tar))) for tar in saved.layers[len(parent) :]]


def seal(
    write: Callable[[bytes | memoryview], object],
    parts: Sequence[SealedLayer],
    config: Mapping[str, Any],
    *,
    os: str,
    architecture: str,
    tag: str,
    more: Callable[[Sealed], Mapping[str, bytes]] = lambda sealed: {},
) -> Sealed:
    """Write the archive for `docker load`, in one pass: layers, configuration, manifest. Layers without content go.

    The same parts and configuration give the same bytes. Memory does not grow with the size of the layers.
    write: must have done with what it gets when it returns: the memory is used again. more: further members, by name.
    """
    names: list[str] = []
    diff_ids: list[str] = []
    for part in parts:
        if part.empty:
            continue
        names.append(f"layers/{len(names):03}.tar")
        if part.left_out:
            diff_ids.append(part.diff_id)
            continue
        write(block(names[-1].encode(), b"0", size=part.size))
        if part.layer:
            diff_ids.append(write_layer(write, part.layer))
        elif part.raw:
            diff_ids.append(part.diff_id)
            for chunk in part.raw.chunks():
                write(chunk)
        write(b"\0" * (-part.size % BLOCK))
    sealed = Sealed(image_config(config, os=os, architecture=architecture, diff_ids=diff_ids), tuple(diff_ids))
    manifest = [{"Config": ARCHIVE_CONFIG, "Layers": names, "RepoTags": [tag]}]
    last = {ARCHIVE_CONFIG: sealed.config, ARCHIVE_MANIFEST: json.dumps(manifest).encode(), **more(sealed)}
    for name, data in last.items():
        write(block(name.encode(), b"0", size=len(data)) + padded(data))
    write(END)
    return sealed


def write_layer(write: Callable[[bytes | memoryview], object], layer: CanonicalLayer) -> str:
    """Write a layer's tar; its diff ID."""
    written = 0
    with Hasher() as hasher:
        for chunk in layer.chunks(hasher.buffer):
            hasher.update(chunk)
            write(chunk)
            written += len(chunk)
    if written != layer.size:
        raise BuildError(f"a layer of {layer.size} bytes came to {written}", next_step="run the build again")
    return f"sha256:{hasher.digest.hexdigest()}"


class Hasher:
    """SHA-256 in a thread of its own, over pieces that lie in its buffers while others read and write."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.free: SimpleQueue[bytearray] = SimpleQueue()
        self.todo: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(BUFFERS):
            self.free.put(bytearray(ROOM))
        self.thread = threading.Thread(target=self.run, name="hash", daemon=True)

    def buffer(self) -> bytearray:
        return self.free.get()

    def update(self, piece: memoryview) -> None:
        """A piece in a buffer, which is free when it is hashed."""
        self.todo.put(piece)

    def run(self) -> None:
        while (piece := self.todo.get()) is not None:
            self.digest.update(piece)
            self.free.put(cast(bytearray, piece.obj))

    def __enter__(self) -> Hasher:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.todo.put(None)
        self.thread.join()
