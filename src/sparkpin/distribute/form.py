"""A release in one file: the form of the archive, and reading one that may come from anybody.

A bundle is a plain tar in one fixed form: regular files in a fixed order under fixed headers, sparkpin/bundle.json with
the size and SHA-256 of all others at its head. Reading computes what each header has to be and compares, so that no
name, link, extension or compression of a stranger is ever interpreted.

    sparkpin/bundle.json            index of all members
    sparkpin/release.json           the release's record
    sparkpin/images/<key>.json      build records of its image and of those that it stands on
    sparkpin/distribute/...           statement, SBOM, signature, smoke logs
    sparkpin/inputs/<sha256>        what no lock names: pins, locks, stages, wheels of mods, tools
    sparkpin/layers/<diff ID>.jsonl.gz   what each layer holds, file by file
    sparkpin/store/<sha256>         with the store: wheels, Debian packages, what is fetched of the model
    sparkpin/checkpoint.json, sparkpin/checkpoint/<sha256>   with the checkpoint: its record, its files
    oci-layout, index.json, manifest.json, blobs/sha256/...  the image, for every tool that reads OCI layouts
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
import re
import stat
import struct
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, BinaryIO, Literal, cast

from pydantic import Field, ValidationError

from sparkpin.build.pair import require_no_secrets
from sparkpin.build.record import LOCKED, BuildRecord
from sparkpin.checkpoint.content import RECORD
from sparkpin.core import terminal
from sparkpin.core.errors import DiskError, InputError, IntegrityError, SparkpinError, clipped
from sparkpin.core.files import CHUNK, existing_parent, sha256_of
from sparkpin.core.names import is_plain
from sparkpin.core.paths import Paths
from sparkpin.core.tags import image_ref
from sparkpin.core.terminal import Say
from sparkpin.distribute import verify
from sparkpin.distribute.materials import model_inputs
from sparkpin.distribute.signing import Keys, UntrustedError
from sparkpin.distribute.verify import Claimed, pin_names, pins_of
from sparkpin.fetch.model_files import blobs_of
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END, Slice, file_header
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import ENTRIES, contents_of, parents_of, parse_contents
from sparkpin.pins import manifests
from sparkpin.pins.reading import LOCK_LIMIT, YAML_LIMIT
from sparkpin.pins.schema import LockedFile, Sha256, Size, StrictModel
from sparkpin.pins.values import require_values
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.demands import demands_of

SCHEMA: Literal[1] = 1
INDEX, RELEASE, CHECKPOINT = "sparkpin/bundle.json", "sparkpin/release.json", "sparkpin/checkpoint.json"
IMAGES, EVIDENCE, INPUTS, LAYERS = "sparkpin/images/", "sparkpin/distribute/", "sparkpin/inputs/", "sparkpin/layers/"
STORE, CHECKPOINTS, BLOBS = "sparkpin/store/", "sparkpin/checkpoint/", "blobs/sha256/"
JSON_LIMIT = 16 << 20  # bytes of what is read into memory as a whole
NAME = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*"
NAME_LIMIT = 100  # bytes: longer ones need more than one header
PART_LIMIT, PATH_LIMIT = 200, 1000  # bytes of a file name and of a path: a half-written file has a longer one
LAYER_LIMIT = 128  # the engine takes no more
LISTINGS = "listings"  # name of a check
SAID_VALUE = 100  # characters of a value that does not fit
SAID = 2000  # characters of a refusal: it may quote what a stranger wrote
STAGE = re.compile(r"[a-z0-9][a-z0-9.-]*")
PINS_LIMIT, PINS_ALLOWED = 32 << 20, 1000  # bytes and number of pins: a name costs no bytes when two share a hash
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9a-f]{40}")
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
AGAIN = "get the file again from where it was exported, and compare its SHA-256 with the one there (sha256sum)"


class MemberRow(StrictModel):
    """One member. size: bytes."""

    name: Annotated[str, Field(pattern=f"^{NAME}$", max_length=NAME_LIMIT)]
    size: Size
    sha256: Sha256


class BundleIndex(StrictModel):
    """members: all but the index itself, in the order in which they lie in the archive."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = SCHEMA
    tag: str
    image: bool
    store: bool
    checkpoint: bool
    members: list[MemberRow]

    @property
    def text(self) -> bytes:
        value = self.model_dump(mode="json", by_alias=True)
        rows = ",\n".join(json.dumps(row, sort_keys=True) for row in value.pop("members"))
        head = json.dumps(value, sort_keys=True)
        return f'{head[:-1]}, "members": [\n{rows}\n]}}\n'.encode()


