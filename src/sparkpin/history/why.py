"""Where a path of a release's image comes from: layer, stage, package, lock entry, and who asked for that package.

From records alone. Who needs a wheel is in the wheels' own METADATA: it is told where the store still has them.
"""

from __future__ import annotations

import contextlib
import difflib
import posixpath
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.build.context_files import HIDDEN
from sparkpin.build.record import BuildInput, BuildRecord, layer_file, records_of
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable
from sparkpin.fetch.store import Store
from sparkpin.fetch.wheels import Dist, applicable, read_dist, target_of
from sparkpin.image.listing import Contents, PathEntry, above, image_contents, parents_of, read_contents, source_of
from sparkpin.image.listing_diff import MARKS, common
from sparkpin.pins import manifests
from sparkpin.pins.schema import Stack, Stage
from sparkpin.pins.wheel_layers import VENV
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
    kind: str  # "deb", "wheel", "source" or "mod"
    name: str
    version: str
    file: str
    size: int
    sha256: str
    lock: str  # the file whose entry names it, "" for a mod
    asked: tuple[str, ...] = ()  # where people ask for it
    needed: tuple[str, ...] = ()  # "package (its requirement)" of each that needs it
    chain: tuple[str, ...] = ()  # from what people ask for down to it, if longer
    note: str = ""


@dataclass(frozen=True)
class TracedPath:
    """One path of an image."""

    path: str
    entry: PathEntry | None  # None of a folder that no layer names
    layer: TracedLayer | None  # the one that is seen
    replaced: tuple[TracedLayer, ...]  # lower ones that have the path too
    package: TracedPackage | None
    source: tuple[str, ...]  # how it came there, in lines for people


@dataclass(frozen=True)
class PathOrigin:
    release: str
    asked: str
    links: tuple[TracedPath, ...]  # that were followed from the path asked for to `place`
    place: TracedPath
    dangling: bool = False  # `place` is a link to nothing
    circle: bool = False  # `place` is a link, and following it comes back to one before
    deleted: TracedLayer | None = None  # the layer that hides `place`, which then is in a layer and not in the image
    below: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of a folder, package -> (files, bytes)


@dataclass(frozen=True)
class TracedImage:
    """A release's layers, lowest first, and what a container sees of them (path -> number of the layer, entry)."""

    layers: tuple[TracedLayer, ...]
    contents: tuple[Contents, ...]
    seen: Mapping[str, tuple[int, PathEntry]]
    folders: frozenset[str]

    @classmethod
    def of(cls, layers: Sequence[TracedLayer], contents: Sequence[Contents]) -> TracedImage:
        seen = image_contents(contents)
        return cls(tuple(layers), tuple(contents), seen, frozenset(parents_of(seen)))

    def has(self, path: str) -> bool:
        return path in self.seen or path in self.folders or not path

    def naming(self, path: str) -> list[tuple[TracedLayer, PathEntry]]:
        """The layers that hold a path, visible or not, lowest first."""
        return [
            (layer, entry)
            for layer, contents in zip(self.layers, self.contents, strict=True)
            for entry in contents
            if entry.path == path and entry.kind not in MARKS
        ]

    def hider(self, path: str, over: TracedLayer) -> TracedLayer | None:
        """The lowest layer over one that deletes a path, or puts something else than a folder over it."""
        folders = set(above(path))
        for layer, contents in zip(self.layers[over.number :], self.contents[over.number :], strict=True):
            for entry in contents:
                deletes = entry.kind == "whiteout" and (entry.path == path or entry.path in folders)
                covers = entry.kind not in ("dir", "whiteout") and entry.path in folders
                if deletes or covers:
                    return layer
        return None


