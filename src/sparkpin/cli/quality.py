"""The task `quality`: two releases, measured and compared."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated, Literal

from sparkpin.build.consistent import require_consistent
from sparkpin.build.record import records_of as build_records
from sparkpin.cli.choose import choose_known
from sparkpin.cli.options import Json, KnownRecipe
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError, QualityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.measure.quality import asking, compare, run, texts
from sparkpin.measure.quality.report import report
from sparkpin.measure.quality.texts import Corpus
from sparkpin.pins import manifests
from sparkpin.releases import quality_allowance, quality_gate, quality_record
from sparkpin.releases.quality_record import Judged, QualityRecord
from sparkpin.releases.record import Release, Releases, now


@dataclass(frozen=True)
class Pair:
    release: Release
    reference: Release
    role: Literal["parent", "named"]  # as in QualityRecord


def parent_of(paths: Paths, release: Release) -> Release:
    """The release of the stage below: one that has passed before any other, of these one on the same image, of these
    one of the same recipe file, of these the newest.
    """
    stage = manifests.load_stage(paths.project, release.stage)
    if stage.parent is None:
        step = f"invoke quality {release.tag} --against TAG"
        raise InputError(f"{release.tag}: stage {release.stage!r} has no parent to compare it with", next_step=step)
    below, settings = "", f"recipes/{release.recipe}.yaml"
    with contextlib.suppress(SparkpinError, IndexError):
        below = build_records(paths, release)[-2].key

    def fitness(known: Release) -> tuple[object, ...]:
        same_settings = known.inputs.get(settings) == release.inputs.get(settings)
        return known.is_good, known.build_key == below, same_settings, known.age

    parents = [known for known in Releases(paths).of_recipe(release.recipe) if known.stage == stage.parent]
    if not parents:
        return Releases(paths).get(stage.parent, release.recipe)  # says that there is none
    best = max(parents, key=fitness)
    if not best.is_good:
        say(f"warning: {best.tag}, the reference, has not passed: invoke smoke {best.tag}")
    return best


def newest(paths: Paths, recipe: str) -> Release:
    """The newest release that has passed, of any stage with a parent; else the newest of the recipe's own stage."""
    for release in reversed(Releases(paths).of_recipe(recipe)):
        if release.is_good and (stage := quality_gate.stage_of(paths, release)) and stage.parent:
            return release
    return Releases(paths).get(manifests.load_recipe(paths.project, recipe).stage, recipe)


def chosen(paths: Paths, recipe: str | None, tag: str | None, against: str | None) -> Pair:
    records = Releases(paths)
    release = records.get(tag, recipe) if tag else newest(paths, choose_known(paths, recipe))
    if not against:
        return Pair(release, parent_of(paths, release), "parent")
    stages = {known.stage for known in records.of_recipe(release.recipe)}
    reference = records.get(against, release.recipe if against in stages else None)
    if reference.tag == release.tag:
        raise InputError(f"{release.tag} against itself", next_step="name another release with --against")
    stage = quality_gate.stage_of(paths, release)
    is_parent = stage is not None and (reference.recipe, reference.stage) == (release.recipe, stage.parent)
    return Pair(release, reference, "parent" if is_parent else "named")


@task("measure")
def quality(
    paths: Paths,
    tag: Annotated[str | None, "release to measure (default: the newest that passed, of a stage with a parent)"] = None,
    *,
    recipe: KnownRecipe = None,
    against: Annotated[str | None, "tag or stage to compare it with (default: its parent stage)", "TAG"] = None,
    quick: Annotated[bool, "two texts of each kind, fewer questions: says less, and sooner"] = False,
    json: Json = False,
) -> None:
    """Compare the quality of a release with its parent stage's."""
    pair = chosen(paths, recipe, tag, against)
    for known in (pair.reference, pair.release):
        require_consistent(paths, known)
    found = compared(paths, engine_of(paths), pair, texts.load(quick=quick))
    path = quality_record.save(paths, pair.release, pair.reference, found)
    if json:
        show_json(quality_record.to_json(found))
    else:
        report(found)
        show(f"kept: {path}")
    if found.more:
        more = "; ".join(map(quality_allowance.line, found.more))
        cause = f"{found.release} has lost more against {found.reference} than its stage may cost: {more}"
        raise QualityError(cause, next_step=f"invoke promote {found.release} refuses it, unless --accept-loss says why")


def compared(paths: Paths, engine: Engine, pair: Pair, corpus: Corpus) -> QualityRecord:
    """The reference first: it is the one that other comparisons have measured, maybe."""
    p = run.measure(paths, engine, pair.reference, corpus)
    q = run.measure(paths, engine, pair.release, corpus)
    figures, skills = compare.texts(p, q, asking.TOP), compare.skills(p, q)
    notes, judged = [*p.notes, *q.notes, *compare.asked_alone(p, q)], tuple[Judged, ...]()
    if pair.role == "parent" and (stage := quality_gate.stage_of(paths, pair.release)):
        notes += quality_allowance.notes(figures[0], skills, stage.quality)
        judged = quality_allowance.judge(figures[0], skills, stage.quality)
    if corpus.quick:
        notes.append(f"--quick: {texts.QUICK} texts of each kind, fewer questions; wide intervals")
    return QualityRecord(
        release=pair.release.tag,
        reference=pair.reference.tag,
        role=pair.role,
        time=now(),
        seconds=round(p.seconds + q.seconds, 1),
        vllm_release=q.vllm,
        vllm_reference=p.vllm,
        host=read_fingerprint(engine.version),
        corpus=corpus.digest,
        top_k=asking.TOP,
        quick=corpus.quick,
        texts=figures,
        skills=skills,
        judged=judged,
        notes=tuple(dict.fromkeys(notes)),
    )
