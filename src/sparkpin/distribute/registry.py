"""Releases in a registry: the image as an OCI image, and what belongs to it as one artifact that refers to it.

    NAME:<stage>-<key12>    the image: its configuration, and its layers as plain tars, so that a blob's digest is the
                            layer's diff ID, and what two releases share lies there once
    NAME:sha256-<digest>    the referrers tag of that image (OCI distribution 1.1): the artifacts about it
    NAME@sha256:...         an artifact: the bundle of the release without its image, SBOM, statement, signature

Whoever has the record can compute image and artifact to the byte, so what a registry says is compared, not interpreted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core import files, locks
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import Say, count, printable, size
from sparkpin.distribute import copy as transfer
from sparkpin.distribute import export, form, take_in, verify
from sparkpin.host.engine import Engine
from sparkpin.host.skopeo import AbsentError, Registry
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.oci import digest_of
from sparkpin.releases import current
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Release

ARTIFACT, BUNDLE = "application/vnd.sparkpin.release.v1", "application/vnd.sparkpin.distribute.v1.tar"
EVIDENCE = {SBOM: "application/vnd.cyclonedx+json", STATEMENT: "application/vnd.in-toto+json", SIGNATURE: "text/plain"}
EMPTY = b"{}"
EMPTY_TYPE, TITLE = "application/vnd.oci.empty.v1+json", "org.opencontainers.image.title"
DIGEST = re.compile("sha256:[0-9a-f]{64}")
LARGEST = 1 << 40  # bytes of a layer
REFERRERS = 50  # artifacts about an image that are looked at
PROPRIETARY = "nvidia-"  # how the names of wheels start that the CUDA toolkit's licence is about, and of some others
TERMS = "docs/registry.md, «What may be redistributed»"
STRANGE = "find out who wrote to that registry; nothing of it was used"


class Hashed(Protocol):
    @property
    def sha256(self) -> str: ...
    @property
    def size(self) -> int: ...


def artifact(image: bytes, tag: str, rows: Sequence[tuple[str, str, str, int]]) -> bytes:
    """Manifest of what belongs to an image. tag: of the release; rows: media type, name, SHA-256 (hex), size."""
    layers = [
        {"mediaType": kind, "digest": f"sha256:{sha256}", "size": length, "annotations": {TITLE: name}}
        for kind, name, sha256, length in rows
    ]
    return oci.text(
        {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST_TYPE,
            "artifactType": ARTIFACT,
            "config": oci.described(EMPTY_TYPE, EMPTY),
            "layers": layers,
            "subject": oci.described(oci.MANIFEST_TYPE, image),
            "annotations": {oci.REF_NAME: tag},
        }
    )


def rows_of(bundle: tuple[str, int], members: Mapping[str, Hashed]) -> list[tuple[str, str, str, int]]:
    """bundle: SHA-256 (hex) and size; members: those of the bundle, by name."""
    found = [(kind, name, members.get(form.EVIDENCE + name)) for name, kind in EVIDENCE.items()]
    return [(BUNDLE, "release.tar", *bundle), *((kind, name, row.sha256, row.size) for kind, name, row in found if row)]


def referrers_tag(image: bytes) -> str:
    return f":{digest_of(image).replace(':', '-')}"


def name_in(release: Release) -> str:
    """The tag in a registry: what stands behind the colon of the release's own."""
    return release.tag.rpartition(":")[2]


