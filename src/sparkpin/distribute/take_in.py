"""Taking a release in: loading its image, keeping its files, recording it.

The release's record comes last: what a killed run leaves is complete files that nothing names yet, and the same command
again goes on from there. No network, and nothing of this checkout but the program: the release brings its own pins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from sparkpin.build.consistent import IMPORTS, is_brought
from sparkpin.build.record import BuildRecord, layer_file, record_file, records_with_key, write_record
from sparkpin.checkpoint import content
from sparkpin.checkpoint.content import RECORD, is_complete
from sparkpin.checkpoint.write import hold_model, set_aside
from sparkpin.core import files, locks
from sparkpin.core.errors import EngineError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.distribute import copy as transfer
from sparkpin.distribute import layout, verify
from sparkpin.distribute.bundle import Bundle, open_bundle
from sparkpin.distribute.export import copied, saved_layers
from sparkpin.distribute.verify import Check
from sparkpin.fetch import model as hub
from sparkpin.host.engine import Engine
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import contents_of, write_contents
from sparkpin.releases import current
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import STATEMENT, Release, Releases, now

HAPPENED = ("state", "smoke", "created", "build_seconds", "size", "host")  # another machine's record may differ here
SPARE = 64 << 20  # bytes that stay free


@dataclass(frozen=True)
class Imported:
    """sent: None when the engine had the image; checks: what was found out about the bundle."""

    release: Release
    sent: transfer.Sent | None
    checks: tuple[Check, ...]


def import_bundle(paths: Paths, engine: Engine, path: Path, *, signed: bool = False) -> Imported:
    """Verify a file, load its image, keep its files, record its release: as built, for no smoke test ran here.

    signed: refuse what nobody signed whom `allowed_signers` names.
    Raises IntegrityError, before anything changes, for a bundle that is not whole and true or that contradicts what
    this machine has.
    """
    with open_bundle(path) as bundle:
        if signed:
            verify.require([verify.demanded(check) for check in bundle.checks], str(path))
        with locks.claim(paths):
            return take_in(paths, engine, bundle)


def take_in(paths: Paths, engine: Engine, bundle: Bundle) -> Imported:
    is_own = require_no_conflict(paths, engine, bundle)
    require_space(paths, bundle)
    sent = load_image(engine, bundle)
    say("keeping its files")
    keep_files(paths, bundle)
    keep_listings(paths, engine, bundle)
    if bundle.has_checkpoint and is_own:
        say("its checkpoint is left out: this machine made the release, and makes its checkpoint")
    elif bundle.has_checkpoint:
        keep_checkpoint(paths, bundle)
    keep_evidence(paths, bundle)
    release = Releases(paths).update(bundle.release.tag, lambda known: merged(paths, bundle, known))
    return Imported(release, sent, bundle.checks)


def merged(paths: Paths, bundle: Bundle, known: Release | None) -> Release:
    """The record as it is to be, under the recipe's lock: a build may have recorded the same tag meanwhile, and its
    release stays its own. known: what is recorded by now."""
    if known:
        require_same_release(bundle, known)
    if known is None or is_brought(paths, known):
        lines = [check.line for check in bundle.checks]
        row = {"file": bundle.source, "with_statement": STATEMENT in bundle.data, "checks": lines}
        add_row(Releases(paths).evidence(bundle.release) / IMPORTS, row | {"with_store": bundle.has_store})
    return known or dataclasses.replace(bundle.release, state="built", smoke=None)


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add to a list of bundles, with the time; what it said about the same file goes."""
    try:
        rows = [old for old in json.loads(path.read_text(encoding="utf-8")) if old["file"] != row["file"]]
    except (OSError, ValueError, KeyError, TypeError):
        rows = []
    files.write_json(path, [*rows, {**row, "time": now()}])


def require_no_conflict(paths: Paths, engine: Engine, bundle: Bundle) -> bool:
    """Whether this machine made the release itself. IntegrityError when it has anything of the bundle otherwise."""
    known = Releases(paths).find(bundle.release.tag)
    if known:
        require_same_release(bundle, known)
    for record in bundle.records:
        require_same_record(paths, bundle, record)
    for target, title in named_files(paths, bundle).items():
        if target.is_file() and not target.name == sha256_of(title) and not is_same(target, title):
            raise IntegrityError(
                f"{bundle.source}: {title} differs from {target}",
                next_step=f"if that one is damaged, move it away, then the same command again: {target}",
            )
    transfer.require_free(engine, transfer.images_of(bundle.release, bundle.records))
    return known is not None and not is_brought(paths, known)


def require_same_release(bundle: Bundle, known: Release) -> None:
    """Alike in all but what happened to it on each machine."""
    names = [field.name for field in dataclasses.fields(Release) if field.name not in HAPPENED]
    if other := [name for name in names if getattr(known, name) != getattr(bundle.release, name)]:
        step = "the release here stays as it is; take theirs in under another SPARKPIN_HOME to compare"
        raise IntegrityError(
            f"{bundle.source} has {known.tag} with other {', '.join(other)} than this machine",
            next_step=f"invoke reproduce {known.tag} shows which is right" if "image" in other else step,
        )


