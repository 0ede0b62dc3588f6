"""A release as an OCI image layout: a folder, which skopeo takes to and from a registry, or one tar of it.

    oci-layout, index.json, manifest.json     for every tool that reads OCI layouts, and for `docker load`
    blobs/sha256/...                          the image: manifest, configuration, layers as plain tars
    blobs/sha256/...                          the release: one artifact manifest, and a blob for each of its rows

The artifact's `subject` is the image's manifest, so that a registry lists it for the image. A row has a title:

    release.json                              the release's record
    images/<key>.json                         build records of its image and of those that it stands on
    provenance.json, .sig, sbom.cdx.json      statement, signature, SBOM
    inputs/<sha256>                           what no lock names: pins, locks, stages, wheels of mods, tools
    store/<sha256>                            with the store: wheels, Debian packages, what is fetched of the model

Whoever has the record can compute every manifest to the byte, so what a stranger wrote is compared, not interpreted:
the models below read only what is needed to do so.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, ValidationError

from sparkpin.core import files, terminal
from sparkpin.core.errors import DiskError, InputError, IntegrityError, SparkpinError, clipped
from sparkpin.core.progress import progress
from sparkpin.distribute.signing import UntrustedError
from sparkpin.host.engine import counted
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END, Slice, file_header, padding
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Digest

RELEASE = "release.json"
EVIDENCE = (SBOM, STATEMENT, SIGNATURE)
IMAGES, INPUTS, STORE = "images/", "inputs/", "store/"
ARTIFACT = "application/vnd.sparkpin.release.v1"  # type of the artifact; in index.json, the key of its digest
TYPES = {  # by title, or by the folder that it begins with
    RELEASE: "application/vnd.sparkpin.release.v1+json",
    SBOM: "application/vnd.cyclonedx+json",
    STATEMENT: "application/vnd.in-toto+json",
    SIGNATURE: "text/plain",
    IMAGES: "application/vnd.sparkpin.build.v1+json",
    INPUTS: "application/vnd.sparkpin.input.v1",
    STORE: "application/vnd.sparkpin.stored.v1",
}
EMPTY = b"{}"
EMPTY_TYPE, TITLE = "application/vnd.oci.empty.v1+json", "org.opencontainers.image.title"
JSON_LIMIT = 16 << 20  # bytes of what is read into memory as a whole
MEMBERS = 8192  # files of a layout; the store of a large model has some thousand
LARGEST = 1 << 40  # bytes of one blob
BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}")
SAID, SAID_VALUE = 2000, 100  # characters of a refusal, and of a value in it: it may quote what a stranger wrote
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
# A last net: what a stranger wrote may meet a reader that did not expect it.
BROKEN = (SparkpinError, *MISFITS, ArithmeticError, tarfile.TarError, csv.Error, zlib.error, struct.error, EOFError)
AGAIN = "get it again from where it was exported, and compare its SHA-256 with the one there (sha256sum)"
NAME_ONE = "name the file that `invoke export` wrote"


class Read(BaseModel):
    """Of a manifest that a stranger wrote. What else stands in it is found by the comparison."""

    model_config = ConfigDict(frozen=True, strict=True)


class Descriptor(Read):
    """size: bytes."""

    digest: Digest
    size: Annotated[int, Field(ge=0, lt=LARGEST)]


class Row(Descriptor):
    """Of the artifact."""

    title: Annotated[str, Field(validation_alias=AliasChoices("title", AliasPath("annotations", TITLE)))]

    @property
    def media_type(self) -> str:
        return TYPES[self.title if self.title in TYPES else self.title.partition("/")[0] + "/"]

    @property
    def sha256(self) -> str:
        return self.digest.removeprefix("sha256:")


class Artifact(Read):
    layers: Annotated[tuple[Row, ...], Field(min_length=1, max_length=MEMBERS)]
    subject: Descriptor


class ImageManifest(Read):
    layers: tuple[Descriptor, ...]


class IndexRow(Descriptor):
    """Names the image's manifest, and the artifact in an annotation."""

    artifact: Annotated[Digest, Field(validation_alias=AliasPath("annotations", ARTIFACT))]


class Index(Read):
    manifests: Annotated[tuple[IndexRow, ...], Field(min_length=1, max_length=1)]


class Refused(IntegrityError):
    """Why a layout is not taken."""