def why(paths: Paths, tag: str, path: str) -> PathOrigin:
    """Raises InputError, with the nearest names, for a path that no layer has."""
    release = Releases(paths).get(tag)
    records = records_of(paths, release)
    layers = layers_of(records)
    image = TracedImage.of(layers, [read_contents(layer_file(paths, layer.diff_id)) for layer in layers])
    way = follow(image, path)
    end = way.end
    witness = Witness(paths, release, records, image)
    hops = tuple(witness.place(link) for link in way.links)
    if way.dangling or way.circle:
        place = witness.with_reasons(hops[-1])
        return PathOrigin(release.tag, path, hops[:-1], place, dangling=way.dangling, circle=way.circle)
    if image.has(end):
        return PathOrigin(release.tag, path, hops, witness.with_reasons(witness.place(end)), below=witness.below(end))
    if held := image.naming(end):
        layer, entry = held[-1]
        place = TracedPath(end, entry, layer, (), witness.package(entry, layer), witness.sources(entry, layer))
        return PathOrigin(release.tag, path, hops, witness.with_reasons(place), deleted=image.hider(end, layer))
    near = nearest(image, end)
    raise InputError(
        f"{release.tag} has no {path}" + (f" (that is /{printable(end)})" if hops else ""),
        next_step=f"did you mean: {', '.join('/' + printable(name) for name in near)}"
        if near
        else f"invoke why {tag} /",
    )


def layers_of(records: Sequence[BuildRecord]) -> list[TracedLayer]:
    ids = records[-1].diff_ids
    names = {layer.diff_id: layer.name for record in records for layer in record.layers if layer.diff_id}
    names.setdefault(ids[0], ROOT_LAYER)
    stages = [next(r.stage for r in records if len(r.diff_ids) > at) for at in range(len(ids))]
    return [
        TracedLayer(at + 1, len(ids), names.get(diff_id, ""), stages[at], diff_id) for at, diff_id in enumerate(ids)
    ]


@dataclass(frozen=True)
class Way:
    links: tuple[str, ...]  # on the way from a path to `end`
    end: str
    dangling: bool = False  # the last of them leads there and nothing is there
    circle: bool = False  # the last of them leads to itself, or to one before that leads to it


def follow(image: TracedImage, path: str) -> Way:
    """As the kernel goes, below the image's root; ".." of the path asked for is taken as text."""
    rest = clean(path)
    links: list[str] = []
    within: dict[str, int] = {}  # links whose own targets are not yet done with -> names that come after each
    last_is_link = False
    while len(links) < HOPS:
        parts = rest.split("/")
        for end in range(1, len(parts) + 1):
            prefix = "/".join(parts[:end])
            if prefix in image.seen and image.seen[prefix][1].kind == "symlink":
                break
        else:
            break
        after = len(parts) - end
        # The same link twice is no circle by itself: /bin leads to /usr/bin, and a link there may name /bin again.
        within = {link: left for link, left in within.items() if left <= after}
        if prefix in within:
            return Way(tuple(links), rest, circle=True)
        within[prefix] = after
        links.append(prefix)
        last_is_link = after == 0
        target = posixpath.join("/", posixpath.dirname(prefix), image.seen[prefix][1].link)
        rest = clean(posixpath.join(target, *parts[end:]))
    return Way(tuple(links), rest, dangling=last_is_link and not image.has(rest))


def clean(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path)).strip("/")


def nearest(image: TracedImage, path: str) -> list[str]:
    """Paths that a person may have meant: that name in like folders, or like names where the path still exists."""
    name = posixpath.basename(path)
    same = [known for known in image.seen if posixpath.basename(known) == name]
    alike = {known: common(known.split("/")[::-1], path.split("/")[::-1]) for known in same}
    if len(same) > NEAR:  # as of __init__.py
        same = [known for known in same if alike[known] > 1]
    same.sort(key=lambda known: -alike[known])
    folder = next(parent for parent in above(path) if image.has(parent))
    start = f"{folder}/" if folder else ""
    beside = {known[len(start) :].split("/")[0] for known in image.seen if known.startswith(start) and known != folder}
    wanted = path[len(start) :].split("/")[0]
    like = [start + found for found in difflib.get_close_matches(wanted, sorted(beside), n=NEAR)]
    return list(dict.fromkeys([*same[:2], *like, *same]))[:NEAR]


