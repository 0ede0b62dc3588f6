"""Images into an engine, from a bundle or from another engine: only the layers that it lacks are sent. And checkpoints
into volumes of it: only the bytes that they lack.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from sparkpin.build.consistent import require_consistent
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.bundle import export
from sparkpin.checkpoint.content import RECORD
from sparkpin.checkpoint.receive import ROWS
from sparkpin.checkpoint.write import SPARE
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, DiskError, EngineError, HostError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import UNPACKS, progress
from sparkpin.core.terminal import Say, printable
from sparkpin.host.containers import Attached
from sparkpin.host.disk_usage import inventory
from sparkpin.host.engine import Engine
from sparkpin.host.ssh import engine_at, errors_of
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.releases import volumes
from sparkpin.releases.container import UID
from sparkpin.releases.record import Release, Releases


@dataclass(frozen=True)
class Sent:
    layers: int  # that went over
    skipped: int  # layers that the engine had
    bytes: int  # of the archive as it was sent


@dataclass(frozen=True)
class Carried:
    """A checkpoint in a volume. bytes, seconds: of the sending alone."""

    volume: str
    files: int  # that went over, or what they lacked
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


def copy(paths: Paths, engine: Engine, release: Release, url: str, say: Say, *, way: str = "") -> Sent:
    """Send the image of a release to the engine at a url. way: the address on a link that ssh takes."""
    with engine_at(url, way) as other:
        return copy_image(paths, engine, release, other, url, say)


def copy_image(paths: Paths, engine: Engine, release: Release, other: Engine, url: str, say: Say) -> Sent:
    images = images_of(release, records_of(paths, release))
    with contextlib.ExitStack() as stack:
        with errors_of(url):
            require_free(other, images, url)
            if is_there(other, images):
                return Sent(0, len(release.diff_ids), 0)
            below = present(other, release.diff_ids)
        lacks_none = below == len(release.diff_ids)
        layers = {} if lacks_none else export.saved_layers(paths, engine, release, stack, say)
        with errors_of(url):
            return send(other, images, layers, below, say)


def copy_with_checkpoint(
    paths: Paths, engine: Engine, release: Release, url: str, say: Say, *, way: str = "", deep: bool = False
) -> tuple[Sent, Carried]:
    """As `copy`, and the release's checkpoint into a volume there. deep: all of what is there is hashed again.

    CheckpointError for a checkpoint that is not whole here, HostError for an engine of another platform: both before
    anything is sent.
    """
    require_consistent(paths, release, finished=True)
    folder = Releases(paths).checkpoint(release)
    config = json.loads(records_of(paths, release)[-1].config)
    wanted = f"{config['os']}/{config['architecture']}"
    with engine_at(url, way) as other:
        with errors_of(url):
            seen = other.platform
        if seen != wanted:
            raise HostError(
                f"{url} is {seen}, the image of {release.tag} is for {wanted}",
                next_step="choose a release of a stack for that machine; without --with-checkpoint the image is sent",
            )
        sent = copy_image(paths, engine, release, other, url, say)
        with errors_of(url):
            return sent, carry(other, release, folder, say, deep=deep)


def carry(engine: Engine, release: Release, folder: Path, say: Say, *, deep: bool = False) -> Carried:
    """A checkpoint into the release's volume of an engine that has its image. What is there whole stays, a file that is
    there in part is gone on with. Every byte is hashed there, and the record comes last.

    CheckpointError for a file that is not, or is no longer, the recorded one; DiskError, before the first byte, where
    there is no room; HostError for a volume that the container's user may not write to.
    """
    record = (folder / RECORD).read_text(encoding="utf-8")
    rows, volume = json.loads(record)[ROWS], volumes.volume_name(release.checkpoint_key)
    with volumes.receiving(engine, release, say) as there:
        there.send(line({"key": release.checkpoint_key, "record": record, "deep": deep}))
        told = answer_of(there, say)
        if "owner" in told:
            uid, gid, mode = told["owner"]
            raise HostError(
                f"volume {volume} belongs to {uid}:{gid}, mode {mode}; the image's user {UID} has to write to it",
                next_step=f"there: docker volume rm {volume} (the next run makes it anew)",
            )
        if not (wants := wants_of(told, rows)) and told.get("whole"):
            return Carried(volume, 0, len(rows), 0, 0)
        lacking = sum(rows[want["file"]]["size"] - want["offset"] for want in wants)
        if lacking + SPARE > told["free"]:
            raise DiskError(
                f"the checkpoint needs {lacking + SPARE:,} bytes in volume {volume}, {told['free']:,} are free"
            )
        begun = sum(want["offset"] for want in wants)
        rest = f"; {begun / 1e6:.1f} MB of them are there" if begun else ""
        say(f"sending {len(wants)} of {len(rows)} files of the checkpoint, {lacking / 1e6:.1f} MB{rest}")
        began, written = time.monotonic(), 0
        with progress(say, lacking) as sent:
            for want in wants:
                written += send_file(there, folder / want["file"], rows[want["file"]], want, say, sent)
        seconds = time.monotonic() - began
        if not answer_of(there, say).get("whole"):
            raise strange("nothing of the record")
    return Carried(volume, len(wants), len(rows) - len(wants), written, seconds)


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def answer_of(there: Attached, say: Say) -> dict[str, Any]:
    """The next line that is not for people. DiskError or EngineError where it tells of a failure."""
    while "said" in (told := there.answer()):
        say(f"  {printable(str(told['said']))}")
    if "failed" in told:
        raise (DiskError if told.get("full") else EngineError)(f"the checkpoint's volume: {told['failed']}")
    return told


def wants_of(told: Mapping[str, Any], rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files that it asks for. EngineError for others than the checkpoint's: the machine there may be anybody's."""
    with contextlib.suppress(KeyError, TypeError):
        wants: list[dict[str, Any]] = told.get("wants", [])
        numbers = [want["offset"] for want in wants] + ([] if told.get("whole") else [told["free"]])
        if all(type(number) is int for number in numbers) and all(
            0 <= want["offset"] <= rows[want["file"]]["size"] and isinstance(want["sha256"], str) for want in wants
        ):
            return wants
    raise strange("files or sizes that are not the checkpoint's")


