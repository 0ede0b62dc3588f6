"""What `comparison` compares, read from records and from the project: no engine, no image.

A side is a release, with its build records and the project as it was, or the working tree, whose image is looked at
where a build has made it already.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sparkpin.build.pair import pair
from sparkpin.build.record import BuildRecord, layer_file, read_record, record_file, records_of
from sparkpin.build.render import RenderedImage
from sparkpin.build.rootfs import RootfsSpec
from sparkpin.checkpoint.plan import MTP_FP8, checkpoint_steps, lock_for, used_repositories
from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import InputError, IntegrityError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable
from sparkpin.fetch.model_files import fetched_of, named_parts
from sparkpin.history.comparison import (
    TREE_NAME,
    Checkpoint,
    Difference,
    Side,
    VersionedPart,
    compare,
    text_diff,
)
from sparkpin.image.listing import read_contents
from sparkpin.image.seal import VERSION
from sparkpin.pins import manifests, schema
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release, Releases

TREE = "."
OWN_LABEL = "sparkpin.key"


def difference(paths: Paths, before: str, after: str) -> Difference:
    """before, after: tags of releases, one of them may be `.`, the working tree."""
    if before == after == TREE:
        raise InputError("the working tree has no differences from itself", next_step="invoke diff TAG .")
    records = Releases(paths)
    if before == TREE:  # it is looked at for what the other side is a release of
        left, right = tree_side(paths, new := records.get(after)), release_side(paths, new)
    else:
        left = release_side(paths, old := records.get(before))
        right = tree_side(paths, old) if after == TREE else release_side(paths, records.get(after))
    edited = {sha256: path for side in (left, right) if side.name == TREE_NAME for path, sha256 in side.files.items()}

    def read(sha256: str) -> bytes | None:
        if sha256 in edited:
            return (paths.project / edited[sha256]).read_bytes()
        return kept_text(paths, sha256)

    # Listings are some 100,000 objects without a cycle: collecting would look at all of them again and again.
    was_on = gc.isenabled()
    gc.disable()
    try:
        return compare(left, right, read, lambda diff_id: read_contents(layer_file(paths, diff_id)))
    finally:
        if was_on:
            gc.enable()


def recorded_difference(paths: Paths, before: Side, after: Side) -> Difference:
    """From the records alone: no listing of an image is read, which is what takes long."""
    old, new = (replace(side, layers=None) for side in (before, after))
    return compare(old, new, lambda sha256: kept_text(paths, sha256), lambda diff_id: ())


@contextlib.contextmanager
def pin_named(paths: Paths, release: Release) -> Iterator[None]:
    """A lock that no longer fits its pin is told with what changed in the pin since the release, not as two hashes."""
    try:
        yield
    except ManifestError as error:
        lock = Path(error.file).resolve()
        if error.key != "inputs" or not lock.is_relative_to(paths.project.resolve()):
            raise
        pin = lock.with_suffix(".yaml")
        name = pin.relative_to(paths.project.resolve()).as_posix()
        lines, why = text_diff(kept_text(paths, release.inputs.get(name, "")), pin.read_bytes())
        changed = "".join(f"\n    {printable(line)}" for line in lines or (why,))
        error.message = (
            f"{name} and {lock.name} do not fit each other, so what the working tree would build is not known. "
            f"In {name}, since {release.name}:{changed}"
        )
        error.next_step = f"{error.next_step}, then the same command again"
        raise


def kept_text(paths: Paths, sha256: str) -> bytes | None:
    with contextlib.suppress(IntegrityError):
        return KeptInputs.of(paths).read(sha256, "a file of the project")
    return None


def release_side(paths: Paths, release: Release) -> Side:
    records = records_of(paths, release)
    descriptions, checkpoint = {}, Checkpoint(release.checkpoint_key)
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:  # another sparkpin's manifests
        chain = manifests.load_chain(project, release.stage)
        descriptions = {stage.name: stage.description for stage in chain}
        model = manifests.load_models(project, release.model, release.drafter)
        checkpoint = checkpoint_of(release.checkpoint_key, model, manifests.load_model_lock(project, model), chain)
    return Side(
        name=release.tag,
        key=release.key,
        recipe=release.recipe,
        stage=release.stage,
        stack=release.stack,
        model=release.model,
        drafter=release.drafter or "",
        stages={record.stage: descriptions.get(record.stage, "") for record in records},
        files=release.inputs,
        argv=release.argv,
        env=release.env,
        checkpoint=checkpoint,
        host=release.host.line if release.host else "",
        **of_records(paths, records),
    )


def tree_side(paths: Paths, like: Release) -> Side:
    """What the working tree makes of a release's recipe and stage."""
    with pin_named(paths, like):
        pairings = pair(paths.project, like.recipe, stage=like.stage)
    last = pairings[-1]
    images = [pairing.rendered for pairing in pairings]
    try:
        found = of_records(paths, [read_record(record_file(paths, image)) for image in images])
    except (FileNotFoundError, IntegrityError):
        found = of_rendered(images)
    return Side(
        name=TREE_NAME,
        key=last.key,
        recipe=last.recipe.name,
        stage=last.stage.name,
        stack=last.stack.name,
        model=last.model.name,
        drafter=last.model.drafter.name if last.model.drafter else "",
        stages={stage.name: stage.description for stage in last.chain},
        files=last.inputs,
        argv=last.argv,
        env=last.env,
        checkpoint=checkpoint_of(last.checkpoint_key, last.model, last.model_lock, last.chain),
        **found,
    )


