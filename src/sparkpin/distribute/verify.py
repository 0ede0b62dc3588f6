"""What a release's evidence proves: records, statement, SBOM, signature and image compared with each other.

`check_evidence` serves releases of this machine and bundles from elsewhere, whose every byte may be hostile; it asks
nobody but ssh-keygen. What follows it asks this machine's engine and the project's published digests.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from sparkpin.build.consistent import check_image, check_key, check_layers, check_records, has_statement, same
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core.errors import BuildError, HostError, IntegrityError, SparkpinError
from sparkpin.core.files import disk_errors, sha256_of
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, size
from sparkpin.distribute import digests, layout, signing
from sparkpin.distribute.materials import input_parts, model_inputs, recorded
from sparkpin.host.engine import Engine
from sparkpin.image.archive import Slice
from sparkpin.pins.reading import LOCK_LIMIT
from sparkpin.pins.schema import StackLock
from sparkpin.releases.kept_inputs import lay_out
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Release, Releases, to_json

OF_RECORDS = ("image", "layers", "release key", "build records", "kept inputs", "locks")
OF_STATEMENT = ("statement", "SBOM", "signature")
NAMES = OF_RECORDS + OF_STATEMENT  # of the checks that every release gets, in their order
LAYERS = "the layers' bytes"  # of a bundle
UNSIGNED = "what no statement covers"  # of a bundle
MARKS = {"ok": "ok", "wrong": "WRONG", "open": "--"}
PINS = re.compile(r"(?:pins/models|pins/stacks|stages|dockerfiles)/[^/]+|mods/[^/]+/pyproject\.toml")
"""What `manifests` reads of a release's project."""
PINS_LIMIT, PINS_ALLOWED = 32 << 20, 1000  # bytes and number of pins: a name costs no bytes when two share a hash


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. result "open": there is nothing to hold it against, or it is not there.

    next_step: what mends it, "" where nothing is known that is only for this check; is_trust: the bytes hold, and what
    lacks is a signature by somebody whom this machine trusts.
    """

    what: str
    result: Literal["ok", "wrong", "open"]
    detail: str
    next_step: str = ""
    is_trust: bool = False

    @property
    def line(self) -> str:
        """What strangers say may stand in it, so it is one line and does nothing to a terminal."""
        return printable(f"{MARKS[self.result]:5}  {self.what}: {self.detail}")


@dataclass(frozen=True)
class Claimed:
    """What is said about a release, before any of it is believed.

    records: of the whole chain, first stage first; data: title of a row, as in a layout -> bytes, of what is there;
    attested: whoever made the release left a statement, so that its absence is wrong.
    """

    release: Release
    records: tuple[BuildRecord, ...]
    data: Mapping[str, Slice]
    attested: bool = False

    def file(self, title: str) -> bytes | None:
        return layout.small(self.data, title) if title in self.data else None

    def input(self, name: str, sha256: str | None) -> Slice:
        """A kept input, whose bytes were hashed. IntegrityError."""
        found = self.data.get(f"{layout.INPUTS}{sha256}")
        if found is None:
            raise IntegrityError(f"{name} (sha256={sha256}) is missing")
        same(f"{name}: sha256", sha256_of(found), sha256)
        found.seek(0)
        return found

    def project_file(self, path: str) -> bytes:
        """Measured before a parser sees it."""
        found = self.input(path, self.release.inputs.get(path))
        if found.size > LOCK_LIMIT:
            raise IntegrityError(f"{path} has {found.size:,} bytes, expected {LOCK_LIMIT:,} or less")
        return found.read()


def check_evidence(evidence: Claimed, keys: signing.Keys | None = None) -> list[Check]:
    """Every check, in the order in which a person reads them. keys: those that are configured, when None."""
    checks = [
        checked("image", lambda: check_image(evidence.release, evidence.records[-1].config.encode())),
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


def checked(what: str, check: Callable[[], str]) -> Check:
    try:
        return Check(what, "ok", check())
    except (IntegrityError, BuildError) as error:
        return Check(what, "wrong", error.message, error.next_step)
    except (ValueError, OverflowError) as error:  # by what reads or writes what a stranger said
        return Check(what, "wrong", f"it cannot be read, or nothing can be made of it: {error}")


def require(
    checks: Sequence[Check], what: str, *, next_step: str = "do not use it; ask for it where it comes from"
) -> None:
    """IntegrityError when one of the checks is wrong; UntrustedError where no more than a trusted signature lacks.

    what: the release or the bundle; next_step: where a check knows none of its own.
    """
    wrong = [check for check in checks if check.result == "wrong"]
    if not wrong:
        return
    why = "; ".join(printable(f"{check.what}: {check.detail}") for check in wrong)
    step = wrong[0].next_step if all(check.next_step for check in wrong) else next_step
    if all(check.is_trust for check in wrong):
        raise signing.UntrustedError(f"{what} holds, but lacks a trusted signature: {why}", next_step=step)
    raise IntegrityError(f"{what} is not what its evidence says: {why}", next_step=step)


def demanded(check: Check, sign: str = "ask for a bundle that its maker has signed") -> Check:
    """The check where a release has to be signed by somebody who is trusted. sign: how an unsigned one is signed."""
    if check.what != "signature" or check.result != "open":
        return check
    detail = f"{check.detail}; the signature of an allowed signer is required"
    return replace(check, result="wrong", detail=detail, next_step=check.next_step or sign, is_trust=True)


def conclusion(checks: Sequence[Check]) -> str:
    """One sentence: how it came out, and what was not checked. The checks' own lines stand above it."""
    done, wrong, missed = ([one.what for one in checks if one.result == way] for way in ("ok", "wrong", "open"))
    looked = {check.what for check in checks}
    missed += [name for name in NAMES if name not in looked]
    missed += [] if LAYERS in looked else [f"{LAYERS} (invoke export TAG FILE hashes them)"]
    missed.append("what the smoke tests found (invoke smoke repeats them)")
    fault = f"WRONG: {', '.join(wrong)}" if wrong else "none is wrong"
    return f"{count(len(done), 'check')} hold; {fault}; not checked: {', '.join(missed)}."