class CheckpointFile(StrictModel):
    size: Size
    sha256: Sha256


@dataclass(frozen=True)
class Bundle:
    """A bundle, every byte of which was verified. data: member -> its bytes in the open file."""

    path: Path
    index: BundleIndex
    data: Mapping[str, Slice]
    release: Release
    records: tuple[BuildRecord, ...]
    checks: tuple[verify.Check, ...]
    model_files: Mapping[str, LockedFile]
    model_blobs: tuple[LockedFile, ...]
    checkpoint_files: Mapping[str, CheckpointFile]

    @cached_property
    def sha256(self) -> dict[str, str]:
        """Member -> SHA-256."""
        return {row.name: row.sha256 for row in self.index.members}

    @property
    def locked(self) -> tuple[LockedFile, ...]:
        """Debian packages and wheels of the builds, each once."""
        return locked_files(self.records)

    @property
    def stored(self) -> tuple[LockedFile, ...]:
        """All that a bundle with its store has of what can be fetched."""
        return (*self.locked, *self.model_files.values(), *self.model_blobs)

    @property
    def kept(self) -> tuple[str, ...]:
        """SHA-256 of what no lock names."""
        return kept_hashes(self.release, self.records)

    @cached_property
    def layers(self) -> dict[str, Slice]:
        """Diff ID -> the layer's tar, for each layer of the image that the bundle holds, or that came beside it."""
        names = {diff_id: oci.blob(diff_id) for diff_id in self.release.diff_ids}
        return {diff_id: self.data[name] for diff_id, name in names.items() if name in self.data}

    @property
    def evidence(self) -> dict[str, str]:
        """Name below the release's evidence folder -> member."""
        return {name.removeprefix(EVIDENCE): name for name in self.data if name.startswith(EVIDENCE)}


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
def open_bundle(path: Path, say: Say = lambda line: None) -> Iterator[Bundle]:
    """A bundle for reading, after all of it was verified and held against itself; nothing is written.

    Raises InputError when there is no such file, IntegrityError for anything that is not exactly what an export writes,
    DiskError when the pins do not fit into the temporary folder.
    """
    with open_regular(path) as file:
        try:
            with refusing():
                bundle = read_bundle(path, *read_members(file, say))
        except Refused as refusal:
            why = "\n".join(map(terminal.printable, str(refusal)[:SAID].split("\n")))
            raise IntegrityError(f"{path} is refused, and nothing of it was used: {why}", next_step=AGAIN) from None
        except UntrustedError as error:
            why = f"{path} is refused, and nothing of it was used: {error.message}"
            raise UntrustedError(why, next_step=error.next_step) from None
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


class Refused(Exception):
    """Why a bundle is not taken."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Whatever is wrong with a bundle is Refused."""
    try:
        yield
    except (DiskError, UntrustedError):  # of this machine: the bundle is not to blame, and they know what to do
        raise
    except SparkpinError as error:
        raise Refused(error.message) from None
    except (*MISFITS, ArithmeticError, tarfile.TarError, csv.Error, zlib.error, struct.error, EOFError) as error:
        # A last net: what a stranger wrote met a reader that did not expect it.
        raise Refused(f"it cannot be read ({type(error).__name__}: {error})") from None


