"""A release that came from elsewhere, every byte of which was verified before anything is written or loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import posixpath
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from sparkpin.build.pair import require_no_secrets
from sparkpin.build.record import LOCKED, BuildRecord
from sparkpin.checkpoint.content import RECORD
from sparkpin.core.errors import InputError
from sparkpin.core.files import existing_parent
from sparkpin.core.models import Sha256, Size, StrictModel
from sparkpin.core.names import is_plain
from sparkpin.core.paths import Paths
from sparkpin.core.tags import image_ref
from sparkpin.core.terminal import say, size
from sparkpin.distribute import layout, verify
from sparkpin.distribute.layout import Refused, Row, reading, small
from sparkpin.distribute.materials import model_inputs
from sparkpin.distribute.signing import Keys
from sparkpin.distribute.verify import Claimed, pin_names, pins_of
from sparkpin.fetch.model_files import blobs_of
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.layer_tar import DEVICES, HARDLINK, SYMLINK, CanonicalLayer, Member, read_layer
from sparkpin.image.listing import ENTRIES, Contents, contents_of, parents_of
from sparkpin.image.seal import image_config
from sparkpin.pins import manifests
from sparkpin.pins.reading import LOCK_LIMIT, YAML_LIMIT
from sparkpin.pins.schema import LockedFile
from sparkpin.pins.values import require_values
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.demands import demands_of

NAME_LIMIT, PART_LIMIT, PATH_LIMIT = 100, 200, 1000  # characters of a name, bytes of a file name, and of a path
LAYER_LIMIT = 128  # the engine takes no more
STAGE = re.compile(r"[a-z0-9][a-z0-9.-]*")
PINS_LIMIT, PINS_ALLOWED = 32 << 20, 1000  # bytes and number of pins: a name costs no bytes when two share a hash
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9a-f]{40}")
UNCOVERED = "which files may be executed, times and sizes"


class CheckpointFile(StrictModel):
    size: Size
    sha256: Sha256


@dataclass(frozen=True)
class Bundle:
    """source: a file or a place in a registry; data: title of a row -> bytes; layers: diff ID -> tar, of those that
    came, None where the image stayed behind; listings: diff ID -> what the layer holds; model_files: path below the
    folder of models -> file.
    """

    source: str
    data: Mapping[str, Slice]
    layers: Mapping[str, Slice] | None
    listings: Mapping[str, Contents]
    release: Release
    records: tuple[BuildRecord, ...]
    checks: tuple[verify.Check, ...]
    model_files: Mapping[str, LockedFile]
    model_blobs: tuple[LockedFile, ...]
    checkpoint_files: Mapping[str, CheckpointFile]

    @property
    def has_store(self) -> bool:
        return any(title.startswith(layout.STORE) for title in self.data)

    @property
    def has_checkpoint(self) -> bool:
        return layout.CHECKPOINT in self.data

    @cached_property
    def locked(self) -> tuple[LockedFile, ...]:
        return locked_files(self.records)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return kept_hashes(self.release, self.records)


def kept_hashes(release: Release, records: Sequence[BuildRecord]) -> tuple[str, ...]:
    """SHA-256 of all that the release was made from and that no lock names, each once."""
    made = {row.sha256 for record in records for row in record.context if not row.what.startswith(LOCKED)}
    return tuple(sorted(made | set(release.inputs.values())))


def locked_files(records: Sequence[BuildRecord]) -> tuple[LockedFile, ...]:
    """The Debian packages and wheels that the images were made from, and in, each once."""
    found: dict[str, LockedFile] = {}
    for record in records:
        for spec in record.root_file_systems:
            found |= {deb.sha256: deb for deb in spec.debs}
        found |= {row.sha256: row.locked for row in record.context if row.what.startswith(LOCKED)}
    return tuple(found[sha256] for sha256 in sorted(found))


@contextlib.contextmanager
def open_bundle(path: Path, keys: Keys | None = None) -> Iterator[Bundle]:
    """The release in a file, after all of it was verified; nothing is written. keys: as of `read_bundle`.

    Raises InputError when there is no such file, IntegrityError for anything that is not exactly what an export writes,
    DiskError when the pins do not fit into the temporary folder.
    """
    with open_regular(path) as file:
        with layout.refusing(path):
            found = layout.read_archive(file)
            say(f"verifying {len(found)} members, {size(sum(member.size for member in found.values()))}")
            made, image = layout.read_index(found)
            bundle = read_bundle(str(path), made, found, image, keys)
            require_layout(found, made, image, bundle)
            if image is not None:
                bundle = with_layers(bundle, found, image)
                if lacking := sorted(set(bundle.release.diff_ids) - set(bundle.layers or ())):
                    raise Refused(f"layer {lacking[0]} is missing, which the image's manifest names")
        yield bundle


def open_regular(path: Path) -> BinaryIO:
    """InputError for what is no file that can be read."""
    step = f"name the file that `invoke export` wrote: ls {existing_parent(path.absolute().parent)}"
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe without a writer would never open
            raise InputError(f"{path} is no regular file", next_step=step)
        return path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", next_step=step) from None


def require_layout(found: Mapping[str, Slice], made: bytes, image: bytes | None, bundle: Bundle) -> None:
    """Exactly the files of this release and this image, each to the byte."""
    config = bundle.records[-1].config.encode()
    layers = None if image is None else layout.read_image(image, bundle.release.diff_ids, config)
    wanted = layout.layout_files(bundle.release.tag, config, layers, made)
    for name, content in wanted.items():
        if small(found, name) != content:
            raise Refused(f"{name} is not the one that an export writes")
    others = {oci.blob(row.digest) for row in layout.read_rows(made)} | {oci.blob(row.digest) for row in layers or ()}
    if strange := sorted(found.keys() - wanted.keys() - others):
        raise Refused(f"{strange[0]} is nothing that the release or its image names")


def read_bundle(
    source: str, made: bytes, found: Mapping[str, Slice], image: bytes | None, keys: Keys | None = None
) -> Bundle:
    """What an artifact says, each row compared with the others; without layers. found: file of a layout -> bytes;
    keys: for the signature, those that are configured if None. Refused, and whatever else `refusing` turns into it.
    """
    rows = layout.read_rows(made)
    data = layout.rows_data(rows, found)
    release = read_release(small(data, layout.RELEASE))
    records = read_records(data, release)
    require_plain(release, records)
    require_names(release.inputs, layout.RELEASE)  # first: what follows writes some of them to a folder of its own
    require_small_pins(release, data)
    texts = {sha256: name for name, sha256 in release.inputs.items() if name.endswith(".yaml")}
    inputs = {sha256: layout.INPUTS + sha256 for sha256 in texts if layout.INPUTS + sha256 in data}
    require_no_secrets({texts[sha256]: small(data, title) for sha256, title in inputs.items()})
    checks = tuple(verify.check_evidence(evidence_of(release, records, data, rows), keys))
    verify.require([check for check in checks if not check.is_trust], release.tag)
    Releases(Paths(*[Path(source)] * 3)).check(release)
    require_paths(release, records)
    store = any(title.startswith(layout.STORE) for title in data)
    models, blobs = read_models(release, data) if store else ({}, ())
    files = read_checkpoint(release, data) if layout.CHECKPOINT in data else {}
    bundle = Bundle(source, data, None, {}, release, records, checks, models, blobs, files)
    require_rows(bundle, rows)
    if made != layout.artifact(release.tag, rows, image):
        raise Refused("the artifact is not the one of this release and this image")
    if image is not None:
        layout.read_image(image, release.diff_ids, records[-1].config.encode())
    more = [check_demands(release, data)]
    verify.require(checks, release.tag)  # last: what lacks trust alone is said to hold
    if files:
        named = f"{len(files)} files as its own record names them; no statement does"
        more.append(verify.Check(verify.FINISHED, "open", named))
    missed = f"what no statement covers ({UNCOVERED})"
    more.append(verify.Check(verify.UNSIGNED, "open", UNCOVERED, missed=missed))
    return dataclasses.replace(bundle, checks=(*checks, *more))


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


def evidence_of(
    release: Release, records: tuple[BuildRecord, ...], data: Mapping[str, Slice], rows: Sequence[Row]
) -> Claimed:
    """What `verify` looks at."""

    def read(sha256: str) -> bytes | None:
        return small(data, layout.INPUTS + sha256) if layout.INPUTS + sha256 in data else None

    files = {name: small(data, name) for name in layout.EVIDENCE if name in data}
    whole = frozenset(row.digest[7:] for row in rows if row.title == layout.INPUTS + row.digest[7:])
    return Claimed(release, records, files, records[-1].config.encode(), read, whole)


def require_paths(release: Release, records: Sequence[BuildRecord]) -> None:
    """Whatever becomes a path or a name later has to be harmless now."""
    platform = records[0].platform
    names = (release.recipe, release.stage, release.stack, release.model, *(record.stage for record in records))
    if long := [name for name in names if len(name) > NAME_LIMIT]:
        raise Refused(f"{layout.RELEASE} names {long[0]!r}; names have at most {NAME_LIMIT} characters")
    for record in records:
        ref, what = image_ref(release.stack, record.stage, record.key), f"the record of {record.stage}"
        if not STAGE.fullmatch(record.stage) or (record.stack, record.ref) != (release.stack, ref):
            raise Refused(f"the record of {record.stage!r} names its image {record.ref!r}, expected {ref!r}")
        require_names([row.path for row in record.context], what)
        debs = [deb.file for spec in record.root_file_systems for deb in spec.debs]
        require_names(debs, what)
        if folders := [name for name in debs if "/" in name]:
            raise Refused(f"{what} names a package {folders[0]!r}")
        with reading(f"configuration of {record.stage}"):
            os, _, architecture = platform.partition("/")
            config = json.loads(record.config)["config"]
            made = image_config(config, os=os, architecture=architecture, diff_ids=record.diff_ids)
        if made != record.config.encode() or record.platform != platform:
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
    if both := found & parents_of(names):
        raise Refused(f"{what}: {min(both)} is a file and a folder")


def require_plain(release: Release, records: Sequence[BuildRecord]) -> None:
    """What is built of a recipe here is held to the same."""
    require_values(release.argv, release.env, layout.RELEASE)
    for record in records:
        env = (json.loads(record.config).get("config") or {}).get("Env")
        require_values([], dict(row.split("=", 1) for row in env or ()), f"configuration of {record.stage}")


def require_small_pins(release: Release, data: Mapping[str, Slice]) -> None:
    """Before a parser sees one of them. A missing one is reported later."""
    names, total = pin_names(release), 0
    for name in names:
        limit = LOCK_LIMIT if name.endswith(".lock") else YAML_LIMIT
        length = member.size if (member := data.get(layout.INPUTS + release.inputs[name])) else 0
        if length > limit:
            raise Refused(f"{name} has {length:,} bytes, expected {limit:,} or less")
        total += length
    if len(names) > PINS_ALLOWED or total > PINS_LIMIT:
        got = f"{len(names):,} pins and stages of {total:,} bytes"
        raise Refused(f"{layout.RELEASE} names {got}; {PINS_ALLOWED:,} of {PINS_LIMIT:,} are allowed")


def pins_in(release: Release, data: Mapping[str, Slice]) -> contextlib.AbstractContextManager[Path]:
    """The release's project as far as `manifests` reads it. IntegrityError for a pin that it does not take."""
    return pins_of(release, lambda name: small(data, layout.INPUTS + release.inputs[name]))