def check_kept(evidence: Claimed) -> str:
    """All that no lock names: sparkpin keeps its bytes."""
    parts = input_parts(evidence.release, evidence.records)
    for part in parts:
        evidence.input(part.what, part.sha256)
    return f"{count(len(parts), 'file')} with the recorded hashes"


def check_locks(evidence: Claimed) -> str:
    """The Debian packages and wheels of the builds are those that the release's own lock names."""
    path = f"pins/stacks/{evidence.release.stack}.lock"
    lock = StackLock.model_validate_json(evidence.project_file(path))
    locked = {("deb", file.name, file.version, file.sha256) for file in lock.debs}
    locked |= {("wheel", canonicalize_name(file.name), file.version, file.sha256) for file in lock.wheels}
    used = [material for material in recorded(evidence.release, evidence.records) if material.locked]
    for one in used:
        if (one.kind, one.name, one.version, one.sha256) not in locked:
            raise IntegrityError(f"{path} does not name {one.kind} {one.name} {one.version} {one.sha256}")
    return f"{len(used)} packages and wheels of the builds as in {path}"


def check_statement(evidence: Claimed) -> list[Check]:
    """The statement and the SBOM. Without a statement an SBOM proves nothing.

    Both follow from records and locks alone, so they have to be, to the byte, what is made of these now.
    """
    from sparkpin.distribute.statement import Attested  # slow to import, and every task imports this module

    data = evidence.file(STATEMENT)
    if data is None:
        step = f"invoke verify {evidence.release.tag} --sign makes it again, of what the records say"
        if evidence.attested:
            return [Check("statement", "wrong", "there is none, and whoever made the release left one", step)]
        return [Check("statement", "open", "there is none: the bundle came without one")]
    attested = list[Attested]()

    def statement() -> str:
        with pins_of(evidence.release, evidence.project_file) as project:
            models = model_inputs(project, evidence.release)
        attested.append(Attested.of(evidence.release, evidence.records, models))
        return same_text(data, attested[0].statement)

    checks = [checked("statement", statement)]
    if attested:
        checks.append(checked("SBOM", lambda: same_text(evidence.file(SBOM), attested[0].sbom)))
    return checks


