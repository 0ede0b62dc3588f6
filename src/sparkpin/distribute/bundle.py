"""A release that came from elsewhere, every byte of which was verified before anything is written or loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from sparkpin.build.pair import require_no_secrets
from sparkpin.build.record import BuildRecord
from sparkpin.core.files import sha256_of
from sparkpin.core.names import is_plain
from sparkpin.core.tags import image_ref, is_internal
from sparkpin.core.terminal import say, size
from sparkpin.distribute import layout, materials, verify
from sparkpin.distribute.layout import Refused, reading, small
from sparkpin.distribute.materials import Part, model_inputs
from sparkpin.distribute.signing import Keys
from sparkpin.distribute.verify import Claimed, pins_of
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.layer_tar import DEVICES, HARDLINK, SYMLINK, Member, parents, read_layer
from sparkpin.image.listing import ENTRIES, Contents, contents_of
from sparkpin.image.seal import image_config
from sparkpin.pins import manifests
from sparkpin.pins.values import require_values
from sparkpin.releases.record import Release
from sparkpin.smoke.demands import demands_of

NAME_LIMIT, PART_LIMIT, PATH_LIMIT = 100, 200, 1000  # characters of a name, bytes of a file name, and of a path
LAYER_LIMIT = 128  # the engine takes no more
STAGE = re.compile(r"[a-z0-9][a-z0-9.-]*")
UNCOVERED = "which files may be executed, times and sizes"


@dataclass(frozen=True)
class Bundle:
    """source: where it lies; data: title of a row -> bytes; parts: the files that are no records; image: its layers;
    layers: diff ID -> tar, of those that came; listings: diff ID -> what the layer holds.
    """

    source: str
    data: Mapping[str, Slice]
    release: Release
    records: tuple[BuildRecord, ...]
    parts: tuple[Part, ...]
    checks: tuple[verify.Check, ...]
    image: Sequence[oci.OciLayer]
    layers: Mapping[str, Slice] = dataclasses.field(default_factory=dict)
    listings: Mapping[str, Contents] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def open_bundle(path: Path, keys: Keys | None = None, without: Collection[str] = ()) -> Iterator[Bundle]:
    """The release in a file or in the folder of a layout, after all of it was verified; nothing is written.

    keys: as of `read_bundle`; without: diff IDs of layers that need not be there.
    Raises InputError when no such file can be read, IntegrityError for anything that is not exactly what an export
    writes, DiskError when the pins do not fit into the temporary folder.
    """
    with layout.opened(path) as found:
        say(f"verifying {len(found)} members, {size(sum(member.size for member in found.values()))}")
        with layout.refusing(path):
            manifest, image = layout.read_index(found)
            bundle = read_bundle(str(path), manifest, image, found, keys)
            require_layout(found, manifest, bundle, without)
            bundle = with_layers(bundle, found)
        yield bundle


def require_layout(found: Mapping[str, Slice], manifest: bytes, bundle: Bundle, without: Collection[str]) -> None:
    """Exactly the files of this release and this image, each to the byte."""
    wanted = layout.layout_files(bundle.release.tag, bundle.records[-1].config.encode(), bundle.image, manifest)
    digests = {layer.digest for layer in bundle.image}.union(
        row.digest for row in layout.read_artifact(manifest).layers
    )
    strange = found.keys() ^ (wanted.keys() | set(map(oci.blob, digests)))
    if strange := strange - set(map(oci.blob, without)):
        raise Refused(f"{min(strange)} is missing, or is nothing that the release or its image names")
    for name, content in wanted.items():
        if small(found, name) != content:
            raise Refused(f"{name} is not the one that an export writes")


def read_bundle(
    source: str, manifest: bytes, image: bytes, found: Mapping[str, Slice], keys: Keys | None = None
) -> Bundle:
    """What an artifact says, each row compared with the others; without layers. found: file of a layout -> bytes;
    keys: for the signature, those that are configured if None. Refused, and whatever else `refusing` turns into it.
    """
    data = layout.rows_data(layout.read_artifact(manifest).layers, found)
    release = read_release(small(data, layout.RELEASE))
    records = read_records(data, release)
    require_harmless(release, records)  # first: what follows writes some of the files to a folder of its own
    texts = {layout.INPUTS + sha256: name for name, sha256 in release.inputs.items() if name.endswith(".yaml")}
    total = sum(data[title].size for title in texts if title in data)
    if total > verify.PINS_LIMIT:
        raise Refused(f"its YAML files have {total:,} bytes; {verify.PINS_LIMIT:,} are allowed")
    require_no_secrets({name: small(data, title) for title, name in texts.items() if title in data})
    claimed = Claimed(release, records, data)
    checks = verify.check_evidence(claimed, keys)
    verify.require([check for check in checks if not check.is_trust], release.tag)
    with pins_of(release, claimed.project_file) as project:
        demands = check_demands(project, release)
        parts = materials.input_parts(release, records)
        if layout.has_store(data):
            parts += materials.stored_parts(records, model_inputs(project, release))
    require_rows(data, records, parts)
    if manifest != layout.artifact(release.tag, [layout.row_of(title, data[title]) for title in data], image):
        raise Refused("the artifact is not the one of this release and this image")
    layers = layout.read_image(image, release.diff_ids, records[-1].config.encode())
    verify.require(checks, release.tag)  # last: what lacks trust alone is said to hold
    checks += [demands, verify.Check(verify.UNSIGNED, "open", UNCOVERED)]
    return Bundle(source, data, release, records, tuple(parts), tuple(checks), layers)


def read_release(content: bytes) -> Release:
    with reading(layout.RELEASE):
        release = Release(**layout.read_json(content))
    if len(release.diff_ids) > LAYER_LIMIT:
        raise Refused(f"{layout.RELEASE} names {len(release.diff_ids):,} layers; {LAYER_LIMIT} are allowed")
    return release


def read_records(data: Mapping[str, Slice], release: Release) -> tuple[BuildRecord, ...]:
    """From the release's own image down to the first stage; given first stage first."""
    found: list[BuildRecord] = []
    key: str | None = release.build_key
    while key is not None:
        title = f"{layout.IMAGES}{key}.json"
        content = small(data, title)
        with reading(title):
            record = BuildRecord.model_validate(layout.read_json(content))
        if record.key != key or record in found:
            raise Refused(f"{title}: it is of the build key {record.key}")
        found.append(record)
        key = record.parent_key
    return tuple(reversed(found))


