"""The tasks `bench` and `quality`: how fast a release is, and what it has lost against another."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated, Literal

from sparkpin.build.consistent import require_consistent
from sparkpin.build.record import records_of as build_records
from sparkpin.cli.notes import require_runnable
from sparkpin.cli.tasks import Json, KnownRecipe, task
from sparkpin.core.errors import InputError, QualityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.measure.bench import record, text
from sparkpin.measure.bench import run as running
from sparkpin.measure.bench.plan import common
from sparkpin.measure.quality import compare, run
from sparkpin.measure.quality.compare import report
from sparkpin.measure.quality.corpus import QUICK, Corpus, load
from sparkpin.measure.quality.distance import TOP
from sparkpin.pins import manifests
from sparkpin.releases import container, quality_allowance, quality_gate, quality_record
from sparkpin.releases.current import current_of
from sparkpin.releases.quality_record import Judged, QualityRecord
from sparkpin.releases.record import Release, Releases, now
from sparkpin.serve.served import running_release

ROUNDS = 4


@task("measure")
def bench(
    paths: Paths,
    tag: Annotated[str | None, "release to measure (default: the recipe's served one, otherwise its current)"] = None,
    *,
    recipe: KnownRecipe = None,
    compare: Annotated[str, "measure TAG_A and TAG in turns", "TAG_A"] = "",
    rounds: Annotated[int | None, "of a comparison, a turn of each (default: 4)", "COUNT"] = None,
    quick: Annotated[bool, "a short run, to see whether it works"] = False,
    json: Json = False,
) -> None:
    """Measure how fast a release is, or two in turns.

    invoke bench --quick
    invoke bench --compare v2 v2-tq
    """
    if compare and not tag:
        cause = f"--compare {compare}: expected a second release to compare it with, as TAG"
        raise InputError(cause, next_step=f"invoke bench --compare {compare} TAG")
    if rounds is not None and (rounds < 1 or not compare):
        cause = f"--rounds: got {rounds}, expected 1 or more, and --compare"
        raise InputError(cause, next_step=f"invoke bench --compare A B --rounds {ROUNDS}")
    engine, records = engine_of(paths), Releases(paths)
    if not tag:
        tag = running_release(paths, engine, recipe or records.default_recipe()) or current_of(paths, recipe).tag
    releases = [*([records.get(compare)] if compare else []), records.get(tag, recipe)]
    for release in releases:
        require_runnable(paths, engine, release)
        container.require_here(engine)
    plans = [running.plan_for(paths, release, quick=quick) for release in releases]
    if compare:
        comparison = running.compare(paths, engine, releases, common(*plans), rounds or ROUNDS)
        show_json(record.to_json(comparison)) if json else text.show_comparison(comparison)
    else:
        found = running.bench(paths, engine, releases[0], plans[0])
        show_json(record.to_json(found)) if json else text.show_record(found)


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
    release = records.get(tag, recipe) if tag else newest(paths, recipe or records.default_recipe())
    if not against:
        return Pair(release, parent_of(paths, release), "parent")
    reference = records.get(against, None if ":" in against else release.recipe)
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
    quick: Annotated[bool, "sooner and less exact: two texts of each kind, fewer questions"] = False,
    json: Json = False,
) -> None:
    """Compare the quality of a release with its parent stage's.

    invoke quality v2-tq --quick
    """
    pair = chosen(paths, recipe, tag, against)
    for known in (pair.reference, pair.release):
        require_consistent(paths, known)
    found = compared(paths, engine_of(paths), pair, load(quick=quick))
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
    figures, skills = compare.texts(p, q, TOP), compare.skills(p, q)
    notes, judged = [*p.notes, *q.notes, *compare.asked_alone(p, q)], tuple[Judged, ...]()
    if pair.role == "parent" and (stage := quality_gate.stage_of(paths, pair.release)):
        notes += quality_allowance.notes(figures[0], skills, stage.quality)
        judged = quality_allowance.judge(figures[0], skills, stage.quality)
    if corpus.quick:
        notes.append(f"--quick: {QUICK} texts of each kind, fewer questions; wide intervals")
    return QualityRecord(
        release=pair.release.tag,
        reference=pair.reference.tag,
        role=pair.role,
        time=now(),
        seconds=round(p.seconds + q.seconds, 1),
        vllm_release=q.vllm,
        vllm_reference=p.vllm,
        host=read_fingerprint(engine.version),
        corpus=corpus.digest(),
        top_k=TOP,
        quick=corpus.quick,
        texts=figures,
        skills=skills,
        judged=judged,
        notes=tuple(dict.fromkeys(notes)),
    )
