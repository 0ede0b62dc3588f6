"""What a release's evidence proves: records, statement, SBOM, signature and image held against each other.

`check_evidence` is pure but for asking ssh-keygen; it serves releases of this machine and bundles from elsewhere, whose
every byte may be hostile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from sparkpin.buildrecord import BuildRecord
from sparkpin.errors import HostError, IntegrityError
from sparkpin.evidence import signing
from sparkpin.evidence.materials import LISTED, ModelInputs, materials_of, recorded
from sparkpin.layering import normal
from sparkpin.releases import SBOM as SBOM
from sparkpin.releases import SIGNATURE as SIGNATURE
from sparkpin.releases import STATEMENT as STATEMENT
from sparkpin.releases import Release, release_key, tag_of
from sparkpin.schema import ModelLock, StackLock
from sparkpin.seal import digest_of

PATH = re.compile(r"(?:[\w@%+=:,.~-]+/)*[\w@%+=:,.~-]+")  # of a project file; no part of it is . or ..
MODEL = "model "  # how the names of a model's files start
if TYPE_CHECKING:
    from sparkpin.evidence.provenance import Claims

LAYERS, FETCHED = "the layers' bytes", "fetched files"
MARKS = {"ok": "ok", "wrong": "WRONG", "open": "--"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. result "open": there is nothing to hold it against, or it is not there."""

    what: str
    result: Literal["ok", "wrong", "open"]
    detail: str

    @property
    def line(self) -> str:
        return f"{MARKS[self.result]:5}  {self.what}: {self.detail}"