def require_harmless(release: Release, records: Sequence[BuildRecord]) -> None:
    """Whatever becomes a path, a word of a command or a variable later. What is built here is held to the same."""
    require_values(release.argv, release.env, layout.RELEASE)
    require_names(release.inputs, layout.RELEASE)
    names = (release.recipe, release.stage, release.stack, release.model, *(record.stage for record in records))
    if long := [name for name in names if len(name) > NAME_LIMIT]:
        raise Refused(f"{layout.RELEASE} names {long[0]!r}; names have at most {NAME_LIMIT} characters")
    if is_internal(release.recipe):
        raise Refused(f"recipe {release.recipe!r}: such names belong to the images of stages")
    for record in records:
        require_harmless_record(release, record, records[0].platform)


def require_harmless_record(release: Release, record: BuildRecord, platform: str) -> None:
    """Its image has the name and the configuration that a build here would have given it."""
    what = f"the record of {record.stage!r}"
    debs = [deb.file for spec in record.root_file_systems for deb in spec.debs]
    require_names([row.path for row in record.context], what)
    require_names(debs, what)
    if folders := [name for name in debs if "/" in name]:
        raise Refused(f"{what} names a package {folders[0]!r}")
    ref = image_ref(release.stack, record.stage, record.key)
    expected = (release.stack, ref, platform)
    if not STAGE.fullmatch(record.stage) or (record.stack, record.ref, record.platform) != expected:
        raise Refused(f"{what} is of {record.stack} {record.ref!r} {record.platform}, expected {expected}")
    os, _, architecture = platform.partition("/")
    with reading(f"configuration of {record.stage}"):
        config = json.loads(record.config)["config"]
        require_values([], dict(row.split("=", 1) for row in config.get("Env") or ()), what)
        computed = image_config(config, os=os, architecture=architecture, diff_ids=record.diff_ids)
    if computed != record.config.encode():
        raise Refused(f"configuration of {record.stage}: it is not the one of its record's platform and layers")


def require_names(names: Collection[str], what: str) -> None:
    """That files of these names can lie below one folder, and nowhere else. what: that names them."""
    for name in names:
        longest = max(len(part.encode()) for part in name.split("/"))
        if not is_plain(name) or len(name) > PATH_LIMIT or longest > PART_LIMIT:
            raise Refused(f"{what} names a file {name[:PATH_LIMIT]!r}, which is none for a file system")
    found = set(names)
    if len(found) != len(names):
        raise Refused(f"{what} names a file twice")
    if both := found & parents(names):
        raise Refused(f"{what}: {min(both)} is a file and a folder")