def check_demands(release: Release, data: Mapping[str, Slice]) -> verify.Check:
    """The smoke test asks for what the release's own stages ask for: a sender does not decide what proves it."""
    with pins_in(release, data) as project:
        stack = manifests.load_stack(project, release.stack)
        model = manifests.load_models(project, release.model, release.drafter)
        wanted = demands_of(project, stack, manifests.load_chain(project, release.stage), model)
    if release.demands != wanted:
        got = f"got {release.demands}, expected {wanted}, as its pins and stages say"
        raise Refused(f"{layout.RELEASE}: demands: {got}")
    return verify.Check("demands", "ok", f"{len(wanted.checks)} checks of the smoke test, as pins and stages say")


def read_models(release: Release, data: Mapping[str, Slice]) -> tuple[dict[str, LockedFile], tuple[LockedFile, ...]]:
    """All that the checkpoint is made from, as an export with the store writes it.

    <repo>/<revision>/<file> -> file, and the headers and tensors that lie in the store.
    """
    for name in filter(None, (release.model, release.drafter)):
        for end in ("yaml", "lock"):
            if (pin := f"pins/models/{name}.{end}") not in release.inputs:
                raise Refused(f"{layout.RELEASE} names no {pin}")
    with pins_in(release, data) as project:
        inputs = model_inputs(project, release)
    found: dict[str, LockedFile] = {}
    for repository in inputs.repositories:
        if not REPOSITORY.fullmatch(f"{repository.repo}@{repository.revision}"):
            raise Refused(f"the lock of {release.model} names a repository {repository.repo}@{repository.revision}")
        require_names([file.file for file in repository.files], f"the lock of {release.model}")
        found |= {f"{repository.repo}/{repository.revision}/{file.file}": file for file in repository.files}
    return found, tuple(blob for repository in inputs.repositories for blob in blobs_of(repository))


