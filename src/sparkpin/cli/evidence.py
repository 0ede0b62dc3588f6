"""`invoke verify`, with and without --sign."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.cli.tasks import task
from sparkpin.core import locks
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show
from sparkpin.distribute import signing
from sparkpin.distribute import verify as verifying
from sparkpin.distribute.bundle import open_bundle
from sparkpin.host.engine import engine_of
from sparkpin.image.oci import INDEX
from sparkpin.releases import current
from sparkpin.releases.record import Release, Releases


def make_evidence(paths: Paths, tag: str) -> None:
    """Make a release's SBOM, statement and, with a key, signature again."""
    with locks.claim(paths):
        release, keys = Releases(paths).get(tag), signing.Keys.from_env()
        require_consistent(paths, release)  # a signature says that this is what was built
        signer = signing.attest(paths, release, keys)
    why = "" if keys.signing else f" (not signed now: no key in {signing.places(signing.SIGNING_KEY)})"
    show(f"made again in {Releases(paths).evidence(release)}; signed by: {signer or 'nobody'}{why}")


def step_of(wrong: Sequence[str], paths: Paths, release: Release) -> str:
    """What mends a release. wrong: names of checks. Neither --sign nor a rebuild mends a record: both go by it."""
    if {*wrong} & {*verifying.OF_RECORDS}:
        record = Releases(paths).record_path(release)
        return f"restore {record} from a backup, or invoke import FILE (a bundle of the release)"
    if {*wrong} <= {*verifying.OF_STATEMENT}:
        return f"invoke verify {release.tag} --sign"
    return current.how_to_rebuild(release)


@task("verify and distribute")
def verify(
    subject: Annotated[str, "tag of a release, or the file of a bundle", "TAG|FILE"],
    *,
    sign: Annotated[bool, "make SBOM, statement and, with a key, signature again first"] = False,
    require_signature: Annotated[bool, "fail unless a signer in allowed_signers has signed it"] = False,
) -> None:
    """Check a release or a bundle, and sign a release.

    invoke verify v2 --require-signature
    """
    if Path(subject).is_file() or (Path(subject) / INDEX).is_file():
        if sign:
            raise InputError(f"{subject}: a bundle is signed where it was made", next_step="leave --sign out")
        with open_bundle(Path(subject)) as opened:
            checks = list(opened.checks)
        how = "get the bundle again from where it was exported"
        sign_step = "where it was exported: name a key in SPARKPIN_SIGNING_KEY, invoke verify TAG --sign, export again"
    else:
        paths = Paths.from_env()
        if sign:
            make_evidence(paths, subject)
        release = Releases(paths).get(subject)
        evidence, allowed = verifying.evidence_of(paths, release), signing.Keys.from_env().allowed
        checks = [*verifying.check_evidence(evidence), verifying.check_loaded(engine_of(paths), release)]
        checks.append(verifying.check_published(paths.project, release, evidence.records, allowed))
        how = step_of([check.what for check in checks if check.result == "wrong"], paths, release)
        sign_step = f"with a key in {signing.places(signing.SIGNING_KEY)}: invoke verify {release.tag} --sign"
    if require_signature:
        checks = [verifying.demanded(check, sign_step) for check in checks]
    for check in checks:
        show(check.line)
    show(verifying.conclusion(checks))
    verifying.require(checks, subject, next_step=how)
