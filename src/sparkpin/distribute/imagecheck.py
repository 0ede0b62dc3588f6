"""What `verify` looks at on this machine: a release's kept evidence, its image, fetched files, its checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparkpin.build.consistent import has_statement, same
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.checkpoint.content import RECORD, is_complete
from sparkpin.checkpoint.plan import make_plan
from sparkpin.checkpoint.steps import checkpoint_steps, lock_for, used_repositories
from sparkpin.checkpoint.verify import verify_checkpoint
from sparkpin.core.errors import BuildError, IntegrityError, SparkpinError
from sparkpin.core.files import disk_errors, require_space, sha256_file, sha256_of
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.core.progress import GATHERS, progress
from sparkpin.core.terminal import Say
from sparkpin.distribute import digests
from sparkpin.distribute.materials import recorded
from sparkpin.distribute.verify import CHECKPOINT, LAYERS, MODELS, PACKAGES, Check, Claimed, Open, checked
from sparkpin.fetch.model_files import blobs_of, fetched_of, listing_of, places_of, repository_folder
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.image.oci import digest_of
from sparkpin.image.saved import Saved, open_saved
from sparkpin.image.seal import image_config
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Release, Releases


def evidence_of(paths: Paths, release: Release) -> Claimed:
    """IntegrityError when a build record is gone or damaged."""
    folder = Releases(paths).evidence(release)
    kept = KeptInputs.of(paths).kept

    def read(sha256: str) -> bytes | None:
        path = kept.path(sha256)
        return path.read_bytes() if path.is_file() else None

    files = {name: folder / name for name in (STATEMENT, SBOM, SIGNATURE)}
    records = records_of(paths, release)
    return Claimed(
        release,
        records,
        {name: path.read_bytes() for name, path in files.items() if path.is_file()},
        records[-1].config.encode(),
        read,
        attested=has_statement(paths, release),
    )


def check_published(project: Path, release: Release, records: Sequence[BuildRecord], allowed: Path | None) -> Check:
    """The release's digest against the one that the project publishes, and against what builders got."""
    found = digests.confirmations(project, release.build_key, release.image, allowed)
    tail = "".join([f"; {found.line}", *(f"; not counted: {why}" for why in found.uncounted)])
    step = f"invoke reproduce {release.tag}"
    if found.others:
        return Check("published", "wrong", f"{', '.join(found.others)} got another image of these pins{tail}", step)
    try:
        published = digests.load(project, release.stack)
    except SparkpinError as error:
        return Check("published", "wrong", error.message, error.next_step)
    compared = digests.compare(published, records, release.image, release.diff_ids)
    if compared and compared.difference:
        return Check("published", "wrong", f"published is {compared.published}; {compared.difference}{tail}", step)
    what = f"the same bytes as {digests.file_of(release.stack)}" if compared else "nothing is published for these pins"
    return Check("published", "ok" if compared or found.builders else "open", f"{what}{tail}")


def check_loaded(engine: Engine, release: Release) -> Check:
    """The engine's word for what it holds under the release's tag."""

    def look() -> str:
        image = engine.image(release.tag)
        if image is None:
            raise IntegrityError(f"it has no {release.tag}")
        same("config digest", image.config_digest, release.image)
        same("diff IDs", list(image.diff_ids), list(release.diff_ids))
        return f"holds {release.tag} with this configuration and these {len(release.diff_ids)} layers"

    return checked("engine", look)


@contextlib.contextmanager
def saved_image(paths: Paths, engine: Engine, release: Release, ref: str, say: Say) -> Iterator[Saved]:
    """The image that the engine has under a name, in a temporary file."""
    say(f"reading {len(release.diff_ids)} layers from the engine, {release.size / 1e6:.1f} MB")
    with saving_folder(paths) as work:
        with (work / "image.tar").open("wb") as file, progress(say, release.size, before=GATHERS) as came:
            engine.save(ref, file, came)
        with open_saved(work / "image.tar") as saved:
            yield saved


