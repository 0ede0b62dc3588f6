"""`invoke verify`, with and without --sign."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.cli.tasks import task
from sparkpin.core import locks
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.distribute import attest as attesting
from sparkpin.distribute import signing
from sparkpin.host.engine import engine_of
from sparkpin.releases import current
from sparkpin.releases.record import Release, Releases

if TYPE_CHECKING:
    from sparkpin.distribute.verify import Check


def make_evidence(tag: str) -> None:
    """Make a release's SBOM, statement and, with a key, signature again."""
    paths = Paths.from_env()
    with locks.claim(paths):
        release, keys = Releases(paths).get(tag), signing.Keys.from_env()
        require_consistent(paths, release)  # a signature says that this is what was built
        made = attesting.attest(paths, release, keys)
    for path in made.files:
        show(str(path))
    if made.removed:
        show(attesting.REMOVED.format(release.tag))
    if keys.signing:
        show(f"signed with {keys.signing}: {made.signer}")
    else:
        stays = f"; the signature from before stays: {made.signer}" if made.signer else ""
        show(f"not signed now: no key in {signing.places(signing.SIGNING_KEY)}{stays}")


def step_of(wrong: Sequence[str], paths: Paths, release: Release) -> str:
    """What mends a release. wrong: names of checks. Neither --sign nor a rebuild mends a record: both go by it."""
    from sparkpin.distribute import verify as verifying

    if {*wrong} & {*verifying.OF_RECORDS}:
        record = Releases(paths).record_path(release)
        return (
            f"restore {record} from a backup, or invoke import FILE (a bundle of the release), or use another release"
        )
    if {*wrong} <= {*verifying.OF_STATEMENT}:
        return f"invoke verify {release.tag} --sign"
    return current.how_to_rebuild(release)


@task("prove and carry")
def verify(
    subject: Annotated[str, "tag of a release, or the file of a bundle", "TAG|FILE"],
    *,
    sign: Annotated[bool, "make SBOM, statement and, with a key, signature again first"] = False,
    deep: Annotated[bool, "read and hash every layer and fetched package, too"] = False,
    require_signature: Annotated[bool, "fail unless somebody whom allowed_signers names has signed it"] = False,
) -> None:
    """Check a release or a bundle, and sign a release."""
    from sparkpin.distribute import verify as verifying  # slow to import, and no other task needs it

    if Path(subject).is_file():
        if sign:
            step = "leave --sign out"
            raise InputError(f"{subject}: a bundle is signed where its release was made", next_step=step)
        checks, how = verify_file(Path(subject), deep=deep), "get the bundle again from where it was exported"
        sign_step = "where it was exported: name a key in SPARKPIN_SIGNING_KEY, invoke verify TAG --sign, export again"
    else:
        if sign:
            make_evidence(subject)
        paths = Paths.from_env()
        try:
            release = Releases(paths).get(subject)
        except InputError as error:
            raise InputError(f"{error.message}, and no file of that name", next_step=error.next_step) from None
        checks = verify_release(paths, release, deep=deep)
        how = step_of([check.what for check in checks if check.result == "wrong"], paths, release)
        key = "" if signing.Keys.from_env().signing else f"name a key in {signing.places(signing.SIGNING_KEY)}; then "
        sign_step = f"{key}invoke verify {release.tag} --sign"
    if require_signature:
        checks = [verifying.demanded(check, sign_step) for check in checks]
    for check in checks:
        show(check.line)
    show(verifying.conclusion(checks))
    verifying.require(checks, subject, next_step=how, told=True)


def verify_file(path: Path, *, deep: bool) -> list[Check]:
    from sparkpin.distribute import bundle
    from sparkpin.distribute import verify as verifying

    if deep:
        say("--deep adds nothing for a bundle: all of it is read and hashed in any case")
    with bundle.open_bundle(path) as opened:
        checks = [verifying.Check("bundle", "ok", f"{len(opened.data)} rows, each of its size and hash")]
        checks += opened.checks
        detail = "in the bundle, each with its hash" if opened.has_store else "not in the bundle"
        checks.append(verifying.Check(verifying.PACKAGES, "ok" if opened.has_store else "open", detail))
        absent = [] if opened.layers is not None else [verifying.Check(verifying.LAYERS, "open", "not in the bundle")]
        return [*checks, *absent]


def verify_release(paths: Paths, release: Release, *, deep: bool) -> list[Check]:
    from sparkpin.distribute import imagecheck
    from sparkpin.distribute import verify as verifying

    engine, evidence = engine_of(paths), imagecheck.evidence_of(paths, release)
    checks = [*verifying.check_evidence(evidence), imagecheck.check_loaded(engine, release)]
    allowed = signing.Keys.from_env().allowed
    checks.append(imagecheck.check_published(paths.project, release, evidence.records, allowed))
    if deep:
        checks.append(imagecheck.check_fetched(paths, release, evidence.records))
        checks.append(imagecheck.check_saved(paths, engine, release))
    return checks
