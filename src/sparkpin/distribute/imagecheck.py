"""What `verify` looks at on this machine: a release's kept evidence, its image, fetched files, its checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparkpin.build.consistent import has_statement, same
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core.errors import BuildError, IntegrityError, SparkpinError
from sparkpin.core.files import disk_errors, require_space, sha256_file, sha256_of
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.core.progress import GATHERS, progress
from sparkpin.core.terminal import say
from sparkpin.distribute import digests
from sparkpin.distribute.materials import recorded
from sparkpin.distribute.verify import LAYERS, PACKAGES, Check, Claimed, Open, checked
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.image.oci import digest_of
from sparkpin.image.saved import Saved, open_saved
from sparkpin.image.seal import image_config
from sparkpin.releases.kept_inputs import KeptInputs
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
def saved_image(paths: Paths, engine: Engine, release: Release, ref: str) -> Iterator[Saved]:
    """The image that the engine has under a name, in a temporary file."""
    say(f"reading {len(release.diff_ids)} layers from the engine, {release.size / 1e6:.1f} MB")
    with saving_folder(paths) as work:
        with (work / "image.tar").open("wb") as file, progress(release.size, before=GATHERS) as came:
            engine.save(ref, file, came)
        with open_saved(work / "image.tar") as saved:
            yield saved


def check_saved(paths: Paths, engine: Engine, release: Release) -> Check:
    """Every byte of the layers, as the engine gives them out."""

    def look() -> str:
        require_space(paths.work, release.size + (64 << 20), "the image's layers", "SPARKPIN_CACHE")
        with disk_errors(paths.work), saved_image(paths, engine, release, release.tag) as saved:
            say("hashing them")
            size = sum(layer.size for layer in saved.layers)
            with progress(size) as hashed:
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
