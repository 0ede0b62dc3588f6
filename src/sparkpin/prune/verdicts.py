"""Which releases a prune keeps, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkpin.releases.protection import Protection
from sparkpin.releases.record import Release
from sparkpin.releases.rollback import landing


@dataclass(frozen=True)
class Verdict:
    """What `prune` makes of a release. reasons: why it stays; none: it goes."""

    release: Release
    reasons: tuple[str, ...]


def verdicts(
    releases: Sequence[Release],
    before: Sequence[str],
    keep: int,
    protections: Mapping[str, Protection],
    used: Mapping[str, str],
    refused: Callable[[Release], bool],
) -> list[Verdict]:
    """For the releases of one recipe (from the oldest to the newest), the most worthy first.

    The first `keep` stay, the current one counted. Whatever `keep` is, so do the current one, what was current before
    and a rollback would land on, the newest that passed, the protected, and those whose image a container uses.
    before: `Releases.before`; used: release tag -> name of the container; refused: whether a rollback passes it over.
    """
    current = next((release for release in releases if release.state == "current"), None)
    back = landing(releases, current, before, refused) if current else None
    passed_last = next((release for release in reversed(releases) if release.is_good), None)
    by_worth = sorted(releases, key=lambda r: (r == current, r == back, r.is_good, r.age), reverse=True)
    found = []
    for place, release in enumerate(by_worth):
        container = used.get(release.tag)
        protection = protections.get(release.tag)
        reasons = (
            "current" if release == current else "",
            "passed last" if release == passed_last else "",
            protection.text if protection else "",
            f"in use by the container {container}" if container else "",
            f"one of the {keep} to keep" if place < keep else "",
            "to roll back to" if release == back and (place < keep or release.tag in before) else "",
        )
        found.append(Verdict(release, tuple(filter(None, reasons))))
    return found