def check_demands(project: Path, release: Release) -> verify.Check:
    """The smoke test asks for what the release's own stages ask for: a sender does not decide what proves it."""
    stack = manifests.load_stack(project, release.stack)
    model = manifests.load_models(project, release.model, release.drafter)
    wanted = demands_of(project, stack, manifests.load_chain(project, release.stage), model)
    if release.demands != wanted:
        got = f"got {release.demands}, expected {wanted}, as its pins and stages say"
        raise Refused(f"{layout.RELEASE}: demands: {got}")
    return verify.Check("demands", "ok", f"{len(wanted.checks)} checks of the smoke test, as pins and stages say")


def require_rows(data: Mapping[str, Slice], records: Sequence[BuildRecord], parts: Sequence[Part]) -> None:
    """Exactly the rows that the records ask for, of the sizes that they name, under harmless names."""
    stored = dict.fromkeys((part.path, part.sha256) for part in parts if part.path)
    require_names([path for path, _ in stored], layout.STORE)  # two names of a model may be of one repository
    wanted = {layout.RELEASE, *(f"{layout.IMAGES}{record.key}.json" for record in records)}
    wanted |= {part.title for part in parts} | (data.keys() & {*layout.EVIDENCE})
    if strange := sorted(data.keys() ^ wanted):
        raise Refused(f"{strange[0]} is {'missing' if strange[0] in wanted else 'not what a record asks for'}")
    for part in parts:
        if part.size not in (None, data[part.title].size):
            raise Refused(f"{part.title}: got {data[part.title].size} bytes, expected {part.size}")


def with_layers(bundle: Bundle, found: Mapping[str, Slice]) -> Bundle:
    """With those layers of the image that came, each compared with its digest and its canonical form. Refused."""
    layers, listings = dict[str, Slice](), dict[str, Contents]()
    for row in bundle.image:
        tar = found.get(oci.blob(row.digest))
        if tar is None or row.digest in layers:
            continue
        if tar.size != row.size:
            raise Refused(f"layer {row.digest}: the manifest says {row.size:,} bytes, it has {tar.size:,}")
        listings[row.digest] = check_layer(tar, row.digest, is_lowest=row.digest == bundle.image[0].digest)
        layers[row.digest] = tar
        if sum(map(len, listings.values())) > ENTRIES:
            raise Refused(f"the layers have more than {ENTRIES:,} entries")
    check = verify.Check(verify.LAYERS, "ok", f"{len(layers)} came, each of its digest and in canonical form")
    return dataclasses.replace(bundle, layers=layers, listings=listings, checks=(*bundle.checks, check))


def check_layer(tar: Slice, diff_id: str, *, is_lowest: bool) -> Contents:
    """What a layer holds. A tar with names twice, odd headers or anything after its end is not the canonical form of
    what it holds, so this is computed and compared, besides the bytes that came. Refused.
    """
    if (got := sha256_of(tar)) != diff_id.removeprefix("sha256:"):
        raise Refused(f"layer {diff_id}: got other bytes, of sha256:{got}")
    layer = read_layer(cast(BinaryIO, tar), everything=True)
    paths = {member.path for member in layer.members}
    for member in layer.members:
        if fault := fault_of(member, paths, is_lowest=is_lowest):
            raise Refused(f"layer {diff_id}: {member.path.decode(errors='replace')[:PATH_LIMIT]!r} {fault}")
    digest = hashlib.sha256()
    for chunk in layer.chunks():
        digest.update(chunk)
    if f"sha256:{digest.hexdigest()}" != diff_id:
        raise Refused(f"layer {diff_id} is not the canonical tar of what it holds, which is {digest.hexdigest()}")
    return contents_of(layer)


def fault_of(member: Member, paths: Collection[bytes], *, is_lowest: bool) -> str:
    """Why no layer of ours has such a member, "" where one may. paths: of the layer; is_lowest: the root file system's,
    where su lies."""
    name, to = member.path.rpartition(b"/")[2], member.link.decode(errors="replace")[:PATH_LIMIT]
    if member.kind in DEVICES:
        return "is a device"
    if member.kind == HARDLINK and member.link not in paths:
        return f"is a hard link out of the layer: {to!r}"
    if member.kind == SYMLINK and climbs(posixpath.join(b"/", posixpath.dirname(member.path), member.link)):
        return f"links out of the image: {to!r}"
    if not is_lowest and (member.capability or (member.kind != SYMLINK and member.mode & 0o6000)):
        return f"has mode {member.mode:o} or a capability: only the root file system may raise a user's rights"
    return "is a whiteout of another form than `.wh.NAME`" if name.startswith(b".wh..") or name == b".wh." else ""


def climbs(path: bytes) -> bool:
    """Whether a path leads above the root on its way."""
    depths = itertools.accumulate({b"": 0, b".": 0, b"..": -1}.get(part, 1) for part in path.split(b"/"))
    return min(depths) < 0