def require_same_record(paths: Paths, bundle: Bundle, record: BuildRecord) -> None:
    """Under the key there is no record of another name or content."""
    for path, here in records_with_key(paths, record.stack, record.key):
        ours, theirs = stated(here), stated(record)
        if other := [name for name in ours if ours[name] != theirs[name]]:
            raise IntegrityError(
                f"{bundle.source} has {record.ref} with other {', '.join(other)} than {here.ref} of this machine",
                next_step=f"invoke verify {bundle.release.tag}; a record that no release here is made of: rm {path}",
            )


def stated(record: BuildRecord) -> dict[str, Any]:
    """What two machines that built the same say alike. An engine that wants whole images hides what a tree became."""
    return record.model_dump(
        mode="json", exclude={"seconds": True, "size": True, "layers": {"__all__": {"diff_id": True}}}
    )


def sha256_of(title: str) -> str:
    """Of the inputs and stored files, whose titles end in it."""
    return title.rpartition("/")[2]


def is_same(target: Path, title: str) -> bool:
    return files.sha256_file(target)[0] == sha256_of(title)


def require_space(paths: Paths, bundle: Bundle) -> None:
    """Room for what this machine lacks, wherever it goes. The engine's own disk is the engine's to complain of."""
    lacking = sum(bundle.data[title].size for path, title in named_files(paths, bundle).items() if not path.is_file())
    lacking += sum(file.size for file in bundle.checkpoint_files.values()) + SPARE
    for folder, variable in ((paths.home, "SPARKPIN_HOME"), (paths.cache, "SPARKPIN_CACHE")):
        files.require_space(folder, lacking, "the bundle's files", variable)


def load_image(engine: Engine, bundle: Bundle) -> transfer.Sent | None:
    images = transfer.images_of(bundle.release, bundle.records)
    if transfer.is_there(engine, images):
        say("the engine has the image")
        return None
    if bundle.layers is not None:
        below = transfer.present(engine, bundle.release.diff_ids)
        return transfer.send(engine, images, bundle.layers, below)
    ref = current.present_ref(engine, bundle.release)
    if ref is None:
        raise EngineError(
            f"{bundle.source} holds no image, and the engine has no {bundle.release.image}",
            next_step=f"on the machine that has it: invoke export {bundle.release.tag} ssh://user@this-host",
        )
    engine.tag(ref, bundle.release.tag)
    return None


def named_files(paths: Paths, bundle: Bundle) -> dict[Path, str]:
    """Where inputs, wheels, packages and what was fetched of the model belong -> title."""
    store = KeptInputs.of(paths)
    found = {store.kept.path(sha256): layout.INPUTS + sha256 for sha256 in bundle.kept}
    if bundle.has_store:
        stored = (*bundle.locked, *bundle.model_blobs)
        found |= {store.fetched.path(file.sha256): layout.STORE + file.sha256 for file in stored}
        found |= {paths.models / path: layout.STORE + file.sha256 for path, file in bundle.model_files.items()}
    return found


def keep_files(paths: Paths, bundle: Bundle) -> None:
    repositories = {"/".join(path.split("/")[:2]) for path in bundle.model_files}
    with hub.hold_repositories(paths, repositories):
        for target, title in named_files(paths, bundle).items():
            if target.is_file() and is_same(target, title):
                os.utime(target)  # young again for `prune`, should the run be killed before its record is written
                continue
            # Read-only as `hub` makes them: checkpoints hold hard links to the model's files.
            with files.atomic_file(target, 0o444 if target.is_relative_to(paths.models) else 0o644) as out:
                copy(bundle, title, out, sha256_of(title))
    for record in bundle.records:
        if not record_file(paths, record).is_file():
            write_record(paths, record, imported=True)


def copy(bundle: Bundle, title: str, out: IO[bytes], sha256: str) -> None:
    if copied(bundle.data[title], out) != sha256:
        step = "copy it to a disk of your own first"
        raise IntegrityError(f"{bundle.source} changed while it was read: {title}", next_step=step)


def keep_listings(paths: Paths, engine: Engine, bundle: Bundle) -> None:
    """What each layer holds, for `diff` and `why`: of the bytes that came, or of those that the engine has."""
    found: Mapping[str, Any] = bundle.listings
    lacking = [one for one in dict.fromkeys(bundle.release.diff_ids) if not layer_file(paths, one).is_file()]
    with contextlib.ExitStack() as stack:
        if set(lacking) - found.keys():
            layers = saved_layers(paths, engine, bundle.release, stack)
            read = {one: read_layer(cast(BinaryIO, layers[one]), everything=True) for one in lacking}
            found = {one: contents_of(layer) for one, layer in read.items()}
        for diff_id in lacking:
            write_contents(layer_file(paths, diff_id), found[diff_id])


def keep_checkpoint(paths: Paths, bundle: Bundle) -> None:
    """The finished checkpoint, whole or not at all."""
    folder, model = Releases(paths).checkpoint(bundle.release), bundle.release.model
    with hold_model(paths, model):
        if is_complete(folder, bundle.release.checkpoint_key):
            return
        files.sweep(folder.parent)
        if folder.exists():
            set_aside(folder)
        with files.atomic_folder(folder) as partial:
            for name, file in bundle.checkpoint_files.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with (partial / name).open("wb") as out:
                    copy(bundle, layout.CHECKPOINTS + file.sha256, out, file.sha256)
            (partial / RECORD).write_bytes(layout.small(bundle.data, layout.CHECKPOINT))
            (partial / content.IMPORTED).touch()


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
