"""What `invoke quality` makes of two servers' answers, its records, and what `promote` makes of these."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import select
import shutil
import socket as tcp
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import httpx
import numpy as np
import pytest
from checkout import PROJECT
from doc_tables import table
from made_releases import release
from places import DATA

from benchmarks.interval_coverage import LOSSES, Loss, coverage
from sparkpin.commands import bump, choose, quality
from sparkpin.commands import releases as commands_releases
from sparkpin.commands import up as commands_up
from sparkpin.core import progress
from sparkpin.core.errors import DiskError, HostError, InputError, ManifestError, QualityError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.history.report.measured import quality_of
from sparkpin.host import machine
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.measure import own_server
from sparkpin.measure.quality import asking, compare, intervals, ledger, limits, run, skills, standard, texts, watched
from sparkpin.measure.quality import report as quality_report
from sparkpin.measure.quality.distance import agreement, kl, rows_of, until_they_part
from sparkpin.measure.quality.ledger import Cost
from sparkpin.measure.quality.measured import QualityMeasured, Reading, SkillAnswer, keep, known
from sparkpin.pins import manifests
from sparkpin.pins.schema import Quality
from sparkpin.releases import quality_allowance, quality_gate, quality_record
from sparkpin.releases.quality_record import Figure, QualityRecord, Texts
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.rollback import landing
from sparkpin.serve import memory_limit, socket_port
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
    said = [rows_of([told(row, top, t) for row, t in zip(side, tokens, strict=True)], tokens) for side in (p, q)]
    bound = kl(*said, top)
    assert (bound <= exact + 1e-9).all() and (bound >= 0).all()
    if change == 0:
        assert bound.max() < 1e-9
    if spread == 6.0 and change:
        assert bound.sum() > 0.8 * exact.sum()


def test_a_likeliest_token_that_the_other_does_not_even_name_is_a_great_distance() -> None:
    p = rows_of([{1: math.log(0.98), 2: math.log(0.01)}], [1])
    q = rows_of([{8: math.log(0.6), 9: math.log(0.39), 1: math.log(0.0001)}], [1])
    swapped = rows_of([{8: math.log(0.6), 9: math.log(0.39)}], [8])
    parts = ((0.98, 0.0001), (0.01, 0.0099), (0.01, 0.99))  # token 1; 2, of which q says nothing; all others
    assert kl(p, q, 2)[0] == pytest.approx(sum(a * math.log(a / b) for a, b in parts))
    assert kl(p, swapped, 2)[0] > 3  # at most 0.01 is left of it for tokens 1 and 2


def test_rows_are_ranked_and_equals_go_by_their_id() -> None:
    rows = rows_of([{7: -1.0, 3: -1.0, 5: -0.5}, {4: -9999.0}], [3, 4])
    assert rows.ids.tolist() == [[5, 3, 7], [4, -1, -1]]
    assert rows.chosen.tolist() == [-1.0, -100.0]
    other = rows_of([{5: -0.4, 3: -1.0}, {9: -0.1, 4: -4.0}], [3, 4])
    assert agreement(rows, other).tolist() == [True, False]


@pytest.mark.parametrize(
    ("reference", "other", "wanted"),
    [([1, 2, 3], [1, 2, 3], (3, 3)), ([1, 2, 3], [1, 9, 3], (2, 1)), ([1, 2, 3], [1, 2], (2, 2)), ([4], [5], (1, 0))],
)
def test_continuations_are_compared_up_to_the_first_word_that_differs(
    reference: list[int], other: list[int], wanted: tuple[int, int]
) -> None:
    made = [rows_of([{t: -0.1} for t in tokens], tokens) for tokens in (reference, other)]
    assert until_they_part(*made) == wanted


def test_intervals_are_the_same_each_time_and_hold_the_value() -> None:
    figure = intervals.ratio([1.0, 4.0, 2.0, 9.0], [10, 20, 10, 30], (0, 1))
    assert figure == intervals.ratio([1.0, 4.0, 2.0, 9.0, 0.0], [10, 20, 10, 30, 0], (0, 1))
    assert figure.value == 16 / 70 and 0 <= figure.low < 0.15 and 0.3 < figure.high <= 1
    alike = intervals.ratio([2.0, 4.0], [1, 2], (0, 9), math.exp)
    assert (alike.low, alike.value, alike.high) == pytest.approx((math.exp(2),) * 3)
    assert intervals.ratio([], [], (0, 1)).value == 0
    assert intervals.ratio([0.2], [10], (0, 100)) == Figure(value=0.02, low=0, high=100), "one says nothing of others"
    # Two that differ, drawn again and again, are one text, or both as they are: the draws know no spread.
    two = intervals.ratio([0.9, 1.1], [1, 1], (0, 100))
    assert two.low == pytest.approx(0, abs=0.3) and two.high == pytest.approx(2.27, abs=0.01)


@pytest.mark.parametrize("texts", [23, 8])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_intervals_hold_the_truth_as_often_as_they_say(loss: Loss, texts: int) -> None:
    """The same draws each time. Of the hardest loss the percentiles of the draws hold it 77 and 88 % of the time."""
    trials = 250
    assert coverage(loss, texts, trials).held >= 0.93 - 2 * math.sqrt(0.93 * 0.07 / trials)


def test_few_questions_leave_a_wide_interval_even_where_both_are_right() -> None:
    none = intervals.lost([True] * 12, [True] * 12)
    assert none.value == 0 and none.low < -0.15 and none.high > 0.15
    assert intervals.lost([True] * 100, [True] * 100).high < 0.03
    all_lost = intervals.lost([True] * 12, [False] * 12)
    assert all_lost.value == 1 and all_lost.low > 0.5
    assert intervals.lost([True, False], [False, True]).value == 0


def changed(**changes: Any) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(json.dumps(only_choice(ANSWER)))
    return choice | changes


def test_a_real_answer_is_read() -> None:
    tokens = ANSWER["choices"][0]["prompt_token_ids"]
    rows = asking.forced(changed(), tokens, "x")
    assert len(rows) == 1 and rows.tokens.tolist() == tokens[1:] and rows.ids.shape[1] == 21
    after = asking.continued(changed(), "x")
    assert after.tokens.tolist() == [257, 258] and after.ids[0, 0] == 257 and after.chosen[0] == 0.0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (None, "wanted a list of 2"),
        ([None, {"5": {"logprob": -1.0}}], "lacks the prompt's own token"),
        ([None, {"97": {"logprob": float("nan")}}], "wanted a finite one"),
        ([None, {"97": {"logprob": 0.5}}], "wanted a finite one, 0 at most"),
        ([None, None], "wanted an object"),
    ],
)
def test_an_answer_without_what_must_be_there_is_wrong(entries: object, message: str) -> None:
    with pytest.raises(Wrong, match=message):
        asking.forced(changed(prompt_logprobs=entries), [67, 97], "x")
    words = {"tokens": [" a"], "top_logprobs": [{" a": -0.1}], "token_logprobs": [-0.1]}
    with pytest.raises(Wrong, match="saw the token ' a'"):
        asking.continued({"logprobs": words}, "x")


def reading(name: str, kind: str, shift: float = 0.0, tokens: tuple[int, ...] = (1, 2, 3)) -> Reading:
    entries = [{t: math.log(0.6) - shift, t + 1: math.log(0.3)} for t in tokens]
    rows = rows_of(entries, list(tokens))
    return Reading(name, kind, 9, rows, rows.first(2))


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
    with pytest.raises(InputError, match="other tokens of the text a"):
        compare.texts(ours, measured(reading("a", "code", tokens=(1, 2, 4))), 2)


def test_what_was_measured_is_kept_whole_or_measured_again(tmp_path: Path) -> None:
    made = measured(reading("a", "code"), reading("b", "english", tokens=(5,)))
    folder = tmp_path / "quality/x"
    assert known(folder) is None
    keep(folder, made)
    back = known(folder)
    assert back and (back.vllm, back.asked, back.notes) == (made.vllm, made.asked, made.notes)
    for one, other in zip(back.readings, made.readings, strict=True):
        assert (one.name, one.kind, one.first) == (other.name, other.kind, other.first)
        for part in ("ids", "logprobs", "tokens", "chosen"):
            assert np.array_equal(getattr(one.forced, part), getattr(other.forced, part))
    (folder / "rows.npz").write_bytes((folder / "rows.npz").read_bytes()[:-1])
    assert known(folder) is None
    keep(folder, made)
    assert known(folder)
    (folder / "measured.json").write_text("[]")
    assert known(folder) is None


def test_answers_to_other_questions_are_kept_elsewhere(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ours = run.QualityPlan(texts.load()), release(2)
    before = plan.folder(paths, ours)
    assert plan.folder(paths, ours) == before
    monkeypatch.setattr(skills, "STEPS", (4096,))
    assert plan.folder(paths, ours) != before


@pytest.mark.parametrize(
    ("name", "limit", "kept"),
    [("kl", 0.03, "within"), ("kl", 0.015, "unclear"), ("kl", 0.005, "more"), ("top1", 0.98, "within"),
     ("top1", 0.985, "within"), ("top1", 0.9875, "unclear"), ("top1", 0.995, "more")],
)  # fmt: skip
def test_a_loss_is_more_than_allowed_only_where_its_whole_interval_is(name: str, limit: float, kept: str) -> None:
    (judged,) = quality_allowance.judge(figures(), (), Quality(**{name: limit}))
    assert judged.kept == kept


def skill(asked: int, worse: int = 0, better: int = 0) -> quality_record.Skill:
    right = [True] * (asked - better) + [False] * better
    others = [False] * worse + [True] * (asked - worse)
    return quality_record.Skill(
        name="tool calls", asked=asked, reference=sum(right), release=sum(others),
        lost=intervals.lost(right, others), failures=tuple("wrong" for _ in range(worse)),
    )  # fmt: skip


def test_an_interval_wider_than_the_limit_tells_nothing() -> None:
    """And as many questions as are said to tell do tell."""
    allowed = Quality(tool_calls=0.05)
    few = skill(10)
    (judged,) = quality_allowance.judge(figures(), [few], allowed)
    assert judged.seen.high - judged.seen.low > 0.3 and judged.kept == "unclear"
    (text,) = re.findall(r"about (\d+) questions", quality_allowance.would_tell(judged, 23, [few]))
    assert 53 <= int(text) <= 56
    for asked, kept in ((int(text), "within"), (int(text) // 2, "unclear")):
        assert [one.kept for one in quality_allowance.judge(figures(), [skill(asked)], allowed)] == [kept]
    (judged,) = quality_allowance.judge(figures(), [skill(20, worse=2)], allowed)  # 10 % lost, 5 % allowed
    wanted = quality_allowance.needed_questions(skill(20, worse=2), 0.05)
    (more,) = quality_allowance.judge(figures(), [skill(wanted, worse=-(-wanted // 10))], allowed)
    assert (judged.kept, more.kept) == ("unclear", "more")
    assert quality_allowance.needed_questions(skill(20, worse=1), 0.05) == 0  # as much as is allowed


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
    if kept == "unclear":  # with that many texts the side in question is as far away as the limit
        count = quality_allowance.needed_texts(judged, 23)
        side = (high - value if value < 0.03 else value - low) / math.sqrt(count / 23)
        assert side <= abs(0.03 - value) < side * 1.05


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [({"kl": 0.03}, "ok"), ({"kl": 0.005, "top1": 0.9875}, "lost MORE than allowed: kl; cannot tell top1"),
     ({}, "none")],
)  # fmt: skip
def test_a_verdict_ends_the_report(allowed: dict[str, float], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    judged = quality_allowance.judge(figures(), (), Quality(**allowed))
    quality_report.report(made_record(release(2), release(1), judged=judged))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"verdict: {wanted}")
    row = next(line for line in lines if line.startswith("same first choice"))
    assert ("at least 98.75%" in row) == ("top1" in allowed)
    told = dict(re.findall(r"^(kl|top1): about ([\d,]+) tokens tell", "\n".join(lines), re.M))
    texts = figures()
    assert {name: int(text.replace(",", "")) for name, text in told.items()} == {
        one.name: math.ceil(quality_allowance.needed_texts(one, texts.texts) * texts.tokens / texts.texts)
        for one in judged
    }


def test_the_tables_fit_into_a_pipe(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kl = Figure(value=0.00123, low=0.00099, high=0.00234)
    seen = dataclasses.replace(figures(kl), perplexity_reference=123.4)
    allowed = Quality(kl=0.0035, top1=0.98, perplexity=1.02, continued_kl=0.0045, tool_calls=0.05)
    task = quality_record.Standard(
        task="gsm8k_cot_zeroshot", metric="exact_match,flexible-extract", samples=1319,
        reference=0.8123, release=0.7912, reference_stderr=0.01, release_stderr=0.0112,
    )  # fmt: skip
    made = made_record(
        release(2), release(1, stage="mtp"), judged=quality_allowance.judge(seen, [skill(200)], allowed),
        texts=(seen, *(dataclasses.replace(seen, kind=kind) for kind in ("conversation", "code"))),
        skills=(skill(200),), standard=(task,),
    )  # fmt: skip
    quality_record.save(paths, release(2), release(1, stage="mtp"), made)
    Releases(paths).save(release(2))
    monkeypatch.setenv("COLUMNS", "80")
    quality_report.report(made)
    limits.show(paths, release(2).recipe)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_limits_of_which_nothing_was_measured_are_shown(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    limits.show(paths, "scripted-tiny")
    assert "nothing was measured" in capsys.readouterr().out
    limits.show(paths, "scripted-tiny", as_json=True)
    rows = json.loads(capsys.readouterr().out)["limits"]
    chain = {stage.name: stage.quality for stage in manifests.load_chain(paths.project, "v2-tq")}
    assert {row["stage"] for row in rows} == chain.keys() - {"base"}
    for row in rows:
        assert row["allowed"] == getattr(chain[row["stage"]], row["limit"]) is not None
        assert (row["newest"], row["releases"], row["verdict"]) == (None, 0, None)


def by_the_rule(rows: Sequence[Cost]) -> Quality:
    """docs/quality.md, "The rule"."""
    steps = [digit * 10.0**power for power in range(-6, 1) for digit in (1, 1.5, 2, 3, 5, 7)]

    def four_times(*ends: float) -> float:
        return min(steps, key=lambda step: abs(step - 4 * max(ends)))

    turned = max(1 - row.top1.low for row in rows)
    return Quality(
        kl=four_times(*(row.kl.high for row in rows)),
        continued_kl=four_times(*(row.continued_kl.high for row in rows)),
        perplexity=1 + four_times(*(row.ratio.high - 1 for row in rows)),
        top1=1 - math.floor(150 * turned) / 100,
    )


def test_limits_of_stages_follow_from_the_ledger_by_the_rule_that_is_written_down() -> None:
    kernels = [cost for cost in ledger.costs() if not cost.stages]
    assert len(kernels) >= 2
    written = {}
    for stages, _, limits_told, _ in table("docs/quality.md", "stage"):
        told = {name: float(value) for name, value in re.findall(r"(kl|decoding|top1|ratio) ([\d.]+)", limits_told)}
        for name in stages.split(", "):
            written[name] = own = manifests.load_stage(PROJECT, name).quality
            rows = [*ledger.of_stages([name]), *kernels]
            wanted = by_the_rule(rows)
            for limit, title in {"kl": "kl", "continued_kl": "decoding", "perplexity": "ratio", "top1": "top1"}.items():
                assert getattr(own, limit) == pytest.approx(getattr(wanted, limit)), (name, limit)
                assert getattr(own, limit) == told[title], (name, limit)
            for row in rows:
                seen = {one: getattr(row, one) for one in ("kl", "top1", "ratio", "continued_kl")}
                judged = quality_allowance.judge(dataclasses.replace(figures(), **seen), (), own)
                assert {one.kept for one in judged} == {"within"}, (name, row)
    files = (path.stem for path in (PROJECT / "stages").glob("*.yaml"))
    assert written.keys() == {name for name in files if manifests.load_stage(PROJECT, name).quality != Quality()}
    newer = {name: getattr(written["mtp"], name) for name in ("kl", "top1", "perplexity")}  # other kernels, no more
    assert newer == {name: getattr(bump.ALLOWED, name) for name in newer}


def test_the_ledger_s_data_are_those_that_were_measured() -> None:
    """And nothing that was measured of such a change since, with worse ends, is left out."""
    kept = {cost.data: cost for cost in ledger.costs() if cost.data}
    assert len(kept) == sum(1 for cost in ledger.costs() if cost.data) >= 8
    measured: dict[str, Any] = {}
    for path in (PROJECT / "benchmarks/ledger/data").glob("*/figures.json"):
        for found in json.loads(path.read_text()):
            measured[f"{path.parent.name}/{found['name']}/{found['against']}"] = found.get("texts", [None])[0]
    for where, cost in kept.items():
        for name in ("kl", "top1", "ratio", "continued_kl"):
            told = getattr(cost, name)
            assert [told.value, told.low, told.high] == pytest.approx(list(measured[where][name].values()), rel=1e-3)
        setup = where.partition("/")[2]
        for other, found in measured.items():
            if other.partition("/")[2] == setup and found:
                assert found["top1"]["low"] >= cost.top1.low - 1e-4
                for name in ("kl", "ratio", "continued_kl"):
                    assert found[name]["high"] <= getattr(cost, name).high * 1.001
    page = (PROJECT / "docs/quality-ledger.md").read_text(encoding="utf-8").partition("trained-tiny on a CPU")[2]
    rows = [[float(one) for one in re.findall(r"[\d.]+", line.partition("|")[2])] for line in page.splitlines()]
    for cost in ledger.costs():  # of which the tables alone are left
        wanted = list[float]()
        for name, unit in {"kl": 1, "top1": 100, "ratio": 1, "continued_kl": 1}.items():
            seen = getattr(cost, name)
            wanted += [
                one * unit for one in ([seen.value, seen.low, seen.high] if seen.low < seen.high else [seen.low])
            ]
        assert cost.data or any(holds_in_order(row, wanted) for row in rows), cost


def holds_in_order(row: list[float], wanted: list[float]) -> bool:
    rest = iter(row)
    return all(any(math.isclose(one, seen, rel_tol=1e-6) for seen in rest) for one in wanted)


def test_what_could_not_be_measured_is_no_limit_kept() -> None:
    allowed = Quality(kl=0.03, continued_kl=0.03, needles=0.1)
    lines = quality_allowance.judge(dataclasses.replace(figures(), continued=0), (), allowed)
    assert [line.name for line in lines] == ["kl"]
    assert quality_allowance.unmeasured(lines, (), allowed) == ("continued_kl", "needles")


@pytest.mark.parametrize(("perplexity", "judged"), [(1.4e14, False), (200_000.0, True)])
def test_a_ratio_to_a_reference_that_is_worse_than_a_guess_is_not_judged(
    paths: Paths, perplexity: float, judged: bool
) -> None:
    ours, parent = release(2), release(1, stage="mtp")
    worse = Figure(value=1.076, low=1.07, high=1.08)
    seen = dataclasses.replace(figures(), perplexity_reference=perplexity, ratio=worse)
    quality_record.save(paths, ours, parent, made_record(ours, parent, texts=(seen,)))
    limit(paths, 0.05, ", perplexity: 1.005")
    if judged:
        with pytest.raises(QualityError, match="perplexity: MORE"):
            quality_gate.check(paths, ours, accepted="")
        return
    note, summary = quality_gate.check(paths, ours, accepted="")
    assert note == "perplexity is not judged: the reference is worse than a uniform guess"
    assert "1 of 1 limits kept" in summary


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "accepted.json: saw .*, wanted Invalid JSON"),
        ("{}", "accepted.json: wanted Input should be a valid"),
        ('[{"time": "t", "reason": 1, "reference": "r", "lost": []}]', "accepted.json: 0.reason: saw 1"),
        ('[{"time": "t", "reason": "r", "reference": "r"}]', "accepted.json: 0.lost: "),
    ],
)
@pytest.mark.parametrize("accepted", ["", "a test"])
def test_a_damaged_note_of_what_was_accepted_is_an_error(paths: Paths, text: str, message: str, accepted: str) -> None:
    ours, parent = release(3, "passed"), release(2, "passed", stage="mtp")
    limit(paths, 0.005)
    judged = quality_gate.judged(paths, ours, made_record(ours, parent))
    quality_record.save(paths, ours, parent, made_record(ours, parent, judged=judged))
    path = quality_record.folder_of(paths, ours) / quality_record.ACCEPTED
    path.write_text(text)
    with pytest.raises(ManifestError, match=message) as caught:
        quality_gate.check(paths, ours, accepted=accepted)
    assert str(path) in caught.value.message and caught.value.next_step.startswith(f"restore {path} from a backup")
    assert quality_gate.is_refused(paths, ours)
    assert quality_of(paths, ours).text == "record damaged"
    assert path.read_text() == text


def test_what_promote_refuses_rollback_passes_over(paths: Paths) -> None:
    old, parent, worse, current = release(1, "passed"), release(2, stage="mtp"), release(3, "passed"), release(4)
    quality_record.save(paths, worse, parent, made_record(worse, parent))
    limit(paths, 0.005)
    refused = partial(quality_gate.is_refused, paths)
    assert landing([old, parent, worse, current], current, [], refused) == old
    quality_gate.note_accepted(paths, worse, "a test")
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


def test_other_standard_tasks_of_the_same_two_stay(paths: Paths) -> None:
    ours, parent = release(2), release(1, stage="mtp")
    same: dict[str, Any] = {"metric": "acc", "samples": 4, "reference_stderr": None, "release_stderr": 0.1}
    tasks = (("a", 0.5), ("b", 0.25), ("a", 0.75))
    rows = [quality_record.Standard(task=task, reference=value, release=value, **same) for task, value in tasks]
    for standard_rows in ((rows[0], rows[1]), (), (rows[2],)):
        quality_record.save(paths, ours, parent, made_record(ours, parent, standard=standard_rows))
    assert quality_record.records_of(paths, ours)[0].standard == (rows[1], rows[2])


def test_a_skill_that_the_reference_has_not_is_not_judged() -> None:
    lost = Figure(value=0.0, low=-0.4, high=0.4)
    both = tuple(
        quality_record.Skill(name=name, asked=5, reference=right, release=right, lost=lost, failures=())
        for name, right in (("tool calls", 0), ("needles", 2))
    )
    texts = made_record(release(2), release(1, stage="mtp")).overall
    allowed = Quality(tool_calls=0.05, needles=0.05)
    judged = quality_allowance.judge(texts, both, allowed)
    assert [line.name for line in judged] == ["needles"]
    assert quality_allowance.unmeasured(judged, both, allowed) == ()
    [note] = quality_allowance.notes(texts, both, allowed)
    assert note.startswith("tool calls are not judged")
    assert quality_allowance.notes(texts, both, Quality(needles=0.05)) == ()


def test_the_only_recipe_with_releases_is_meant(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_recipe", lambda project, stack=None: "default")
    assert choose.choose_known(paths, None) == "default" and choose.choose_known(paths, "x") == "x"
    records = Releases(paths)
    records.save(release(1))
    assert choose.choose_known(paths, None) == release(1).recipe
    records.save(release(2, recipe="other"))
    records.record_path(release(2, recipe="other")).write_text("{")
    assert choose.choose_known(paths, None) == "default"


def test_a_release_is_compared_with_its_parent_stage_or_with_what_a_person_names(paths: Paths) -> None:
    records = Releases(paths)
    base, old, parent, ours = release(1, stage="base"), release(2, stage="mtp"), release(3, stage="mtp"), release(4)
    for made in (base, old, parent, ours):
        records.save(made)
    assert quality.chosen(paths, "tiny", ours.tag, None) == quality.Pair(ours, parent, "parent")
    assert quality.chosen(paths, "tiny", ours.tag, old.tag) == quality.Pair(ours, old, "parent")
    assert quality.chosen(paths, "tiny", ours.tag, "base") == quality.Pair(ours, base, "named")
    with pytest.raises(InputError, match="stage 'base' has no parent"):
        quality.chosen(paths, "tiny", base.tag, None)
    with pytest.raises(InputError, match="against itself"):
        quality.chosen(paths, "tiny", ours.tag, "v2")
    with pytest.raises(InputError, match="no release of stage 'hybrid'"):
        quality.chosen(paths, "tiny", old.tag, None)


def test_a_parent_that_passed_goes_before_a_newer_one_and_of_these_one_of_the_same_recipe(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Releases(paths)
    same, other = ({"recipes/tiny.yaml": digit * 64} for digit in "ab")
    fits = release(1, "passed", stage="mtp", inputs=same)
    unlike = release(2, "passed", stage="mtp", inputs=other)
    unproven, ours = release(3, stage="mtp", inputs=same), release(4, inputs=same)
    records.save(unproven)
    assert quality.parent_of(paths, ours) == unproven
    told = capsys.readouterr()
    assert f"warning: {unproven.tag}, the reference, has not passed" in told.out + told.err
    records.save(unlike)
    assert quality.parent_of(paths, ours) == unlike
    records.save(fits)
    assert quality.parent_of(paths, ours) == fits
    told = capsys.readouterr()
    assert "warning" not in told.out + told.err


def test_without_a_name_it_is_the_newest_that_passed_and_has_a_parent(paths: Paths) -> None:
    records = Releases(paths)
    name = "scripted-tiny"
    own = manifests.load_recipe(paths.project, name).stage
    with pytest.raises(InputError, match=f"no release of stage '{own}'") as caught:
        quality.newest(paths, name)
    assert caught.value.next_step == f"invoke build --recipe {name} --stage {own}"
    unproven = release(5, recipe=name, stage=own)
    records.save(unproven)
    assert quality.newest(paths, name) == unproven
    passed = [release(day, "passed", recipe=name, stage=stage) for day, stage in ((2, "mtp"), (3, "v2"), (4, "base"))]
    for made in passed:
        records.save(made)
    assert quality.newest(paths, name) == passed[1]


def test_a_long_text_and_a_long_needle_are_told_of_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        told.set()

    def read_until_told(result: object) -> Callable[..., object]:
        def slow(*_: object) -> object:
            told.clear()
            assert told.wait(60), "nothing is said"
            return result

        return slow

    monkeypatch.setattr(progress, "EVERY", 0.1)
    monkeypatch.setattr(skills, "tool_questions", lambda *_, **__: [])
    monkeypatch.setattr(skills, "needle_steps", lambda *_, **__: (2048,))
    monkeypatch.setattr(skills, "needles", read_until_told([SkillAnswer("needles, 2,048 tokens", "word", True)]))
    monkeypatch.setattr(asking, "room", lambda _: 4096)
    monkeypatch.setattr(asking, "reading", read_until_told(SimpleNamespace(forced=[])))
    exact = SimpleNamespace(chat=SimpleNamespace(exact=True))
    subject: Any = SimpleNamespace(expect=exact, client=None, model="m")
    corpus: Any = SimpleNamespace(quick=True, texts=[SimpleNamespace(name="a poem")])
    run.read(subject, corpus, say, [])
    run.questions(subject, corpus, say, [])
    waits = [line for line in said if line.startswith("  ")]
    assert {line.partition(",")[0].strip() for line in waits} == {"a first answer", "reading text 1", "needles"}


def test_questions_that_only_one_was_asked_are_noted() -> None:
    def asked(step: str) -> QualityMeasured:
        needles = (SkillAnswer(f"needles, {step} tokens", f"word {n}", True) for n in range(2))
        return QualityMeasured("0.32.0", 1.5, (), (SkillAnswer("tool calls", "one", True), *needles))

    p, q = asked("2,048"), asked("1,900")
    assert compare.asked_alone(p, q) == (
        "needles, 2,048 tokens: 2 asked of the reference alone, so not compared",
        "needles, 1,900 tokens: 2 asked of the release alone, so not compared",
    )
    assert compare.asked_alone(p, p) == ()


def limit(paths: Paths, value: float, others: str = "") -> None:
    stage = paths.project / "stages/v2.yaml"
    lines = [line for line in stage.read_text().splitlines() if not line.startswith("quality:")]
    stage.write_text("\n".join([*lines, f"quality: {{kl: {value}{others}}}"]) + "\n")


def test_promotion_goes_by_the_record_and_by_the_stage_as_it_is_now(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, parent = release(2), release(1, stage="mtp")
    assert quality_gate.check(paths, ours, accepted="")[0].startswith("no quality record: nobody has measured")
    assert quality_gate.check(paths, release(4, stage="base"), accepted="") == ()
    limit(paths, 0.005)
    judged = quality_gate.judged(paths, ours, made_record(ours, parent))
    quality_record.save(paths, ours, parent, made_record(ours, parent, judged=judged))
    with pytest.raises(QualityError, match=r"kl: MORE, 0.02 \[0.01, 0.03\], allowed at most 0.005") as caught:
        quality_gate.check(paths, ours, accepted="")
    assert "--accept-loss" in caught.value.next_step
    accepted = quality_gate.check(paths, ours, accepted="we need the memory")
    assert accepted[0].startswith("accepted: kl: MORE")
    quality_gate.note_accepted(paths, ours, "we need the memory")
    quality_gate.note_accepted(paths, ours, "still")
    first, second = quality_record.accepted_of(paths, ours)
    assert (first.reason, second.reason) == ("we need the memory", "still")
    assert [(one.name, one.limit, one.seen.value) for one in first.lost] == [("kl", 0.005, 0.02)]
    with monkeypatch.context() as reworded:  # what was accepted are figures, whatever the words for them are
        reworded.setattr(quality_allowance, "TOLD", dict.fromkeys(quality_allowance.TOLD, "another word"))
        assert quality_gate.refusal(paths, ours) is None
    assert quality_gate.check(paths, ours, accepted="")[1] == "accepted before: still"
    evidence = quality_of(paths, ours)
    assert evidence.text == f"lost more than allowed: kl; accepted: still ({parent.name})"
    limit(paths, 0.005, ", top1: 0.999")  # another loss, which nobody has accepted
    with pytest.raises(QualityError, match="top1: MORE"):
        quality_gate.check(paths, ours, accepted="")
    limit(paths, 0.004)
    assert quality_gate.refusal(paths, ours) is None
    quality_record.save(
        paths, ours, parent, made_record(ours, parent, texts=(figures(Figure(value=0.03, low=0.02, high=0.04)),))
    )
    with pytest.raises(QualityError, match=r"kl: MORE, 0\.03"):
        quality_gate.check(paths, ours, accepted="")
    quality_record.save(paths, ours, parent, made_record(ours, parent))
    assert len(quality_record.records_of(paths, ours)) == 1  # the note of what was accepted is no record
    limit(paths, 0.015)
    assert quality_gate.check(paths, ours, accepted="")[0].startswith("kl: cannot tell")
    limit(paths, 0.05, ", needles: 0.1")
    assert quality_gate.check(paths, ours, accepted="")[0] == "not measured: needles"
    limit(paths, 0.05)
    assert quality_gate.check(paths, ours, accepted="") == (
        f"quality against {parent.tag}: 1 of 1 limits kept, measured 2026-01-05T00:00:00.000Z",
    )
    assert quality_gate.check(paths, ours, accepted="x")[0].startswith("nothing to accept")
    assert [one.kind for one in quality_of(paths, ours).limits] == ["good"], "the report goes by the same limits"


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
        commands_releases.promote(ours.tag, accept_loss="  ")
    with pytest.raises(InputError, match="not of other"):
        commands_releases.promote(ours.tag, recipe="other")
    assert Releases(paths).current("tiny") is None
    where.write_text("{")
    assert isinstance(quality_gate.refusal(paths, ours), ManifestError)


def test_limits_stand_beside_what_was_measured(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    limits.show(paths, "tiny")  # a recipe whose file is gone
    assert capsys.readouterr().out.strip().endswith("invoke quality --recipe tiny")
    parent, one, other = release(1, stage="mtp"), release(2), release(3)
    lost = Figure(value=0.02, low=0.01, high=0.0312), Figure(value=0.01, low=0.008, high=0.012)
    for made, figure in zip((one, other), lost, strict=True):
        Releases(paths).save(made)
        quality_record.save(paths, made, parent, made_record(made, parent, texts=(figures(figure),)))
    limit(paths, 0.005)
    limits.show(paths, "tiny")
    text = capsys.readouterr().out
    row = next(line.split() for line in text.splitlines() if " kl " in line)
    assert row == ["v2", "kl", "0.005", "0.01", "0.008", "..", "0.012", "MORE", "2", "0.032"]
    top1 = next(line.split() for line in text.splitlines() if " top1 " in line)
    assert top1 == ["v2", "top1", "-", "0.985", "0.98", "..", "0.99", "2", "0.98"]
    limits.show(paths, "tiny", as_json=True)
    told = json.loads(capsys.readouterr().out)
    kl = next(row for row in told["limits"] if row["limit"] == "kl")
    assert kl["newest"] == {"value": 0.01, "low": 0.008, "high": 0.012}
    assert (kl["allowed"], kl["verdict"], kl["releases"], kl["would_keep_all"]) == (0.005, "more", 2, 0.032)
    (paths.project / "stages/v2.yaml").unlink()
    limits.show(paths, "tiny")
    assert "stage v2 is left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "down", "wanted"),
    [(0.03121, False, 0.032), (0.98123, True, 0.981), (1.00482, False, 1.0049), (0.05, False, 0.05), (12.3, False, 13),
     (0.0, False, 0.0), (1.0, True, 1.0), (1.0, False, 1.0), (1.5e-11, False, 1.5e-11)],
)  # fmt: skip
def test_a_limit_is_rounded_to_the_side_that_is_kept(value: float, down: bool, wanted: float) -> None:
    assert limits.rounded(value, down=down) == pytest.approx(wanted, rel=1e-9)


def test_every_stage_with_a_parent_says_what_it_may_cost() -> None:
    for path in sorted((PROJECT / "stages").glob("*.yaml")):
        stage = manifests.load_stage(PROJECT, path.stem)
        limits = stage.quality.model_dump()
        assert (None not in limits.values()) if stage.parent else set(limits.values()) == {None}, path.name


def test_the_texts_are_those_that_their_sources_name() -> None:
    corpus = texts.load()
    assert {text.kind for text in corpus.texts} == {"code", "english", "json", "turkish"}
    said = (texts.FOLDER / "SOURCES.md").read_text(encoding="utf-8")
    for text in corpus.texts:
        assert f"{text.kind}/*" in said or text.name.partition("/")[2] in said, text.name
    assert len(texts.load(quick=True).texts) == 8
    assert texts.load(quick=True).digest != corpus.digest == texts.load().digest
    assert all(set(one.calls) <= {tool["function"]["name"] for tool in one.tools} for one in corpus.questions)


RESULTS = {  # of lm-eval 0.4.13
    "results": {
        "sparkpin_choices": {"alias": "sparkpin_choices", "acc,none": 0.25, "acc_stderr,none": 0.11, "sample_len": 16},
        "gsm8k": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"},
    },
    "n-samples": {"sparkpin_choices": {"original": 16, "effective": 12}},
}


def test_scores_of_lm_eval_are_read() -> None:
    assert standard.read_scores(RESULTS) == (
        standard.Score("sparkpin_choices", "acc", 12, 0.25, 0.11),
        standard.Score("gsm8k", "exact_match,strict-match", 0, 0.5, None),
    )


ARC, OWN = standard.StandardTasks(("arc_easy",)), standard.StandardTasks(("sparkpin_choices",))
OFFLINE = "...\nConnectionError: Couldn't reach 'allenai/ai2_arc' on the Hub (OfflineModeIsEnabled)"
CHATS = "Loglikelihood is not supported for chat completions. Consider ..."


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda paths: standard.require_known(paths, ARC), InputError, "lm-eval is not installed.*arc_easy\n.*--fetch"),
        (lambda paths: standard.require_known(paths, OWN), InputError, r"lm-eval is not installed in \S+\n"),
        (lambda _: standard.raise_for(OFFLINE, ARC), InputError, "data of arc_easy are not at hand"),
        (lambda _: standard.raise_for(CHATS, ARC), InputError, "which chats do not give"),
        (lambda _: standard.raise_for("aiohttp: 500", ARC), SmokeError, "no result for arc_easy"),
        (lambda _: standard.wanted_of("a b", limit=0, chat=False, fetch=False), InputError, "wanted a name"),
        (lambda _: standard.wanted_of("--x", limit=0, chat=False, fetch=False), InputError, "wanted a name"),
        (lambda _: standard.wanted_of("sparkpin_x", limit=0, chat=False, fetch=False), InputError, "sparkpin_choices"),
        (lambda _: standard.wanted_of("", limit=0, chat=False, fetch=True), InputError, "are about --tasks"),
    ],
)
def test_what_lm_eval_lacks_is_said_with_what_to_do(
    paths: Paths, act: Callable[[Paths], object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        act(paths)


FAKE = """class TaskManager:
    all_tasks = ["arc_easy", "arc_challenge", "gsm8k"]
    def __init__(self, include_path): open(include_path + "/sparkpin_choices.yaml").close()
    def match_tasks(self, names): return [name for name in names if name in self.all_tasks]
