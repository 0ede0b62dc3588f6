"""What `invoke quality` makes of two servers' answers, its records, and what `promote` makes of these."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkout import PROJECT
from made_releases import release
from places import DATA

from sparkpin.cli import measure as task
from sparkpin.cli import releases as commands_releases
from sparkpin.cli import up as commands_up
from sparkpin.core.errors import DiskError, HostError, InputError, ManifestError, QualityError
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.measure import own_server
from sparkpin.measure.quality import compare, corpus, run
from sparkpin.measure.quality.corpus import SkillAnswer
from sparkpin.measure.quality.distance import agreement, kl, rows_of
from sparkpin.measure.quality.run import QualityMeasured, Reading, save
from sparkpin.measure.quality.run import load as known
from sparkpin.pins import manifests
from sparkpin.pins.schema import Quality
from sparkpin.releases import quality_allowance, quality_gate, quality_record
from sparkpin.releases.promotions import landing
from sparkpin.releases.quality_record import Figure, QualityRecord, Texts
from sparkpin.releases.record import Release, Releases, now
from sparkpin.report.measured import quality_of
from sparkpin.serve import memory_limit
from sparkpin.smoke import logprobs
from sparkpin.smoke.answers import Wrong, only_choice

ANSWER = json.loads((DATA / "quality/completion.json").read_text(encoding="utf-8"))
"""vLLM 0.32's to a prompt of two tokens, stage v2-tq with MTP-2; of its continuation the first two tokens."""


@pytest.fixture
def paths(project: Path, tmp_path: Path) -> Paths:
    return Paths(project, tmp_path / "cache", tmp_path / "home")


def told(logprobs: np.ndarray, top: int, token: int) -> dict[int, float]:
    """What a server tells of a distribution: the `top` likeliest tokens and the one that follows."""
    best = np.argsort(-logprobs)[:top]
    return {int(t): float(logprobs[t]) for t in (*best, token)}


def distributions(seed: int, count: int, words: int, spread: float) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, spread, (count, words))
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("change", [0.0, 0.1, 1.0, 5.0])
def test_the_divergence_is_a_lower_bound_and_near_where_the_top_holds_most(spread: float, change: float) -> None:
    words, count, top = 300, 64, 20
    p = distributions(1, count, words, spread)
    q = p + change * distributions(2, count, words, 1.0)
    q -= np.log(np.exp(q).sum(axis=1, keepdims=True))
    exact = (np.exp(p) * (p - q)).sum(axis=1)
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, words, count)]
    said = [rows_of([(t, told(row, top, t)) for row, t in zip(side, tokens, strict=True)]) for side in (p, q)]
    bound = kl(*said, top)
    assert (bound <= exact + 1e-9).all() and (bound >= 0).all()
    if change == 0:
        assert bound.max() < 1e-9
    if spread == 6.0 and change:
        assert bound.sum() > 0.8 * exact.sum()


def test_a_likeliest_token_that_the_other_does_not_even_name_is_a_great_distance() -> None:
    p = rows_of([(1, {1: math.log(0.98), 2: math.log(0.01)})])
    q = rows_of([(1, {8: math.log(0.6), 9: math.log(0.39), 1: math.log(0.0001)})])
    swapped = rows_of([(8, {8: math.log(0.6), 9: math.log(0.39)})])
    parts = ((0.98, 0.0001), (0.01, 0.0099), (0.01, 0.99))  # token 1; 2, of which q says nothing; all others
    assert kl(p, q, 2)[0] == pytest.approx(sum(a * math.log(a / b) for a, b in parts))
    assert kl(p, swapped, 2)[0] > 3  # at most 0.01 is left of it for tokens 1 and 2


def test_rows_are_ranked_and_equals_go_by_their_id() -> None:
    rows = rows_of([(3, {7: -1.0, 3: -1.0, 5: -0.5}), (4, {4: -9999.0})])
    assert rows.ids.tolist() == [[5, 3, 7], [4, -1, -1]]
    assert rows.chosen.tolist() == [-1.0, -100.0]
    other = rows_of([(3, {5: -0.4, 3: -1.0}), (4, {9: -0.1, 4: -4.0})])
    assert agreement(rows, other).tolist() == [True, False]


