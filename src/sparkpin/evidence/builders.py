"""Builders' statements: who else got these bytes of these pins.

pins/digests/builders/<name>.json       build keys, each with the config digest and diff IDs that came out
pins/digests/builders/<name>.json.sig   the builder's signature over it, in a namespace of its own
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from sparkpin.build import digests
from sparkpin.build.origin import is_from_elsewhere
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core.errors import InputError, IntegrityError, SparkpinError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count
from sparkpin.evidence import signing
from sparkpin.pins.schema import Sha256, StrictModel
from sparkpin.releases.record import Digest, Release

if TYPE_CHECKING:  # slow to import, and a build makes no check
    from sparkpin.evidence.verify import Check

FOLDER = f"{digests.FOLDER}/builders"
NAMESPACE = "sparkpin-builder"  # who may say what came out need not be who may sign a release
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


class Came(StrictModel):
    """What came out of one build."""

    stack: str
    stage: str
    image: Digest
    layers: list[Digest]


class Statement(StrictModel):
    """images: by build key."""

    statement: Literal["built"] = "built"
    builder: str
    images: dict[Sha256, Came]


@dataclass(frozen=True)
class Confirmations:
    """What builders say of one build key. builders: those that are trusted and have the same image; others: those that
    are trusted and have another; uncounted: why a statement does not count.
    """

    builders: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        names = f" ({', '.join(self.builders)})" if self.builders else ""
        return f"confirmed by {count(len(self.builders), 'builder') if self.builders else 'no builder yet'}{names}"


def state(paths: Paths, release: Release, name: str, key: Path | None) -> Path:
    """Add a release and what it stands on to a builder's statement, and sign it. The statement's file."""
    if not NAME.fullmatch(name):
        expected = "up to 64 lower-case letters, digits, `.` and `-`, first a letter or a digit"
        raise InputError(f"--builder: got {name!r}, expected {expected}", next_step="choose a name: --builder my-lab")
    if key is None:
        step = f"name a key in {signing.places(signing.SIGNING_KEY)}"
        raise InputError("a builder's statement is signed, and there is no key", next_step=step)
    if is_from_elsewhere(paths, release):
        raise InputError(
            f"{release.tag}: a bundle brought it, and a builder states what was built here",
            next_step=f"invoke build --recipe {release.recipe} --stage {release.stage}",
        )
    path = paths.project / FOLDER / f"{name}.json"
    came = {
        record.key: Came(stack=record.stack, stage=record.stage, image=record.config_digest, layers=record.diff_ids)
        for record in records_of(paths, release)
    }
    old = read(path) if path.is_file() else None
    made = Statement(builder=name, images={**(old[0].images if old else {}), **came})
    data = json.dumps(made.model_dump(mode="json"), indent=1, sort_keys=True).encode() + b"\n"
    signature = signing.sign(data, key, NAMESPACE)
    if old and old[1] != signing.verify(data, signature, None, NAMESPACE):
        raise InputError(f"{path} is signed with another key: {old[1]}", next_step="choose another --builder name")
    for file, content in ((path, data), (signature_of(path), signature)):
        with atomic_file(file) as out:
            out.write(content)
    return path


def signature_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def read(path: Path, allowed: Path | None = None) -> tuple[Statement, signing.Signer]:
    """A statement that is signed, and by whom. IntegrityError for any other; UntrustedError as `signing.verify`."""
    step = f"get {path.name} and {path.name}.sig from its builder again, or remove both"
    try:
        data, signature = path.read_bytes(), signature_of(path).read_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"{path}: it is not signed", next_step=step) from None
    try:
        signer = signing.verify(data, signature, allowed, NAMESPACE)
    except signing.UntrustedError:
        raise
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", next_step=step) from None
    try:
        statement = Statement.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"{path}: no builder's statement: {error.errors()[0]['msg']}", next_step=step) from None
    if statement.builder != path.stem:
        raise IntegrityError(f"{path}: got builder {statement.builder!r}, expected {path.stem!r}", next_step=step)
    return statement, signer


def confirmations(project: Path, key: str, image: str, allowed: Path | None) -> Confirmations:
    """key: build key; image: the config digest that came out here. Who has several keys or files counts once."""
    builders, others, uncounted = dict[str, None](), dict[str, None](), list[str]()
    for path in sorted((project / FOLDER).glob("*.json")):
        try:
            statement, signer = read(path, allowed)
        except SparkpinError as error:
            uncounted.append(f"{path.name}: {error.message.removeprefix(f'{path}: ')}")
            continue
        if (came := statement.images.get(key)) is None:
            continue
        if signer.principal is None:
            uncounted.append(f"{path.name}: whose key it is nobody says: no {signing.places(signing.ALLOWED_SIGNERS)}")
        else:
            (builders if came.image == image else others)[signer.principal] = None
    return Confirmations(tuple(builders), tuple(others), tuple(uncounted))


def check_published(project: Path, release: Release, records: Sequence[BuildRecord], allowed: Path | None) -> Check:
    """For `verify`: the release's digest against the one that the project publishes, and against what builders got."""
    from sparkpin.evidence.verify import Check

    said = confirmations(project, release.build_key, release.image, allowed)
    tail = "".join([f"; {said.line}", *(f"; not counted: {why}" for why in said.uncounted)])
    step = f"invoke reproduce {release.tag}"
    if said.others:
        return Check("published", "wrong", f"{', '.join(said.others)} got another image of these pins{tail}", step)
    try:
        held = digests.hold(digests.load(project, release.stack), records, release.image, release.diff_ids)
    except SparkpinError as error:
        return Check("published", "wrong", error.message, error.next_step)
    if held and held.difference:
        return Check("published", "wrong", f"published is {held.wanted}; {held.difference}{tail}", step)
    what = f"the same bytes as {digests.file_of(release.stack)}" if held else "nothing is published for these pins"
    return Check("published", "ok" if held or said.builders else "open", f"{what}{tail}")