"""


def test_a_task_that_lm_eval_does_not_have_is_told_before_anything_is_measured(paths: Paths, tmp_path: Path) -> None:
    """What stands in for lm-eval tells as it does: the real one is 0.7 GB."""
    folder, python = standard.environment(paths), standard.environment(paths) / "bin/python"
    python.parent.mkdir(parents=True)
    (folder / standard.READY).write_text("{}")
    (tmp_path / "lm_eval/tasks").mkdir(parents=True)
    (tmp_path / "lm_eval/tasks/__init__.py").write_text(FAKE)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    standard.require_known(paths, standard.StandardTasks(("arc_easy", "sparkpin_choices")))
    for name, begin in (("arc_esy", "did you mean arc_easy"), ("nope", f"{folder}/bin/lm_eval ls tasks lists them")):
        with pytest.raises(InputError, match=f"lm-eval has no task '{name}'") as caught:
            standard.require_known(paths, standard.StandardTasks(("gsm8k", name)))
        assert caught.value.next_step.startswith(begin)
    python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    standard.require_known(paths, standard.StandardTasks(("sparkpin_choices", "sparkpin_answers")))
    with pytest.raises(SmokeError, match="does not tell its tasks:\nbroken"):
        standard.require_known(paths, standard.StandardTasks(("gsm8k",)))


def test_a_run_of_lm_eval_is_offline_and_asks_no_proxy(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"https_proxy": "http://p", "HTTP_PROXY": "http://p", "PYTHONPATH": "x", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    run, fetch = (standard.child_env(paths, offline=offline) for offline in (True, False))
    assert run["HF_HUB_OFFLINE"] == "1" and run["LANG"] == "C"
    assert not {"https_proxy", "HTTP_PROXY", "PYTHONPATH"} & set(run)
    assert "HF_HUB_OFFLINE" not in fetch and fetch["HTTP_PROXY"] == "http://p"


@pytest.mark.parametrize(
    ("gpus", "free", "error"), [(True, 1 << 40, "needs 10.00 GiB"), (False, 0, "the measurements")]
)
def test_what_has_no_room_is_not_started(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, gpus: bool, free: int, error: str
) -> None:
    """A full machine and a full disk, which a test cannot have; nor has it a GPU."""
    ours, no = release(1, "passed"), lambda *_, **__: None
    for room, names in (
        (own_server, "obstacle remove_leftovers"),
        (own_server.running, "require_readable require_image"),
    ):
        for name in names.split():
            monkeypatch.setattr(room, name, no)
    monkeypatch.setattr(own_server, "uses_gpu", lambda *_: gpus)
    monkeypatch.setattr(own_server, "checkpoint_of", lambda *_: paths.project)
    monkeypatch.setattr(own_server, "with_loader", lambda _, release, *__, **___: release)
    needed = memory_limit.Room(10 << 30, 10 << 30, SimpleNamespace(hints=()))  # type: ignore[arg-type]
    for name, told in {"drop_page_cache": None, "available": 1 << 30, "room_for": needed}.items():
        monkeypatch.setattr(own_server.memory_limit, name, lambda *_, told=told: told)
    usage = shutil.disk_usage(paths.project)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    with pytest.raises((HostError, DiskError), match=error):
        run.measure(paths, None, ours, run.QualityPlan(texts.load(quick=True)), print)  # type: ignore[arg-type]


def test_a_long_program_is_told_of_and_its_outputs_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its progress bar is one line. It goes on when it was told of: no time is waited for."""
    monkeypatch.setattr(watched, "EVERY", 0.0)
    bar, said = tmp_path / "go-on", list[str]()

    def say(line: str) -> None:
        said.append(line)
        bar.touch()

    text = f"""
import pathlib, sys, time
print("begins")
print("Requesting API:   1%\\rRequesting API:  50%", end="", file=sys.stderr)
while not pathlib.Path({str(bar)!r}).exists(): time.sleep(0.01)
sys.exit(3)"""
    done = watched.run([sys.executable, "-uc", text], cwd=tmp_path, env=os.environ, limit=600, silent=600, say=say)
    assert done.returncode == 3 and done.stdout == "begins\nRequesting API:   1%\rRequesting API:  50%"
    assert said[0] == "  Requesting API:  50%"