class Layout:
    """A folder in OCI layout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.named = folder, dict[str, dict[str, Any]]()
        (folder / form.BLOBS).mkdir(parents=True, exist_ok=True)
        (folder / oci.LAYOUT).write_bytes(oci.LAYOUT_TEXT)

    def blob(self, digest: str) -> Path:
        return self.folder / oci.blob(digest)

    def drop_damaged(self) -> None:
        """What a killed run left, but for whole blobs: skopeo takes any file under a digest for fetched."""
        for path in (self.folder / form.BLOBS).iterdir():
            if files.sha256_file(path)[0] != path.name:
                path.unlink()

    def add(self, data: bytes, kind: str = "", name: str = "") -> None:
        """A small blob. name: by which skopeo finds it, for a manifest."""
        row = oci.described(kind, data)
        self.blob(row["digest"]).write_bytes(data)
        if name:
            self.named[name] = row
            rows = [{**row, "annotations": {oci.REF_NAME: name}} for name, row in self.named.items()]
            (self.folder / oci.INDEX).write_bytes(oci.index_of(rows))


def publish(paths: Paths, engine: Engine, release: Release, place: Registry, say: Say, *, agreed: bool) -> Registry:
    """Send a release: its artifact, the list of artifacts, then the image, whose tag comes last. Gives where it is.

    agreed: that its proprietary wheels may be redistributed there. InputError where that is to be said first,
    IntegrityError for a tag that is of another image and for what every import would refuse, NetworkError, DiskError.
    """
    if place.reference:
        step = f"invoke export {release.tag} oci://{place.host}/{place.name}"
        raise InputError(f"{place}: the tag is the release's own", next_step=step)
    place = dataclasses.replace(place, tag=name_in(release))
    records = records_of(paths, release)
    seen = place.manifest(place.reference)
    if seen is None:
        require_agreed(records, release, place, agreed=agreed)
    else:
        require_image(seen, release, records, place)
    with locks.claim(paths, say), working(paths, f"publish-{release.key[:12]}", say) as folder:
        layout, file = Layout(folder), folder / "release.tar"
        wanted = export.BundleParts(image=False)
        pieces = export.record_pieces(paths, release, records, say)
        export.require_importable(paths, release, file, wanted, pieces)
        export.write(file, release, wanted, pieces, say)
        written = files.sha256_file(file)
        file.rename(layout.blob(f"sha256:{written[0]}"))
        image = seen or lay_out_image(paths, engine, release, records, layout, say)
        made = artifact(image, release.tag, rows_of(written, {piece.name: piece for piece in pieces}))
        for piece in pieces:
            if piece.name.removeprefix(form.EVIDENCE) in EVIDENCE and isinstance(piece.source, bytes):
                layout.add(piece.source)
        layout.add(EMPTY)
        layout.add(made, oci.MANIFEST_TYPE, "release")
        say(f"sending the record of {release.tag}, {size(written[1])}")
        place.push(folder, "release", f"@{digest_of(made)}")
        others = [row for row, about in referrers(place, image) if about != release.tag]
        own = {
            **oci.described(oci.MANIFEST_TYPE, made),
            "artifactType": ARTIFACT,
            "annotations": {oci.REF_NAME: release.tag},
        }
        layout.add(oci.index_of([own, *others]), oci.INDEX_TYPE, "referrers")
        place.push_index(folder, "referrers", referrers_tag(image))
        if seen is None:
            total = sum(row["size"] for row in json.loads(image)["layers"])
            say(f"sending what {place.host} lacks of its image: {count(len(release.diff_ids), 'layer')}, {size(total)}")
            with waiting(say, "skopeo sends it"):
                place.push(folder, "image", place.reference)
    shutil.rmtree(folder, ignore_errors=True)
    return place


def require_agreed(records: Sequence[BuildRecord], release: Release, place: Registry, *, agreed: bool) -> None:
    """InputError unless somebody has said that what is not free may be given away."""
    names = {file.name for file in form.locked_files(records) if file.name.startswith(PROPRIETARY)}
    if names and not agreed:
        raise InputError(
            f"{release.tag} holds {count(len(names), 'wheel')} of NVIDIA ({min(names)} ...), some of which may not be "
            f"given to others: {TERMS}",
            next_step=f"where you may: invoke export {release.tag} oci://{place.host}/{place.name} --redistribute",
        )


def lay_out_image(
    paths: Paths, engine: Engine, release: Release, records: Sequence[BuildRecord], layout: Layout, say: Say
) -> bytes:
    """The image's blobs, each compared with its digest. Its manifest."""
    twice = 2 * (release.size + release.size // 16)  # as the engine saves it, and layer by layer
    files.require_space(paths.work, twice, "an image's layers, twice", "SPARKPIN_CACHE")
    with contextlib.ExitStack() as stack:
        layers = export.saved_layers(paths, engine, release, stack, say)
        for diff_id, tar in layers.items():
            with files.atomic_file(layout.blob(diff_id)) as out:
                if (seen := f"sha256:{form.copied(tar, out)[0]}") != diff_id:
                    step = current.how_to_rebuild(release)
                    raise IntegrityError(f"layer of {release.tag}: expected {diff_id}, saved {seen}", next_step=step)
        sizes = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids]
    config = records[-1].config.encode()
    layout.add(config)
    image = oci.manifest(config, sizes)
    layout.add(image, oci.MANIFEST_TYPE, "image")
    return image


