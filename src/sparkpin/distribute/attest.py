"""Writing SBOM, statement and signature into a release's evidence folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.record import record_path
from sparkpin.core.errors import HostError, IntegrityError, SparkpinError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.distribute.signing import Keys, sign, verify
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Release, Releases

REMOVED = "{}: the signature from before is removed: it is not over this statement"


@dataclass(frozen=True)
class Attested:
    files: tuple[Path, ...]  # all that is there now
    removed: bool  # a signature went, because it was over another statement
    signer: str  # whose signature is there, "" for none


def ensure_attested(paths: Paths, release: Release) -> None:
    """For builds: make what is missing, cheaply when nothing is. A key that cannot be used is told, and no failure."""
    folder = Releases(paths).evidence(release)
    try:
        keys = Keys.from_env()
        if not is_attested(paths, release):
            if attest(paths, release, keys).removed:
                say(REMOVED.format(release.tag))
        elif keys.signing and not (folder / SIGNATURE).is_file():
            with Releases(paths).locked(release.recipe):
                write(folder / SIGNATURE, sign((folder / STATEMENT).read_bytes(), keys.signing))
    except SparkpinError as error:
        say(f"warning: the evidence of {release.tag} is incomplete: {error}")


def is_attested(paths: Paths, release: Release) -> bool:
    """Whether statement and SBOM are there and are of this very release and its build records.

    A quick look for the hashes that the statement has to name, which `invoke build` takes each time; `verify` is
    thorough.
    """
    from sparkpin.distribute.materials import raw_sha256

    folder = Releases(paths).evidence(release)
    try:
        statement = (folder / STATEMENT).read_text(encoding="utf-8")
        predicate = json.loads(statement)["predicate"]
        keys = predicate["buildDefinition"]["internalParameters"]["buildKeys"]
        named = {row["name"]: row["digest"]["sha256"] for row in predicate["runDetails"]["byproducts"]}
        files = {stage: record_path(paths, release.stack, stage, key) for stage, key in keys.items()}
        made = {f"build record {stage}": raw_sha256(json.loads(file.read_bytes())) for stage, file in files.items()}
        made[SBOM] = hashlib.sha256((folder / SBOM).read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    wanted = (release.image.removeprefix("sha256:"), *release.inputs.values())
    return named == made and all(sha256 in statement for sha256 in wanted)


def attest(paths: Paths, release: Release, keys: Keys) -> Attested:
    """Write all of it anew. A signature that is not over it goes first, so that none is ever wrong."""
    # These are slow to import, and most runs find all of it there.
    from sparkpin.build.record import records_of
    from sparkpin.distribute.materials import materials_of, model_inputs
    from sparkpin.distribute.provenance import make_statement
    from sparkpin.distribute.sbom import make_sbom

    records = records_of(paths, release)
    with project_of(paths, release) as project:
        materials = materials_of(release, records, model_inputs(project, release))
    sbom = make_sbom(release, materials)
    made = {SBOM: sbom, STATEMENT: make_statement(release, records, materials, sbom)}
    releases = Releases(paths)
    folder = releases.evidence(release)
    signature, statement = folder / SIGNATURE, folder / STATEMENT
    with releases.locked(release.recipe):
        stays = statement.is_file() and statement.read_bytes() == made[STATEMENT]
        signer = signer_of(made[STATEMENT], signature) if stays else ""
        removed = signature.is_file() and not signer
        if removed:
            signature.unlink()
        for name, data in made.items():
            write(folder / name, data)
        if keys.signing:
            write(signature, sign(made[STATEMENT], keys.signing))
            signer = signer_of(made[STATEMENT], signature)
        files = [folder / name for name in (SBOM, STATEMENT, SIGNATURE) if (folder / name).is_file()]
    return Attested(tuple(files), removed and signature not in files, signer)


def signer_of(statement: bytes, signature: Path) -> str:
    """Whose signature it is, in words; "" for one that is not over the statement, and for none."""
    try:
        return str(verify(statement, signature.read_bytes(), None)) if signature.is_file() else ""
    except IntegrityError:
        return ""
    except HostError as error:
        return f"whose, nobody can tell ({error.message})"


def write(path: Path, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)