@contextlib.contextmanager
def refusing(source: object) -> Iterator[None]:
    """Whatever is wrong with what a stranger wrote is one IntegrityError. source: where it lies."""
    try:
        yield
    except DiskError:  # of this machine: the layout is not to blame
        raise
    except BROKEN as error:
        why = str(getattr(error, "message", f"it cannot be read ({type(error).__name__}: {error})"))[:SAID]
        message = f"{source} is refused, and nothing of it was used: {terminal.printable(why)}"
        if isinstance(error, UntrustedError):
            raise UntrustedError(message, next_step=error.next_step) from None
        raise IntegrityError(message, next_step=AGAIN) from None


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """What does not fit is Refused under this name."""
    try:
        yield
    except ValidationError as error:
        fault = error.errors()[0]
        where, got = ".".join(map(str, fault["loc"])), clipped(repr(fault["input"]), SAID_VALUE)
        raise Refused(f"{what}: {where}: got {got}: {fault['msg']}") from None
    except MISFITS as error:
        raise Refused(f"{what}: {error or type(error).__name__}") from None


def as_json(value: Any) -> bytes:
    """The form of records. ValueError for numbers and texts that JSON or UTF-8 have no words for."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(data: bytes) -> Any:
    """ValueError for what `as_json` would not write: a key twice, an infinite number, half of a surrogate pair."""
    value = json.loads(data)
    if as_json(value) != data:
        raise ValueError("it is not in the form that an export writes")
    return value


def artifact(tag: str, rows: Sequence[Row], image: bytes) -> bytes:
    """The manifest of a release. image: the manifest of its image."""
    layers = [
        {"mediaType": row.media_type, "digest": row.digest, "size": row.size, "annotations": {TITLE: row.title}}
        for row in sorted(rows, key=lambda row: row.title)
    ]
    value = {
        "schemaVersion": 2,
        "mediaType": oci.MANIFEST_TYPE,
        "artifactType": ARTIFACT,
        "config": oci.described(EMPTY_TYPE, EMPTY),
        "layers": layers,
        "annotations": {oci.REF_NAME: tag},
        "subject": oci.described(oci.MANIFEST_TYPE, image),
    }
    return oci.text(value)


def read_artifact(manifest: bytes) -> Artifact:
    """Refused for what cannot be one, before a blob is asked for."""
    with reading("the artifact"):
        found = Artifact.model_validate_json(manifest)
    if len({row.title for row in found.layers}) != len(found.layers):
        raise Refused("the artifact has a title twice")
    return found


def read_image(image: bytes, diff_ids: Sequence[str], config: bytes) -> list[oci.OciLayer]:
    """The layers of an image's manifest, of which only their sizes are new. Refused for any other image's."""
    with reading("the image's manifest"):
        rows = ImageManifest.model_validate_json(image).layers
    layers = [oci.OciLayer(row.digest, row.size) for row in rows]
    if image != oci.manifest(config, layers) or [row.digest for row in rows] != list(diff_ids):
        raise Refused("the image's manifest is not the one of an image with plain layers that the record describes")
    return layers


def layout_files(tag: str, config: bytes, layers: Sequence[oci.OciLayer], manifest: bytes) -> dict[str, bytes]:
    """The small files of a layout. layers: of the image; manifest: the artifact."""
    digest, found = oci.digest_of(manifest), oci.layout(config, layers, tag)
    (row,) = json.loads(found[oci.INDEX])["manifests"]
    row["annotations"][ARTIFACT] = digest  # not a row of its own: skopeo takes a layout of one image without a name
    found[oci.INDEX] = oci.index_of([row])
    return found | {oci.blob(digest): manifest, oci.blob(oci.digest_of(EMPTY)): EMPTY}


class WholeFile(Slice):
    """A file that is open only while it is read: a layout may have more than a process can open."""

    def __init__(self, path: Path) -> None:
        super().__init__(BytesIO(), 0, path.stat().st_size)
        self.path = path

    def readinto(self, view: memoryview | bytearray) -> int:  # type: ignore[override]
        with self.path.open("rb") as self.file:
            return super().readinto(view)


def slice_of(data: bytes) -> Slice:
    return Slice(BytesIO(data), 0, len(data))


def write(target: Path, found: Mapping[str, Slice]) -> int:
    """A layout into an empty folder, or into a file that appears whole or not at all; its size in bytes. What is wrong
    with its bytes is found when it is read again."""
    total = sum(BLOCK + data.size + len(padding(data.size)) for data in found.values()) + len(END)
    files.require_space(target.parent, total, "the release's bytes", "the file")
    terminal.say(f"writing {target}: {len(found)} members, {terminal.size(total)}")
    if target.is_dir():
        for name, data in found.items():
            with files.atomic_file(target / name) as out:
                out.writelines(data.chunks())
        return total
    with files.atomic_file(target) as out, progress(total) as written:
        for name, data in found.items():
            out.write(file_header(name, data.size))
            out.writelines(counted(data.chunks(), written))
            out.write(padding(data.size))
        out.write(END)
    return total


@contextlib.contextmanager
def opened(path: Path) -> Iterator[dict[str, Slice]]:
    """The files of a layout: name -> bytes, as a stranger named them. InputError where nothing can be read."""
    try:
        is_folder = path.is_dir()
        file = path.open("rb") if path.is_file() else None  # a pipe without a writer would never open
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", next_step=NAME_ONE) from None
    if is_folder:
        with refusing(path):
            found = read_folder(path)
        yield found
    elif file:
        with file:
            with refusing(path):
                found = read_archive(file)
            yield found
    else:
        raise InputError(f"{path} is no file", next_step=NAME_ONE)


def read_folder(folder: Path) -> dict[str, Slice]:
    """As of an archive, no link is followed."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if not path.is_dir()}
    if len(found) > MEMBERS or any(path.is_symlink() or not path.is_file() for path in found.values()):
        raise Refused(f"it has something else than files, or more than {MEMBERS:,} of them")
    return {name: WholeFile(path) for name, path in found.items()}