def read_members(file: BinaryIO, say: Say) -> tuple[BundleIndex, dict[str, Slice]]:
    """Compare the archive with the index at its head, byte for byte."""
    total = file.seek(0, 2)
    index, position = read_index(file)
    rows = index.members
    if len({row.name for row in rows} | {INDEX}) != len(rows) + 1:
        raise Refused(f"{INDEX} names a member twice")
    wanted = position + sum(space_of(row.size) for row in rows) + len(END)
    if total != wanted:
        raise Refused(f"it has {total:,} bytes, and the members that it names {wanted:,}: cut short, or added to")
    say(f"verifying {len(rows)} members, {total / 1e6:.1f} MB")
    data = {}
    for row in rows:
        file.seek(position)
        require_header(file.read(BLOCK), row.name, row.size)
        data[row.name] = Slice(file, position + BLOCK, row.size)
        if (seen := sha256_of(data[row.name])) != row.sha256:
            raise Refused(f"{row.name}: expected sha256={row.sha256}, got {seen}")
        file.seek(position + BLOCK + row.size)
        position += space_of(row.size)
        if file.read(-row.size % BLOCK).strip(b"\0"):
            raise Refused(f"there are bytes between {row.name} and the next member")
    file.seek(position)
    if file.read() != END:
        raise Refused("it does not end as an archive does")
    return index, data


def read_index(file: BinaryIO) -> tuple[BundleIndex, int]:
    """The index, and where the first member after it begins."""
    file.seek(0)
    head = file.read(BLOCK)
    if head[:2] == b"\x1f\x8b" or head[:4] == b"\x28\xb5\x2f\xfd":
        raise Refused("it is compressed; a bundle is a plain tar")
    try:
        size = int(head[124:135], 8)
    except ValueError:
        size = -1
    if not 0 <= size <= JSON_LIMIT or head != file_header(INDEX, size):
        why = "not a bundle, or cut short" if head else "it is empty"
        raise Refused(f"it does not begin with {INDEX}: {why}")
    data = file.read(size)
    if len(data) < size:
        raise Refused(f"{INDEX} is cut short after {len(data):,} of {size:,} bytes")
    with reading(INDEX):
        value = verify.strict_json(data)
    if isinstance(value, dict) and isinstance(value.get("schema"), int) and value["schema"] > SCHEMA:
        raise Refused(f"its schema is {value['schema']}, this sparkpin reads {SCHEMA}: a newer one wrote it")
    with reading(f"{INDEX} is damaged, or something else wrote it"):
        index = BundleIndex.model_validate(value)
    if index.text != data or file.read(-size % BLOCK).strip(b"\0"):
        raise Refused(f"{INDEX} is not in the form that an export writes")
    return index, space_of(size)


def space_of(size: int) -> int:
    """Bytes of a member in the archive, with header and padding."""
    return BLOCK + size + -size % BLOCK


def copied(data: Slice, out: IO[bytes], told: Callable[[int], object] = lambda size: None) -> tuple[str, int]:
    """Write all of it: its SHA-256 and size, taken on the way, for it may lie where others write."""
    digest, size = hashlib.sha256(), 0
    data.seek(0)
    while chunk := data.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        out.write(chunk)
        told(len(chunk))
    return digest.hexdigest(), size


def require_header(head: bytes, name: str, size: int) -> None:
    """Compared and never parsed, because it may be anything."""
    if head != file_header(name, size):
        raise Refused(f"the header of {name!r} ({size} bytes) is not the one that an export writes")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """What does not fit is Refused under this name."""
    try:
        yield
    except ValidationError as error:
        fault = error.errors()[0]
        where, seen = ".".join(map(str, fault["loc"])), clipped(repr(fault["input"]), SAID_VALUE)
        raise Refused(f"{what}: {where}: got {seen}: {fault['msg']}") from None
    except MISFITS as error:
        raise Refused(f"{what}: {error or type(error).__name__}") from None


