"""The report: what is gathered, and how it is drawn."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html as html_text
import math
import re
import shutil
from pathlib import Path

import made_releases
import pytest
from markupsafe import escape
from places import PROJECT
from report_samples import HOST, HOSTILE, Made, benched, comparison, figure
from report_samples import made as made

from sparkpin.cli import history as tasks
from sparkpin.core.paths import Paths
from sparkpin.measure.bench import record as bench
from sparkpin.releases import quality_record as quality
from sparkpin.releases.record import Releases
from sparkpin.report import measured
from sparkpin.report import page as drawing
from sparkpin.report.facts import LimitBar, Report, ReportMemory, ReportRow, SpeedBar
from sparkpin.report.gather import gather
from sparkpin.report.page import html, markdown
from sparkpin.upgrade import bump_record as record
from sparkpin.upgrade.bump_record import Bump, Step


@pytest.fixture(scope="module")
def report(made: Made) -> Report:
    return gather(made[0], None)


@pytest.fixture
def copied(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A home that a test may damage."""
    shutil.copytree(made[0].home, tmp_path / "home")
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPARKPIN_CACHE", str(made[0].cache))
    return Paths.from_env()


def test_releases_and_their_verdicts(report: Report, made: Made) -> None:
    first, hybrid, second, third = made[1]
    [part] = report.recipes
    assert (part.shown.release.tag, part.current, part.machine) == (second.tag, True, HOST.line)
    assert [item.release.tag for item in part.items] == [third.tag, second.tag, hybrid.tag, first.tag]
    items = {item.release.tag: item for item in part.items}
    assert items[second.tag].command == f"invoke diff {hybrid.tag} {second.tag}" and not items[first.tag].command
    assert {tag: [one.kind for one in item.evidence] for tag, item in items.items()} == {
        first.tag: ["good", "none", "good"],
        hybrid.tag: ["none", "none", "none"],
        second.tag: ["good", "bad", "good"],
        third.tag: ["bad", "none", "none"],
    }
    assert items[hybrid.tag].quality.hint == f"invoke quality {hybrid.tag}"
    assert [command.text for command in part.back] == [
        "invoke rollback --recipe scripted-tiny --serve",
        f"invoke promote {second.tag}",
    ]
    assert part.bars == (SpeedBar("base", 38.4, "good", 100.0),)
    assert "KV pool" in [what for what, *_ in part.memory.shares]
    assert "75% of drafts accepted" in items[second.tag].speed.rows[0].text


@pytest.mark.parametrize(
    ("kept", "kind"),
    [((), "unclear"), (("within",), "good"), (("within", "unclear"), "unclear"), (("more", "unclear"), "bad")],
)
def test_the_verdict_on_a_comparison(made: Made, kept: tuple[quality.Kept, ...], kind: str) -> None:
    first, _, second, _ = made[1]
    judged = [
        quality.Judged(name=name, limit=0.1, seen=figure(0.1), kept=one)
        for name, one in zip(("kl", "perplexity"), kept, strict=False)
    ]
    assert measured.quality_word(comparison(second, first, tuple(judged)))[0] == kind


def test_a_release_of_which_little_was_measured_says_so(made: Made, copied: Paths) -> None:
    for release in made[1]:
        for name in ("bench", "quality"):
            shutil.rmtree(Releases(copied).evidence(release) / name, ignore_errors=True)
    [part] = gather(copied, "scripted-tiny").recipes
    assert not {"Output", "First token", "Quality"} & {tile.name for tile in part.tiles}
    assert part.bars == ()
    assert not re.search("[0-9] tok/s", html(Report("2026-01-04T00:00:00Z", "", (part,))))


def test_a_fresh_install_shows_what_its_smoke_test_saw(made: Made, copied: Paths) -> None:
    """Marked as such, and not beside a benchmark."""
    records, first, second = Releases(copied), made[1][0], made[1][2]
    known = {**(second.smoke or {}), "speed": {"first_token": 0.0312, "tokens_a_second": 58.3}}
    records.smoked(second.tag, known)
    shutil.rmtree(records.evidence(second) / "bench")
    assert [bar.rate for bar in gather(copied, "scripted-tiny").recipes[0].bars] == [28.3]
    shutil.rmtree(records.evidence(first) / "bench")
    [part] = gather(copied, "scripted-tiny").recipes
    tiles = {tile.name: tile for tile in part.tiles}
    assert (tiles["Output"].text, tiles["First token"].text) == ("58.3 tok/s", "31.2 ms")
    assert all("smoke test" in tiles[name].note for name in ("Output", "First token")) and "smoke" in part.measured_by
    assert [bar.rate for bar in part.bars] == [58.3] and part.shown.speed.hint == f"invoke bench {second.tag}"
    for damaged in (
        None,
        1,
        {},
        {"first_token": "x", "tokens_a_second": 1},
        {"first_token": 1, "tokens_a_second": 1e300},
    ):
        records.smoked(second.tag, {**known, "speed": damaged})
        assert measured.speed_of(copied, records.get(second.tag)).rate is None


