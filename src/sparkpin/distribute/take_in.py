"""Taking a bundle in: verified as a whole by `bundle` before anything is written or loaded, then put in its place.

The release's record comes last: what a killed run leaves is complete files that nothing names yet, and the same command
again goes on from there. No network, and nothing of this checkout but the program: the release brings its own pins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sparkpin.build.consistent import IMPORTS, is_brought
from sparkpin.build.record import (
    BuildRecord,
    layer_file,
    read_record,
    record_file,
    records_of,
    records_with_key,
    write_record,
)
from sparkpin.checkpoint import content
from sparkpin.checkpoint.content import RECORD, is_complete
from sparkpin.checkpoint.write import hold_model, set_aside
from sparkpin.core import files, locks
from sparkpin.core.errors import EngineError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.distribute import copy as transfer
from sparkpin.distribute import verify
from sparkpin.distribute.form import (
    CHECKPOINT,
    CHECKPOINTS,
    INPUTS,
    LAYERS,
    STORE,
    Bundle,
    copied,
    listing,
    open_bundle,
)
from sparkpin.distribute.verify import SBOM, SIGNATURE, STATEMENT, Check
from sparkpin.fetch import model as hub
from sparkpin.host.engine import Engine
from sparkpin.releases import current
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases, now

IMPORTED = "imported"  # folder of the evidence that other machines made
TOGETHER = (STATEMENT, SBOM, SIGNATURE)
HAPPENED = ("state", "smoke", "created", "build_seconds", "size", "host")  # another machine's record may differ here
SHOWN = 100  # characters of a value in a message
SPARE = 64 << 20  # bytes that stay free


@dataclass(frozen=True)
class Imported:
    """sent: None when the engine had the image; checks: what was found out about the bundle."""

    release: Release
    sent: transfer.Sent | None
    checks: tuple[Check, ...]


def import_bundle(paths: Paths, engine: Engine, path: Path, say: Say, *, signed: bool = False) -> Imported:
    """Verify a bundle, load its image, keep its files, record its release: as built, for no smoke test ran here.

    signed: refuse what nobody signed whom `allowed_signers` names.
    Raises IntegrityError, before anything changes, for a bundle that is not whole and true or that contradicts what
    this machine has.
    """
    with open_bundle(path, say) as bundle:
        if signed:
            verify.require([verify.demanded(check) for check in bundle.checks], str(path))
        with locks.claim(paths, say):
            return take_in(paths, engine, bundle, say)


def take_in(paths: Paths, engine: Engine, bundle: Bundle, say: Say, source: str = "") -> Imported:
    """source: where it comes from, if that is no file."""
    is_own = require_no_conflict(paths, engine, bundle)
    require_space(paths, bundle)
    sent = load_image(engine, bundle, say)
    say("keeping its files")
    keep_files(paths, bundle, say)
    if bundle.index.checkpoint and is_own:
        say("its checkpoint is left out: this machine made the release, and makes its checkpoint")
    elif bundle.index.checkpoint:
        keep_checkpoint(paths, bundle, say)
    keep_evidence(paths, bundle)
    if not is_own:
        row = {
            "file": source or str(bundle.path.absolute()),
            "with_store": bundle.index.store,
            "with_statement": STATEMENT in bundle.evidence,
            "checks": [check.line for check in bundle.checks],
        }
        add_row(Releases(paths).evidence(bundle.release) / IMPORTS, row)
    release = Releases(paths).update(bundle.release.tag, lambda known: merged(bundle, known))
    return Imported(release, sent, bundle.checks)


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add to a list of bundles, with the time; what it said about the same file goes."""
    try:
        rows = [old for old in json.loads(path.read_text(encoding="utf-8")) if old["file"] != row["file"]]
    except (OSError, ValueError, KeyError, TypeError):
        rows = []
    files.write_json(path, [*rows, {**row, "time": now()}])


def merged(bundle: Bundle, known: Release | None) -> Release:
    """The record to be written: the one that is here."""
    if known is None:
        return dataclasses.replace(bundle.release, state="built", smoke=None)
    require_same_release(bundle, known)
    return known


def require_no_conflict(paths: Paths, engine: Engine, bundle: Bundle) -> bool:
    """Whether this machine made the release itself. IntegrityError when it has anything of the bundle otherwise."""
    known = Releases(paths).find(bundle.release.tag)
    if known:
        require_same_release(bundle, known)
    for record in bundle.records:
        require_same_record(paths, bundle, record)
    require_same_files(paths, bundle)
    transfer.require_free(engine, transfer.images_of(bundle.release, bundle.records))
    return known is not None and not is_brought(paths, known)


