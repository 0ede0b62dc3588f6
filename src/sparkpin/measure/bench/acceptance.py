"""The share of the drafted tokens that a release was seen to accept."""

from __future__ import annotations

from dataclasses import dataclass

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.measure.bench import record as bench
from sparkpin.measure.roofline.published import ACCEPTED
from sparkpin.pins.schema import Drafts
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.drafting import drafted

LEAST = 50  # drafted tokens that say anything about a share


@dataclass(frozen=True, slots=True)
class Acceptance:
    share: float  # of the drafted tokens
    origin: str  # where it is from, for a person
    drafts: int | None = None  # tokens in a draft then; None: as many as it is asked for


PUBLISHED = Acceptance(ACCEPTED, "as published for the 122B; --accepted", 2)


def acceptance_of(paths: Paths, recipe: str, stage: str, tokens: int, drafts: Drafts | None = None) -> Acceptance:
    """Of the newest release of the recipe's stage that drafts as many tokens and has passed: its benchmark's prompts,
    else its smoke test, whose prompts are short and alike. As published where nobody has measured. drafts: of the
    recipe's drafter; InputError where its pin has no published share, either.
    """
    releases = [one for one in Releases(paths).of_recipe(recipe) if one.stage == stage and one.is_good]
    measured = (of_bench(paths, one) or of_smoke(one) for one in reversed(releases) if drafted(one) == tokens)
    if found := next(filter(None, measured), None):
        return found
    if drafts is None:
        return PUBLISHED
    if drafts.accepted is None:
        raise InputError(
            f"recipe {recipe}, stage {stage}: no release says which share of {tokens} drafted tokens is accepted, and "
            "its drafter's pin has no `accepted`",
            next_step="say it, for example --accepted 0.45, or measure a release: invoke bench",
        )
    return Acceptance(drafts.accepted, "as published for its drafter; --accepted")


def of_bench(paths: Paths, release: Release) -> Acceptance | None:
    known = bench.newest(paths, release)
    rows = known.of_kind("prompt") if known else ()
    offered, taken = (sum(getattr(row, name) or 0 for row in rows) for name in ("drafted", "accepted"))
    return Acceptance(taken / offered, f"bench of {release.tag}", drafted(release)) if offered >= LEAST else None


def of_smoke(release: Release) -> Acceptance | None:
    share = (release.smoke or {}).get("acceptance")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        return None  # a record may come from anybody
    return Acceptance(float(share), f"smoke test of {release.tag}", drafted(release))