def test_intervals_are_the_same_each_time_and_hold_the_value() -> None:
    figure = compare.ratio([1.0, 4.0, 2.0, 9.0], [10, 20, 10, 30], (0, 1))
    assert figure == compare.ratio([1.0, 4.0, 2.0, 9.0, 0.0], [10, 20, 10, 30, 0], (0, 1))
    assert figure.value == 16 / 70 and 0 <= figure.low < 0.15 and 0.3 < figure.high <= 1
    alike = compare.ratio([2.0, 4.0], [1, 2], (0, 9), math.exp)
    assert (alike.low, alike.value, alike.high) == pytest.approx((math.exp(2),) * 3)
    assert compare.ratio([], [], (0, 1)).value == 0
    assert compare.ratio([0.2], [10], (0, 100)) == Figure(value=0.02, low=0, high=100), "one says nothing of others"


def test_few_questions_leave_a_wide_interval_even_where_both_are_right() -> None:
    none = compare.lost([True] * 12, [True] * 12)
    assert none.value == 0 and none.low < -0.15 and none.high > 0.15
    assert compare.lost([True] * 100, [True] * 100).high < 0.03
    all_lost = compare.lost([True] * 12, [False] * 12)
    assert all_lost.value == 1 and all_lost.low > 0.5
    assert compare.lost([True, False], [False, True]).value == 0


def changed(**changes: Any) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(json.dumps(only_choice(ANSWER)))
    return choice | changes


def test_a_real_answer_is_read() -> None:
    tokens = ANSWER["choices"][0]["prompt_token_ids"]
    rows = rows_of(logprobs.prompt_rows(changed(), "x", tokens))
    assert len(rows) == 1 and rows.tokens.tolist() == tokens[1:] and rows.ids.shape[1] == 21
    after = rows_of(logprobs.answer_rows(changed(), "x"))
    assert after.tokens.tolist() == [257, 258] and after.ids[0, 0] == 257 and after.chosen[0] == 0.0


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [None, {"5": {"logprob": -1.0}}],  # without the prompt's own token
        [None, {"97": {"logprob": float("nan")}}],
        [None, {"97": {"logprob": 0.5}}],
        [None, None],
    ],
)
def test_an_answer_without_what_must_be_there_is_wrong(entries: object) -> None:
    with pytest.raises(Wrong):
        logprobs.prompt_rows(changed(prompt_logprobs=entries), "x", [67, 97])
    words = {"tokens": [" a"], "top_logprobs": [{" a": -0.1}], "token_logprobs": [-0.1]}
    with pytest.raises(Wrong):
        logprobs.answer_rows({"logprobs": words}, "x")


def reading(name: str, kind: str, shift: float = 0.0, tokens: tuple[int, ...] = (1, 2, 3)) -> Reading:
    rows = rows_of([(t, {t: math.log(0.6) - shift, t + 1: math.log(0.3)}) for t in tokens])
    return Reading(name, kind, 9, rows, rows[:2])


def measured(*readings: Reading, right: tuple[bool, ...] = (True, True)) -> QualityMeasured:
    asked = tuple(SkillAnswer("needles, 512 tokens", f"word {n}", ok, "" if ok else "no") for n, ok in enumerate(right))
    return QualityMeasured("0.32.0", 1.5, readings, (*asked, SkillAnswer("tool calls", "one", True)), ("a note",))


