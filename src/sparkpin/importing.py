"""Taking a bundle in: verified as a whole by `bundle` before anything is written or loaded, then put in its place.

The release's record comes last: what a killed run leaves is complete files that nothing names yet, and the same command
again goes on from there. No network, and nothing of this checkout but the program: the release brings its own pins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sparkpin import claims, files, hub, retention, transfer
from sparkpin.buildrecord import layer_file, read_record, record_file, write_record
from sparkpin.bundle import CHECKPOINT, CHECKPOINTS, IMPORTS, INPUTS, STORE, Bundle, listing, open_bundle
from sparkpin.checkpoint.build import hold_model, is_complete, set_aside
from sparkpin.checkpoint.verify import RECORD
from sparkpin.engine import Engine
from sparkpin.errors import EngineError, IntegrityError
from sparkpin.evidence import verify
from sparkpin.evidence.verify import SBOM, SIGNATURE, STATEMENT, Check
from sparkpin.exporting import add_row
from sparkpin.inputs import Inputs
from sparkpin.paths import Paths
from sparkpin.releases import Release, Releases

Say = Callable[[str], None]
IMPORTED = "imported"  # folder of the evidence that other machines made
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
        with claims.claim(paths, say):
            return take_in(paths, engine, bundle, say)


def take_in(paths: Paths, engine: Engine, bundle: Bundle, say: Say) -> Imported:
    known = require_no_conflict(paths, engine, bundle)
    require_space(paths, bundle)
    sent = load_image(engine, bundle, say)
    say("keeping its files")
    keep_files(paths, bundle, say)
    keep_evidence(paths, bundle)
    if known is None or known.inputs != bundle.release.inputs:
        release = dataclasses.replace(
            known or dataclasses.replace(bundle.release, state="built", smoke=None),
            inputs=bundle.release.inputs,
            executable=bundle.release.executable,
        )
        Releases(paths).save(release)
    return Imported(Releases(paths).get(bundle.release.tag), sent, bundle.checks)


def require_no_conflict(paths: Paths, engine: Engine, bundle: Bundle) -> Release | None:
    """The release as this machine has it already, if so. IntegrityError when it has it otherwise."""
    known = Releases(paths).find(bundle.release.tag)
    rows = [(bundle.release.tag, known.image, bundle.release.image)] if known else []
    for record in bundle.records:
        with contextlib.suppress(FileNotFoundError):
            here = read_record(record_file(paths, record.rendered))
            rows.append((record.ref, here.config_digest, record.config_digest))
            if here.key != record.key:
                rows.append((record.ref, here.key, record.key))
    for name, here_digest, theirs in rows:
        if here_digest != theirs:
            raise IntegrityError(
                f"{bundle.path} has {name} with {theirs}; this machine made it with {here_digest}",
                next_step=f"invoke reproduce --release {bundle.release.tag} tells which is right",
            )
    transfer.require_free(engine, transfer.images_of(bundle.release, bundle.records), "the engine")
    return known


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
    ref = retention.present_ref(engine, bundle.release)
    if ref is None:
        raise EngineError(
            f"{bundle.path} holds no image, and the engine has no {bundle.release.image}",
            next_step=f"on the machine that has it: invoke copy {bundle.release.tag} --to ssh://user@this-host",
        )
    engine.tag(ref, bundle.release.tag)
    return None


def home_files(paths: Paths, bundle: Bundle) -> dict[Path, str]:
    """Where the inputs and the listings of layers belong -> member."""
    kept = Inputs.of(paths).kept
    found = {kept.path(sha256): INPUTS + sha256 for sha256 in bundle.kept}
    return found | {layer_file(paths, diff_id): listing(diff_id) for diff_id in bundle.release.diff_ids}


def cache_files(paths: Paths, bundle: Bundle) -> dict[Path, str]:
    """Where wheels, packages and the model's files belong -> member."""
    if not bundle.index.store:
        return {}
    store = Inputs.of(paths).fetched
    found = {store.path(file.sha256): STORE + file.sha256 for file in bundle.locked}
    return found | {paths.models / path: STORE + file.sha256 for path, file in bundle.model_files.items()}


def keep_files(paths: Paths, bundle: Bundle, say: Say) -> None:
    repositories = {"/".join(path.split("/")[:2]) for path in bundle.model_files}
    with hub.hold_repositories(paths, repositories, say):
        for target, name in (home_files(paths, bundle) | cache_files(paths, bundle)).items():
            # Read-only as `hub` makes them: checkpoints hold hard links to the model's files.
            put(bundle, name, target, mode=0o444 if target.is_relative_to(paths.models) else 0o644)
    if bundle.index.checkpoint:
        keep_checkpoint(paths, bundle, say)
    for record in bundle.records:
        if not record_file(paths, record.rendered).is_file():
            write_record(paths, record)


def put(bundle: Bundle, name: str, target: Path, *, mode: int = 0o644) -> None:
    """Write a member to a file, unless these very bytes are there: a damaged one is mended."""
    data = bundle.data[name]
    if target.is_file() and files.sha256_file(target) == (bundle.sha256[name], data.size):
        os.utime(target)  # young again for `prune`, should the run be killed before its record is written
        return
    with files.atomic_file(target, mode) as out:
        copy(bundle, name, out)


def copy(bundle: Bundle, name: str, out: IO[bytes]) -> None:
    """Hashed again on its way: the file may lie where others write."""
    digest, data = hashlib.sha256(), bundle.data[name]
    data.seek(0)
    while chunk := data.read(files.CHUNK):
        digest.update(chunk)
        out.write(chunk)
    if digest.hexdigest() != bundle.sha256[name]:
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


def keep_evidence(paths: Paths, bundle: Bundle) -> None:
    """The statement is about the release, wherever it lies; what else other machines saw is kept as theirs."""
    folder = Releases(paths).evidence(bundle.release)
    for name, member in bundle.evidence.items():
        target = folder / name if name in (STATEMENT, SBOM, SIGNATURE) else folder / IMPORTED / name
        if not target.is_file():
            put(bundle, member, target)
    checks = [check.line for check in bundle.checks]
    row = {"file": str(bundle.path.absolute()), "with_store": bundle.index.store, "checks": checks}
    add_row(folder / IMPORTS, row)
