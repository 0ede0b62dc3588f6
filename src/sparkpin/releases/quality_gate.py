"""What `promote` makes of a release's quality record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sparkpin.core.errors import InputError, ManifestError, QualityError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.pins.schema import Stage
from sparkpin.releases import quality_allowance
from sparkpin.releases.quality_record import Judged, QualityRecord, against_parent
from sparkpin.releases.record import Release, Releases


def stage_of(paths: Paths, release: Release) -> Stage | None:
    """As it is now: what may be lost is decided when a release is promoted. None where its file is gone."""
    try:
        return manifests.load_stage(paths.project, release.stage)
    except (InputError, ManifestError):
        return None


def judged(paths: Paths, release: Release, record: QualityRecord) -> tuple[Judged, ...]:
    """A record against what the stage allows now."""
    stage = stage_of(paths, release)
    return quality_allowance.judge(record.overall, record.skills, stage.quality) if stage else record.judged


@dataclass(frozen=True)
class Promotable:
    """notes: what a person should know before a release is current; lost: limits of its stage that it is beyond."""

    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def check(paths: Paths, release: Release, *, accepted: str) -> Promotable:
    """accepted: the reason to take a greater loss.

    QualityError where the record shows a loss that the stage does not allow and nobody accepts or has accepted.
    """
    record, stage = against_parent(paths, release), stage_of(paths, release)
    if record is None:
        if stage is None or stage.parent is None:
            return Promotable()
        why = f"its quality loss against {stage.parent} was not measured (invoke quality {release.tag})"
        return Promotable((f"no quality record: {why}",))
    lines = judged(paths, release, record)
    more = [line for line in lines if line.kept == "more"]
    reason = accepted or accepted_reason(paths, release, record, more)
    if more and not reason:
        raise QualityError(
            f"{release.tag} has lost more against {record.reference} than its stage may cost: "
            + "; ".join(map(quality_allowance.line, more)),
            next_step=f"invoke promote {release.tag} --accept-loss REASON, or change `quality` in "
            f"stages/{release.stage}.yaml",
        )
    notes = [quality_allowance.line(line) for line in lines if line.kept != "within"]
    notes += [f"accepted: {reason}"] if more else []
    notes += quality_allowance.notes(record.overall, record.skills, stage.quality) if stage else ()
    within = [line.kept for line in lines].count("within")
    limits = f"{within} of {len(lines)} limits kept" if lines else "its stage sets no limits"
    notes.append(f"quality against {record.reference}: {limits}, measured {record.time}")
    return Promotable(tuple(notes), tuple(line.name for line in more))


def refusal(paths: Paths, release: Release) -> QualityError | ManifestError | None:
    """Why `promote` would refuse this release: a loss that nobody has accepted here, or a record that is damaged."""
    try:
        check(paths, release, accepted="")
    except (QualityError, ManifestError) as error:
        return error
    return None


def is_refused(paths: Paths, release: Release, present: Collection[str] | None = None) -> bool:
    """Whether a rollback would pass it over. present: config digests of the engine's images; None: nobody asked it."""
    is_there = present is None or (release.image in present and Releases(paths).checkpoint(release).is_dir())
    return not is_there or refusal(paths, release) is not None


def accepted_reason(paths: Paths, release: Release, record: QualityRecord, more: Sequence[Judged]) -> str:
    """Why all of `more` was accepted last, with which the release was promoted since the record was made; "" where
    nobody has."""
    for row in reversed(Releases(paths).promotions(release.recipe)):
        if row.tag == release.tag and row.time >= record.time and {one.name for one in more} <= row.accepted.keys():
            return next(iter(row.accepted.values()), "")
    return ""