def test_what_is_compared_is_all_and_each_kind() -> None:
    p = measured(reading("a", "code"), reading("b", "english"))
    q = measured(reading("a", "code", 0.1), reading("b", "english"), right=(True, False))
    every, code, english = compare.texts(p, q, 2)
    assert (every.kind, code.kind, english.kind) == ("all", "code", "english")
    assert every.continued_same.value == 1
    assert every.tokens == 6 and code.kl.value > 0 and english.kl.value == 0
    assert code.ratio.value == pytest.approx(math.exp(0.1)) and english.ratio.value == 1
    assert every.kl.low == 0 < every.kl.value < every.kl.high <= 100  # two texts say little
    found = {one.name: one for one in compare.skills(p, q)}
    assert set(found) == {"tool calls", "needles"}
    assert found["needles"].failures == ("word 1: no",) and found["needles"].lost.value == 0.5


def test_texts_are_compared_token_by_token_as_far_as_both_read_them() -> None:
    ours = measured(reading("a", "code"))
    found = compare.texts(ours, measured(reading("a", "code", tokens=(1, 2))), 2)[0]
    assert (found.tokens, found.continued) == (2, 0)
    with pytest.raises(InputError):
        compare.texts(ours, measured(reading("a", "code", tokens=(1, 2, 4))), 2)


def test_what_was_measured_is_kept_whole(tmp_path: Path) -> None:
    made = measured(reading("a", "code"), reading("b", "english", tokens=(5,)))
    folder = tmp_path / "quality/x"
    assert known(folder) is None
    save(folder, made)
    back = known(folder)
    assert back and (back.vllm, back.asked, back.notes) == (made.vllm, made.asked, made.notes)
    for one, other in zip(back.readings, made.readings, strict=True):
        assert (one.name, one.kind, one.first) == (other.name, other.kind, other.first)
        for part in ("ids", "logprobs", "tokens", "chosen"):
            assert np.array_equal(getattr(one.forced, part), getattr(other.forced, part))