@dataclass(frozen=True)
class Witness:
    """Answers from the records, the release's project and the store."""

    paths: Paths
    release: Release
    records: Sequence[BuildRecord]
    image: TracedImage

    def place(self, path: str) -> TracedPath:
        if path not in self.image.seen:
            return TracedPath(
                path, None, None, (), None, ("no layer names this folder itself: it came with what is in it",)
            )
        number, entry = self.image.seen[path]
        layer = self.image.layers[number]
        replaced = tuple(lower for lower, _ in self.image.naming(path) if lower.number < layer.number)
        return TracedPath(path, entry, layer, replaced, self.package(entry, layer), self.sources(entry, layer))

    def below(self, folder: str) -> dict[str, tuple[int, int]]:
        """Of a folder: package -> (files, bytes), those with the most bytes first."""
        if folder and folder not in self.image.folders:
            return {}
        rows = [row for record in self.records for row in record.context if row.what.startswith("mod ")]
        mods = {f"wheel:{distribution_of(row)}": f"mod:{row.what.split(' ')[1]}" for row in rows}
        files: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        start = f"{folder}/" if folder else ""
        for path, (_, entry) in self.image.seen.items():
            if path.startswith(start) and entry.kind != "dir":
                owner = mods.get(entry.owner, entry.owner)
                files[owner] += 1
                sizes[owner] += entry.size
        return {owner: (files[owner], sizes[owner]) for owner in sorted(files, key=lambda o: (-sizes[o], o))}

    def record(self, layer: TracedLayer) -> BuildRecord:
        return next(record for record in self.records if record.stage == layer.stage)

    def inputs(self, layer: TracedLayer) -> list[BuildInput]:
        """Files that the build of the layer's stage saw, those for the very layer first."""
        own = f"wheels/{layer.name}/"
        return sorted(self.record(layer).context, key=lambda file: not file.path.startswith(own))

    def package(self, entry: PathEntry, layer: TracedLayer) -> TracedPackage | None:
        kind, _, name = entry.owner.partition(":")
        lock = f"pins/stacks/{self.release.stack}.lock"
        rootfs = self.records[0].rootfs
        if kind == "deb" and rootfs and not self.is_merged(entry):
            for deb in rootfs.debs:
                if deb.name == name:
                    return TracedPackage("deb", name, deb.version, deb.file, deb.size, deb.sha256, lock)
        return distribution_in(self.inputs(layer), name, lock) if kind == "wheel" else None

    def with_reasons(self, place: TracedPath) -> TracedPath:
        """Who asked for its package, read from the release's project as it was."""
        if place.package is None:
            return place
        try:
            with project_of(self.paths, self.release) as project:
                stack = manifests.load_stack(project, self.release.stack)
                chain = manifests.load_chain(project, self.release.stage)
        except SparkpinError as error:
            return replace(place, package=replace(place.package, note=f"who asked for it is not told: {error.message}"))
        return replace(place, package=self.reasons(place.package, stack, chain))

    def reasons(self, package: TracedPackage, stack: Stack, chain: Sequence[Stage]) -> TracedPackage:
        file = f"pins/stacks/{stack.name}.yaml"
        if package.kind == "mod":
            asked = [f"mods of {file}"] if package.name in stack.mods else []
            asked += [f"mods of stages/{stage.name}.yaml" for stage in chain if package.name in stage.mods]
            return replace(package, asked=tuple(asked))
        if package.kind == "deb":
            if stack.debian and package.name in stack.debian.packages:
                return replace(package, asked=(f"debian.packages of {file}",))
            return replace(package, note="not asked for by name: essential in Debian, or another package needs it")
        asked = [row for row in stack.python.requirements if canonicalize_name(Requirement(row).name) == package.name]
        return self.needed(
            replace(package, asked=tuple(f"python.requirements of {file}: {row}" for row in asked)), stack
        )

    def needed(self, package: TracedPackage, stack: Stack) -> TracedPackage:
        store = Store(self.paths.store)
        wheels = [file for file in self.records[0].context if file.what.startswith("wheel ")]
        wheels = [file for file in wheels if not file.what.endswith(HIDDEN)]
        read = [dist_of(store.path(wheel.sha256)) for wheel in wheels]
        dists = {dist.name: dist for dist in read if dist}
        if None in read:
            bad = f"the store lacks, or has damaged, {count(read.count(None), 'wheel')} (invoke build --fetch-only)"
            return replace(package, note=f"who needs it is not told: {bad}")
        rootfs = self.records[0].rootfs
        environment = target_of(stack, rootfs.debs if rootfs else ()).environment()
        roots = stack.python.requirements
        edges = requirers(dists, roots, stack.python.exclude, environment)
        names: set[str] = {canonicalize_name(Requirement(row).name) for row in roots}
        return replace(
            package,
            needed=tuple(f"{by} ({text})" for by, text in edges.get(package.name, ())),
            chain=chain_to(package.name, edges, names),
        )

    def sources(self, entry: PathEntry, layer: TracedLayer) -> tuple[str, ...]:
        module, own = source_of(entry.path), f"runmods/{layer.name}/"
        if module in self.image.seen and entry.kind == "file":
            how = "its package's installation" if layer.name == ROOT_LAYER else "install.py"
            number, compiled = self.image.seen[module]
            of_mod = self.mod_source(compiled, self.image.layers[number])
            return (f"compiled by {how} from", f"/{module}", *([of_mod] if of_mod else []))
        if entry.kind == "file" and (known := self.mod_source(entry, layer) or self.copied(entry, layer)):
            return (known,)
        if entry.kind != "dir" and any(file.path.startswith(own) for file in self.inputs(layer)):
            return (f"made or changed by run.sh of the community mod {layer.name}",)
        if layer.name == ROOT_LAYER:
            found = self.set_up(entry)
        elif entry.kind == "dir":
            found = "" if entry.path in self.image.folders else "an empty folder of the layer's tree"
        elif layer.name == VENV:
            found = "made by install.py: the empty virtual environment of `uv venv`"
        else:
            found = self.in_wheel(entry, layer)
        return (found,) if found else ()

    def copied(self, entry: PathEntry, layer: TracedLayer) -> str:
        """Empty files are all alike: they say nothing about where they come from."""
        for file in self.inputs(layer) if entry.size else ():
            if file.sha256 == entry.sha256 and file.size == entry.size:
                return f"copied from the build's context: {file.path} ({file.what})"
        return ""

    def mod_source(self, entry: PathEntry, layer: TracedLayer) -> str:
        """The project's file that a file of a mod is: of several with its bytes, the one in the likest folder."""
        package = self.package(entry, layer)
        if package is None or package.kind != "mod":
            return ""
        start, name = f"mods/{package.name}/", posixpath.basename(entry.path)
        same = [
            path
            for path, sha256 in self.release.inputs.items()
            if path.startswith(start) and sha256 == entry.sha256 and posixpath.basename(path) == name
        ]
        parts = entry.path.split("/")[::-1]
        return f"{max(same, key=lambda path: common(path.split('/')[::-1], parts))} of the project" if same else ""

    def set_up(self, entry: PathEntry) -> str:
        """How the root file system came to what no package's list has."""
        rootfs = self.records[0].rootfs
        if self.is_merged(entry):
            return "made by the root file system's set-up: Debian's merged /usr"
        if entry.owner:
            return ""
        if entry.path.startswith("var/lib/dpkg/"):
            return "made by the root file system's set-up: dpkg's notes"
        if rootfs and f"$root/{entry.path}" in rootfs.customize:
            return "made by the root file system's set-up: rootfs.sh writes it"
        return "" if entry.kind == "dir" else "made as packages were installed; no package lists it"

    def is_merged(self, entry: PathEntry) -> bool:
        """Packages list these links, too, as the folders that they once were."""
        rootfs = self.records[0].rootfs
        return entry.kind == "symlink" and any(
            f'"$1/{entry.path}"' in word for word in (rootfs.arguments if rootfs else ())
        )

    def in_wheel(self, entry: PathEntry, layer: TracedLayer) -> str:
        """Whether a file lies in its wheel as it is; the wheel is looked at where a store has it."""
        kind, _, name = entry.owner.partition(":")
        if kind != "wheel":
            return f"made by the build step of layer `{layer.name}`; no package lists it" if layer.name else ""
        _, site, inside = entry.path.partition("/site-packages/")
        for file in self.inputs(layer):
            if distribution_of(file) == name and file.path.endswith(".whl"):
                path = Store(self.paths.store).path(file.sha256)
                path = path if path.is_file() else Store(self.paths.inputs).path(file.sha256)
                with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as wheel:
                    if site and inside in wheel.namelist():
                        return f"{inside} of the wheel" if not inside.endswith("/RECORD") else "written by uv"
                    return "made by uv as it installed the wheel (scripts, notes on the installation)"
        return ""


