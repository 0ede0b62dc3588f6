"""What a release's evidence proves: records, statement, SBOM, signature and image compared with each other.

`check_evidence` is pure but for a temporary folder and asking ssh-keygen; it serves releases of this machine and
bundles from elsewhere, whose every byte may be hostile.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name
from pydantic import ValidationError

from sparkpin.build.consistent import check_image, check_key, check_layers, check_records, same
from sparkpin.build.record import LOCKED, BuildRecord
from sparkpin.core.errors import HostError, IntegrityError, SparkpinError
from sparkpin.core.files import disk_errors
from sparkpin.core.terminal import count, printable
from sparkpin.distribute import signing
from sparkpin.distribute.materials import LISTED, materials_of, model_inputs, recorded
from sparkpin.pins.schema import StackLock
from sparkpin.releases.record import SBOM as SBOM
from sparkpin.releases.record import SIGNATURE as SIGNATURE
from sparkpin.releases.record import STATEMENT as STATEMENT
from sparkpin.releases.record import Release

OF_RECORDS = ("image", "layers", "release key", "build records", "kept inputs", "locks")
OF_STATEMENT = ("statement", "SBOM", "signature")
NAMES = OF_RECORDS + OF_STATEMENT  # of the checks that every release gets, in their order
LAYERS, PACKAGES = "the layers' bytes", "fetched packages"
DEEP = (PACKAGES, LAYERS)
SHOWN, DIFFERENT = 200, 8  # characters and lines of a difference
FINISHED, UNSIGNED = "finished checkpoint", "not in the statement"  # of a bundle
NOT_SO = "is not what its evidence says"
MARKS = {"ok": "ok", "wrong": "WRONG", "open": "--"}
PINS = re.compile(r"(?:pins/models|pins/stacks|stages|dockerfiles)/[^/]+|mods/[^/]+/pyproject\.toml")
"""What `manifests` reads of a release's project."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. result "open": there is nothing to hold it against, or it is not there.

    next_step: what mends it, "" where nothing is known that is only for this check; missed: what an open one leaves
    unchecked, where its name does not say it; is_trust: the bytes hold, and what lacks is a signature by
    somebody whom this machine trusts.
    """

    what: str
    result: Literal["ok", "wrong", "open"]
    detail: str
    next_step: str = ""
    missed: str = ""
    is_trust: bool = False

    @property
    def line(self) -> str:
        """What strangers say may stand in it, so it is one line and does nothing to a terminal."""
        return printable(f"{MARKS[self.result]:5}  {self.what}: {self.detail}")


@dataclass(frozen=True)
class Claimed:
    """What is said about a release, before any of it is believed."""

    release: Release
    records: tuple[BuildRecord, ...]  # of the whole chain, first stage first, as read from their files
    files: Mapping[str, bytes] = field(default_factory=dict)  # name of the evidence -> bytes, as far as it is there
    config: bytes | None = None  # the image's configuration as it would be loaded, None when there is no image
    read: Callable[[str], bytes | None] = lambda sha256: None  # gives the kept input of a SHA-256, or None
    whole: frozenset[str] = frozenset()  # SHA-256 of kept inputs that were hashed before
    attested: bool = False  # whoever made the release left a statement, so that its absence is wrong


def check_evidence(evidence: Claimed, keys: signing.Keys | None = None) -> list[Check]:
    """Every check, in the order in which a person reads them. keys: those that are configured, when None."""
    checks = [
        checked("image", lambda: check_config(evidence)),
        checked("layers", lambda: check_layers(evidence.release, evidence.records)),
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
        return Check(what, "wrong", error.message, error.next_step)


def require(
    checks: Sequence[Check],
    what: str,
    *,
    next_step: str = "do not use it; ask for it where it comes from",
    told: bool = False,
) -> None:
    """IntegrityError when one of the checks is wrong; UntrustedError where no more than a trusted signature lacks.

    what: the release or the bundle; next_step: for a check that knows none of its own; told: the checks' lines stand
    above already, so that names are enough.
    """
    wrong = [check for check in checks if check.result == "wrong"]
    if not wrong:
        return
    why = [check.what if told else printable(f"{check.what}: {check.detail}") for check in wrong]
    is_trust = all(check.is_trust for check in wrong)
    fault = "holds, but lacks a trusted signature" if is_trust else NOT_SO
    kind = signing.UntrustedError if is_trust else IntegrityError
    steps = dict.fromkeys(check.next_step or next_step for check in wrong)
    once = [step for step in steps if not any(step != other and step in other for other in steps)]
    raise kind(f"{what} {fault}: {(', ' if told else '; ').join(why)}", next_step="; ".join(once))


def demanded(check: Check, sign: str = "ask for a bundle that its maker has signed") -> Check:
    """The check where a release has to be signed by somebody who is trusted. sign: how an unsigned one is signed."""
    if check.what == FINISHED:
        step = "on the machine that exported it: the same export --with-store instead of --with-checkpoint"
        detail = f"{check.detail}, so no signature is over it"
        return replace(check, result="wrong", detail=detail, next_step=step, is_trust=True)
    if check.what != "signature" or check.result != "open":
        return check
    detail = f"{check.detail}; the signature of an allowed signer is required"
    return replace(check, result="wrong", detail=detail, next_step=check.next_step or sign, is_trust=True)


def conclusion(checks: Sequence[Check]) -> str:
    """One sentence: how it came out, and what was not checked. The checks' own lines stand above it."""
    done, wrong = ([check.what for check in checks if check.result == way] for way in ("ok", "wrong"))
    missed = [check.missed or check.what for check in checks if check.result == "open"]
    looked = {check.what for check in checks}
    missed += [name for name in NAMES if name not in looked]
    missed += [f"{name} (--deep)" for name in DEEP if name not in looked]
    missed.append("what the smoke tests found (invoke smoke repeats them)")
    hold = f"{count(len(done), 'check')} {'holds' if len(done) == 1 else 'hold'}"
    fault = f"WRONG: {', '.join(wrong)}" if wrong else "none is wrong"
    return f"{hold}; {fault}; not checked: {', '.join(missed)}."