def pull(paths: Paths, engine: Engine, place: Registry, say: Say, *, unsigned: bool = False) -> take_in.Imported:
    """Fetch the record, verify it, fetch the layers that the engine lacks, verify them, then go on as an import does.

    unsigned: take what nobody signed whom `allowed_signers` names, too. InputError for a place that names no image or
    several releases, IntegrityError, before the engine gets anything, for what is not whole and true.
    """
    if not place.reference:
        raise InputError(f"{place}: which image?", next_step=f"invoke import {place}:<stage>-<key>, or @sha256:...")
    if (image := place.manifest(place.reference)) is None:
        raise AbsentError(f"{place} is not there", next_step="look at the name, and whether it was published")
    if place.digest and digest_of(image) != place.digest:
        raise IntegrityError(f"{place}: the registry gave {digest_of(image)}", next_step=STRANGE)
    name = f"pull-{digest_of(image)[7:19]}"
    with locks.claim(paths, say), working(paths, name, say) as folder, contextlib.ExitStack() as stack:
        layout = Layout(folder)
        layout.drop_damaged()
        made = artifact_about(place, image)
        say(f"fetching the record of {place}")
        place.fetch(folder, f"@{digest_of(made)}", "release")
        bundle = stack.enter_context(opened(place, image, made, layout, say))
        if not unsigned:
            step = "ask its maker to sign it (invoke verify TAG --sign) and to export it again; --unsigned takes it"
            verify.require([verify.demanded(check, step) for check in bundle.checks], str(place))
        take_in.require_no_conflict(paths, engine, bundle)
        bundle = with_layers(paths, engine, place, image, bundle, layout, stack, say)
        done = take_in.take_in(paths, engine, bundle, say, source=str(place))
    shutil.rmtree(folder, ignore_errors=True)
    return done


def artifact_about(place: Registry, image: bytes) -> bytes:
    """The manifest of the one artifact that is about the wanted release."""
    found = {about: row["digest"] for row, about in referrers(place, image) if about}
    fitting = [about for about in found if not place.tag or about.endswith(f":{place.tag}")]
    if not fitting:
        other = f"; {printable(', '.join(found))} are" if found else ""
        step = f"{STRANGE}; invoke export TAG oci://{place.host}/{place.name} writes both"
        raise IntegrityError(f"{place}: no record of such a release belongs to that image{other}", next_step=step)
    if len(fitting) > 1:
        tags = printable(", ".join(about.rpartition(":")[2] for about in fitting))
        raise InputError(f"{place} is the image of several releases", next_step=f"the same command with a tag: {tags}")
    if (made := fetched(place, found[fitting[0]])) is None:
        raise IntegrityError(f"{place}: its record was deleted just now", next_step="the same command again")
    return made


def referrers(place: Registry, image: bytes) -> list[tuple[dict[str, Any], str]]:
    """The rows of an image's referrers tag; with each the release that it is about, "" for what others wrote."""
    data = place.manifest(referrers_tag(image))
    found = []
    with reading(place, "the list of what belongs to it"):
        rows = verify.strict_json(data)["manifests"] if data else []
        for row in rows[:REFERRERS]:
            if (about := fetched(place, row["digest"])) is None:  # deleted there: no release's, and not ours to drop
                found.append((row, ""))
                continue
            value = verify.strict_json(about)
            is_ours = value.get("artifactType") == ARTIFACT and value["subject"]["digest"] == digest_of(image)
            found.append((row, str(value["annotations"][oci.REF_NAME]) if is_ours else ""))
        found += [(row, "") for row in rows[REFERRERS:]]
    return found


def fetched(place: Registry, digest: str) -> bytes | None:
    """A manifest by its digest, None where the registry has none."""
    data = place.manifest(f"@{require_digest(digest)}")
    if data is not None and digest_of(data) != digest:
        raise IntegrityError(f"{place}: {digest} belongs to it, and came as another", next_step=STRANGE)
    return data


def require_digest(value: object) -> str:
    """ValueError for what a registry says that is none."""
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value
    raise ValueError(f"got {str(value)[:80]!r}, expected sha256 and 64 digits")


@contextlib.contextmanager
def reading(place: Registry, what: str) -> Iterator[None]:
    try:
        yield
    except form.MISFITS as error:
        why = printable(f"{place}: {what} cannot be read ({type(error).__name__}: {error})"[: form.SAID])
        raise IntegrityError(why, next_step=STRANGE) from None