def require_same_release(bundle: Bundle, known: Release) -> None:
    """Alike in all but what happened to it on each machine."""
    theirs, tag = bundle.release, known.tag
    if known.image != theirs.image:
        raise IntegrityError(
            f"{bundle.path} has {tag} with {theirs.image}; this machine made it with {known.image}",
            next_step=f"invoke reproduce {tag} tells which is right",
        )
    names = (field.name for field in dataclasses.fields(Release) if field.name not in HAPPENED)
    if other := [name for name in names if getattr(known, name) != getattr(theirs, name)]:
        raise IntegrityError(
            f"{bundle.path} has {tag} with other {', '.join(other)} than this machine",
            next_step="the release here stays as it is; take theirs in under another SPARKPIN_HOME to compare",
        )


def require_same_record(paths: Paths, bundle: Bundle, record: BuildRecord) -> None:
    """Under the key there is no record of another name or content."""
    for path, here in records_with_key(paths, record.stack, record.key):
        ours, theirs = stated(here), stated(record)
        if other := [name for name in ours if ours[name] != theirs[name]]:
            name = "config_digest" if "config_digest" in other else other[0]
            seen = [str(value) if len(str(value)) < SHOWN else "another" for value in (theirs[name], ours[name])]
            raise IntegrityError(
                f"{bundle.path} has {record.ref} with {name} {seen[0]}; this machine made {here.ref} with {seen[1]}",
                next_step=which_is_right(paths, path, here),
            )
    path = record_file(paths, record)
    with contextlib.suppress(FileNotFoundError):
        if (here := read_record(path)).key != record.key:
            raise IntegrityError(
                f"{bundle.path} has {record.ref} with key {record.key}; this machine made it with {here.key}",
                next_step=which_is_right(paths, path, here),
            )


def stated(record: BuildRecord) -> dict[str, Any]:
    """What two machines that built the same say alike. An engine that wants whole images hides what a tree became."""
    return record.model_dump(
        mode="json", exclude={"seconds": True, "size": True, "layers": {"__all__": {"diff_id": True}}}
    )


def which_is_right(paths: Paths, path: Path, record: BuildRecord) -> str:
    for release in Releases(paths).all():
        with contextlib.suppress(IntegrityError):
            if record in records_of(paths, release):
                return f"invoke reproduce {release.tag} tells which is right"
    return f"no release here is made of {path}: move it away, then the same command again"


def require_same_files(paths: Paths, bundle: Bundle) -> None:
    """What is named by its own hash is mended later; of all else nobody here knows which is right."""
    for target, name in (home_files(paths, bundle) | cache_files(paths, bundle)).items():
        if target.is_file() and not is_named_by_hash(bundle, name, target) and not is_same(bundle, name, target):
            raise IntegrityError(
                f"{bundle.path}: {name} differs from {target}",
                next_step=f"if that one is damaged, move it away, then the same command again: {target}",
            )


def is_named_by_hash(bundle: Bundle, name: str, target: Path) -> bool:
    return target.name == bundle.sha256[name]


def is_same(bundle: Bundle, name: str, target: Path) -> bool:
    """The same bytes, or a listing that was packed otherwise (by another zlib)."""
    data = bundle.data[name]
    if target.stat().st_size == data.size and files.sha256_file(target) == (bundle.sha256[name], data.size):
        return True
    if not name.startswith(LAYERS):
        return False
    data.seek(0)
    with target.open("rb") as file, gzip.GzipFile(fileobj=file) as ours, gzip.GzipFile(fileobj=data) as theirs:
        try:
            while (chunk := ours.read(files.CHUNK)) == theirs.read(files.CHUNK):
                if not chunk:
                    return True
        except (OSError, EOFError, zlib.error):
            pass
    return False


def require_space(paths: Paths, bundle: Bundle) -> None:
    """Room for what this machine lacks. The engine's own disk is the engine's to complain of."""

    def lacking(wanted: Mapping[Path, str]) -> int:
        return sum(bundle.data[name].size for target, name in wanted.items() if not target.is_file())

    home, cache = lacking(home_files(paths, bundle)), lacking(cache_files(paths, bundle))
    if bundle.index.checkpoint:
        home += sum(file.size for file in bundle.checkpoint_files.values())
    home, cache = home + SPARE, cache + (SPARE if cache else 0)
    if files.existing_parent(paths.home).stat().st_dev == files.existing_parent(paths.cache).stat().st_dev:
        home = cache = home + cache
    files.require_space(paths.home, home, "the bundle's files", "SPARKPIN_HOME")
    files.require_space(paths.cache, cache, "the bundle's files", "SPARKPIN_CACHE")