def read_bundle(path: Path, index: BundleIndex, data: Mapping[str, Slice], keys: Keys | None = None) -> Bundle:
    """What the members say, each held against the others. keys: for the signature; those that are configured, if None.

    Refused, and whatever else `refusing` makes that of.
    """
    release = read_release(small(data, RELEASE))
    if release.tag != index.tag:
        raise Refused(f"{INDEX} is of {index.tag}, {RELEASE} of {release.tag}")
    records = read_records(data, release)
    require_plain(release, records)
    require_names(release.inputs, RELEASE)  # first: what follows writes some of them to a folder of its own
    require_small_pins(release, data)
    texts = {sha256: name for name, sha256 in release.inputs.items() if name.endswith(".yaml")}
    require_no_secrets({name: small(data, INPUTS + sha) for sha, name in texts.items() if INPUTS + sha in data})
    evidence = evidence_of(release, records, data, {row.name: row.sha256 for row in index.members})
    checks = tuple(verify.check_evidence(evidence, keys))
    verify.require([check for check in checks if not check.is_trust], release.tag)
    Releases(Paths(path, path, path)).check(release)
    require_paths(release, records)
    require_names([name for name in data if name.startswith(EVIDENCE)], INDEX)
    models, blobs = read_models(release, data) if index.store else ({}, ())
    files = read_checkpoint(release, data) if index.checkpoint else {}
    bundle = Bundle(path, index, data, release, records, checks, models, blobs, files)
    require_members(bundle)
    more = [check_demands(release, data), check_listings(bundle)]
    verify.require(checks, release.tag)  # last: what lacks trust alone is said to hold
    if index.checkpoint:
        files_named = f"{len(bundle.checkpoint_files)} files as its own record names them; no statement does"
        more.append(verify.Check(verify.FINISHED, "open", files_named))
    uncovered = "which files may be executed, times and sizes, logs"
    more.append(verify.Check(verify.UNSIGNED, "open", uncovered, missed=f"what no statement says ({uncovered})"))
    return dataclasses.replace(bundle, checks=(*checks, *more))


def small(data: Mapping[str, Slice], name: str) -> bytes:
    """All of a member that has to be there and to be small."""
    if name not in data:
        raise Refused(f"{name} is missing")
    if data[name].size > JSON_LIMIT:
        raise Refused(f"{name} has {data[name].size:,} bytes; {JSON_LIMIT:,} are allowed")
    data[name].seek(0)
    return data[name].read()


def read_release(content: bytes) -> Release:
    with reading(RELEASE):
        release = Release(**verify.strict_json(content))
    if len(release.diff_ids) > LAYER_LIMIT:
        raise Refused(f"{RELEASE} names {len(release.diff_ids):,} layers; {LAYER_LIMIT} are allowed")
    return release


def read_records(data: Mapping[str, Slice], release: Release) -> tuple[BuildRecord, ...]:
    """From the release's own image down to the first stage; given first stage first."""
    found: list[BuildRecord] = []
    key: str | None = release.build_key
    while key is not None:
        name = f"{IMAGES}{key}.json"
        content = small(data, name)
        with reading(name):
            record = BuildRecord.model_validate(verify.strict_json(content))
        if record.key != key or record in found:
            raise Refused(f"{name}: it is of the build key {record.key}")
        found.append(record)
        key = record.parent_key
    return tuple(reversed(found))


def evidence_of(
    release: Release, records: tuple[BuildRecord, ...], data: Mapping[str, Slice], hashes: Mapping[str, str]
) -> Claimed:
    """What `verify` looks at. hashes: SHA-256 of each member, as read."""

    def read(sha256: str) -> bytes | None:
        return small(data, INPUTS + sha256) if INPUTS + sha256 in data else None

    names = (verify.STATEMENT, verify.SBOM, verify.SIGNATURE)
    files = {name: small(data, EVIDENCE + name) for name in names if EVIDENCE + name in data}
    whole = frozenset(sha256 for name, sha256 in hashes.items() if name == INPUTS + sha256)
    return Claimed(release, records, files, records[-1].config.encode(), read, whole)


