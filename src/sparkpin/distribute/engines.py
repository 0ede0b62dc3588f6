"""Images into an engine, from a bundle or from another engine: only the layers that it lacks are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from sparkpin.build.consistent import require_consistent, same
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core.errors import EngineError, IntegrityError
from sparkpin.core.files import disk_errors, require_space
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.core.progress import GATHERS, UNPACKS, progress
from sparkpin.core.terminal import count, say, size
from sparkpin.host.engine import Engine, counted
from sparkpin.host.ssh import engine_at, errors_of
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.saved import open_saved
from sparkpin.releases import current, remote
from sparkpin.releases.record import Release, Releases


@dataclass(frozen=True)
class Sent:
    """Layers of an image: those that went over, those that were there, bytes that went. checkpoint: its folder there,
    where it went as well."""

    sent: int
    there: int
    bytes: int = 0
    checkpoint: str = ""


def images_of(release: Release, records: Sequence[BuildRecord]) -> list[oci.OciImage]:
    """The images of a chain, first stage first: those below the release's own cost no layer of their own, and
    `reproduce --keep` stands on them."""
    refs = [(record.ref, release.tag) if record is records[-1] else (record.ref,) for record in records]
    chain = zip(records, refs, strict=True)
    return [oci.OciImage(record.config.encode(), tuple(record.diff_ids), tags) for record, tags in chain]


def copy(
    paths: Paths, engine: Engine, release: Release, url: str, *, checkpoint: bool = False, deep: bool = False
) -> Sent:
    """Send the image of a release to the engine at a url, and its checkpoint to that ssh host. deep: all of what is
    there of the checkpoint is compared again.

    Before anything is sent: CheckpointError for a checkpoint that is not whole here, InputError for one that would not
    go to an ssh host.
    """
    if checkpoint:
        remote.host_of(url)
        require_consistent(paths, release, finished=True)
    records = records_of(paths, release)
    images, total = images_of(release, records), len(release.diff_ids)
    with engine_at(url) as other:
        with errors_of(url):
            require_free(other, images, url)
            there = is_there(other, images)
            below = total if there else present(other, release.diff_ids)
        with contextlib.ExitStack() as stack:
            layers = stack.enter_context(saved_layers(paths, engine, release)) if below < total else {}
            stack.enter_context(errors_of(url))
            sent = Sent(0, total) if there else send(other, images, layers, below)
    if not checkpoint:
        return sent
    folder = Releases(paths).checkpoint(release)
    return replace(sent, checkpoint=remote.send_checkpoint(url, release, folder, deep=deep))


@contextlib.contextmanager
def saved_layers(paths: Paths, engine: Engine, release: Release) -> Iterator[dict[str, Slice]]:
    """Diff ID -> tar, as the engine gives them out, in a temporary file; what is in them is not verified."""
    ref = current.require_ref(engine, release)
    require_space(paths.work, release.size + release.size // 16, "an image's layers", "SPARKPIN_CACHE")
    say(f"reading {len(release.diff_ids)} layers from the engine, {size(release.size)}")
    with saving_folder(paths) as work:
        archive = work / "image.tar"
        with disk_errors(work), archive.open("wb") as file, progress(release.size, before=GATHERS) as came:
            engine.save(ref, file, came)
        with open_saved(archive) as saved:
            same("configuration of what the engine saved", saved.config_digest, release.image)
            same("diff IDs of what the engine saved", saved.diff_ids, list(release.diff_ids))
            yield dict(zip(release.diff_ids, saved.layers, strict=True))


def named(images: Sequence[oci.OciImage]) -> dict[str, str]:
    """Tag -> config digest."""
    return {tag: image.config_digest for image in images for tag in image.tags}


def is_there(engine: Engine, images: Sequence[oci.OciImage]) -> bool:
    return all(digest(engine, tag) == expected for tag, expected in named(images).items())


def digest(engine: Engine, ref: str) -> str | None:
    found = engine.image(ref)
    return found.config_digest if found else None


def require_free(engine: Engine, images: Sequence[oci.OciImage], url: str = "") -> None:
    """IntegrityError when a tag names another image there: it would be taken away from it. url: not this machine's."""
    program = f"docker -H {url}" if url else "docker"
    for tag, expected in named(images).items():
        if (got := digest(engine, tag)) not in (None, expected):
            cause = f"{url or 'the engine'} has another image under {tag}: got {got}, expected {expected}"
            step = f"find out which is right (invoke verify); the other goes with: {program} rmi {tag}"
            raise IntegrityError(cause, next_step=step)


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
    diff_ids = images[-1].diff_ids
    lacking = dict.fromkeys(diff_ids[below:])
    if lost := [diff_id for diff_id in lacking if diff_id not in layers]:  # another run removed an image meanwhile
        raise EngineError(f"the engine no longer has layer {lost[0]}", next_step="the same command again")
    tars = {diff_id: layers[diff_id] for diff_id in lacking}
    total, there = sum(tar.size for tar in tars.values()), len({*diff_ids} - tars.keys())
    say(f"sending {count(len(tars), 'layer')}, {size(total)}; the engine has {there} more")
    with progress(total, after=UNPACKS) as sent:
        engine.load(counted(oci.load_archive(images, tars), sent))
    for tag, expected in named(images).items():
        if (got := digest(engine, tag)) != expected:
            engine.untag(tag)
            raise IntegrityError(f"{tag}: sent {expected}, the engine has {got}", next_step="the same command again")
    return Sent(len(tars), there, total)
