"""The report: what is gathered, and how it is drawn."""

from __future__ import annotations

import dataclasses
import http.client
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import made_releases
import pytest
from places import PROJECT
from report_samples import HOST, HOSTILE, Made, benched, comparison, figure
from report_samples import made as made

from sparkpin.commands import report as tasks
from sparkpin.core.errors import BusyError, InputError
from sparkpin.core.paths import Paths
from sparkpin.history.report import charts, drawing, measured, offer
from sparkpin.history.report import gather as gathering
from sparkpin.history.report.facts import Chart, Point, Report, Series
from sparkpin.history.report.gather import gather
from sparkpin.history.report.markdown import markdown, plain
from sparkpin.history.report.page import html
from sparkpin.history.report.speed import speed_of
from sparkpin.measure.bench import record as bench
from sparkpin.releases import quality_record as quality
from sparkpin.releases.keep import pins_file
from sparkpin.releases.record import Releases

DRAWN = {"svg", "text", "rect", "line", "polyline", "circle", "title"}


@pytest.fixture(scope="module")
def report(made: Made) -> Report:
    return gather(made[0], None)


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return html(report)


def test_what_changed_is_told_against_the_release_before(report: Report, made: Made) -> None:
    first, hybrid, second, third = made[1]
    [part] = report.recipes
    items = {item.tag: item for item in part.items}
    assert [item.tag for item in part.items] == [third.tag, second.tag, hybrid.tag, first.tag]
    changes = items[second.tag].changes
    assert changes.since == first.tag and changes.command == f"invoke diff {first.tag} {second.tag}"
    assert dict(changes.sections) == {
        "vllm serve": ("~ --max-num-seqs 4 -> 2",),
        "files that people edit": ("~ recipes/scripted-tiny.yaml",),
    }
    assert items[hybrid.tag].changes.since == first.tag
    assert items[hybrid.tag].changes.why == "the first release of the stage hybrid"
    assert items[first.tag].changes.why == "the first release of this recipe"


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ((), ("unclear", "compared, no allowance declared")),
        (("within", "within"), ("good", "within its allowance")),
        (("within", "unclear"), ("unclear", "not clear: perplexity")),
        (("more", "unclear"), ("bad", "lost more than allowed: kl")),
    ],
)
def test_what_is_said_of_a_comparison(made: Made, kept: tuple[quality.Kept, ...], told: tuple[str, str]) -> None:
    first, _, second, _ = made[1]
    judged = [
        quality.Judged(name=name, limit=0.1, seen=figure(0.1), kept=one)
        for name, one in zip(("kl", "perplexity"), kept, strict=False)
    ]
    assert measured.quality_word(comparison(second, first, tuple(judged))) == told


def test_verdicts(report: Report, made: Made) -> None:
    first, hybrid, second, third = made[1]
    items = {item.tag: item for item in report.recipes[0].items}
    told = {tag: [(one.kind, one.text) for one in item.evidence] for tag, item in items.items()}
    nothing = ("none", "not measured")
    assert told == {
        first.tag: [("good", "passed in 40 s, 2 of 2 checks"), nothing, ("good", "28.3 tok/s, one user")],
        hybrid.tag: [nothing, nothing, nothing],
        second.tag: [
            ("good", "passed in 40 s, 2 of 2 checks"),
            ("bad", f"lost more than allowed: tool_calls ({first.name})"),
            ("good", "38.4 tok/s, one user"),
        ],
        third.tag: [("bad", "failed: chat, 1 of 2 checks"), nothing, nothing],
    }
    assert items[hybrid.tag].quality.hint == f"invoke quality {hybrid.tag}"
    rows = {row.name: row.text for row in items[second.tag].speed.rows}
    assert rows["of the ceiling"] == "38% of 100 tok/s at 273 GB/s"
    math = next(row for row in items[second.tag].speed.rows if row.name == "Math")
    assert ("75%", "of the drafts accepted") in math.figures
    assert ("20 ms", "first token; 95 %: 50 ms") in math.figures