def dist_of(path: Path) -> Dist | None:
    """What a wheel says of itself; None where it is not there, or damaged: zipfile tells that in many ways."""
    try:
        return read_dist(path)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error):
        return None


def distribution_in(rows: Iterable[BuildInput], name: str, lock: str) -> TracedPackage | None:
    """What a build read that a distribution came from: its wheel, its mod, or the archive that it was compiled from."""
    for file in rows:
        what, _, rest = file.what.removesuffix(f" {HIDDEN}").partition(" ")
        called, _, version = rest.rpartition(" ")
        compiled = what == "source" and canonicalize_name(called) == name and file.path.startswith("source/archives/")
        if compiled or (what in ("wheel", "mod") and distribution_of(file) == name):
            locked = "" if what == "mod" else lock
            return TracedPackage(what, called, version, Path(file.path).name, file.size, file.sha256, locked)
    return None


def distribution_of(wheel: BuildInput) -> str:
    """The normal name of the distribution of a wheel file."""
    return canonicalize_name(Path(wheel.path).name.partition("-")[0])


def requirers(
    dists: Mapping[str, Dist], roots: Sequence[str], exclude: Collection[str], environment: Mapping[str, str]
) -> dict[str, list[tuple[str, str]]]:
    """Distribution -> (who needs it, in which words), nearest to the roots first; as `wheels.reachable` walks."""
    found: dict[str, list[tuple[str, str]]] = {}
    todo: list[tuple[str, str]] = []
    for root in map(Requirement, roots):
        todo += [(canonicalize_name(root.name), extra) for extra in ("", *root.extras)]
    for name, extra in todo:  # it grows meanwhile
        for requirement in applicable(dists[name].requires, extra, environment) if name in dists else ():
            wanted = canonicalize_name(requirement.name)
            if wanted not in exclude:
                requirement.marker = None
                edges = found.setdefault(wanted, [])
                edges += [edge for edge in [(name, str(requirement))] if edge not in edges]
                nodes = [(wanted, other) for other in ("", *requirement.extras)]
                todo += [node for node in nodes if node not in todo]
    return found


def chain_to(name: str, edges: Mapping[str, Sequence[tuple[str, str]]], roots: set[str]) -> tuple[str, ...]:
    """The shortest way from what people ask for; none where that needs it itself. The first edge of each is nearest."""
    way = [name]
    while way[0] not in roots:
        if way[0] not in edges:
            return ()
        way.insert(0, edges[way[0]][0][0])
    return tuple(way) if len(way) > 2 else ()
