"""Images into an engine, from a bundle or from another engine: only the layers that it lacks are sent. And checkpoints
into volumes of it: only the files that they lack.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from sparkpin.build.consistent import require_consistent
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.checkpoint.content import RECORD
from sparkpin.checkpoint.write import SPARE
from sparkpin.core.errors import BuildError, CheckpointError, DiskError, EngineError, HostError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import UNPACKS, progress
from sparkpin.core.terminal import say
from sparkpin.distribute import export
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.ssh import engine_at, errors_of
from sparkpin.image import oci
from sparkpin.image.archive import END, Slice, padding
from sparkpin.releases import volumes
from sparkpin.releases.container import HOME, UID
from sparkpin.releases.record import Release, Releases

CARRIER = "sparkpin.carrier"  # label of a container; its value is the checkpoint key


@dataclass(frozen=True)
class Sent:
    layers: int  # that went over
    skipped: int  # layers that the engine had
    bytes: int  # of the archive as it was sent


@dataclass(frozen=True)
class Carried:
    """A checkpoint in a volume. bytes, seconds: of the sending alone."""

    volume: str
    files: int  # that went over
    whole: int  # files that were there
    bytes: int
    seconds: float


def images_of(release: Release, records: Sequence[BuildRecord]) -> list[oci.OciImage]:
    """The images of a chain, first stage first: those below the release's own cost no layer of their own."""
    return [
        oci.OciImage(
            record.config.encode(),
            tuple(record.diff_ids),
            (record.ref, release.tag) if record is records[-1] else (record.ref,),
        )
        for record in records
    ]


def copy(paths: Paths, engine: Engine, release: Release, url: str) -> Sent:
    """Send the image of a release to the engine at a url."""
    with engine_at(url) as other:
        return copy_image(paths, engine, release, other, url)


def copy_image(paths: Paths, engine: Engine, release: Release, other: Engine, url: str) -> Sent:
    images = images_of(release, records_of(paths, release))
    with contextlib.ExitStack() as stack:
        with errors_of(url):
            require_free(other, images, url)
            if is_there(other, images):
                return Sent(0, len(release.diff_ids), 0)
            below = present(other, release.diff_ids)
        lacks_none = below == len(release.diff_ids)
        layers = {} if lacks_none else export.saved_layers(paths, engine, release, stack)
        with errors_of(url):
            return send(other, images, layers, below)


def copy_with_checkpoint(
    paths: Paths, engine: Engine, release: Release, url: str, *, deep: bool = False
) -> tuple[Sent, Carried]:
    """As `copy`, and the release's checkpoint into a volume there. deep: all of what is there is hashed again.

    CheckpointError for a checkpoint that is not whole here, HostError for an engine of another platform: both before
    anything is sent.
    """
    require_consistent(paths, release, finished=True)
    wanted = records_of(paths, release)[-1].platform
    with engine_at(url) as other:
        with errors_of(url):
            if (got := other.platform) != wanted:
                step = "choose a release of a stack for that machine; without --with-checkpoint the image is sent"
                raise HostError(f"{url} is {got}, the image of {release.tag} is for {wanted}", next_step=step)
        sent = copy_image(paths, engine, release, other, url)
        with errors_of(url):
            return sent, carry(other, release, Releases(paths).checkpoint(release), deep=deep)


def carry(engine: Engine, release: Release, folder: Path, *, deep: bool = False) -> Carried:
    """A checkpoint into the release's volume of an engine that has its image. A file that is there and right stays.
    Every byte is hashed there, and the record comes last.

    CheckpointError for a file that is not, or is no longer, the recorded one; DiskError, before the first byte, where
    there is no room. Of two runs for one checkpoint at once, the later one ends the other.
    """
    record, volume = (folder / RECORD).read_text(encoding="utf-8"), volumes.volume_name(release.checkpoint_key)
    rows = json.loads(record)["files"]
    volumes.make_volume(engine, release)
    order = {"do": "make_way", "folder": HOME, "record": record}
    say("looking at what is there of the checkpoint")
    answer = volumes.ask(engine, release, order | {"deep": deep}, mode="rw")
    if answer.get("complete") is True:
        return Carried(volume, 0, len(rows), 0, 0)
    lacking = names_of(answer, rows)
    size = sum(rows[name]["size"] for name in lacking)
    if size + SPARE > answer["free"]:
        raise DiskError(f"the checkpoint needs {size + SPARE:,} bytes in volume {volume}, {answer['free']:,} are free")
    say(f"sending {len(lacking)} of {len(rows)} files of the checkpoint, {size / 1e6:.1f} MB")
    began = time.monotonic()
    with carrier(engine, release) as container, progress(size) as sent:
        for name in lacking:
            put_file(container, name, (folder / name).stat().st_size, chunks_of(folder / name, sent))
        seconds = time.monotonic() - began
        say("hashing it there")
        answer = volumes.ask(engine, release, order | {"deep": False}, mode="rw")
        for name in names_of(answer, rows):
            raise altered(folder / name, "it was changed while it was sent, or what arrived was not what was sent")
        put_file(container, RECORD, len(record.encode()), [record.encode()])
    return Carried(volume, len(lacking), len(rows) - len(lacking), size, seconds)