def test_damaged_records_are_named(made: Made, copied: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    """On the page; a table for others leaves them out."""
    records = Releases(copied)
    first, _, second, third = made[1]
    records.record_path(third).write_text("{")
    (bench.folder(copied, first) / "20260103T020000Z.json").write_text("{}")
    quality.folder_of(copied, second).joinpath(f"{first.recipe}-{first.name}.json").write_text("[]")
    found = gather(copied, "scripted-tiny").recipes[0]
    assert len(found.faults) == 1 and f"{third.name}.json" in found.faults[0]
    items = {item.release.tag: item for item in found.items}
    assert {items[first.tag].speed.text, items[second.tag].quality.text} == {"record damaged"}
    for release in made[1]:
        records.record_path(release).write_text("{")
    tasks.report(copied, markdown=True)
    seen = capsys.readouterr()
    assert all(f"{release.name}.json" in seen.err for release in made[1]) and ".json" not in seen.out


def test_bumps_that_were_taken_and_refused(made: Made, copied: Paths) -> None:
    first, second = made[1][:2]
    ends = {"recipe": first.recipe, "what": "all", "current": first.tag, "release": second.tag}
    speed = Step(name="speed", passed=True, detail="decode_rate x1.010 [0.990, 1.030]", seconds=9.0)
    smoke = Step(name="smoke", passed=False, detail=f"tool-call: {HOSTILE}", seconds=9.0)
    taken = {
        "changes": ["~ wheel a: 1 -> 2"],
        "steps": (speed,),
        "verdict": "promote",
        "applied": "2026-01-05T02:00:00Z",
    }
    refused = {"release": "", "changes": [], "steps": (smoke,), "verdict": "stay", "reason": "smoke: no"}
    for day, more in (("05", taken), ("06", refused | {"guilty": "~ wheel b: 1 -> 3"})):
        bump = Bump.model_validate({**ends, "time": f"2026-01-{day}T00:00:00Z", **more})
        record.write(copied.home / record.FOLDER / bump.time[:10], bump)
    part = gather(copied, first.recipe).recipes[0]
    assert [bump.verdict for bump in part.bumps] == ["stay", "promote"]
    assert [item.notes for item in part.items if item.release.tag == second.tag] == [("promoted",)]
    page = html(Report("2026-01-07T00:00:00Z", "", (part,)))
    assert HOSTILE not in page and all(str(escape(text)) in page for text in ("~ wheel b: 1 -> 3", smoke.detail))


def test_the_page_stands_for_itself(report: Report) -> None:
    """The one script is the page's own, which the policy names by its hash."""
    page = html(report)
    assert not re.search(r"<(img|iframe|object|embed|base|form)\b", page)
    assert re.findall(r"<link[^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert not re.search(r"""\s(style|on\w+)=["']""", page)
    policy = html_text.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert HOSTILE not in page and str(escape(HOSTILE)) in page


def test_markdown_is_a_table_that_nothing_breaks_out_of(report: Report) -> None:
    lines = markdown(report).splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == 4
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 7 for row in rows)
    assert "<script" not in markdown(report)


def test_a_quick_run_counts_only_where_there_is_no_other(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    release = made_releases.release(1)
    benched(paths, release, 99.0, tokens=32, day=4)
    quick = measured.speed_of(paths, release)
    assert "(quick)" in quick.evidence.text and quick.rate is None
    benched(paths, release, 28.3)  # the older one
    assert measured.speed_of(paths, release).rate == 28.3


def test_a_loss_is_drawn_against_its_limit() -> None:
    judged = [
        quality.Judged(name=name, limit=limit, seen=quality.Figure(value=value, low=low, high=high), kept="unclear")
        for name, limit, value, low, high in (
            ("kl", 0.02, 0.01, 0.005, 0.03), ("top1", 0.96, 0.98, 0.94, 1.0), ("perplexity", 1.02, 1.01, 1.005, 1.03),
        )
    ]  # fmt: skip
    bars = [measured.limit_bar(one) for one in judged]
    for bar, low, high in zip(bars, (0.25, 0.0, 0.25), (1.5, 1.5, 1.5), strict=True):
        assert (bar.value, bar.low, bar.high) == pytest.approx((0.5, low, high))


def test_one_recipe_s_page_does_not_take_the_place_of_all(
    made: Made, copied: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = made[1][0].recipe
    for asked, name in ((None, "report.html"), (recipe, f"report-{recipe}.html")):
        tasks.report(copied, recipe=asked)
        assert (copied.home / name).read_text().startswith("<!doctype html>")
    capsys.readouterr()
    tasks.report(copied, markdown=True)
    assert "| release | state |" in capsys.readouterr().out


def test_words_in_drawings_are_escaped() -> None:
    """The template takes drawings as they are."""
    limit = LimitBar(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "good", 0.5, -math.inf, math.inf)
    shares = drawing.draw_shares(ReportMemory(HOSTILE, "good", ((HOSTILE, 1, HOSTILE),)))
    checks = drawing.draw_checks([ReportRow(HOSTILE, HOSTILE)])
    for drawn in (drawing.draw_speeds([SpeedBar(HOSTILE, 1.0)]), shares, checks, drawing.draw_limit(limit)):
        assert "<script" not in drawn and "&lt;script&gt;" in drawn


def test_without_headers_nothing_is_fetched(made: Made, tmp_path: Path) -> None:
    paths = dataclasses.replace(made[0], cache=tmp_path / "cache")
    assert not gather(paths, "scripted-tiny").recipes[0].memory.shares
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