def read_checkpoint(release: Release, data: Mapping[str, Slice]) -> dict[str, CheckpointFile]:
    """File of the checkpoint -> size and SHA-256, as its record says."""
    content = small(data, layout.CHECKPOINT)
    with reading(layout.CHECKPOINT):
        value = json.loads(content)
        if (value["model"], value["key"]) != (release.model, release.checkpoint_key):
            raise Refused(f"{layout.CHECKPOINT} is of {value['model']} {value['key']}, not of the release's checkpoint")
        files = {name: CheckpointFile.model_validate(row) for name, row in value["files"].items()}
    require_names([*files, RECORD], layout.CHECKPOINT)
    return files


def require_rows(bundle: Bundle, rows: Sequence[Row]) -> None:
    """Exactly the rows that the records ask for, each with the hash and size that they name."""
    by_title = {row.title: row for row in rows}
    stored = [*bundle.locked, *bundle.model_files.values(), *bundle.model_blobs] if bundle.has_store else []
    wanted: dict[str, LockedFile | CheckpointFile | None] = {layout.RELEASE: None}
    wanted |= dict.fromkeys(f"{layout.IMAGES}{record.key}.json" for record in bundle.records)
    wanted |= dict.fromkeys(layout.INPUTS + sha256 for sha256 in bundle.kept)
    wanted |= dict.fromkeys(name for name in layout.EVIDENCE if name in by_title)
    wanted |= {layout.STORE + file.sha256: file for file in stored}
    wanted |= {layout.CHECKPOINTS + file.sha256: file for file in bundle.checkpoint_files.values()}
    wanted |= {layout.CHECKPOINT: None} if bundle.has_checkpoint else {}
    if strange := sorted(by_title.keys() ^ wanted.keys()):
        raise Refused(f"{strange[0]} is {'missing' if strange[0] in wanted else 'not what a record asks for'}")
    for title, file in wanted.items():
        head, _, sha256 = title.rpartition("/")
        if f"{head}/" in (layout.INPUTS, layout.STORE, layout.CHECKPOINTS) and by_title[title].digest[7:] != sha256:
            raise Refused(f"{title}: its digest is {by_title[title].digest}")
        if file and by_title[title].size != file.size:
            raise Refused(f"{title}: expected {file.size} bytes, as its record says; it has {by_title[title].size}")