@contextlib.contextmanager
def carrier(engine: Engine, release: Release) -> Iterator[Container]:
    """A container that is never started, through which files go into the volume."""
    with engine_errors():
        label = {"label": f"{CARRIER}={release.checkpoint_key}"}
        for left in engine.containers.list(all=True, filters=label, ignore_removed=True):
            volumes.remove(left)
        container = volumes.create(engine, release, CARRIER, at=HOME, mode="rw")
        try:
            yield container
        finally:
            volumes.remove(container)


def put_file(container: Container, name: str, size: int, chunks: Iterable[bytes]) -> None:
    """A file of the image's user, read-only, with the folders that it lies in."""
    folders = [parent.as_posix() for parent in reversed(PurePosixPath(name).parents[:-1])]
    heads = [member(folder, type=tarfile.DIRTYPE, mode=0o755) for folder in folders]
    heads.append(member(name, size=size, mode=0o444))
    with engine_errors():
        container.put_archive(HOME, itertools.chain(heads, chunks, [padding(size) + END]))


def member(name: str, **attributes: Any) -> bytes:
    """A header of a tar archive."""
    info = tarfile.TarInfo(name)
    info.uid = info.gid = UID
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def chunks_of(path: Path, sent: Callable[[int], None]) -> Iterator[bytes]:
    """CheckpointError for a file that becomes shorter."""
    with path.open("rb") as file:
        try:
            for chunk in Slice(file, 0, path.stat().st_size).chunks():
                yield chunk
                sent(len(chunk))
        except BuildError:
            raise altered(path, "it is shorter than it was a moment ago") from None


def names_of(answer: Mapping[str, Any], rows: Mapping[str, Any]) -> list[str]:
    """The files that are lacking there. EngineError for an answer of another form: the machine may be anybody's."""
    lacking, free = answer.get("lacking"), answer.get("free")
    if type(free) is int and isinstance(lacking, list) and {*map(str, lacking)} <= rows.keys():
        return lacking
    step = "find out what answers there: it is not the program that was sent"
    raise EngineError("the checkpoint's volume: got something else than the files that are lacking", next_step=step)


def altered(path: Path, cause: str) -> CheckpointError:
    step = "the same command again; if it says the same, this machine's file is damaged (invoke promote TAG --deep)"
    return CheckpointError(f"{path}: {cause}", next_step=step)


def is_there(engine: Engine, images: Sequence[oci.OciImage]) -> bool:
    return all(digest(engine, tag) == image.config_digest for image in images for tag in image.tags)


def digest(engine: Engine, ref: str) -> str | None:
    image = engine.image(ref)
    return image.config_digest if image else None


def require_free(engine: Engine, images: Sequence[oci.OciImage], url: str = "") -> None:
    """IntegrityError when a tag names another image there: it would be taken away from it. url: not this machine's."""
    where, program = (url, f"docker -H {url}") if url else ("the engine", "docker")
    for image in images:
        for tag in image.tags:
            if (seen := digest(engine, tag)) not in (None, image.config_digest):
                raise IntegrityError(
                    f"{where} has another image under {tag}: {seen}, expected {image.config_digest}",
                    next_step=f"find out which is right (invoke verify); the other goes with: {program} rmi {tag}",
                )


def present(engine: Engine, diff_ids: Sequence[str]) -> int:
    """How many of the lowest layers the engine has in the image that shares most of them."""
    if not engine.keeps_layers:
        return 0
    standing = (zip(image.diff_ids, diff_ids, strict=False) for image in engine.images())
    return max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) for pairs in standing), default=0)


def send(engine: Engine, images: Sequence[oci.OciImage], layers: Mapping[str, Slice], below: int) -> Sent:
    """Load images, then compare what the engine has with them. layers: diff ID -> tar; below: how many of the lowest
    layers the engine has.
    """
    lacking = dict.fromkeys(images[-1].diff_ids[below:])
    if lost := [diff_id for diff_id in lacking if diff_id not in layers]:  # another run removed an image meanwhile
        raise EngineError(f"the engine no longer has layer {lost[0]}", next_step="the same command again")
    sent = load(engine, images, {diff_id: layers[diff_id] for diff_id in lacking})
    for image in images:
        for tag in image.tags:
            if (got := digest(engine, tag)) != image.config_digest:
                engine.untag(tag)
                raise IntegrityError(
                    f"{tag}: sent {image.config_digest}, the engine has {got}", next_step="the same command again"
                )
    return sent


def load(engine: Engine, images: Sequence[oci.OciImage], layers: Mapping[str, Slice]) -> Sent:
    total, count = sum(tar.size for tar in layers.values()), len(dict.fromkeys(images[-1].diff_ids))
    rest = "; the engine has the others" if len(layers) < count else ""
    say(f"sending {len(layers)} of {count} layers, {total / 1e6:.1f} MB{rest}")
    written = 0

    def counted(sent: Callable[[int], None]) -> Iterator[bytes]:
        nonlocal written
        for chunk in oci.load_archive(images, layers):
            written += len(chunk)
            yield chunk
            sent(len(chunk))

    with progress(total, after=UNPACKS) as sent:
        engine.load(counted(sent))
    return Sent(len(layers), count - len(layers), written)