def check_config(evidence: Claimed) -> str:
    if evidence.config is None:
        raise Open("the configuration was not looked at")
    return check_image(evidence.release, evidence.config)


def kept(evidence: Claimed) -> dict[str, str]:
    """Name -> SHA-256 (hex) of what sparkpin keeps the bytes of: all that no lock names."""
    rows = [(record.stage, row) for record in evidence.records for row in record.context]
    own = {f"{stage}: {row.path}": row.sha256 for stage, row in rows if not row.what.startswith(LOCKED)}
    return {**evidence.release.inputs, **own}


def check_kept(evidence: Claimed) -> str:
    wanted = kept(evidence)
    for name, sha256 in wanted.items():
        if sha256 in evidence.whole:
            continue
        if (data := evidence.read(sha256)) is None:
            raise IntegrityError(f"{name} (sha256={sha256}) is missing")
        same(f"{name}: sha256", hashlib.sha256(data).hexdigest(), sha256)
    return f"{len(wanted)} of {len(wanted)} hashes agree with the kept bytes"


def input_bytes(evidence: Claimed, path: str) -> bytes:
    """Of a project file."""
    sha256 = evidence.release.inputs.get(path)
    data = evidence.read(sha256) if sha256 else None
    if data is None:
        raise IntegrityError(f"{path} is missing")
    same(f"{path}: sha256", hashlib.sha256(data).hexdigest(), sha256)
    return data


def check_locks(evidence: Claimed) -> str:
    """The Debian packages and wheels of the builds are those that the release's own lock names."""
    path = f"pins/stacks/{evidence.release.stack}.lock"
    try:
        lock = StackLock.model_validate_json(input_bytes(evidence, path))
    except ValidationError as error:
        raise IntegrityError(f"{path} cannot be read: {error.errors()[0]['msg']}") from None
    locked = {("deb", file.name, file.version, file.sha256) for file in lock.debs}
    locked |= {("wheel", canonicalize_name(file.name), file.version, file.sha256) for file in lock.wheels}
    found = {
        (material.kind, material.name, material.version, material.sha256)
        for material in recorded(evidence.release, evidence.records)
        if material.locked
    }
    if strange := sorted(found - locked):
        raise IntegrityError(f"{path} does not name {' '.join(strange[0])}")
    return f"{len(found)} packages and wheels of the builds as in {path}"