def require_paths(release: Release, records: Sequence[BuildRecord]) -> None:
    """Whatever becomes a path or a name later has to be harmless now."""
    platform = records[0].platform
    if long := [
        name for name in (release.recipe, release.stage, release.stack, release.model) if len(name) > NAME_LIMIT
    ]:
        raise Refused(f"{RELEASE} names {long[0]!r}; names have at most {NAME_LIMIT} characters")
    for record in records:
        ref = image_ref(release.stack, record.stage, record.key)
        named = STAGE.fullmatch(record.stage) and len(record.stage) <= NAME_LIMIT
        if not named or (record.stack, record.ref) != (release.stack, ref):
            raise Refused(f"the record of {record.stage!r} names its image {record.ref!r}, expected {ref!r}")
        require_names([row.path for row in record.context], f"the record of {record.stage}")
        debs = [deb.file for spec in record.root_file_systems for deb in spec.debs]
        require_names(debs, f"the record of {record.stage}")
        if folders := [name for name in debs if "/" in name]:
            raise Refused(f"the record of {record.stage} names a package {folders[0]!r}")
        with reading(f"configuration of {record.stage}"):
            config = verify.strict_json(record.config.encode())
            seen = (f"{config['os']}/{config['architecture']}", config["rootfs"]["diff_ids"])
        if seen != (platform, record.diff_ids) or record.platform != platform:
            raise Refused(f"configuration of {record.stage}: platform and layers are not those of its record")


def require_names(names: Collection[str], what: str) -> None:
    """That files of these names can lie below one folder, and nowhere else. what: that names them."""
    for name in names:
        parts = name.split("/")
        if not is_plain(name) or len(name) > PATH_LIMIT or max(len(part.encode()) for part in parts) > PART_LIMIT:
            raise Refused(f"{what} names a file {name[:PATH_LIMIT]!r}, which is none for a file system")
    found = set(names)
    if len(found) != len(names):
        raise Refused(f"{what} names a file twice")
    if both := found & parents_of(names):
        raise Refused(f"{what}: {min(both)} is a file and a folder")


def require_plain(release: Release, records: Sequence[BuildRecord]) -> None:
    """What is built of a recipe here is held to the same."""
    require_values(release.argv, release.env, RELEASE)
    for record in records:
        env = (verify.strict_json(record.config.encode()).get("config") or {}).get("Env")
        require_values([], dict(row.split("=", 1) for row in env or ()), f"configuration of {record.stage}")


def require_small_pins(release: Release, data: Mapping[str, Slice]) -> None:
    """Before a parser sees one of them. A missing one is told later."""
    names, total = pin_names(release), 0
    for name in names:
        limit = LOCK_LIMIT if name.endswith(".lock") else YAML_LIMIT
        size = member.size if (member := data.get(INPUTS + release.inputs[name])) else 0
        if size > limit:
            raise Refused(f"{name} has {size:,} bytes, expected {limit:,} or less")
        total += size
    if len(names) > PINS_ALLOWED or total > PINS_LIMIT:
        seen = f"{len(names):,} pins and stages of {total:,} bytes"
        raise Refused(f"{RELEASE} names {seen}; {PINS_ALLOWED:,} of {PINS_LIMIT:,} are allowed")


def pins_in(release: Release, data: Mapping[str, Slice]) -> contextlib.AbstractContextManager[Path]:
    """The release's project as far as `manifests` reads it. IntegrityError for a pin that it does not take."""
    return pins_of(release, lambda name: small(data, INPUTS + release.inputs[name]))


def check_demands(release: Release, data: Mapping[str, Slice]) -> verify.Check:
    """The smoke test asks for what the release's own stages want: a sender does not decide what proves it. Refused."""
    with pins_in(release, data) as project:
        stack = manifests.load_stack(project, release.stack)
        model = manifests.load_models(project, release.model, release.drafter)
        wanted = demands_of(project, stack, manifests.load_chain(project, release.stage), model)
    if release.demands != wanted:
        raise Refused(f"{RELEASE}: demands: got {release.demands}, expected {wanted}, as its pins and stages say")
    return verify.Check("demands", "ok", f"{len(wanted.checks)} checks of the smoke test, as pins and stages say")