def test_ways_memory_and_inputs(report: Report, made: Made) -> None:
    first, _, second, _ = made[1]
    [part] = report.recipes
    assert [command.text for command in part.back] == [
        "invoke rollback --recipe scripted-tiny --serve",
        f"invoke promote {second.tag}",
        f"invoke rebuild {first.tag}",
    ]
    known = gathering.way_to(made[0], dataclasses.replace(first, recipe="another"))
    assert known and known.does.endswith("then invoke serve --recipe another")
    assert re.match("(fits|does not fit): needs ", part.memory.headline)
    assert "KV pool" in [what for what, *_ in part.memory.shares]
    rows = {row.name: row.text for row in part.inputs}
    assert re.match(r"cpu, linux/amd64: \d+ wheels, \d+ Debian packages$", rows["stack"])
    assert (rows["signature"], part.sbom) == ("not signed", ())
    with pytest.raises(InputError):
        gather(made[0], "no-such-recipe")
    assert gather(made[0], "scripted-tiny-spark").recipes == ()


def test_histories_and_stages(report: Report) -> None:
    charts = {chart.title: chart for chart in report.recipes[0].charts}
    [series] = charts["Output, one user: base"].series
    assert [point.value for point in series.points] == [28.3, 38.4]
    [series] = charts["Start to first answer: base"].series
    assert [(point.value, point.kind) for point in series.points] == [(30.9, "good"), (19.2, "good"), (77.7, "bad")]
    sweep = charts["Output of all users at once"].series
    assert [(point.label, round(point.value, 1)) for point in sweep[0].points] == [("1", 38.4), ("4", 153.6)]
    assert not any("each stage" in title for title in charts)  # of one stage alone


def test_without_headers_nothing_is_fetched(made: Made, tmp_path: Path) -> None:
    paths = dataclasses.replace(made[0], cache=tmp_path / "cache")
    memory = gather(paths, "scripted-tiny").recipes[0].memory
    assert re.match(r"no plan: \d+ files of its model not here$", memory.headline)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_records_that_are_damaged_are_told(made: Made, tmp_path: Path) -> None:
    paths = dataclasses.replace(made[0], home=tmp_path / "home")
    shutil.copytree(made[0].home, paths.home)
    first, _, second, third = made[1]
    pins_file(Releases(paths), third.recipe).write_text("[]")
    Releases(paths).record_path(third).write_text("{")
    (bench.folder(paths, first) / bench.file_name("2026-01-03T02:00:00Z")).write_text("{}")
    quality.folder_of(paths, second).joinpath(f"{first.recipe}-{first.name}.json").write_text("[]")
    found = gather(paths, "scripted-tiny").recipes[0]
    assert len(found.faults) == 2 and f"{third.name}.json" in found.faults[0]
    assert str(pins_file(Releases(paths), third.recipe)) in found.faults[1]
    items = {item.tag: item for item in found.items}
    assert items[first.tag].speed.text == items[second.tag].quality.text == "record damaged"
    assert f"{third.name}.json" in html(Report("2026-01-04T00:00:00Z", "", (found,)))


def test_the_page_stands_for_itself(page: str) -> None:
    assert not re.search(r"<(script|img|iframe|object|embed|base|form)\b", page)
    assert re.findall(r"<link[^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert not re.search(r"""\s(style|on\w+)=["']""", page)
    assert "default-src &#39;none&#39;; style-src &#39;sha256-" in page
    assert len(page) < 200_000


def test_markdown_is_a_table_that_nothing_breaks_out_of(report: Report, made: Made) -> None:
    lines = markdown(report).splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == 4
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 7 for row in rows)
    assert rows[1].startswith(
        f"| `{made[1][2].name}` | current | 2026-01-03 | passed in 40 s, 2 of 2 checks | lost more"
    )
    assert "<script" not in markdown(report)
    (line,) = [line for line in lines if line.startswith("Speed of ")]
    wanted = [f"`{made[1][0].name}`", f"`{made[1][2].name}`", "vLLM 0.32.0", plain(HOST.line)]
    assert [part for part in wanted if part not in line] == []


