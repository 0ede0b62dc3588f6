"""The two sides that `diff` compares, read from records and from the project: no engine, no image.

A side is a release, with its build records and the project as it was, or the working tree, whose image is looked at
where a build has made it already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparkpin.build.pair import Pairing, pair
from sparkpin.build.record import BuildRecord, layer_file, read_record, record_file, records_of
from sparkpin.build.rootfs import RootfsSpec
from sparkpin.checkpoint.steps import checkpoint_steps, lock_for, used_repositories
from sparkpin.core.errors import InputError, IntegrityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history.diff import KINDS, TREE_NAME, Difference, Side, VersionedPart, compare
from sparkpin.image.listing import read_contents
from sparkpin.pins import manifests, schema
from sparkpin.pins.mods import Mod
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release, Releases

TREE = "."


def difference(paths: Paths, before: str, after: str) -> Difference:
    """before, after: tags of releases, one of them may be `.`, the working tree."""
    if before == after == TREE:
        raise InputError("the working tree has no differences from itself", next_step="invoke diff TAG .")
    records = Releases(paths)
    like = records.get(after if before == TREE else before)  # what the working tree is compared with
    left, right = (
        tree_side(paths, like) if name == TREE else release_side(paths, records.get(name)) for name in (before, after)
    )
    edited = {sha256: path for side in (left, right) if side.name == TREE_NAME for path, sha256 in side.files.items()}

    def read(sha256: str) -> bytes | None:
        if sha256 in edited:
            return (paths.project / edited[sha256]).read_bytes()
        return kept_text(paths, sha256)

    return compare(left, right, read, lambda diff_id: read_contents(layer_file(paths, diff_id)))


def kept_text(paths: Paths, sha256: str) -> bytes | None:
    with contextlib.suppress(IntegrityError):
        return KeptInputs.of(paths).read(sha256, "a file of the project")
    return None


def release_side(paths: Paths, release: Release) -> Side:
    origin = dict[str, str]()
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:  # another sparkpin's manifests
        chain = manifests.load_chain(project, release.stage)
        model = manifests.load_models(project, release.model, release.drafter)
        origin = made_from(model, manifests.load_model_lock(project, model), chain)
    names = {name: getattr(release, name) for name in ("recipe", "stage", "stack", "model", "drafter")}
    return make_side(release, release.tag, names, origin, of_records(paths, records_of(paths, release)))


def tree_side(paths: Paths, like: Release) -> Side:
    """What the working tree makes of a release's recipe and stage."""
    pairings = pair(paths.project, like.recipe, stage=like.stage)
    last, images = pairings[-1], [pairing.rendered for pairing in pairings]
    try:
        built = of_records(paths, [read_record(record_file(paths, image)) for image in images])
    except (FileNotFoundError, IntegrityError):  # not built yet: a mod's wheel has no hash
        rows = [
            (row.path, row.what, "" if isinstance(row.source, Mod) else row.sha256)
            for image in images
            for row in image.context
        ]
        built = {"image": "", "layers": None, "parts": parts_of(images[0].rootfs, rows)}
    names = {name: getattr(last, name).name for name in ("recipe", "stage", "stack", "model")}
    names["drafter"] = last.model.drafter.name if last.model.drafter else ""
    return make_side(last, TREE_NAME, names, made_from(last.model, last.model_lock, last.chain), built)


def make_side(
    one: Release | Pairing, name: str, names: Mapping[str, str], origin: Mapping[str, str], built: Mapping[str, Any]
) -> Side:
    """origin: of its checkpoint, as of `made_from`; built: the fields that `of_records` gives."""
    return Side(
        name=name,
        key=one.key,
        names={what: value for what, value in names.items() if value},
        files=one.inputs,
        argv=one.argv,
        env=one.env,
        checkpoint={"key": one.checkpoint_key[:16], **origin},
        **built,
    )


def of_records(paths: Paths, records: Sequence[BuildRecord]) -> dict[str, Any]:
    """The fields of a Side that build records hold."""
    last = records[-1]
    listed = all(layer_file(paths, diff_id).is_file() for diff_id in last.diff_ids)
    rows = [(row.path, row.what, row.sha256) for record in records for row in record.context]
    layers = tuple(last.diff_ids) if listed else None
    return {"image": last.config_digest, "layers": layers, "parts": parts_of(records[0].rootfs, rows)}


def parts_of(rootfs: RootfsSpec | None, rows: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, VersionedPart]]:
    """rows: (path, what, SHA-256) of the files that the builds saw."""
    found: dict[str, dict[str, VersionedPart]] = {kind: {} for kind in KINDS}
    if rootfs:
        found["debs"] = {deb.name: VersionedPart(deb.version, deb.sha256) for deb in rootfs.debs}
    for path, what, sha256 in rows:
        kind, _, rest = what.partition(" ")
        name, _, version = rest.rpartition(" ")
        if kind in ("wheel", "mod"):
            found[f"{kind}s"][name] = VersionedPart(version, sha256)
        elif path.startswith("tools/") and kind != "sparkpin":  # its own scripts are files of the project
            found["tools"][kind] = VersionedPart(rest, sha256)
    return found


def made_from(model: schema.ModelPin, lock: schema.ModelLock, chain: Sequence[schema.Stage]) -> dict[str, str]:
    """What a checkpoint is made from: model, steps, and the commit of each repository."""
    steps = checkpoint_steps(chain, model)
    locked = lock_for(model, lock, steps).repositories
    used = {name: locked[name] for name in sorted(used_repositories(model, steps))}
    repositories = {f"repository {name}": f"{one.repo} at {one.revision[:12]}" for name, one in used.items()}
    return {"model": model.name, "steps": " + ".join(steps), **repositories}
