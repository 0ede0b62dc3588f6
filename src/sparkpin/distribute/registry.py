"""Releases in a registry: the layout of a file, image and artifact each under a name.

NAME:<stage>-<key12>           the image: its configuration, and its layers as plain tars, so that a blob's digest is
                               the layer's diff ID, and what two releases share lies there once
NAME:<stage>-<key12>.release   the artifact that refers to it: record, SBOM, statement, signature, inputs
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core import files, locks
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import count, say, size
from sparkpin.distribute import bundle as bundles
from sparkpin.distribute import copy as transfer
from sparkpin.distribute import export, layout, take_in, verify
from sparkpin.distribute.bundle import Bundle
from sparkpin.distribute.layout import Refused, refusing
from sparkpin.distribute.signing import Keys
from sparkpin.host.engine import Engine
from sparkpin.host.skopeo import AbsentError, Registry
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.oci import OciLayer, digest_of
from sparkpin.releases.record import Release

END = ".release"  # of an artifact's tag: registries without the referrers API have no other way from image to artifact
RECORD_LIMIT = 1 << 30  # bytes of an artifact, which has no store and no checkpoint here
PROPRIETARY = "nvidia-"  # how the names of wheels start that the CUDA toolkit's licence is about, and of some others
TERMS = "docs/registry.md, «What may be redistributed»"
STRANGE = "find out who wrote to that registry; nothing of it was used"


def name_in(release: Release) -> str:
    """The tag in a registry: what stands behind the colon of the release's own."""
    return release.tag.rpartition(":")[2]


def publish(paths: Paths, engine: Engine, release: Release, place: Registry, *, agreed: bool) -> Registry:
    """Send a release: the image, then its artifact, whose tag an import begins with. Gives where it is.

    agreed: that its proprietary wheels may be redistributed there. InputError where that is to be said first,
    IntegrityError for a tag that is of another image and for what every import would refuse, NetworkError, DiskError.
    """
    if place.reference:
        step = f"invoke export {release.tag} oci://{place.host}/{place.name}"
        raise InputError(f"{place}: the tag is the release's own", next_step=step)
    place = dataclasses.replace(place, tag=name_in(release))
    records = records_of(paths, release)
    image, config = place.manifest(place.reference), records[-1].config.encode()
    if image is None:
        require_agreed(records, release, place, agreed=agreed)
    else:
        require_image(image, release, config, place)
    with locks.claim(paths), working(paths, f"publish-{release.key[:12]}") as folder:
        rows = export.release_rows(paths, release, records, export.BundleParts(image=False))
        with contextlib.ExitStack() as stack:
            layers = None if image else export.saved_layers(paths, engine, release, stack)
            if layers:
                image = oci.manifest(config, [OciLayer(one, layers[one].size) for one in release.diff_ids])
            assert image
            made = layout.artifact(release.tag, [row for row, _ in rows.values()], image)
            found: dict[str, export.Source] = {oci.blob(row.digest): source for row, source in rows.values()}
            found |= {oci.blob(digest_of(data)): data for data in (made, image, config, layout.EMPTY)}
            lay_out(folder, found | {oci.blob(one): tar for one, tar in (layers or {}).items()})
        with (
            export.importable(release, lambda: shutil.rmtree(folder)),
            refusing(release.tag),
            blobs_in(folder) as blobs,
        ):
            bundles.with_layers(bundles.read_bundle(release.tag, made, blobs, image, Keys()), blobs, image)
        name_manifests(folder, {"image": image, "release": made})
        if layers:
            total = size(sum(tar.size for tar in layers.values()))
            say(f"sending what {place.host} lacks of its image: {count(len(layers), 'layer')}, {total}")
            with waiting("skopeo sends it"):
                place.push(folder, "image", place.reference)
        say(f"sending the record of {release.tag}, {size(sum(row.size for row, _ in rows.values()))}")
        place.push(folder, "release", f":{place.tag}{END}")
        shutil.rmtree(folder)
    return place


def require_agreed(records: Sequence[BuildRecord], release: Release, place: Registry, *, agreed: bool) -> None:
    """InputError unless somebody has said that what is not free may be given away."""
    names = {file.name for file in bundles.locked_files(records) if file.name.startswith(PROPRIETARY)}
    if names and not agreed:
        raise InputError(
            f"{release.tag} holds {count(len(names), 'wheel')} of NVIDIA ({min(names)} ...), some of which may not be "
            f"given to others: {TERMS}",
            next_step=f"where you may: invoke export {release.tag} oci://{place.host}/{place.name} --redistribute",
        )


def require_image(image: bytes, release: Release, config: bytes, place: Registry) -> list[OciLayer]:
    """The layers of an image's manifest. IntegrityError for another image's."""
    try:
        return layout.read_image(image, release.diff_ids, config)
    except Refused:
        why = f"{place} is another image than that of {release.tag} ({release.image})"
        raise IntegrityError(why, next_step=STRANGE) from None


def lay_out(folder: Path, found: Mapping[str, export.Source]) -> None:
    """Write the files of a layout; what a killed run left is written again."""
    total = sum(map(export.length_of, found.values()))
    files.require_space(folder, total, "the release's bytes", "SPARKPIN_CACHE")
    for name, source in found.items():
        with files.atomic_file(folder / name) as out:
            export.copied(source, out)


def name_manifests(folder: Path, named: Mapping[str, bytes]) -> None:
    """So that skopeo finds them: name -> manifest."""
    rows = [
        {**oci.described(oci.MANIFEST_TYPE, data), "annotations": {oci.REF_NAME: name}} for name, data in named.items()
    ]
    (folder / oci.LAYOUT).write_bytes(oci.LAYOUT_TEXT)
    (folder / oci.INDEX).write_bytes(oci.index_of(rows))


