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
from sparkpin.core.terminal import say, show
from sparkpin.distribute import attest as attesting
from sparkpin.distribute import signing
from sparkpin.host.engine import engine_of
from sparkpin.releases import current
from sparkpin.releases.record import Release, Releases


def make_evidence(tag: str, *, builder: str | None = None) -> None:
    """Make a release's SBOM, statement and, with a key, signature again. builder: add it to that builder's statement
    instead."""
    paths = Paths.from_env()
    with locks.claim(paths, say):
        release, keys = Releases(paths).get(tag), signing.Keys.from_env()
        require_consistent(paths, release)  # a signature says that this is what was built
        if builder is not None:
            from sparkpin.distribute import digests  # slow to import, for this alone

            path = digests.confirm(paths, release, builder, keys.signing)
            show(f"{path}: signed with {keys.signing}; to be counted, it and {path.name}.sig go into the project")
            return
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
        return f"restore {record} from a backup, or invoke import a bundle of the release, or use another release"
    if {*wrong} <= {*verifying.OF_STATEMENT}:
        return f"invoke verify {release.tag} --sign"
    return current.how_to_rebuild(release)


@task("prove and carry")
def verify(
    subject: Annotated[str, "tag of a release, or the file of a bundle", "TAG|FILE"],
    *,
    sign: Annotated[bool, "make SBOM, statement and, with a key, signature again first"] = False,
    builder: Annotated[
        str | None, "with --sign, instead: sign, under this name in pins/digests/builders, that it was built here"
    ] = None,
    deep: Annotated[bool, "read and hash every layer and fetched file, too"] = False,
    require_signature: Annotated[bool, "fail unless somebody whom allowed_signers names has signed it"] = False,
) -> None:
    """Check a release or a bundle, and sign a release."""
    from sparkpin.distribute import (
        form,
        imagecheck,  # slow to import, and no other task needs them
    )
    from sparkpin.distribute import verify as verifying

    paths = Paths.from_env()
    if builder is not None and not sign:
        raise InputError("--builder: goes with --sign", next_step=f"invoke verify {subject} --sign --builder {builder}")
    if sign and Path(subject).is_file():
        raise InputError(f"{subject}: a bundle is signed where its release was made", next_step="leave --sign out")
    if sign:
        make_evidence(subject, builder=builder)
    how_to_sign = "where it was exported: name a key in SPARKPIN_SIGNING_KEY, invoke verify TAG --sign, export it again"
    if Path(subject).is_file():
        how = "get the bundle again from where it was exported"
        if deep:
            say("--deep adds nothing for a bundle: all of it is read and hashed in any case")
        with form.open_bundle(Path(subject), say) as opened:
            count = len(opened.index.members)
            checks = [verifying.Check("bundle", "ok", f"{count} members, each of its size and hash"), *opened.checks]
            for what, there in (
                (verifying.PACKAGES, opened.index.store),
                (verifying.MODELS, opened.index.store),
                (verifying.LAYERS, opened.index.image),
            ):
                said = "in the bundle, each with its hash" if there else "not in the bundle"
                checks.append(verifying.Check(what, "ok" if there else "open", said))
            said = "not held against its sources" if opened.index.checkpoint else "not in the bundle"
            checks.append(verifying.Check(verifying.CHECKPOINT, "open", said))
    else:
        try:
            release = Releases(paths).get(subject)
        except InputError as error:
            raise InputError(f"{error.message}, and no file of that name", next_step=error.next_step) from None
        key = "" if signing.Keys.from_env().signing else f"name a key in {signing.places(signing.SIGNING_KEY)}; then "
        how_to_sign = f"{key}invoke verify {release.tag} --sign"
        engine, evidence = engine_of(paths), imagecheck.evidence_of(paths, release)
        checks = [*verifying.check_evidence(evidence), imagecheck.check_loaded(engine, release)]
        allowed = signing.Keys.from_env().allowed
        checks.append(imagecheck.check_published(paths.project, release, evidence.records, allowed))
        if deep:
            checks.append(imagecheck.check_fetched(paths, release, evidence.records))
            checks += imagecheck.check_model(paths, release, say)
            checks.append(imagecheck.check_saved(paths, engine, release, say))
        how = step_of([check.what for check in checks if check.result == "wrong"], paths, release)
    if require_signature:
        checks = [verifying.demanded(check, how_to_sign) for check in checks]
    for check in checks:
        show(check.line)
    show(verifying.conclusion(checks))
    verifying.require(checks, subject, next_step=how, told=True)