def test_answers_to_other_questions_are_kept_elsewhere(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, ours = corpus.load(), release(2)
    before = run.folder_of(paths, ours, whole)
    assert run.folder_of(paths, ours, whole) == before != run.folder_of(paths, ours, corpus.load(quick=True))
    monkeypatch.setattr(corpus, "STEPS", (4096,))
    assert run.folder_of(paths, ours, whole) != before


@pytest.mark.parametrize(("limit", "kept"), [(0.98, "within"), (0.985, "within"), (0.9875, "unclear"), (0.995, "more")])
def test_a_share_is_less_than_allowed_only_where_its_whole_interval_is(limit: float, kept: str) -> None:
    (judged,) = quality_allowance.judge(figures(), (), Quality(top1=limit))
    assert judged.kept == kept


def skill(asked: int, worse: int = 0, better: int = 0) -> quality_record.Skill:
    right = [True] * (asked - better) + [False] * better
    others = [False] * worse + [True] * (asked - worse)
    return quality_record.Skill(
        name="tool calls", asked=asked, reference=sum(right), release=sum(others),
        lost=compare.lost(right, others), failures=tuple("wrong" for _ in range(worse)),
    )  # fmt: skip


def test_an_interval_wider_than_the_limit_tells_nothing() -> None:
    for asked, worse, kept in ((10, 0, "unclear"), (100, 0, "within"), (20, 2, "unclear"), (400, 40, "more")):
        (judged,) = quality_allowance.judge(figures(), [skill(asked, worse)], Quality(tool_calls=0.05))
        assert judged.kept == kept


@pytest.mark.parametrize(("low", "value", "high", "kept"), [
    (0.001, 0.01, 0.09, "unclear"),  # wider than all that may be lost
    (0.015, 0.02, 0.034, "within"),  # the limit is in it, and it is narrow
    (0.0, 0.001, 0.029, "within"),
    (0.02, 0.04, 0.06, "unclear"),
    (0.031, 0.04, 0.09, "more"),
])  # fmt: skip
def test_verdicts_by_interval(low: float, value: float, high: float, kept: str) -> None:
    seen = figures(Figure(value=value, low=low, high=high))
    (judged,) = quality_allowance.judge(seen, (), Quality(kl=0.03))
    assert judged.kept == kept


def test_a_ratio_to_a_reference_that_is_worse_than_a_guess_is_not_judged(paths: Paths) -> None:
    ours, parent = release(2), release(1, stage="mtp")
    worse = Figure(value=1.076, low=1.07, high=1.08)
    limit(paths, 0.05, ", perplexity: 1.005")
    for perplexity, refused in ((1.4e14, False), (200_000.0, True)):
        seen = dataclasses.replace(figures(), perplexity_reference=perplexity, ratio=worse)
        quality_record.save(paths, ours, parent, made_record(ours, parent, texts=(seen,)))
        assert (quality_gate.refusal(paths, ours) is not None) == refused


def figures(kl: Figure = Figure(value=0.02, low=0.01, high=0.03)) -> Texts:  # noqa: B008
    top1, one = Figure(value=0.985, low=0.98, high=0.99), Figure(value=1.0, low=1.0, high=1.0)
    return Texts(
        kind="all", texts=3, tokens=30, kl=kl, top1=top1, perplexity_reference=5.0, perplexity=5.0, ratio=one,
        continued=9, continued_kl=kl, continued_same=one,
    )  # fmt: skip


def made_record(release: Release, reference: Release, **changes: Any) -> QualityRecord:
    made = QualityRecord(
        release=release.tag, reference=reference.tag, role="parent", time="2026-01-05T00:00:00.000Z", seconds=3.0,
        vllm_release="0.32.0", vllm_reference="0.32.0", host=read_fingerprint(""), corpus="c" * 64, top_k=20,
        texts=(figures(),), skills=(),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_what_promote_refuses_rollback_passes_over(paths: Paths) -> None:
    old, parent, worse, current = release(1, "passed"), release(2, stage="mtp"), release(3, "passed"), release(4)
    quality_record.save(paths, worse, parent, made_record(worse, parent))
    limit(paths, 0.005)
    refused = partial(quality_gate.is_refused, paths)
    assert landing([old, parent, worse, current], current, [], refused) == old
    Releases(paths).point(worse, accepted={"kl": "a test"})
    assert landing([old, parent, worse, current], current, [], refused) == worse


def test_records_come_back_and_a_full_one_goes_before_a_quick_one(paths: Paths) -> None:
    ours, parent = release(2), release(1, stage="mtp")
    assert quality_record.against_parent(paths, ours) is None
    full, quick = made_record(ours, parent), made_record(ours, parent, quick=True, time="2026-01-06T00:00:00.000Z")
    where = quality_record.save(paths, ours, parent, full)
    assert where == paths.releases / f"tiny/{ours.name}/quality/tiny-{parent.name}.json"
    quality_record.save(paths, ours, parent, quick)
    named = made_record(ours, release(3), role="named", time="2026-01-07T00:00:00.000Z")
    quality_record.save(paths, ours, release(3), named)
    assert quality_record.records_of(paths, ours) == (full, quick, named)
    assert quality_record.against_parent(paths, ours) == full
    where.write_text(where.read_text().replace('"top_k": 20', '"top_k": "20"'))
    with pytest.raises(ManifestError, match="top_k"):
        quality_record.records_of(paths, ours)


def test_a_skill_that_the_reference_has_not_is_not_judged() -> None:
    lost = Figure(value=0.0, low=-0.4, high=0.4)
    both = tuple(
        quality_record.Skill(name=name, asked=5, reference=right, release=right, lost=lost, failures=())
        for name, right in (("tool calls", 0), ("needles", 2))
    )
    allowed = Quality(tool_calls=0.05, needles=0.05)
    judged = quality_allowance.judge(figures(), both, allowed)
    assert [line.name for line in judged] == ["needles"]
    (note,) = quality_allowance.notes(figures(), both, allowed)
    assert "tool_calls" in note and "needles" not in note


def test_a_release_is_compared_with_its_parent_stage_or_with_what_a_person_names(paths: Paths) -> None:
    records = Releases(paths)
    base, old, parent, ours = release(1, stage="base"), release(2, stage="mtp"), release(3, stage="mtp"), release(4)
    for made in (base, old, parent, ours):
        records.save(made)
    assert task.chosen(paths, "tiny", ours.tag, None) == task.Pair(ours, parent, "parent")
    assert task.chosen(paths, "tiny", ours.tag, old.tag) == task.Pair(ours, old, "parent")
    assert task.chosen(paths, "tiny", ours.tag, "base") == task.Pair(ours, base, "named")
    for tag, reference in ((base.tag, None), (ours.tag, "v2"), (old.tag, None)):
        with pytest.raises(InputError):
            task.chosen(paths, "tiny", tag, reference)


def test_a_parent_that_passed_goes_before_a_newer_one_and_of_these_one_of_the_same_recipe(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Releases(paths)
    same, other = ({"recipes/tiny.yaml": digit * 64} for digit in "ab")
    fits = release(1, "passed", stage="mtp", inputs=same)
    unlike = release(2, "passed", stage="mtp", inputs=other)
    unproven, ours = release(3, stage="mtp", inputs=same), release(4, inputs=same)
    records.save(unproven)
    assert task.parent_of(paths, ours) == unproven
    assert unproven.tag in "".join(capsys.readouterr()), "a warning"
    for better in (unlike, fits):
        records.save(better)
        assert task.parent_of(paths, ours) == better
    assert capsys.readouterr() == ("", "")


def test_without_a_name_it_is_the_newest_that_passed_and_has_a_parent(paths: Paths) -> None:
    records = Releases(paths)
    name = "scripted-tiny"
    own = manifests.load_recipe(paths.project, name).stage
    with pytest.raises(InputError):
        task.newest(paths, name)
    unproven = release(5, recipe=name, stage=own)
    records.save(unproven)
    assert task.newest(paths, name) == unproven
    passed = [release(day, "passed", recipe=name, stage=stage) for day, stage in ((2, "mtp"), (3, "v2"), (4, "base"))]
    for made in passed:
        records.save(made)
    assert task.newest(paths, name) == passed[1]


def limit(paths: Paths, value: float, others: str = "") -> None:
    stage = paths.project / "stages/v2.yaml"
    lines = [line for line in stage.read_text().splitlines() if not line.startswith("quality:")]
    stage.write_text("\n".join([*lines, f"quality: {{kl: {value}{others}}}"]) + "\n")


def test_promotion_goes_by_the_record_and_by_the_stage_as_it_is_now(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, parent = release(2), release(1, stage="mtp")
    assert len(quality_gate.check(paths, ours, accepted="").notes) == 1, "that nobody has measured it"
    assert quality_gate.check(paths, release(4, stage="base"), accepted="") == quality_gate.Promotable()
    limit(paths, 0.005)
    judged = quality_gate.judged(paths, ours, made_record(ours, parent))
    quality_record.save(paths, ours, parent, made_record(ours, parent, judged=judged))
    with pytest.raises(QualityError, match="kl") as caught:
        quality_gate.check(paths, ours, accepted="")
    assert "--accept-loss" in caught.value.next_step
    taken = quality_gate.check(paths, ours, accepted="we need the memory")
    assert "kl" in taken.notes[0] and taken.lost == ("kl",)
    records = Releases(paths)
    records.point(ours)
    assert isinstance(quality_gate.refusal(paths, ours), QualityError), "a promotion alone accepts nothing"
    records.point(ours, accepted={"kl": "we need the memory"})
    assert quality_gate.refusal(paths, ours) is None
    limit(paths, 0.005, ", top1: 0.999")  # another loss, which nobody has accepted
    with pytest.raises(QualityError, match="top1"):
        quality_gate.check(paths, ours, accepted="")
    limit(paths, 0.004)
    assert quality_gate.refusal(paths, ours) is None
    assert "we need the memory" in quality_of(paths, ours).text
    worse = figures(Figure(value=0.03, low=0.02, high=0.04))
    quality_record.save(paths, ours, parent, made_record(ours, parent, texts=(worse,), time=now()))
    with pytest.raises(QualityError, match="kl"):
        quality_gate.check(paths, ours, accepted="")
    quality_record.save(paths, ours, parent, made_record(ours, parent))
    for limited, others, kept in ((0.015, "", "unclear"), (0.05, ", needles: 0.1", "good"), (0.05, "", "good")):
        limit(paths, limited, others)
        assert quality_gate.refusal(paths, ours) is None
        if kept == "good":
            assert [one.kind for one in quality_of(paths, ours).limits][:1] == ["good"], "the report goes by them, too"


def test_what_promote_refuses_becomes_current_in_no_other_way(
    paths: Paths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paths, "from_env", lambda: paths)
    ours, parent = release(2, "passed"), release(1, stage="mtp")
    Releases(paths).save(ours)
    assert quality_gate.refusal(paths, ours) is None
    where = quality_record.save(paths, ours, parent, made_record(ours, parent))
    limit(paths, 0.005)
    commands_up.first_is_current(paths, ours)
    assert "is not current" in (told := capsys.readouterr()).out + told.err
    with pytest.raises(QualityError, match="kl: MORE"):
        commands_releases.promote(paths, ours.tag, accept_loss="  ")
    with pytest.raises(InputError, match="not of other"):
        commands_releases.promote(paths, ours.tag, recipe="other")
    assert Releases(paths).current("tiny") is None
    where.write_text("{")
    assert isinstance(quality_gate.refusal(paths, ours), ManifestError)


def test_every_stage_with_a_parent_says_what_it_may_cost() -> None:
    for path in sorted((PROJECT / "stages").glob("*.yaml")):
        stage = manifests.load_stage(PROJECT, path.stem)
        limits = stage.quality.model_dump()
        assert (None not in limits.values()) if stage.parent else set(limits.values()) == {None}, path.name


def test_the_texts_are_those_that_their_sources_name() -> None:
    whole, quick = corpus.load(), corpus.load(quick=True)
    assert {text.kind for text in whole.texts} == {"code", "english", "json", "turkish"}
    said = (corpus.FOLDER / "SOURCES.md").read_text(encoding="utf-8")
    for text in whole.texts:
        assert f"{text.kind}/*" in said or text.name.partition("/")[2] in said, text.name
    assert len(quick.texts) == 8
    assert quick.digest() != whole.digest() == corpus.load().digest()
    for _, case in whole.questions:
        offered = {tool["function"]["name"] for tool in case.request["tools"]}
        assert {name for name, _ in case.calls or ()} <= offered


@pytest.mark.parametrize(
    ("gpus", "free", "error"),
    [(True, 1 << 40, "needs 10.00 GiB"), (False, 1 << 40, "needs 10.00 GiB"), (False, 0, "the measurements")],
)
def test_what_has_no_room_is_not_started(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, gpus: bool, free: int, error: str
) -> None:
    """A full machine and a full disk, which a test cannot have; nor has it a GPU."""
    ours, no = release(1, "passed"), lambda *_, **__: None
    monkeypatch.setattr(own_server, "obstacle", no)
    monkeypatch.setattr(own_server, "exclusive_run", lambda *_: contextlib.nullcontext())
    for name in ("require_readable", "require_image"):
        monkeypatch.setattr(own_server.running, name, no)
    monkeypatch.setattr(own_server, "checkpoint_of", lambda *_: paths.project)
    plan: Any = SimpleNamespace(needed=10 << 30, hints=())
    needed = memory_limit.Room(10 << 30, plan, compilers=1 if gpus else None)
    for name, told in {"drop_page_cache": None, "available": 1 << 30, "room_for": needed}.items():
        monkeypatch.setattr(own_server.memory_limit, name, lambda *_, told=told: told)
    usage = shutil.disk_usage(paths.project)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises((HostError, DiskError), match=error):
        run.measure(paths, None, ours, corpus.load(quick=True))  # type: ignore[arg-type]