@pytest.mark.parametrize(("limit", "silent", "why"), [(0.2, 600, "took more than"), (600, 0.2, "said nothing")])
def test_a_program_that_takes_too_long_ends_with_what_it_started(
    tmp_path: Path, limit: float, silent: float, why: str
) -> None:
    """Whoever holds the pipe open lives."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        argv = ["/bin/sh", "-c", f"exec 9>{tmp_path / 'pipe'}; echo begun; sleep 1000 & sleep 1000"]
        with pytest.raises(watched.Overdue, match=why):
            watched.run(argv, cwd=tmp_path, env=os.environ, limit=limit, silent=silent, say=print)
        assert select.select([pipe], [], [], 300)[0] and os.read(pipe, 100) == b""
    finally:
        os.close(pipe)


def test_scores_are_asked_again_where_lm_eval_or_a_task_of_ours_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = standard.StandardTasks(("sparkpin_choices",))
    before = standard.asked(wanted)
    assert standard.asked(wanted) == before != standard.asked(dataclasses.replace(wanted, limit=4))
    shutil.copytree(standard.TASKS, tmp_path / "tasks")
    monkeypatch.setattr(standard, "TASKS", tmp_path / "tasks")
    assert standard.asked(wanted) == before
    (tmp_path / "tasks/choices.jsonl").write_text("")
    assert standard.asked(wanted) != before


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server of recorded answers on a Unix socket whose path is too long for one."""
    folder = tmp_path / ("long" * 20) / ("longer" * 10)
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with fake_vllm.serving(fake_vllm.UnixServer("vllm.sock", fake_vllm.Handler)):
        yield folder / "vllm.sock"


