"""Images into an engine, from a bundle or from another engine: only the layers that it lacks are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparkpin.build.record import BuildRecord, records_of
from sparkpin.bundle import export
from sparkpin.core.errors import EngineError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import UNPACKS, progress
from sparkpin.core.terminal import Say
from sparkpin.host.disk_usage import inventory
from sparkpin.host.engine import Engine
from sparkpin.host.ssh import engine_at, errors_of
from sparkpin.image import oci
from sparkpin.image.layer_tar import Slice
from sparkpin.image.listing_diff import common
from sparkpin.releases.record import Release


@dataclass(frozen=True)
class Sent:
    layers: int  # that went over
    skipped: int  # layers that the engine had
    bytes: int  # of the archive as it was sent


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


def copy(paths: Paths, engine: Engine, release: Release, url: str, say: Say) -> Sent:
    """Send the image of a release to the engine at a url."""
    images = images_of(release, records_of(paths, release))
    with engine_at(url) as other, contextlib.ExitStack() as stack:
        with errors_of(url):
            require_free(other, images, url)
            if is_there(other, images):
                return Sent(0, len(release.diff_ids), 0)
            below = present(other, release.diff_ids)
        lacks_none = below == len(release.diff_ids)
        layers = {} if lacks_none else export.saved_layers(paths, engine, release, stack, say)
        with errors_of(url):
            return send(other, images, layers, below, say)


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
                    f"{where} has another image under {tag}: {seen}, wanted {image.config_digest}",
                    next_step=f"find out which is right (invoke verify); the other goes with: {program} rmi {tag}",
                )


def present(engine: Engine, diff_ids: Sequence[str]) -> int:
    """How many of the lowest layers the engine has in the image that shares most of them."""
    if not engine.keeps_layers:
        return 0
    return max((common(image.diff_ids, diff_ids) for image in inventory(engine)), default=0)


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