@contextlib.contextmanager
def blobs_in(folder: Path) -> Iterator[dict[str, Slice]]:
    """File of a layout -> its bytes, while the block runs."""
    with contextlib.ExitStack() as stack:
        paths = sorted((folder / "blobs/sha256").iterdir())
        opened = {path: stack.enter_context(path.open("rb")) for path in paths}
        yield {f"blobs/sha256/{path.name}": Slice(file, 0, path.stat().st_size) for path, file in opened.items()}


def pull(paths: Paths, engine: Engine, place: Registry, *, unsigned: bool = False) -> take_in.Imported:
    """Fetch the record, verify it, fetch the layers that the engine lacks, verify them, then go on as an import does.

    unsigned: take what nobody signed whom `allowed_signers` names, too. InputError for a place that names no release,
    IntegrityError, before the engine gets anything, for what is not whole and true.
    """
    if not place.reference:
        raise InputError(f"{place}: which release?", next_step=f"invoke import {place}:<stage>-<key>, or @sha256:...")
    made = place.manifest(f"{place.reference}{END if place.tag else ''}")
    if made is None:
        raise AbsentError(f"{place} is not there", next_step="look at the name, and whether it was published")
    if place.digest and digest_of(made) != place.digest:
        raise IntegrityError(f"{place}: the registry gave {digest_of(made)}", next_step=STRANGE)
    with (
        locks.claim(paths),
        working(paths, f"pull-{digest_of(made)[7:19]}") as folder,
        contextlib.ExitStack() as stack,
    ):
        drop_damaged(folder)
        image = fetch_record(place, made, folder)
        with refusing(place):
            blobs = stack.enter_context(blobs_in(folder))
            bundle = bundles.read_bundle(str(place), made, blobs, image)
            if bundle.has_store or bundle.has_checkpoint or (place.tag and name_in(bundle.release) != place.tag):
                raise Refused(f"it is of {bundle.release.tag}, or holds more than a record")
        if not unsigned:
            step = "ask its maker to sign it (invoke verify TAG --sign) and to export it again; --unsigned takes it"
            verify.require([verify.demanded(check, step) for check in bundle.checks], str(place))
        take_in.require_no_conflict(paths, engine, bundle)
        if not transfer.is_there(engine, transfer.images_of(bundle.release, bundle.records)):
            bundle = fetch_layers(engine, place, folder, bundle, image, stack)
        done = take_in.take_in(paths, engine, bundle)
        shutil.rmtree(folder, ignore_errors=True)
    return done


def drop_damaged(folder: Path) -> None:
    """What a killed run left, except whole blobs: skopeo takes any file under a digest for fetched."""
    (folder / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    for path in (folder / "blobs/sha256").iterdir():
        if files.sha256_file(path)[0] != path.name:
            path.unlink()


def fetch_record(place: Registry, made: bytes, folder: Path) -> bytes:
    """Fetch what an artifact names, as far as its sizes are possible ones. Gives the manifest of its image."""
    with refusing(place):
        rows = layout.read_rows(made)
        total = sum(row.size for row in rows)
        subject = json.loads(made)["subject"]["digest"]
        if total > RECORD_LIMIT or not layout.DIGEST.fullmatch(subject):
            raise Refused(f"its record has {total:,} bytes; {RECORD_LIMIT:,} are allowed")
    files.require_space(folder, total, "the record's bytes", "SPARKPIN_CACHE")
    say(f"fetching the record of {place}, {size(total)}")
    place.fetch(folder, f"@{digest_of(made)}", "release", max(row.size for row in rows))
    if (image := place.manifest(f"@{subject}")) is None or digest_of(image) != subject:
        raise IntegrityError(f"{place}: the registry does not have its image {subject}", next_step=STRANGE)
    return image


def fetch_layers(
    engine: Engine,
    place: Registry,
    folder: Path,
    bundle: Bundle,
    image: bytes,
    stack: contextlib.ExitStack,
) -> Bundle:
    """The bundle with the layers that the engine lacks."""
    release = bundle.release
    sizes = {row.digest: row.size for row in require_image(image, release, bundle.records[-1].config.encode(), place)}
    below = transfer.present(engine, release.diff_ids)
    lacking = dict.fromkeys(release.diff_ids[below:])
    stand_ins = [folder / oci.blob(one) for one in set(release.diff_ids[:below]) - lacking.keys()]
    total = sum(sizes[one] for one in lacking if not (folder / oci.blob(one)).is_file())
    files.require_space(folder, total, "the image's layers", "SPARKPIN_CACHE")
    say(f"fetching {len(lacking)} of {count(len(sizes), 'layer')}, {size(total)}")
    for path in stand_ins:
        with path.open("wb") as file:  # holes: skopeo takes the blob for fetched, and nobody reads it
            file.truncate(sizes[f"sha256:{path.name}"])
    with waiting("skopeo fetches them"):
        place.fetch(folder, f"@{digest_of(image)}", "image", max(sizes.values()))
    for path in stand_ins:
        path.unlink()
    with refusing(place):
        return bundles.with_layers(bundle, stack.enter_context(blobs_in(folder)), image)


@contextlib.contextmanager
def working(paths: Paths, name: str) -> Iterator[Path]:
    """A folder that stays when a run is killed, so that the next one goes on with it; of two runs one waits."""
    folder = paths.work / name
    with files.lock(paths.locks / f"{name}.lock", on_wait=lambda: say("another run is at it; waiting")):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # records lie in it, whose command and environment are nobody else's
        yield folder