def test_a_port_reaches_a_server_on_a_socket(socket: Path) -> None:
    left_open = httpx.Client(trust_env=False, timeout=60)
    with (
        socket_port.listening(socket) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        for _ in range(3):
            answer = http.get("/v1/models")
            assert answer.status_code == 200 and answer.json()["data"][0]["id"] == "scripted-tiny"
        assert left_open.get(f"http://127.0.0.1:{port}/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        left_open.get(f"http://127.0.0.1:{port}/v1/models")
    left_open.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
def test_a_port_answers_no_other_user(socket: Path) -> None:
    """Nor one who has closed the connection before anybody looks: it belongs to nobody then, which looks like root."""
    with socket_port.listening(socket) as port, tcp.create_server(("127.0.0.1", 0)) as here:
        said, told = os.pipe()
        child = os.fork()
        if not child:
            os.setuid(65534)
            with tcp.create_connection(("127.0.0.1", port)) as link, contextlib.suppress(ConnectionError):
                link.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                os.write(told, link.recv(100))
            with tcp.create_connection(here.getsockname()) as link:
                link.recv(1)
            os._exit(0)
        os.close(told)
        link, peer = here.accept()
        assert not socket_port.is_ours(peer[1], here.getsockname()[1])
        link.sendall(b"x")
        assert os.waitpid(child, 0)[1] == 0 and os.read(said, 100) == b""
        assert not socket_port.is_ours(peer[1], here.getsockname()[1])
        link.close()
        os.close(said)
        with tcp.create_connection(here.getsockname()) as link:
            assert socket_port.is_ours(link.getsockname()[1], here.getsockname()[1])