def load_image(engine: Engine, bundle: Bundle, say: Say) -> transfer.Sent | None:
    images = transfer.images_of(bundle.release, bundle.records)
    if transfer.is_there(engine, images):
        say("the engine has the image")
        return None
    if bundle.index.image:
        below = transfer.present(engine, bundle.release.diff_ids)
        return transfer.send(engine, images, bundle.layers, below, say)
    ref = current.present_ref(engine, bundle.release)
    if ref is None:
        raise EngineError(
            f"{bundle.path} holds no image, and the engine has no {bundle.release.image}",
            next_step=f"on the machine that has it: invoke export {bundle.release.tag} ssh://user@this-host",
        )
    engine.tag(ref, bundle.release.tag)
    return None


def home_files(paths: Paths, bundle: Bundle) -> dict[Path, str]:
    """Where the inputs and the listings of layers belong -> member."""
    kept = KeptInputs.of(paths).kept
    found = {kept.path(sha256): INPUTS + sha256 for sha256 in bundle.kept}
    return found | {layer_file(paths, diff_id): listing(diff_id) for diff_id in bundle.release.diff_ids}


def cache_files(paths: Paths, bundle: Bundle) -> dict[Path, str]:
    """Where wheels, packages and what was fetched of the model belong -> member."""
    if not bundle.index.store:
        return {}
    store = KeptInputs.of(paths).fetched
    found = {store.path(file.sha256): STORE + file.sha256 for file in (*bundle.locked, *bundle.model_blobs)}
    return found | {paths.models / path: STORE + file.sha256 for path, file in bundle.model_files.items()}


def keep_files(paths: Paths, bundle: Bundle, say: Say) -> None:
    repositories = {"/".join(path.split("/")[:2]) for path in bundle.model_files}
    with hub.hold_repositories(paths, repositories, say):
        for target, name in (home_files(paths, bundle) | cache_files(paths, bundle)).items():
            # Read-only as `hub` makes them: checkpoints hold hard links to the model's files.
            put(bundle, name, target, mode=0o444 if target.is_relative_to(paths.models) else 0o644)
    for record in bundle.records:
        if not record_file(paths, record).is_file():
            write_record(paths, record, imported=True)


def put(bundle: Bundle, name: str, target: Path, *, mode: int = 0o644) -> None:
    """Write a member to a file. One that is there stays, unless its name says that it is damaged."""
    if target.is_file() and (not is_named_by_hash(bundle, name, target) or is_same(bundle, name, target)):
        os.utime(target)  # young again for `prune`, should the run be killed before its record is written
        return
    with files.atomic_file(target, mode) as out:
        copy(bundle, name, out)


def copy(bundle: Bundle, name: str, out: IO[bytes]) -> None:
    if copied(bundle.data[name], out)[0] != bundle.sha256[name]:
        raise IntegrityError(
            f"{bundle.path} changed while it was read: {name}", next_step="copy it to a disk of your own first"
        )


def keep_checkpoint(paths: Paths, bundle: Bundle, say: Say) -> None:
    """The finished checkpoint, whole or not at all."""
    folder, model = Releases(paths).checkpoint(bundle.release), bundle.release.model
    with hold_model(paths, model, say):
        if is_complete(folder, bundle.release.checkpoint_key):
            return
        files.sweep(folder.parent)
        if folder.exists():
            set_aside(folder)
        with files.atomic_folder(folder) as partial:
            members = {name: CHECKPOINTS + file.sha256 for name, file in bundle.checkpoint_files.items()}
            for name, member in (members | {RECORD: CHECKPOINT}).items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with (partial / name).open("wb") as out:
                    copy(bundle, member, out)
            (partial / content.IMPORTED).touch()


def keep_evidence(paths: Paths, bundle: Bundle) -> None:
    """The statement is about the release, wherever it lies; what else other machines saw is kept as theirs.

    Statement, SBOM and signature go together: where this machine has others, all of theirs lie with the rest.
    """
    folder = Releases(paths).evidence(bundle.release)
    there = {name: member for name, member in bundle.evidence.items() if name in TOGETHER}
    others = [name for name in TOGETHER if (folder / name).is_file()]
    if all(name in there and is_same(bundle, there[name], folder / name) for name in others):
        place = folder
    else:
        place = folder / IMPORTED
        for name in TOGETHER:  # of an earlier bundle
            (place / name).unlink(missing_ok=True)
    for name, member in bundle.evidence.items():
        put(bundle, member, (place if name in there else folder / IMPORTED) / name)