def of_records(paths: Paths, records: Sequence[BuildRecord]) -> dict[str, Any]:
    """The fields of a Side that build records hold."""
    last = records[-1]
    listed = all(layer_file(paths, diff_id).is_file() for diff_id in last.diff_ids)
    rows = [(row.path, row.what, row.sha256, row.size) for record in records for row in record.context]
    return {
        "image": last.config_digest,
        "config": flat_config(json.loads(last.config)),
        "layers": tuple(last.diff_ids) if listed else None,
        "texts": texts_of(records),
        "values": values_of(records, last.epoch, last.seal),
        **parts_of(records[0].rootfs, rows),
    }


def of_rendered(images: Sequence[RenderedImage]) -> dict[str, Any]:
    """The same fields, as far as they are known before a build."""
    context = [row for image in images for row in image.context]
    rows = [(row.path, row.what, "" if row.mod else row.sha256, row.size) for row in context]
    found = parts_of(images[0].rootfs, rows)
    mods = {mod.name: mod.distribution for row in context if (mod := row.mod)}
    found["mods"] = {
        name: VersionedPart(part.version, "", part.size, canonicalize_name(mods[name]))
        for name, part in found["mods"].items()
    }
    return {
        "image": "",
        "config": None,
        "layers": None,
        "texts": texts_of(images),
        "values": values_of(images, EPOCH, VERSION),
        **found,
    }


def parts_of(
    rootfs: RootfsSpec | None, rows: Iterable[tuple[str, str, str, int]]
) -> dict[str, dict[str, VersionedPart]]:
    """rows: (path, what, SHA-256, size) of the files that the builds saw."""
    found: dict[str, dict[str, VersionedPart]] = {"debs": {}, "wheels": {}, "tools": {}, "mods": {}}
    if rootfs:
        found["debs"] = {deb.name: VersionedPart(deb.version, deb.sha256, deb.size) for deb in rootfs.debs}
    for path, what, sha256, size in rows:
        kind, _, rest = what.partition(" ")
        name, _, version = rest.rpartition(" ")
        if kind == "wheel":
            found["wheels"][name] = VersionedPart(version, sha256, size)
        elif kind == "mod":
            found["mods"][name] = VersionedPart(
                version, sha256, size, canonicalize_name(Path(path).name.partition("-")[0])
            )
        elif path.startswith("tools/") and kind != "sparkpin":  # its own scripts are files of the project
            found["tools"][kind] = VersionedPart(rest, sha256, size)
    return found


def texts_of(images: Sequence[BuildRecord | RenderedImage]) -> dict[str, str]:
    """Without what follows from the build keys, which are other keys when anything at all is changed."""
    found = {}
    for image in images:
        text = image.dockerfile.replace(image.key, "KEY").replace(image.parent_ref, "PARENT")
        found[f"Dockerfile of stage {image.stage}, as rendered"] = text
        if image.rootfs:
            found["script that finishes the root file system"] = image.rootfs.customize
    return found


def values_of(images: Sequence[BuildRecord | RenderedImage], epoch: int, form: int) -> dict[str, str]:
    found = {"platform": images[0].platform, "times of all files": str(epoch), "canonical form": str(form)}
    if rootfs := images[0].rootfs:
        words = [word for word in rootfs.arguments if not word.startswith("--include=")]  # these are the packages
        found |= {"Debian": rootfs.suite, "mmdebstrap": shlex.join(words)}
    return found


def flat_config(config: Mapping[str, Any]) -> dict[str, str]:
    """An image's configuration, one value a name, without layers, times and sparkpin's own key."""
    found = {name: str(config[name]) for name in ("os", "architecture", "variant") if config.get(name)}
    for name, value in sorted(config.get("config", {}).items()):
        if name == "Env":
            pairs = (pair.partition("=") for pair in value or ())
            found |= {f"env {key}": text for key, _, text in pairs}
        elif name == "Labels":
            found |= {f"label {key}": text for key, text in sorted((value or {}).items()) if key != OWN_LABEL}
        elif value not in (None, "", [], {}, False):
            found[re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()] = (
                value if isinstance(value, str) else json.dumps(value)
            )
    return found


def checkpoint_of(
    key: str, model: schema.ModelPin, lock: schema.ModelLock, chain: Sequence[schema.Stage]
) -> Checkpoint:
    steps = checkpoint_steps(chain, model)
    values = {"model": model.name, "steps": " + ".join(steps)}
    for step in ("hybrid", "mtp"):
        parameters = getattr(model, step)
        if step in steps and parameters:
            unused = {"rules"} if step == "mtp" and MTP_FP8 not in steps else set[str]()
            shown = parameters.model_dump(exclude=unused)
            values |= {f"{step}: {name}": json.dumps(value) for name, value in shown.items()}
    sources, lock = {}, lock_for(model, lock, steps)
    for name in sorted(used_repositories(model, steps)):
        entry = fetched_of(lock.repositories[name], whole=model.is_whole(name))
        sources[f"repository {name}"] = f"{entry.repo} at {entry.revision[:12]}"
        given = {tensor.file for tensor in entry.tensors}  # headers that no tensor is taken from do not count
        used = entry.model_copy(update={"headers": [header for header in entry.headers if header.file in given]})
        sources |= {f"{name}/{path}": part.sha256[:12] for path, part in named_parts(used)}
    return Checkpoint(key, values, sources)
