"""Where a path of a release's image comes from: layer, stage, package, lock entry, and who asked for that package.

From records alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.build.record import BuildInput, BuildRecord, layer_file, records_of
from sparkpin.core import names
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable
from sparkpin.image.listing import MARKS, Contents, PathEntry, above, image_contents, parents_of, read_contents
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases

HOPS = 40  # links that a kernel follows
NEAR = 5
ROOT_LAYER = "root file system"


@dataclass(frozen=True)
class TracedLayer:
    """number: from 1, the lowest, to `of`; name: of the Dockerfile's tree, "" where it is not known."""

    number: int
    of: int
    name: str
    stage: str
    diff_id: str


@dataclass(frozen=True)
class TracedPackage:
    kind: str  # "deb", "wheel" or "mod"
    name: str
    version: str
    file: str
    sha256: str
    lock: str  # the file whose entry names it, "" for a mod
    asked: tuple[str, ...] = ()  # where people ask for it; empty where another package needs it


@dataclass(frozen=True)
class PathOrigin:
    """links: that lead from the path asked for to `path`.

    entry, layer: None of a folder that no layer names; replaced: lower layers that have the path, too; hidden: a layer
    over `layer` deletes or covers it, so that it is not in the image.
    """

    release: str
    asked: str
    links: tuple[str, ...]
    path: str
    entry: PathEntry | None
    layer: TracedLayer | None
    replaced: tuple[TracedLayer, ...]
    package: TracedPackage | None
    hidden: bool = False


def why(paths: Paths, tag: str, path: str) -> PathOrigin:
    """Raises InputError, with the nearest names, for a path that no layer has."""
    release = Releases(paths).get(tag)
    records = records_of(paths, release)
    layers = layers_of(records)
    contents = [read_contents(layer_file(paths, layer.diff_id)) for layer in layers]
    seen = image_contents(contents)
    links, end = follow(seen, path)
    holding = naming(layers, contents, end)
    if not holding and end not in parents_of(seen) and end:
        near = nearest(seen, end)
        step = f"did you mean: {', '.join('/' + printable(name) for name in near)}" if near else f"invoke why {tag} /"
        raise InputError(f"{release.tag} has no /{printable(end)}", next_step=step)
    layer, entry = (layers[seen[end][0]], seen[end][1]) if end in seen else holding[-1] if holding else (None, None)
    return PathOrigin(
        release.tag,
        path,
        links,
        end,
        entry,
        layer,
        tuple(lower for lower, _ in holding if layer and lower.number < layer.number),
        package_of(paths, release, records, entry, layer) if entry and layer else None,
        hidden=bool(holding) and end not in seen,
    )


def layers_of(records: Sequence[BuildRecord]) -> list[TracedLayer]:
    ids = records[-1].diff_ids
    names = {layer.diff_id: layer.name for record in records for layer in record.layers if layer.diff_id}
    names.setdefault(ids[0], ROOT_LAYER)
    stages = [next(r.stage for r in records if len(r.diff_ids) > at) for at in range(len(ids))]
    return [
        TracedLayer(at + 1, len(ids), names.get(diff_id, ""), stages[at], diff_id) for at, diff_id in enumerate(ids)
    ]


def naming(
    layers: Sequence[TracedLayer], contents: Sequence[Contents], path: str
) -> list[tuple[TracedLayer, PathEntry]]:
    """The layers that hold a path, visible or not, lowest first."""
    return [
        (layer, entry)
        for layer, entries in zip(layers, contents, strict=True)
        for entry in entries
        if entry.path == path and entry.kind not in MARKS
    ]


def follow(seen: Mapping[str, tuple[int, PathEntry]], path: str) -> tuple[tuple[str, ...], str]:
    """(links on the way, where they lead), as the kernel goes, below the image's root. A link to nothing is where the
    way ends; links that lead round in a circle end after HOPS."""
    rest, links, is_link = clean(path), list[str](), False
    while len(links) < HOPS:
        parts = rest.split("/")
        starts = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
        link = next((one for one in starts if one in seen and seen[one][1].kind == "symlink"), None)
        if link is None:
            break
        target = posixpath.join("/", posixpath.dirname(link), seen[link][1].link)
        is_link = link == rest
        links.append(link)
        rest = clean(posixpath.join(target, rest[len(link) :].strip("/")))
    if is_link and rest and rest not in seen and rest not in parents_of(seen):
        return tuple(links[:-1]), links[-1]
    return tuple(links), rest


def clean(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path)).strip("/")


def nearest(seen: Iterable[str], path: str) -> list[str]:
    """Paths that a person may have meant: that name in another folder, or like names in the folder that exists."""
    known, name = list(seen), posixpath.basename(path)
    folders = parents_of(known)
    folder = next(parent for parent in above(path) if parent in folders or not parent)
    start = f"{folder}/" if folder else ""
    here = {one[len(start) :].split("/")[0] for one in known if one.startswith(start)}
    like = names.nearest(path[len(start) :].split("/")[0], sorted(here), most=NEAR)
    same = [one for one in known if posixpath.basename(one) == name][:50]  # comparing is slow
    return list(dict.fromkeys([*names.nearest(path, same, most=2, cutoff=0), *(start + one for one in like)]))[:NEAR]


def package_of(
    paths: Paths, release: Release, records: Sequence[BuildRecord], entry: PathEntry, layer: TracedLayer
) -> TracedPackage | None:
    """With who asked for it, where the release's project can be read."""
    kind, _, name = entry.owner.partition(":")
    lock, rootfs = f"pins/stacks/{release.stack}.lock", records[0].rootfs
    found = None
    if kind == "deb" and rootfs:
        rows = [deb for deb in rootfs.debs if deb.name == name]
        found = TracedPackage("deb", name, rows[0].version, rows[0].file, rows[0].sha256, lock) if rows else None
    elif kind == "wheel":
        context = next(record.context for record in records if record.stage == layer.stage)
        found = distribution_in(context, name, lock)
    try:
        return replace(found, asked=tuple(asked_for(paths, release, found))) if found else None
    except SparkpinError:
        return found


def asked_for(paths: Paths, release: Release, package: TracedPackage) -> list[str]:
    with project_of(paths, release) as project:
        stack, chain = manifests.load_stack(project, release.stack), manifests.load_chain(project, release.stage)
    file = f"pins/stacks/{stack.name}.yaml"
    if package.kind == "mod":
        stages = [f"mods of stages/{stage.name}.yaml" for stage in chain if package.name in stage.mods]
        return [f"mods of {file}"] * (package.name in stack.mods) + stages
    if package.kind == "deb":
        return [f"debian.packages of {file}"] if stack.debian and package.name in stack.debian.packages else []
    rows = [row for row in stack.python.requirements if canonicalize_name(Requirement(row).name) == package.name]
    return [f"python.requirements of {file}: {row}" for row in rows]


def distribution_in(rows: Iterable[BuildInput], name: str, lock: str) -> TracedPackage | None:
    """What a build read that a distribution came from: its wheel or its mod."""
    for file in rows:
        what, _, rest = file.what.partition(" ")
        called, _, version = rest.rpartition(" ")
        own = canonicalize_name(Path(file.path).name.partition("-")[0])
        if what in ("wheel", "mod") and own == name:
            return TracedPackage(
                what, called, version, Path(file.path).name, file.sha256, "" if what == "mod" else lock
            )
    return None