def with_layers(bundle: Bundle, found: Mapping[str, Slice], image: bytes) -> Bundle:
    """With those layers of the image that came, each compared with its digest and its canonical form. Refused."""
    release, layers, listings, total = bundle.release, dict[str, Slice](), dict[str, Contents](), 0
    for row in layout.read_image(image, release.diff_ids, bundle.records[-1].config.encode()):
        tar = found.get(oci.blob(row.digest))
        if tar is None or row.digest in layers:
            continue
        if tar.size != row.size:
            raise Refused(f"layer {row.digest}: the manifest says {row.size:,} bytes, it has {tar.size:,}")
        listings[row.digest] = check_layer(tar, row.digest, is_lowest=row.digest == release.diff_ids[0])
        layers[row.digest] = tar
        total += len(listings[row.digest])
        if total > ENTRIES:
            raise Refused(f"the layers have more than {ENTRIES:,} entries")
    detail = f"{len(layers)} came, each of its digest and in canonical form, {total:,} files in all"
    check = verify.Check(verify.LAYERS, "ok", detail)
    return dataclasses.replace(bundle, layers=layers, listings=listings, checks=(*bundle.checks, check))


def check_layer(tar: Slice, diff_id: str, *, is_lowest: bool) -> Contents:
    """What a layer holds. A tar with names twice, odd headers or anything after its end is not the canonical form of
    what it holds, so this is computed and compared. Refused.
    """
    layer = read_layer(cast(BinaryIO, tar), everything=True)
    paths = {member.path for member in layer.members}
    for member in layer.members:
        if fault := fault_of(member, paths, is_lowest=is_lowest):
            raise Refused(f"layer {diff_id}: {member.path.decode(errors='replace')[:PATH_LIMIT]!r} {fault}")
    if (got := digest_of_layer(layer)) != diff_id:
        raise Refused(f"layer {diff_id} is not the canonical tar of what it holds, which is {got}")
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


def digest_of_layer(layer: CanonicalLayer) -> str:
    digest = hashlib.sha256()
    for chunk in layer.chunks():
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"