def read_models(release: Release, data: Mapping[str, Slice]) -> tuple[dict[str, LockedFile], tuple[LockedFile, ...]]:
    """All that the checkpoint is made from, as an export with the store writes it.

    <repo>/<revision>/<file> -> file, and the headers and tensors that lie in the store.
    """
    for name in filter(None, (release.model, release.drafter)):
        for end in ("yaml", "lock"):
            if (pin := f"pins/models/{name}.{end}") not in release.inputs:
                raise Refused(f"{RELEASE} names no {pin}")
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
    content = small(data, CHECKPOINT)
    with reading(CHECKPOINT):
        value = verify.strict_json(content)
        if (value["model"], value["key"]) != (release.model, release.checkpoint_key):
            raise Refused(f"{CHECKPOINT} is of {value['model']} {value['key']}, not of the release's checkpoint")
        files = {name: CheckpointFile.model_validate(row) for name, row in value["files"].items()}
    require_names([*files, RECORD], CHECKPOINT)
    return files


def check_listings(bundle: Bundle) -> verify.Check:
    """Each listing can be read, and with the image it is the one of its layer. Refused."""
    diff_ids, total = dict.fromkeys(bundle.release.diff_ids), 0
    for diff_id in diff_ids:
        name = listing(diff_id)
        try:
            found = parse_contents(small(bundle.data, name))
        except IntegrityError as error:
            raise Refused(f"{name}: {error.message}") from None
        total += len(found)
        if total > ENTRIES:
            raise Refused(f"the listings have more than {ENTRIES:,} entries")
        tar = bundle.layers.get(diff_id)
        if tar is not None and found != contents_of(read_layer(cast(BinaryIO, tar), everything=True)):
            raise Refused(f"{name} does not list what lies in its layer")
    if bundle.layers:
        came = f"{len(bundle.layers)} of {len(diff_ids)} layers lie here, and hold what their listings say"
        return verify.Check(LISTINGS, "ok", f"{total:,} files in all; {came}")
    return verify.Check(LISTINGS, "open", "the bundle has no layers to hold them against")


def listing(diff_id: str) -> str:
    return f"{LAYERS}{diff_id.removeprefix('sha256:')}.jsonl.gz"


def require_members(bundle: Bundle) -> None:
    """Exactly the members that the records ask for, each with the hash and size that they name."""
    release, records, data = bundle.release, bundle.records, bundle.data
    rows = {row.name: row for row in bundle.index.members}
    wanted: dict[str, LockedFile | CheckpointFile | None] = {RELEASE: None}
    wanted |= {f"{IMAGES}{record.key}.json": None for record in records}
    wanted |= dict.fromkeys(INPUTS + sha256 for sha256 in bundle.kept)
    wanted |= dict.fromkeys(listing(diff_id) for diff_id in release.diff_ids)
    wanted |= dict.fromkeys(name for name in rows if name.startswith(EVIDENCE))
    if bundle.index.store:
        wanted |= {STORE + file.sha256: file for file in bundle.stored}
    if bundle.index.checkpoint:
        wanted |= {CHECKPOINTS + file.sha256: file for file in bundle.checkpoint_files.values()} | {CHECKPOINT: None}
    if bundle.index.image:
        wanted |= dict.fromkeys(map(oci.blob, release.diff_ids))
        if absent := [name for name in map(oci.blob, release.diff_ids) if name not in rows]:
            raise Refused(f"{absent[0]} is missing")
        sizes = [oci.OciLayer(diff_id, rows[oci.blob(diff_id)].size) for diff_id in release.diff_ids]
        files = oci.layout(records[-1].config.encode(), sizes, release.tag)
        for name, content in files.items():
            wanted[name] = None
            if name not in rows or small(data, name) != content:
                raise Refused(f"{name} is not the one of an image with plain layers that this record describes")
    if strange := sorted(rows.keys() ^ wanted.keys()):
        raise Refused(f"{strange[0]} is {'missing' if strange[0] in wanted else 'not what a record asks for'}")
    for name, file in wanted.items():
        head, _, digest = name.rpartition("/")
        if f"{head}/" in (INPUTS, STORE, CHECKPOINTS, BLOBS) and rows[name].sha256 != digest:
            raise Refused(f"{name}: its sha256 is {rows[name].sha256}")
        if file and rows[name].size != file.size:
            raise Refused(f"{name}: expected {file.size} bytes, as its record says; it has {rows[name].size}")