@contextlib.contextmanager
def opened(place: Registry, image: bytes, made: bytes, layout: Layout, say: Say) -> Iterator[form.Bundle]:
    """The bundle of the artifact, verified as every bundle, and held against image, artifact and the tag asked for."""
    with reading(place, "its artifact"):
        (digest,) = (row["digest"] for row in verify.strict_json(made)["layers"] if row["mediaType"] == BUNDLE)
        path = layout.blob(require_digest(digest))
    try:
        with form.open_bundle(path, say) as bundle:
            release, index = bundle.release, bundle.index
            if index.image or index.store or index.checkpoint:
                raise IntegrityError(f"{place}: its record holds more than a record", next_step=STRANGE)
            if place.tag and name_in(release) != place.tag:
                raise IntegrityError(f"{place} is the record of {release.tag}", next_step=STRANGE)
            require_image(image, release, bundle.records, place)
            evidence = {row.name: row for row in index.members}
            if made != artifact(image, release.tag, rows_of(files.sha256_file(path), evidence)):
                what = "SBOM, statement or signature beside the record are not those in it"
                raise IntegrityError(f"{place}: {what}", next_step=STRANGE)
            yield bundle
    except IntegrityError as error:
        step = STRANGE if error.next_step == form.AGAIN else error.next_step
        raise IntegrityError(error.message.replace(str(path), str(place)), next_step=step) from None


def require_image(image: bytes, release: Release, records: Sequence[BuildRecord], place: Registry) -> None:
    """IntegrityError unless the manifest is the one of the recorded image, whose layers' sizes it alone knows."""
    with reading(place, "its manifest"):
        rows = verify.strict_json(image)["layers"]
        sizes = [oci.OciLayer(digest, int(row["size"])) for digest, row in zip(release.diff_ids, rows, strict=True)]
        possible = all(0 < layer.size < LARGEST for layer in sizes)
        if possible and image == oci.manifest(records[-1].config.encode(), sizes):
            return
    raise IntegrityError(f"{place} is another image than that of {release.tag} ({release.image})", next_step=STRANGE)


def with_layers(
    paths: Paths,
    engine: Engine,
    place: Registry,
    image: bytes,
    bundle: form.Bundle,
    layout: Layout,
    stack: contextlib.ExitStack,
    say: Say,
) -> form.Bundle:
    """The bundle with the layers that the engine lacks, each hashed and held against its listing."""
    release = bundle.release
    if transfer.is_there(engine, transfer.images_of(release, bundle.records)):
        return bundle
    sizes = {row["digest"]: row["size"] for row in json.loads(image)["layers"]}
    below = transfer.present(engine, release.diff_ids)
    lacking, there = dict.fromkeys(release.diff_ids[below:]), release.diff_ids[:below]
    total = sum(sizes[diff_id] for diff_id in lacking if not layout.blob(diff_id).is_file())
    files.require_space(paths.work, total, "the image's layers", "SPARKPIN_CACHE")
    say(f"fetching {len(lacking)} of {count(len(sizes), 'layer')}, {size(total)}")
    stand_ins = set(there) - lacking.keys()
    for diff_id in stand_ins:
        with layout.blob(diff_id).open("wb") as file:  # holes: skopeo takes the blob for fetched, and nobody reads it
            file.truncate(sizes[diff_id])
    with waiting(say, "skopeo fetches them"):
        place.fetch(layout.folder, f"@{digest_of(image)}", "image")
    for diff_id in stand_ins:
        layout.blob(diff_id).unlink()
    data = dict(bundle.data)
    for diff_id in lacking:
        data[oci.blob(diff_id)] = tar = Slice(stack.enter_context(layout.blob(diff_id).open("rb")), 0, sizes[diff_id])
        if (seen := f"sha256:{files.sha256_of(tar)}") != diff_id:
            layout.blob(diff_id).unlink()
            raise IntegrityError(
                f"{place}: layer {diff_id} came as {seen}", next_step=f"the same command; else {STRANGE}"
            )
    whole = dataclasses.replace(bundle, data=data, index=bundle.index.model_copy(update={"image": True}))
    try:
        with form.refusing():
            listed = form.check_listings(whole)
    except form.Refused as refusal:
        raise IntegrityError(f"{place} is refused: {printable(str(refusal))}", next_step=STRANGE) from None
    checks = tuple(listed if check.what == form.LISTINGS else check for check in bundle.checks)
    return dataclasses.replace(whole, checks=checks)


@contextlib.contextmanager
def working(paths: Paths, name: str, say: Say) -> Iterator[Path]:
    """A folder that stays when a run is killed, so that the next one goes on with it; of two runs one waits."""
    folder = paths.work / name
    with files.lock(paths.locks / f"{name}.lock", on_wait=lambda: say("another run is at it; waiting")):
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