def read_archive(file: BinaryIO) -> dict[str, Slice]:
    """The members of a plain tar of regular files, each under exactly the header that an export writes: so no link,
    device, mode, extension or compression is ever interpreted.
    """
    total, position, found = file.seek(0, 2), 0, dict[str, Slice]()
    while position < total - len(END):
        file.seek(position)
        head = file.read(BLOCK)
        try:
            name, size = head[:100].rstrip(b"\0").decode("ascii"), int(head[124:135], 8)
        except ValueError:
            raise Refused("it is no tar of an OCI layout") from None
        if head != file_header(name, size):
            raise Refused(f"the header at byte {position:,} ({name[:SAID_VALUE]!r}) is none that an export writes")
        if not (name in (oci.LAYOUT, oci.INDEX, oci.ARCHIVE_MANIFEST) or BLOB.fullmatch(name)):
            raise Refused(f"it has {name!r}, which is no file of an OCI layout")
        if name in found or len(found) == MEMBERS:
            raise Refused(f"it has {name} twice, or more than {MEMBERS:,} members")
        found[name] = Slice(file, position + BLOCK, size)
        file.seek(position + BLOCK + size)
        if file.read(-size % BLOCK) != padding(size):
            raise Refused(f"it is cut short in {name}, or there are bytes between it and the next member")
        position = file.tell()
    file.seek(min(position, total))
    if not found or file.read() != END:
        raise Refused("it does not end as an archive does: cut short, or added to" if found else "it is no OCI layout")
    return found


def small(data: Mapping[str, Slice], name: str) -> bytes:
    """All of a file that has to be there and to be small."""
    if name not in data:
        raise Refused(f"{name} is missing")
    if data[name].size > JSON_LIMIT:
        raise Refused(f"{name} has {data[name].size:,} bytes; {JSON_LIMIT:,} are allowed")
    data[name].seek(0)
    return data[name].read()


def read_index(found: Mapping[str, Slice]) -> tuple[bytes, bytes]:
    """The artifact, and the manifest of the image, which are yet to be compared."""
    with reading(oci.INDEX):
        (row,) = Index.model_validate_json(small(found, oci.INDEX)).manifests
    return small(found, oci.blob(row.artifact)), small(found, oci.blob(row.digest))


def has_store(titles: Iterable[str]) -> bool:
    return any(title.startswith(STORE) for title in titles)


def row_of(title: str, data: Slice) -> Row:
    """A kept file lies under its hash, which is in its title; whether it is so is found when a layout is read."""
    sha256 = title.partition("/")[2] if title.startswith((INPUTS, STORE)) else files.sha256_of(data)
    return Row(title=title, digest=f"sha256:{sha256}", size=data.size)


def rows_data(rows: Sequence[Row], found: Mapping[str, Slice]) -> dict[str, Slice]:
    """Title -> bytes, each of its size and hash."""
    data = {}
    for row in rows:
        blob = found.get(oci.blob(row.digest))
        if blob is None or blob.size != row.size or files.sha256_of(blob) != row.sha256:
            raise Refused(f"{row.title}: got other bytes, or none; expected {row.size:,} of {row.digest}")
        data[row.title] = blob
    return data
