"""Where a path of a release's image comes from: layer, stage, package and lock entry. From records alone."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkpin.build.record import BuildRecord, layer_file, records_of
from sparkpin.core import names, terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable
from sparkpin.history.diff_text import columns, tame
from sparkpin.image.layer_tar import parents
from sparkpin.image.listing import PathEntry, image_contents, read_contents
from sparkpin.releases.record import Release, Releases

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


@dataclass(frozen=True)
class PathOrigin:
    """entry, layer: None of a folder that no layer names."""

    release: str
    path: str
    entry: PathEntry | None
    layer: TracedLayer | None
    package: TracedPackage | None


def find_origin(paths: Paths, tag: str, path: str) -> PathOrigin:
    """Raises InputError, with the nearest names, for a path that the image does not have."""
    release = Releases(paths).get(tag)
    records = records_of(paths, release)
    layers = layers_of(records)
    visible = image_contents([read_contents(layer_file(paths, layer.diff_id)) for layer in layers])
    end = clean(path)
    if end in visible:
        number, entry = visible[end]
        package = package_of(release, records, entry, layers[number])
        return PathOrigin(release.tag, end, entry, layers[number], package)
    if end and end not in parents(visible):
        near = names.nearest(end, near_to(visible, end), most=NEAR)
        step = f"did you mean: {', '.join('/' + printable(name) for name in near)}" if near else f"invoke why {tag} /"
        raise InputError(f"{release.tag} has no /{printable(end)}", next_step=step)
    return PathOrigin(release.tag, end, None, None, None)


def layers_of(records: Sequence[BuildRecord]) -> list[TracedLayer]:
    ids = records[-1].diff_ids
    names = {layer.diff_id: layer.name for record in records for layer in record.layers if layer.diff_id}
    names.setdefault(ids[0], ROOT_LAYER)
    stages = [next(r.stage for r in records if len(r.diff_ids) > at) for at in range(len(ids))]
    return [
        TracedLayer(at + 1, len(ids), names.get(diff_id, ""), stages[at], diff_id) for at, diff_id in enumerate(ids)
    ]


def clean(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path)).strip("/")


def near_to(visible: Iterable[str], path: str) -> list[str]:
    """Of that name in another folder, or in the same folder."""
    folder, name = posixpath.split(path)
    return [one for one in visible if posixpath.basename(one) == name or posixpath.dirname(one) == folder]


def package_of(
    release: Release, records: Sequence[BuildRecord], entry: PathEntry, layer: TracedLayer
) -> TracedPackage | None:
    kind, _, name = entry.owner.partition(":")
    lock, rootfs = f"pins/stacks/{release.stack}.lock", records[0].rootfs
    if kind == "deb" and rootfs:
        rows = [deb for deb in rootfs.debs if deb.name == name]
        return TracedPackage("deb", name, rows[0].version, rows[0].file, rows[0].sha256, lock) if rows else None
    if kind != "wheel":
        return None
    for file in next(record.context for record in records if record.stage == layer.stage):
        what, _, rest = file.what.partition(" ")
        called, _, version = rest.rpartition(" ")
        wheel = Path(file.path).name
        if what in ("wheel", "mod") and canonicalize_name(wheel.partition("-")[0]) == name:
            return TracedPackage(what, called, version, wheel, file.sha256, "" if what == "mod" else lock)
    return None


def origin_lines(origin: PathOrigin) -> Iterator[str]:
    """The whole answer of `invoke why`."""
    yield from map(tame, columns(origin_rows(origin)))


def origin_rows(origin: PathOrigin) -> Iterator[tuple[str, str]]:
    """(label, text); a text that goes on has no label."""
    yield "path", f"/{origin.path}"
    if origin.entry and origin.layer:
        yield "what", entry_text(origin.entry)
        if origin.entry.sha256:
            yield "sha256", origin.entry.sha256
        name = f" ({origin.layer.name})" if origin.layer.name else ""
        yield "layer", f"{origin.layer.number} of {origin.layer.of}{name}, stage {origin.layer.stage}"
        yield "", origin.layer.diff_id
    else:
        yield "what", "a folder that no layer names: it came with what is in it"
    if origin.package:
        yield from package_rows(origin.package)


def entry_text(entry: PathEntry) -> str:
    words = {"dir": "folder", "symlink": "link to", "hardlink": "another name of", "char": "device", "block": "device"}
    kind = words.get(entry.kind, entry.kind)
    parts = [f"{kind} {entry.link}" if entry.link else kind]
    parts += [terminal.size(entry.size)] if entry.kind == "file" else []
    parts += [f"mode {entry.mode:04o}"] if entry.kind != "symlink" else []
    parts += [f"owner {entry.uid}:{entry.gid}", *([f"capability {entry.capability}"] if entry.capability else [])]
    return ", ".join(parts)


def package_rows(package: TracedPackage) -> Iterator[tuple[str, str]]:
    yield "package", f"{'Debian package' if package.kind == 'deb' else package.kind} {package.name} {package.version}"
    yield "", package.file
    yield "", f"sha256 {package.sha256}"
    yield "locked", f"in {package.lock}" if package.lock else "by nobody: its wheel is made here, of the project"