def test_a_quick_run_is_told_as_one_and_only_where_there_is_no_other(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    release = made_releases.release(1)
    benched(paths, release, 99.0, tokens=32, day=4)
    quick = speed_of(paths, release)
    assert quick.evidence.text == "99 tok/s, one user (quick)" and quick.tokens is None and not quick.sweep
    benched(paths, release, 28.3)  # the older one
    assert speed_of(paths, release).evidence.text == "28.3 tok/s, one user"


def test_numbers_are_drawn_to_scale() -> None:
    """The published chain: 51 is 1.80 times as long as 28.3."""
    points = tuple(Point(label, value) for label, value in (("base", 28.3), ("hybrid", 30.8), ("v2", 51.0)))
    drawn = drawing.draw(Chart("Output", "tok/s", "bars", (Series("all", points),)))
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths[2] / widths[0] == pytest.approx(51 / 28.3, rel=1e-2)
    assert 'aria-label="Output, tok/s: base 28.3, hybrid 30.8, v2 51"' in drawn


@pytest.mark.parametrize("form", ["line", "bars"])
def test_words_in_drawings_are_escaped(form: Literal["line", "bars"]) -> None:
    """The template takes drawings as they are."""
    drawn = drawing.draw(Chart(HOSTILE, HOSTILE, form, (Series(HOSTILE, (Point(HOSTILE, 1.0), Point("b", 2.0))),)))
    shares = drawing.draw_shares(((HOSTILE, 1, HOSTILE, HOSTILE),))
    for text, times in ((drawn, 4), (shares, 2)):  # spoken: title, unit, label; seen: label or unit, and label
        assert {element.tag for element in ElementTree.fromstring(text).iter()} <= DRAWN
        assert text.count("&lt;script&gt;") >= times


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "3", None])
def test_what_is_no_number_is_not_drawn(made: Made, value: object) -> None:
    """JSON as Python reads it knows NaN and Infinity."""
    first = made[1][0]
    told = dataclasses.replace(first, smoke={**(first.smoke or {}), "ready_seconds": value})
    assert charts.number(told, "ready_seconds") is None
    assert charts.number(first, "ready_seconds") == 30.9


@contextmanager
def offered(page: bytes) -> Iterator[int]:
    with offer.server(page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def test_open_serves_the_page_to_this_machine_alone() -> None:
    with offered(b"<p>page") as port:
        answers = []
        for path, host in (("/", f"127.0.0.1:{port}"), ("/other", f"127.0.0.1:{port}"), ("/", "evil.invalid")):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            answers.append((answer.status, answer.read()))
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            connection.close()
        assert answers == [(200, b"<p>page"), (404, b"not here\n"), (404, b"not here\n")]
        with pytest.raises(BusyError, match=f"127.0.0.1:{port}"):
            offer.server(b"", port)
        with pytest.raises(InputError, match="saw 65536, wanted 0 to 65535"):
            offer.server(b"", 65536)


def write_report(out: Path | str = "", recipe: str | None = None, *, serve: bool = False, table: bool = False) -> None:
    tasks.report(recipe=recipe, out=str(out), serve=serve, port=0, as_markdown=table)


def test_the_task_writes_a_file(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKPIN_HOME", str(made[0].home))
    monkeypatch.setenv("SPARKPIN_CACHE", str(made[0].cache))
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    for _ in range(2):  # a page of its own is written anew
        write_report(page)
        assert re.match(rf"{page}: 4 releases, [\d.]+ kB\n$", capsys.readouterr().out)
    write_report(table, table=True)
    assert page.read_text().startswith("<!doctype html>") and "| release | state |" in table.read_text()
    for path, as_table in ((table, False), (table, True), (page, True)):
        before = path.read_bytes()
        with pytest.raises(InputError, match="is there already, and is not overwritten"):
            write_report(path, table=as_table)
        assert path.read_bytes() == before
    recipe = made[1][0].recipe
    for asked, name in (
        (None, "report.html"),
        (recipe, f"report-{recipe}.html"),
    ):
        write_report(recipe=asked)
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"{made[0].home / name}: ")
    for out, as_table, wanted in (("x", False, "or --out"), ("", True, "or --markdown"), ("x", True, "or --markdown")):
        with pytest.raises(InputError, match="--open serves the page") as caught:
            write_report(out, serve=True, table=as_table)
        assert caught.value.next_step == f"leave out --open, {wanted}"


def test_the_task_tells_what_is_damaged(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """First of some, then of all releases. A table for others does not."""
    shutil.copytree(made[0].home, tmp_path / "home")
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPARKPIN_CACHE", str(made[0].cache))
    records = Releases(Paths.from_env())
    for count, broken in ((1, made[1][:1]), (4, made[1])):
        for release in broken:
            records.record_path(release).write_text("{")
        write_report(table=True)
        seen = capsys.readouterr()
        assert sum(f"{release.name}.json" in seen.err for release in made[1]) == count
        assert ".json" not in seen.out
    assert seen.out == "No release that can be read.\n"
    page = html(gather(Paths.from_env(), None))
    assert page.count('<p class="fault">') == 4 and "No release yet" not in page
    assert "No release yet" in html(Report("2026-01-04T00:00:00Z", "", ()))
