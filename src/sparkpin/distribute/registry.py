"""Releases in a registry: the layout of a file, image and artifact each under a name.

NAME:<stage>-<key12>           the image: its configuration, and its layers as plain tars, so that a blob's digest is
                               the layer's diff ID, and what two releases share lies there once
NAME:<stage>-<key12>.release   the artifact that refers to it: record, SBOM, statement, signature, inputs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from sparkpin.build.record import records_of
from sparkpin.core import locks
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import count, say, size
from sparkpin.distribute import bundle as bundles
from sparkpin.distribute import layout, materials, transfer, verify
from sparkpin.distribute.bundle import Bundle
from sparkpin.distribute.layout import Refused, refusing
from sparkpin.host.engine import Engine
from sparkpin.host.skopeo import AbsentError, Registry
from sparkpin.image import oci
from sparkpin.image.oci import digest_of
from sparkpin.releases.record import Release

END = ".release"  # of an artifact's tag: registries without the referrers API have no other way from image to artifact
RECORD_LIMIT = 1 << 30  # bytes of an artifact
PROPRIETARY = "nvidia-"  # how the names of wheels start that the CUDA toolkit's licence is about, and of some others
TERMS = "docs/registry.md, «What may be redistributed»"
STRANGE = "find out who wrote to that registry; nothing of it was used"


def publish(paths: Paths, engine: Engine, release: Release, place: Registry, *, agreed: bool) -> Registry:
    """Send a release: the image, then its artifact, whose tag an import begins with. Gives where it is.

    agreed: that its proprietary wheels may be redistributed there. InputError where that is to be said first,
    IntegrityError for a tag that is of another image and for what every import would refuse, NetworkError, DiskError.
    """
    again = f"invoke export {release.tag} oci://{place.host}/{place.name}"
    if place.reference:
        raise InputError(f"{place}: the tag is the release's own", next_step=again)
    wheels = {file.name for file in materials.locked_files(records_of(paths, release))}
    if not agreed and (nvidia := [name for name in wheels if name.startswith(PROPRIETARY)]):
        cause = f"{release.tag} holds {count(len(nvidia), 'wheel')} of NVIDIA, some not to be given to others: {TERMS}"
        raise InputError(cause, next_step=f"where you may: {again} --redistribute")
    place = dataclasses.replace(place, tag=release.name)
    with locks.claim(paths), locks.saving_folder(paths) as work:
        folder = work / "layout"
        folder.mkdir()
        total = transfer.export(paths, engine, release, folder)
        manifest, image = layout.read_index(layout.read_folder(folder))
        if place.manifest(place.reference) not in (None, image):
            raise IntegrityError(f"{place} is another image than that of {release.tag}", next_step=STRANGE)
        rows = [
            oci.described(oci.MANIFEST_TYPE, data) | {"annotations": {oci.REF_NAME: name}}
            for name, data in (("image", image), ("release", manifest))  # so that skopeo finds them
        ]
        (folder / oci.INDEX).write_bytes(oci.index_of(rows))
        say(f"sending what {place.host} lacks of {release.tag}, {size(total)}")
        with waiting("skopeo sends it"):
            place.push(folder, "image", place.reference)
            place.push(folder, "release", f":{place.tag}{END}")
    return place


def pull(paths: Paths, engine: Engine, place: Registry, *, unsigned: bool = False) -> Bundle:
    """Fetch the record, verify it, fetch the layers that the engine lacks, verify them, then go on as an import does.

    unsigned: take what nobody signed whom `allowed_signers` names, too. InputError for a place that names no release,
    IntegrityError, before the engine gets anything, for what is not whole and true.
    """
    if not place.reference:
        raise InputError(f"{place}: which release?", next_step=f"invoke import {place}:<stage>-<key>, or @sha256:...")
    manifest = manifest_at(place, f"{place.reference}{END if place.tag else ''}")
    with locks.claim(paths), locks.saving_folder(paths) as work:
        folder = work / "layout"
        image = fetch_record(place, manifest, folder)
        with refusing(place):
            bundle = bundles.read_bundle(str(place), manifest, image, layout.read_folder(folder))
            if place.tag not in ("", bundle.release.name):
                raise Refused(f"it is of {bundle.release.tag}")
        if not unsigned:
            step = "ask its maker to sign it (invoke verify TAG --sign) and to export it again; --unsigned takes it"
            verify.require([verify.demanded(check, step) for check in bundle.checks], str(place))
        transfer.require_no_conflict(paths, engine, bundle)
        fetch_layers(place, folder, bundle, image, transfer.lacking_layers(paths, engine, bundle.release.diff_ids))
        with refusing(place):
            bundle = bundles.with_layers(bundle, layout.read_folder(folder))
        return transfer.take_in(paths, engine, bundle)


def manifest_at(place: Registry, reference: str) -> bytes:
    """AbsentError where the registry has none, IntegrityError where it gives other bytes than the digest's."""
    data = place.manifest(reference)
    if data is None:
        raise AbsentError(f"{place}: {reference} is not there", next_step="look at the name, and who published it")
    if reference.startswith("@") and reference != f"@{digest_of(data)}":
        raise IntegrityError(f"{place}: for {reference} the registry gave {digest_of(data)}", next_step=STRANGE)
    return data


def fetch_record(place: Registry, manifest: bytes, folder: Path) -> bytes:
    """Fetch what an artifact names, as far as its sizes are possible ones. Gives the manifest of its image."""
    with refusing(place):
        found = layout.read_artifact(manifest)
        sizes = [row.size for row in found.layers]
        if more := [row.title for row in found.layers if row.title.startswith(layout.STORE)]:
            raise Refused(f"it holds more than a record: {more[0]}")
        if sum(sizes) > RECORD_LIMIT:
            raise Refused(f"its record has {sum(sizes):,} bytes; {RECORD_LIMIT:,} are allowed")
    say(f"fetching the record of {place}, {size(sum(sizes))}")
    place.fetch(folder, f"@{digest_of(manifest)}", "release", max(sizes))
    return manifest_at(place, f"@{found.subject.digest}")


def fetch_layers(place: Registry, folder: Path, bundle: Bundle, image: bytes, lacking: Collection[str]) -> None:
    sizes = {layer.digest: layer.size for layer in bundle.image}
    say(f"fetching {len(lacking)} of {count(len(sizes), 'layer')}, {size(sum(sizes[one] for one in lacking))}")
    stand_ins = {one: folder / oci.blob(one) for one in sizes.keys() - {*lacking}}
    for digest, path in stand_ins.items():
        with path.open("wb") as file:  # a hole: skopeo takes the blob for fetched, and nobody reads it
            file.truncate(sizes[digest])
    with waiting("skopeo fetches them"):
        place.fetch(folder, f"@{digest_of(image)}", "image", max(sizes.values()))
    for path in stand_ins.values():
        path.unlink()