def strange(seen: str) -> EngineError:
    step = "find out what answers there: it is not the program that was sent"
    return EngineError(f"the checkpoint's volume: the program there told {seen}", next_step=step)


def send_file(
    there: Attached, path: Path, row: dict[str, Any], want: dict[str, Any], say: Say, sent: Callable[[int], None]
) -> int:
    """What a file lacks there, as bytes that were sent: all of it if what is there is not how it begins."""
    why = "it was changed while it was sent, or what arrived was not what was sent"
    try:
        with path.open("rb") as file:
            offset = want["offset"] if begins(file, want["offset"]) == want["sha256"] else 0
            file.seek(offset)
            there.send(line({"offset": offset}))
            left = row["size"] - offset
            while left and there.answers.empty():  # else it has failed
                if not (chunk := file.read(min(left, files.CHUNK))):
                    raise EOFError
                there.send(chunk)
                sent(len(chunk))
                left -= len(chunk)
    except (OSError, EOFError) as error:
        raise altered(path, str(error) or "it is shorter than it was a moment ago") from None
    if (seen := answer_of(there, say).get("sha256")) != row["sha256"]:
        raise altered(path, f"{why}: SHA-256 there {seen}, expected {row['sha256']}")
    return int(row["size"]) - offset


def begins(file: Any, count: int) -> str:
    """SHA-256 (hex) of the first bytes of a file."""
    digest = hashlib.sha256()
    while count and (chunk := file.read(min(count, files.CHUNK))):
        digest.update(chunk)
        count -= len(chunk)
    return digest.hexdigest()


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
    standing = (zip(image.diff_ids, diff_ids, strict=False) for image in inventory(engine))
    return max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) for pairs in standing), default=0)


def send(engine: Engine, images: Sequence[oci.OciImage], layers: Mapping[str, Slice], below: int, say: Say) -> Sent:
    """Load images, then compare what the engine has with them. layers: diff ID -> tar; below: how many of the lowest
    layers the engine has.

    An engine that wants layers that it should have gets all of them.
    """
    diff_ids = images[-1].diff_ids
    for first in (below, 0) if below else (0,):
        try:
            sent = load(engine, images, {diff_id: layers[diff_id] for diff_id in diff_ids[first:]}, say)
            break
        except EngineError as error:
            if not first or len(layers) < len(set(diff_ids)):
                raise
            say(f"the engine wants more layers than it was sent: {error.message}")
    for image in images:
        for tag in image.tags:
            if (seen := digest(engine, tag)) != image.config_digest:
                engine.untag(tag)
                raise IntegrityError(
                    f"{tag}: sent {image.config_digest}, the engine has {seen}", next_step="the same command again"
                )
    return sent


def load(engine: Engine, images: Sequence[oci.OciImage], layers: Mapping[str, Slice], say: Say) -> Sent:
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

    with progress(say, total, after=UNPACKS) as sent:
        engine.load(counted(sent))
    return Sent(len(layers), count - len(layers), written)