def check_statement(evidence: Claimed) -> list[Check]:
    """The statement and the SBOM. Without a statement an SBOM proves nothing.

    Both follow from records and locks alone, so they have to be, to the byte, what is made of these now.
    """
    from sparkpin.distribute import provenance, sbom  # slow to import, and every task imports this module

    data, bill = evidence.files.get(STATEMENT), evidence.files.get(SBOM)
    if data is None:
        step = f"invoke verify {evidence.release.tag} --sign makes it again, of what the records say"
        if evidence.attested:
            return [Check("statement", "wrong", "there is none, and whoever made the release left one", step)]
        return [Check("statement", "open", "there is none: the bundle came without one")]
    try:
        with pins_of(evidence.release, lambda path: input_bytes(evidence, path)) as project:
            models = model_inputs(project, evidence.release)
        materials = materials_of(evidence.release, evidence.records, models)
        made_bill = sbom.make_sbom(evidence.release, materials)
        made = provenance.make_statement(evidence.release, evidence.records, materials, made_bill)
    except IntegrityError as error:
        return [Check("statement", "wrong", error.message, error.next_step)]
    except (ValueError, OverflowError) as error:
        return [Check("statement", "wrong", f"none can be made of what the records say: {error}")]
    listed = sum(material.kind in LISTED for material in materials)
    return [
        checked("statement", lambda: same_text(data, made, f"names {len(materials)} inputs with their hashes")),
        checked("SBOM", lambda: same_text(bill, made_bill, f"names {listed} components with their hashes")),
    ]


def same_text(got: bytes | None, made: bytes, detail: str) -> str:
    """IntegrityError that shows the first lines in which two texts differ."""
    if got is None:
        raise IntegrityError("there is none, and the statement names one")
    if got != made:
        expected, found = (text.decode(errors="replace").splitlines() for text in (made, got))
        lines = difflib.unified_diff(expected, found, "made of the records", "here", n=0, lineterm="")
        shown = " ".join(line.strip()[:SHOWN] for line in itertools.islice(lines, DIFFERENT))
        raise IntegrityError(f"it differs from what is made of the records: {shown}")
    return detail


def pin_names(release: Release) -> list[str]:
    return [name for name in release.inputs if PINS.fullmatch(name)]


@contextlib.contextmanager
def pins_of(release: Release, read: Callable[[str], bytes]) -> Iterator[Path]:
    """A temporary folder with these files. read: gives the bytes of one.

    Their names must be such that they lie in it (`names.is_plain`). IntegrityError for a pin that `manifests` does not
    take in the body, DiskError.
    """
    with tempfile.TemporaryDirectory(prefix="sparkpin-pins-") as folder:
        for name in pin_names(release):
            data, target = read(name), Path(folder, name)
            with disk_errors(Path(folder)):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        try:
            yield Path(folder)
        except (SparkpinError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            why = str(getattr(error, "message", error)).replace(f"{folder}/", "")
            raise IntegrityError(f"the pins of {release.tag}: {why}") from None


def check_signature(evidence: Claimed, keys: signing.Keys) -> Check:
    statement, signature = evidence.files.get(STATEMENT), evidence.files.get(SIGNATURE)
    if signature is None:
        return Check("signature", "open", "not signed")
    if statement is None:
        return Check("signature", "wrong", "there is no statement that it could be over")
    try:
        signer = signing.verify(statement, signature, keys.allowed)
    except IntegrityError as error:
        is_trust = isinstance(error, signing.UntrustedError)
        own = "" if is_trust else f"; of a release of your own: invoke verify {evidence.release.tag} --sign"
        return Check("signature", "wrong", error.message, f"{error.next_step}{own}", is_trust=is_trust)
    except HostError as error:
        return Check("signature", "open", f"not looked at: {error.message}", error.next_step)
    if signer.principal is None:
        where = signing.places(signing.ALLOWED_SIGNERS)
        said = f"over this statement, by {signer}; whose that is nobody says: no {where}"
        return Check("signature", "open", said, signing.how_to_trust(where), missed="whose signature it is")
    return Check("signature", "ok", f"over this statement, by {signer}")