def check_saved(paths: Paths, engine: Engine, release: Release, say: Say) -> Check:
    """Every byte of the layers, as the engine gives them out."""

    def look() -> str:
        require_space(paths.work, release.size + (64 << 20), "the image's layers", "SPARKPIN_CACHE")
        with disk_errors(paths.work), saved_image(paths, engine, release, release.tag, say) as saved:
            say("hashing them")
            size = sum(layer.size for layer in saved.layers)
            with progress(say, size) as hashed:
                found = []
                for layer in saved.layers:
                    found.append(f"sha256:{sha256_of(layer)}")
                    hashed(layer.size)
            same("layers", found, list(release.diff_ids))
            config = saved.config
            platform = {"os": config["os"], "architecture": config["architecture"]}
            made = image_config(config.get("config") or {}, **platform, diff_ids=found)
        same("configuration", digest_of(made), release.image)
        return f"{len(found)} of {len(found)} hashes as recorded ({size / 1e6:,.1f} MB)"

    try:
        return checked(LAYERS, look)
    except BuildError as error:
        return Check(LAYERS, "wrong", error.message)


def check_fetched(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> Check:
    """The packages and wheels that the store of SPARKPIN_CACHE still has; what it lacks can be fetched again."""
    store = Store(paths.store)

    def look() -> str:
        wanted = [material for material in recorded(release, records) if material.kind in ("deb", "wheel")]
        there = [material for material in wanted if store.path(material.sha256).is_file()]
        for material in there:
            path = store.path(material.sha256)
            same(f"{material.label} ({path}): sha256", sha256_file(path)[0], material.sha256)
        if not there:
            raise Open(f"the store has none of the {len(wanted)} packages and wheels")
        return f"{len(there)} of {len(wanted)} packages and wheels are in the store, each with its hash"

    return checked(PACKAGES, look)


def check_model(paths: Paths, release: Release, say: Say) -> list[Check]:
    """The files that the checkpoint is made from, as far as they were fetched, and the checkpoint, if it is there.

    Its bytes are those of its sources. Where these are not all there, it can only be held against its own record, which
    tells damage and no more.
    """
    try:
        with project_of(paths, release) as project:
            pin = manifests.load_models(project, release.model, release.drafter)
            steps = checkpoint_steps(manifests.load_chain(project, release.stage), pin)
            lock = lock_for(pin, manifests.load_model_lock(project, pin), steps)
            used = used_repositories(pin, steps)
        locked = {name: lock.repositories[name] for name in used}
    except (SparkpinError, KeyError) as error:
        why = f"the release's pins cannot be read: {getattr(error, 'message', error)}"
        return [Check(MODELS, "wrong", why), Check(CHECKPOINT, "open", why)]
    wanted: dict[Path, str] = {}
    store = Store(paths.store)
    for name, entry in locked.items():
        parts = fetched_of(entry, whole=pin.is_whole(name))
        wanted |= {repository_folder(paths, entry) / file.file: file.sha256 for file in parts.files}
        wanted |= {store.path(row.sha256): row.sha256 for row in blobs_of(parts)}
        # Of the base they need not be there; where they are, its plan is made from them.
        wanted |= {store.path(row.sha256): row.sha256 for row in entry.headers if store.has(row)}
    there = [path for path in wanted if path.is_file()]

    def look_at_files() -> str:
        if not there:
            raise Open(f"none of the {len(wanted)} is in the cache")
        say(f"hashing {len(there)} files of the model")
        for path in there:
            same(f"{path}: sha256", sha256_file(path)[0], wanted[path])
        return f"{len(there)} of {len(wanted)} are in the cache, each with its hash"

    models = checked(MODELS, look_at_files)

    def look_at_checkpoint() -> str:
        folder = Releases(paths).checkpoint(release)
        if not folder.is_dir():
            raise Open(f"{folder} is not there")
        if not is_complete(folder, release.checkpoint_key):
            raise IntegrityError(f"{folder} is not whole, or of another release")
        say("reading the checkpoint")
        if models.result != "ok" or len(there) < len(wanted):
            files = json.loads((folder / RECORD).read_bytes())["files"]
            for name, row in files.items():
                same(f"{folder / name}: sha256", sha256_file(folder / name)[0], row.get("sha256"))
            return f"{len(files)} files with the hashes of its own record; not all that it was made from is there"
        try:
            listings = {name: listing_of(paths, pin, name, entry) for name, entry in locked.items()}
            verify_checkpoint(folder, places_of(paths, pin, locked), make_plan(listings, pin, steps))
        except SparkpinError as error:
            raise IntegrityError(error.message) from None
        return "every tensor and file has the bytes of what it was made from"

    return [models, checked(CHECKPOINT, look_at_checkpoint)]
