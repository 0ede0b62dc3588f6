"""A release into a layout, and out of one.

Export: collected, put into one file or a folder, and read again as an import reads it. The same release with the same
evidence gives the same bytes.

Import: its image is loaded, its files are kept, and it is recorded. The record comes last: what a killed run leaves is
complete files that nothing names yet, and the same command again goes on from there. No network, and nothing of this
checkout but the program: the release brings its own pins.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkpin.build.consistent import IMPORTS, Import, imports_of, is_brought
from sparkpin.build.record import BuildRecord, layer_file, record_file, records_with_key, write_record
from sparkpin.core import files, locks
from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.distribute import engines, layout, materials, verify
from sparkpin.distribute.bundle import Bundle, open_bundle
from sparkpin.distribute.layout import WholeFile
from sparkpin.distribute.materials import Part
from sparkpin.distribute.signing import Keys
from sparkpin.distribute.verify import Claimed, evidence_of
from sparkpin.fetch import model as hub
from sparkpin.fetch.store import FETCH
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.listing import write_contents
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import STATEMENT, Release, Releases, now

HAPPENED = ("state", "smoke", "created", "build_seconds", "size", "host")  # another machine's record may differ here
NOBODY = Keys()  # is trusted when it is read again: whom the other machine trusts is its own business


def export(paths: Paths, engine: Engine, release: Release, target: Path, *, store: bool = False) -> int:
    """Write the layout of a release to a file, or into an empty folder; its size in bytes. A file appears whole or not
    at all.

    store: with every wheel, package and model file. Raises IntegrityError for an input that is gone or damaged and for
    what every import would refuse, EngineError for an image that is gone, DiskError.
    """
    claimed = evidence_of(paths, release)
    if claimed.attested and STATEMENT not in claimed.data:
        step = f"invoke verify {release.tag} --sign makes it"
        raise IntegrityError(f"{release.tag} has no statement", next_step=step)
    data, parts = dict(claimed.data), materials.input_parts(release, claimed.records)
    if store:
        with project_of(paths, release) as project:
            stored = materials.stored_parts(claimed.records, materials.model_inputs(project, release))
        data |= {part.title: WholeFile(part.place(paths)) for part in stored if part.place(paths).is_file()}
        parts += stored
    if lacking := [part for part in parts if part.title not in data]:
        part, again = lacking[0], f"invoke build --recipe {release.recipe} --stage {release.stage} keeps it again"
        cause = f"{release.tag} was made from {part.what} (sha256={part.sha256}), which is not at {part.place(paths)}"
        raise IntegrityError(cause, next_step=FETCH if part.folder == layout.STORE else again)
    with engines.saved_layers(paths, engine, release) as layers:
        written = layout.write(target, layout_of(dataclasses.replace(claimed, data=data), layers))
    say("reading it as an import would")
    try:
        with open_bundle(target, NOBODY):
            return written
    except BaseException as error:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        if not isinstance(error, IntegrityError):
            raise
        why = f"{release.tag} is not exported, for every import would refuse it: {error.message}"
        raise IntegrityError(why, next_step=f"invoke verify {release.tag} prints all that is wrong") from None


def layout_of(claimed: Claimed, layers: Mapping[str, Slice]) -> dict[str, Slice]:
    """File of the layout -> its bytes, what is small first. layers: diff ID -> tar."""
    release, data, config = claimed.release, claimed.data, claimed.records[-1].config.encode()
    image = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids]
    rows = [layout.row_of(title, data[title]) for title in sorted(data)]
    artifact = layout.artifact(release.tag, rows, oci.manifest(config, image))
    small = layout.layout_files(release.tag, config, image, artifact)
    found = {name: layout.slice_of(content) for name, content in small.items()}
    found |= {oci.blob(row.digest): data[row.title] for row in rows}
    return found | {oci.blob(diff_id): tar for diff_id, tar in layers.items()}


def import_bundle(
    paths: Paths, engine: Engine, path: Path, *, signed: bool = False, without: Collection[str] = ()
) -> Bundle:
    """Verify a file or the folder of a layout, load its image, keep its files, record its release: as built, for no
    smoke test ran here.

    signed: refuse what nobody signed whom `allowed_signers` names; without: as of `open_bundle`.
    Raises IntegrityError, before anything changes, for a bundle that is not whole and true or that contradicts what
    this machine has.
    """
    with open_bundle(path, None, without) as bundle:
        if signed:
            verify.require([verify.demanded(check) for check in bundle.checks], str(path))
        with locks.claim(paths):
            return take_in(paths, engine, bundle)


def take_in(paths: Paths, engine: Engine, bundle: Bundle) -> Bundle:
    """Gives the bundle with the release as it is recorded here."""
    require_no_conflict(paths, engine, bundle)
    images = engines.images_of(bundle.release, bundle.records)
    if engines.is_there(engine, images):
        say("the engine has the image")
    else:
        engines.send(engine, images, bundle.layers, engines.present(engine, bundle.release.diff_ids))
    say("keeping its files")
    keep_files(paths, bundle)
    for diff_id, contents in bundle.listings.items():  # for `diff` and `why`
        write_contents(layer_file(paths, diff_id), contents)
    keep_evidence(paths, bundle)
    release = Releases(paths).update(bundle.release.tag, lambda known: merged(paths, bundle, known))
    return dataclasses.replace(bundle, release=release)


def lacking_layers(paths: Paths, engine: Engine, diff_ids: Sequence[str]) -> set[str]:
    """Those of an image that the engine lacks, and those whose content is not listed here, as `diff` and `why` ask."""
    below = engines.present(engine, diff_ids)
    return {*diff_ids[below:], *(one for one in diff_ids if not layer_file(paths, one).is_file())}


def merged(paths: Paths, bundle: Bundle, known: Release | None) -> Release:
    """The record as it is to be, under the recipe's lock: a build may have recorded the same tag meanwhile, and its
    release stays its own. known: what is recorded by now."""
    if known:
        require_same_release(bundle, known)
    if known is None or is_brought(paths, known):
        parts = {"with_statement": STATEMENT in bundle.data, "with_store": layout.has_store(bundle.data)}
        row = Import(file=bundle.source, checks=[check.line for check in bundle.checks], time=now(), **parts)
        others = [old for old in imports_of(paths, bundle.release) if old.file != bundle.source]
        path = Releases(paths).evidence(bundle.release) / IMPORTS
        files.write_json(path, [one.model_dump() for one in (*others, row)])
    return known or dataclasses.replace(bundle.release, state="built", smoke=None)


def require_no_conflict(paths: Paths, engine: Engine, bundle: Bundle) -> None:
    """IntegrityError when this machine has anything of the bundle otherwise."""
    if known := Releases(paths).find(bundle.release.tag):
        require_same_release(bundle, known)
    for record in bundle.records:
        require_same_record(paths, bundle, record)
    for part in bundle.parts:
        target = part.place(paths)
        if part.path and target.is_file() and files.sha256_file(target)[0] != part.sha256:
            step = f"if that one is damaged, move it away, then the same command again: {target}"
            raise IntegrityError(f"{bundle.source}: {part.title} differs from {target}", next_step=step)
    engines.require_free(engine, engines.images_of(bundle.release, bundle.records))


def require_same_release(bundle: Bundle, known: Release) -> None:
    """Alike in all but what happened to it on each machine."""
    names = [field.name for field in dataclasses.fields(Release) if field.name not in HAPPENED]
    if other := [name for name in names if getattr(known, name) != getattr(bundle.release, name)]:
        cause = f"{bundle.source} has {known.tag} with other {', '.join(other)} than this machine"
        raise IntegrityError(cause, next_step=f"invoke reproduce {known.tag} shows which is right")


def require_same_record(paths: Paths, bundle: Bundle, record: BuildRecord) -> None:
    """Under the key there is no record of another name or content."""
    for path, here in records_with_key(paths, record.stack, record.key):
        ours, theirs = stated(here), stated(record)
        if other := [name for name in ours if ours[name] != theirs[name]]:
            cause = f"{bundle.source} has {record.ref} with other {', '.join(other)} than {here.ref} of this machine"
            step = f"invoke verify {bundle.release.tag}; a record that no release here is made of: rm {path}"
            raise IntegrityError(cause, next_step=step)


def stated(record: BuildRecord) -> dict[str, Any]:
    """What two machines that built the same say alike. An engine that wants whole images hides what a tree became."""
    apart: dict[str, Any] = {"seconds": True, "size": True, "layers": {"__all__": {"diff_id": True}}}
    return record.model_dump(mode="json", exclude=apart)


def keep_files(paths: Paths, bundle: Bundle) -> None:
    repositories = {"/".join(part.path.split("/")[:2]) for part in bundle.parts if part.path}
    with hub.hold_repositories(paths, repositories):
        for part in bundle.parts:
            target = part.place(paths)
            if target.is_file() and files.sha256_file(target)[0] == part.sha256:
                os.utime(target)  # young again for `prune`, should the run be killed before its record is written
            else:
                keep_file(bundle, part, target)
    for record in bundle.records:
        if not record_file(paths, record).is_file():
            write_record(paths, record, imported=True)


def keep_file(bundle: Bundle, part: Part, target: Path) -> None:
    """A model's file is read-only, as `hub` makes it: checkpoints hold hard links to it. Hashed once more, for a bundle
    may lie where others write."""
    digest = hashlib.sha256()
    with files.atomic_file(target, 0o444 if part.path else 0o644) as out:
        for chunk in bundle.data[part.title].chunks():
            digest.update(chunk)
            out.write(chunk)
        if digest.hexdigest() != part.sha256:
            step = "copy it to a disk of your own first"
            raise IntegrityError(f"{bundle.source} changed while it was read: {part.title}", next_step=step)


def keep_evidence(paths: Paths, bundle: Bundle) -> None:
    """Statement, SBOM and signature go together: where this machine has another statement, its own three stay."""
    folder = Releases(paths).evidence(bundle.release)
    there = {name: layout.small(bundle.data, name) for name in layout.EVIDENCE if name in bundle.data}
    statement = folder / STATEMENT
    if statement.is_file() and statement.read_bytes() != there.get(STATEMENT):
        return
    for name, data in there.items():
        if not (folder / name).is_file():
            with files.atomic_file(folder / name) as out:
                out.write(data)