@dataclass(frozen=True)
class Evidence:
    """What is said about a release, before any of it is believed.

    records: of the whole chain, first stage first, as read from their files; files: name -> bytes of the evidence
    (provenance.json, sbom.cdx.json, provenance.json.sig), as far as they are there; config: the image's configuration
    as it would be loaded, None when there is no image; read: gives the kept input of a SHA-256, or None.
    """

    release: Release
    records: tuple[BuildRecord, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    config: bytes | None = None
    read: Callable[[str], bytes | None] | None = None


def check_evidence(evidence: Evidence, keys: signing.Keys | None = None) -> list[Check]:
    """Every check, in the order in which a person reads them. keys: those that are configured, when None."""
    checks = [
        checked("image", lambda: check_image(evidence)),
        checked("layers", lambda: check_layers(evidence)),
        checked("release key", lambda: check_key(evidence.release)),
        checked("build records", lambda: check_records(evidence.release, evidence.records)),
    ]
    if any(check.result == "wrong" for check in checks):
        return checks  # what follows compares with the records, which are good for nothing
    checks.append(checked("kept inputs", lambda: check_kept(evidence)))
    checks.append(checked("locks", lambda: check_locks(evidence)))
    checks += check_statement(evidence)
    return [*checks, check_signature(evidence, keys or signing.Keys.from_env())]


class Open(Exception):
    """There is nothing to check; says why."""


def checked(what: str, check: Callable[[], str]) -> Check:
    try:
        return Check(what, "ok", check())
    except Open as reason:
        return Check(what, "open", str(reason))
    except IntegrityError as error:
        return Check(what, "wrong", error.message)


def require(
    checks: Sequence[Check], what: str, *, next_step: str = "do not use it; ask for it where it comes from"
) -> None:
    """IntegrityError when one of the checks is wrong. what: the release or the bundle."""
    wrong = [f"{check.what}: {check.detail}" for check in checks if check.result == "wrong"]
    if wrong:
        raise IntegrityError(f"{what} is not what its evidence says: {'; '.join(wrong)}", next_step=next_step)


def demanded(check: Check) -> Check:
    """The check where a release has to be signed by somebody who is trusted."""
    if check.what != "signature" or check.result != "open":
        return check
    return Check(check.what, "wrong", f"{check.detail}; the signature of an allowed signer is required")


def conclusion(checks: Sequence[Check]) -> str:
    """One sentence: what was and what was not checked."""
    done, missed, wrong = ([check.what for check in checks if check.result == way] for way in ("ok", "open", "wrong"))
    looked = {check.what for check in checks}
    missed += [f"{name} (--deep)" for name in (LAYERS, FETCHED) if name not in looked]
    missed.append("what the smoke tests found (invoke smoke repeats them)")
    return (
        f"{len(done)} checks hold: {', '.join(done) or '-'}; {len(wrong)} do not: {', '.join(wrong) or '-'}; "
        f"not checked: {', '.join(missed)}."
    )


def same(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise IntegrityError(f"{what}: saw {seen}, wanted {wanted}")


def check_image(evidence: Evidence) -> str:
    release, config = evidence.release, evidence.config
    if config is None:
        raise Open("the configuration was not looked at")
    same("config digest", digest_of(config), release.image)
    try:
        value: Any = json.loads(config)
        same("its layers", value["rootfs"]["diff_ids"], list(release.diff_ids))
        same("its label sparkpin.key", value["config"]["Labels"].get("sparkpin.key"), release.build_key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"the configuration cannot be read: {error!r}") from None
    return f"config digest {release.image} as recorded"


def check_layers(evidence: Evidence) -> str:
    release, records = evidence.release, evidence.records
    if not records or not release.diff_ids:
        raise IntegrityError("there is no build record or no layer")
    same("diff IDs", records[-1].diff_ids, list(release.diff_ids))
    return f"{len(release.diff_ids)} diff IDs, the same in release record, build record and configuration"


def check_key(release: Release) -> str:
    key = release_key(release.build_key, release.checkpoint_key, release.argv, release.env)
    same("key", release.key, key)
    same("tag", release.tag, tag_of(release.recipe, release.stage, key))
    if strange := [path for path in [*release.inputs, *release.executable] if not is_plain(path)]:
        raise IntegrityError(f"names of project files: saw {strange[0]!r}, wanted relative paths")
    return f"{key[:12]} follows from build key, checkpoint key, command and environment"


def is_plain(path: str) -> bool:
    return bool(PATH.fullmatch(path)) and not {".", "..", ".git"} & set(path.split("/"))


def check_records(release: Release, records: Sequence[BuildRecord]) -> str:
    parent: BuildRecord | None = None
    for record in records:
        name = f"record of {record.stage}"
        same(f"{name}: parent key", record.parent_key, parent and parent.key)
        same(f"{name}: root file system", record.rootfs is not None, parent is None)
        same(f"{name}: config digest", digest_of(record.config.encode()), record.config_digest)
        below = parent.diff_ids if parent else []
        same(f"{name}: layers of its parent", record.diff_ids[: len(below)], below)
        if not {layer.diff_id for layer in record.layers} - {None} <= set(record.diff_ids[len(below) :]):
            raise IntegrityError(f"{name}: it names layers that its image does not have")
        parent = record
    if parent is None:
        raise IntegrityError("there is none")
    same("build key", parent.key, release.build_key)
    same("stage and stack", (parent.stage, parent.stack), (release.stage, release.stack))
    same("image", parent.config_digest, release.image)
    return f"a chain of {len(records)} from {records[0].stage} to {release.stage}, which ends in this image"


def kept(evidence: Evidence) -> dict[str, str]:
    """Name -> SHA-256 (hex) of what sparkpin keeps the bytes of: all that no lock names."""
    rows = [(record.stage, row) for record in evidence.records for row in record.context]
    own = {f"{stage}: {row.path}": row.sha256 for stage, row in rows if not row.what.startswith("wheel ")}
    return {**evidence.release.inputs, **own}


def check_kept(evidence: Evidence) -> str:
    if evidence.read is None:
        raise Open("their bytes were not looked at")
    wanted = kept(evidence)
    for name, sha256 in wanted.items():
        if (data := evidence.read(sha256)) is None:
            raise IntegrityError(f"{name} (sha256={sha256}) is missing")
        same(f"{name}: sha256", hashlib.sha256(data).hexdigest(), sha256)
    return f"{len(wanted)} of {len(wanted)} hashes agree with the kept bytes"


def lock_bytes(evidence: Evidence, path: str) -> bytes:
    sha256 = evidence.release.inputs.get(path)
    data = evidence.read(sha256) if evidence.read and sha256 else None
    if data is None:
        raise Open(f"{path} was not looked at")
    same(f"{path}: sha256", hashlib.sha256(data).hexdigest(), sha256)
    return data


def check_locks(evidence: Evidence) -> str:
    """The Debian packages and wheels of the builds are those that the release's own lock names."""
    path = f"pins/stacks/{evidence.release.stack}.lock"
    try:
        lock = StackLock.model_validate_json(lock_bytes(evidence, path))
    except ValidationError as error:
        raise IntegrityError(f"{path} cannot be read: {error}") from None
    locked = {("deb", file.name, file.version, file.sha256) for file in lock.debs}
    locked |= {("wheel", normal(file.name), file.version, file.sha256) for file in (*lock.wheels, *lock.underlay)}
    found = {
        (material.kind, material.name, material.version, material.sha256)
        for material in recorded(evidence.release, evidence.records)
        if material.kind in ("deb", "wheel")
    }
    if strange := sorted(found - locked):
        raise IntegrityError(f"{path} does not name {' '.join(strange[0])}")
    return f"{len(found)} packages and wheels of the builds as in {path}"


def check_statement(evidence: Evidence) -> list[Check]:
    """The statement, its inputs and the SBOM. Without a statement an SBOM proves nothing."""
    from sparkpin.evidence import provenance  # slow to import, and every task imports this module

    data = evidence.files.get(STATEMENT)
    if data is None:
        return [Check("statement", "open", "there is none (invoke attest TAG makes it)")]
    try:
        claims = provenance.read_statement(data)
        models = claimed_models(evidence, claims)
        materials = materials_of(evidence.release, evidence.records, models or ModelInputs((), True))
    except IntegrityError as error:
        return [Check("statement", "wrong", error.message)]
    sbom = evidence.files.get(SBOM, b"")
    wanted = provenance.claims_of(evidence.release, evidence.records, materials, sbom)
    return [
        checked("statement", lambda: compare_claims(claims, wanted)),
        checked("inputs", lambda: compare_inputs(claims, wanted, compared=models is not None)),
        checked("SBOM", lambda: check_sbom(evidence.release, sbom, claims)),
    ]


def claimed_models(evidence: Evidence, claims: Claims) -> ModelInputs | None:
    """The locked repositories of which the statement names a file; None when the lock was not looked at.

    Which repositories the checkpoint steps need, the checkpoint key tells, and `invoke checkpoint` checks it.
    """
    path = f"pins/models/{evidence.release.model}.lock"
    try:
        lock = ModelLock.model_validate_json(lock_bytes(evidence, path))
    except Open:
        return None
    except ValidationError as error:
        raise IntegrityError(f"{path} cannot be read: {error}") from None
    used = {name.partition("@")[0] for name in claims.dependencies if name.startswith(MODEL)}
    repositories = tuple(repository for repository in lock.repositories.values() if MODEL + repository.repo in used)
    if not repositories:
        raise IntegrityError(f"it names no model of {path}")
    return ModelInputs(repositories, generated=True)


def compare_claims(claims: Claims, wanted: Claims) -> str:
    same("build type", claims.build_type, wanted.build_type)
    for name in ("subjects", "external", "internal", "finished"):
        compare(name, getattr(claims, name), getattr(wanted, name))
    compare("byproducts", {**claims.byproducts, SBOM: ""}, {**wanted.byproducts, SBOM: ""})
    count = len(claims.dependencies)
    return f"names this image, its {len(claims.subjects) - 1} layers, command, keys and {count} inputs"


def compare(name: str, seen: Any, wanted: Any) -> None:
    """The first difference, of mappings the first key that differs."""
    if isinstance(seen, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*seen, *wanted}):
            same(f"{name}: {key}", seen.get(key, "nothing"), wanted.get(key, "nothing"))
    else:
        same(name, seen, wanted)


def compare_inputs(claims: Claims, wanted: Claims, *, compared: bool) -> str:
    seen = dict(claims.dependencies)
    if not compared:
        seen = {name: sha256 for name, sha256 in seen.items() if not name.startswith(MODEL)}
    compare("inputs", seen, wanted.dependencies)
    left = len(claims.dependencies) - len(seen)
    return f"{len(seen)} of {len(claims.dependencies)} hashes agree with the records and the locks" + (
        f"; {left} of the model were not looked at" if left else ""
    )


def check_sbom(release: Release, data: bytes, claims: Claims) -> str:
    """It is the one that the statement means, is about this image, and has the statement's packages and model files."""
    if not data:
        raise IntegrityError("there is none, and the statement names one")
    same("sha256", hashlib.sha256(data).hexdigest(), claims.byproducts.get(SBOM))
    try:
        value: Any = json.loads(data)
        root = value["metadata"]["component"]
        same("its image", [row["content"] for row in root["hashes"]], [release.image.removeprefix("sha256:")])
        parts = [part for row in value["components"] for part in [row, *row.get("components", [])]]
        hashes = {part["bom-ref"]: part["hashes"][0]["content"] for part in parts if "hashes" in part}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError) as error:
        raise IntegrityError(f"it cannot be read: {error!r}") from None
    wanted = {name: sha256 for name, sha256 in claims.dependencies.items() if name.partition(" ")[0] in LISTED}
    compare("components", hashes, wanted)
    return f"of this statement; its {len(hashes)} components have the hashes that the statement gives them"


def check_signature(evidence: Evidence, keys: signing.Keys) -> Check:
    statement, signature = evidence.files.get(STATEMENT), evidence.files.get(SIGNATURE)
    if signature is None:
        return Check("signature", "open", "not signed")
    if statement is None:
        return Check("signature", "wrong", "there is no statement that it could be over")
    try:
        signer = signing.verify(statement, signature, keys.allowed)
    except IntegrityError as error:
        return Check("signature", "wrong", error.message)
    except HostError as error:
        return Check("signature", "open", f"not looked at: {error.message}")
    if signer.principal is None:
        trust = f"whose that is nobody says: no {signing.config_folder() / 'allowed_signers'}"
        return Check("signature", "open", f"over this statement, by {signer}; {trust}")
    return Check("signature", "ok", f"over this statement, by {signer}")