def same_text(got: bytes | None, now: bytes) -> str:
    """IntegrityError that shows the first line in which a file differs from what is made of the records."""
    if got is None:
        raise IntegrityError("there is none, and the statement names one")
    for number, (found, expected) in enumerate(zip_longest(got.split(b"\n"), now.split(b"\n")), 1):
        same(f"line {number}", found, expected)
    return f"{size(len(got))}, to the byte what follows from the records"


@contextlib.contextmanager
def pins_of(release: Release, read: Callable[[str], bytes]) -> Iterator[Path]:
    """A temporary folder with the files that `manifests` reads. read: gives the bytes of one.

    Their names must be such that they lie in it (`names.is_plain`). IntegrityError for too many of them, and for a pin
    that `manifests` does not take in the body, DiskError.
    """
    names, pins = [name for name in release.inputs if PINS.fullmatch(name)], dict[str, bytes]()
    with tempfile.TemporaryDirectory(prefix="sparkpin-pins-") as folder:
        for name in names:
            pins[name] = read(name)
            total = sum(map(len, pins.values()))
            if len(names) > PINS_ALLOWED or total > PINS_LIMIT:
                raise IntegrityError(f"{release.tag} has {len(names):,} pins of {total:,} bytes: too many to be read")
        with disk_errors(Path(folder)):
            lay_out(Path(folder), pins, ())
        try:
            yield Path(folder)
        except (SparkpinError, *layout.MISFITS) as error:
            why = str(getattr(error, "message", error)).replace(f"{folder}/", "")
            raise IntegrityError(f"the pins of {release.tag}: {why}") from None


def check_signature(evidence: Claimed, keys: signing.Keys) -> Check:
    statement, signature = evidence.file(STATEMENT), evidence.file(SIGNATURE)
    if signature is None:
        return Check("signature", "open", "not signed")
    if statement is None:
        return Check("signature", "wrong", "there is no statement that it could be over")
    try:
        signer = signing.verify(statement, signature, keys.allowed)
    except IntegrityError as error:
        is_trust = isinstance(error, signing.UntrustedError)
        return Check("signature", "wrong", error.message, error.next_step, is_trust=is_trust)
    except HostError as error:
        return Check("signature", "open", f"not looked at: {error.message}", error.next_step)
    if signer.principal is None:
        where = signing.places(signing.ALLOWED_SIGNERS)
        result = f"over this statement, by {signer}; nothing says whose key it is: no {where}"
        return Check("signature", "open", result, signing.how_to_trust(where))
    return Check("signature", "ok", f"over this statement, by {signer}")


def evidence_of(paths: Paths, release: Release) -> Claimed:
    """Of this machine. The record is as it was built: what this machine made of it (current, passed) is its own
    business. IntegrityError when a build record is gone or damaged."""
    records, folder = records_of(paths, release), Releases(paths).evidence(release)
    small = {layout.RELEASE: layout.as_json(to_json(replace(release, state="built", smoke=None)))}
    for record in records:
        small[f"{layout.IMAGES}{record.key}.json"] = layout.as_json(record.model_dump(mode="json", by_alias=True))
    places = {name: folder / name for name in layout.EVIDENCE}
    places |= {part.title: part.place(paths) for part in input_parts(release, records)}
    data = {title: layout.slice_of(content) for title, content in small.items()}
    data |= {title: layout.WholeFile(path) for title, path in places.items() if path.is_file()}
    return Claimed(release, records, data, has_statement(paths, release))


def check_published(project: Path, release: Release, records: Sequence[BuildRecord], allowed: Path | None) -> Check:
    """The release's digest against the one that the project publishes, and against what builders got."""
    found = digests.confirmations(project, release.build_key, release.image, allowed)
    tail = "".join([f"; {found.line}", *(f"; not counted: {why}" for why in found.uncounted)])
    step = f"invoke reproduce {release.tag}"
    if found.others:
        return Check("published", "wrong", f"{', '.join(found.others)} got another image of these pins{tail}", step)
    compared = digests.compare(digests.load(project, release.stack), records, release.image, release.diff_ids)
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
