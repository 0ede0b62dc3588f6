"""The report: what is gathered, and how it is drawn."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html as html_text
import http.client
import json
import math
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import made_releases
import pytest
from markupsafe import escape
from places import PROJECT
from report_samples import HOST, HOSTILE, Made, benched, comparison, figure
from report_samples import made as made

from sparkpin.commands import report as tasks
from sparkpin.core.errors import BusyError, InputError
from sparkpin.core.paths import Paths
from sparkpin.evidence import builders
from sparkpin.history.bump import record
from sparkpin.history.bump.record import Bump, Step
from sparkpin.history.report import charts, drawing, measured, offer
from sparkpin.history.report import gather as gathering
from sparkpin.history.report.facts import Chart, LimitBar, Point, Reading, Report, ReportMemory, Series
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
        (("within", "unclear"), ("unclear", "cannot tell: perplexity")),
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
    assert rows["of the ceiling"] == "38.4% of 100 tok/s at 273 GB/s"
    table = items[second.tag].speed.table
    assert table
    math = dict(zip([title for title, _ in table.columns], table.rows[0].readings, strict=True))
    assert math["Drafts accepted"] == Reading(0.75, "75%")
    assert math["First token"] == Reading(0.02, "20 ms", "50 ms")


def test_ways_memory_and_inputs(report: Report, made: Made) -> None:
    first, _, second, _ = made[1]
    [part] = report.recipes
    assert [command.text for command in part.back] == [
        "invoke rollback --recipe scripted-tiny --serve",
        f"invoke promote {second.tag}",
        f"invoke reproduce {first.tag} --keep",
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


def test_charts_and_histories(report: Report, made: Made) -> None:
    [part] = report.recipes
    charts = {chart.title: chart.series for chart in part.charts}
    assert charts["Output by stage"][0].points == (Point("base", 38.4, "good", 100.0),)
    assert [(point.label, round(point.value, 1)) for point in charts["Output by users"][0].points] == [
        ("1", 38.4),
        ("4", 153.6),
    ]
    assert [series.name for series in charts["Output by users"]] == [made[1][2].name, made[1][0].name]
    assert charts["First token by prompt length"][0].points == (Point("128 tokens", 20.0),)
    histories = {chart.title: chart for chart in part.histories}
    [series] = histories["Output, one user: base"].series
    assert [point.value for point in series.points] == [28.3, 38.4]
    [series] = histories["Start to first answer: base"].series
    assert [(point.value, point.kind) for point in series.points] == [(30.9, "good"), (19.2, "good"), (77.7, "bad")]
    assert not any("each stage" in title for title in histories)  # of one stage alone


def test_at_a_glance_and_what_did_not_apply(report: Report) -> None:
    [part] = report.recipes
    tiles = {tile.name: tile for tile in part.tiles}
    assert (tiles["Output, one user"].text, tiles["Output, one user"].note) == ("38.4 tok/s", "38.4% of the ceiling")
    assert (tiles["Quality"].text, tiles["Quality"].kind) == ("lost more than allowed", "bad")
    assert tiles["Users that fit"].text == str(part.memory.users[-1][1])
    assert part.machine == HOST.line
    assert [(row.name, row.text) for row in part.apart] == [("image", "does not apply: the model has no eyes")]


def test_a_release_of_which_little_was_measured_says_so(made: Made, tmp_path: Path) -> None:
    paths = dataclasses.replace(made[0], home=tmp_path / "home")
    shutil.copytree(made[0].home, paths.home)
    records = Releases(paths)
    for release in made[1]:
        shutil.rmtree(records.evidence(release) / "bench", ignore_errors=True)
        shutil.rmtree(records.evidence(release) / "quality", ignore_errors=True)
    [part] = gather(paths, "scripted-tiny").recipes
    told = {row.name: row.text for row in part.apart}
    second = made[1][2].tag
    assert told["Speed"] == f"not measured: invoke bench {second} does"
    assert told["Quality"] == f"not measured: invoke quality {second} --against TAG does"
    assert [tile.text for tile in part.tiles][:3] == ["not measured"] * 3
    assert part.charts == ()
    assert not re.search("[0-9] tok/s", html(Report("2026-01-04T00:00:00Z", "", (part,))))


class Figures(HTMLParser):
    """Each <data> of a page: the value and the text; cells of the speed tables by release, row and column."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[float, str]] = []
        self.cells: dict[tuple[str, str], tuple[float, str]] = {}  # of the first table
        self.tables, self.row, self.column, self.inside = 0, "", "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.inside = tag
        self.tables += tag == "table" and given.get("class") == "measured"
        if tag == "th":
            self.row = ""
        if tag == "td":
            self.column = given.get("data-name") or ""
        if tag == "data":
            self.value = float(given["value"] or "nan")

    def handle_data(self, data: str) -> None:
        if self.inside == "th":
            self.row += data.strip()
        elif self.inside == "data":
            self.found.append((self.value, data))
            if self.tables == 1 and self.column:
                self.cells[self.row, self.column] = self.value, data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""
        if tag == "tr":
            self.column = ""


UNITS = {"tok/s": 1.0, "ms": 1e-3, "s": 1.0, "%": 1e-2, "MiB": 2.0**20, "GiB": 2.0**30}


def test_all_figures_of_the_page_are_those_of_the_records(page: str, report: Report, made: Made) -> None:
    """The files are read as JSON here, not by the code that the page is made with."""
    figures = Figures(page)
    [path] = (Releases(made[0]).evidence(made[1][2]) / "bench").glob("*.json")
    wanted = {}
    for row in json.loads(path.read_text())["cells"]:
        cell = row["cell"]
        users = f"{cell['concurrency']} user{'s' if cell['concurrency'] > 1 else ''}"
        name = f"{cell['input_tokens']} tokens, {users}" if cell["input_tokens"] else cell["name"]
        wanted |= {
            (name, "Decode"): row["decode_rate"],
            (name, "Output"): row["output_rate"],
            (name, "First token"): row["ttft"]["p50"],
            (name, "Next token"): row["token"]["p50"],
            (name, "Prefill"): row["prefill_rate"],
            (name, "Drafts accepted"): row["accepted"] / row["drafted"],
        }
    assert {key: value for key, (value, _) in figures.cells.items()} == wanted
    memory = report.recipes[0].memory
    assert {float(size) for _, size, _, _ in memory.shares} <= {value for value, _ in figures.found}
    assert len(figures.found) > len(wanted) + len(memory.shares)
    for value, text in figures.found:  # what is read is what is meant, to three digits
        shown = re.fullmatch(r"(-?[\d.,]+) ?(.*)", text)
        assert shown, text
        read = float(shown[1].replace(",", "")) * UNITS.get(shown[2], 1.0)
        assert read == pytest.approx(value, rel=2e-2 if "iB" in text else 5e-3, abs=5e-3 if "%" in text else 0), text


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


def test_bumps_stand_in_a_line_of_their_own(made: Made, tmp_path: Path) -> None:
    """One that was promoted, and one that was refused, which is shown with what turned it."""
    paths = dataclasses.replace(made[0], home=tmp_path / "home")
    shutil.copytree(made[0].home, paths.home)
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
        record.write(paths.home / record.FOLDER / bump.time[:10], bump)
    part = gather(paths, first.recipe).recipes[0]
    assert [bump.verdict for bump in part.bumps] == ["stay", "promote"]
    assert {item.tag: item.bump for item in part.items if item.bump} == {second.tag: "promoted"}
    page = html(Report("2026-01-07T00:00:00Z", "", (part,)))
    for text in ("stay: smoke: no; turned by ~ wheel b: 1 -> 3", "~ wheel a: 1 -> 2", speed.detail, smoke.detail):
        assert str(escape(text)) in page
    assert HOSTILE not in page
    (paths.home / record.FOLDER / "2026-01-06" / record.FILE).write_text("{}")
    part = gather(paths, first.recipe).recipes[0]
    assert not part.bumps and "2026-01-06/bump.json" in part.faults[0]


def test_the_page_stands_for_itself(page: str) -> None:
    """The one script is the page's own, which the policy names by its hash."""
    assert not re.search(r"<(img|iframe|object|embed|base|form)\b", page)
    assert re.findall(r"<link[^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert not re.search(r"""\s(style|on\w+)=["']""", page)
    policy = html_text.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    for tag, kind in (("style", "style-src"), ("script", "script-src")):
        [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
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


def test_ceilings_are_drawn_to_scale_or_written_only() -> None:
    near, far = (Point("base", 30.0, "good", ceiling) for ceiling in (60.0, 6000.0))
    for point, drawn_too in ((near, True), (far, False)):
        drawn = drawing.draw(Chart("Output", "tok/s", "bars", (Series("all", (point,)),)))
        assert ('class="ceiling"' in drawn) == drawn_too
        assert f"30 of {point.ceiling:,.0f}" in drawn
        widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
        if drawn_too:
            assert widths[0] == pytest.approx(2 * widths[1], rel=1e-2)


def test_a_loss_is_drawn_against_its_limit(made: Made) -> None:
    first, _, second, _ = made[1]
    judged = [
        quality.Judged(name=name, limit=limit, seen=quality.Figure(value=value, low=low, high=high), kept="unclear")
        for name, limit, value, low, high in (
            ("kl", 0.02, 0.01, 0.005, 0.03), ("top1", 0.96, 0.98, 0.94, 1.0), ("perplexity", 1.02, 1.01, 1.005, 1.03),
        )
    ]  # fmt: skip
    bars = [measured.limit_bar(one, comparison(second, first)) for one in judged]
    for bar, low, high in zip(bars, (0.25, 0.0, 0.25), (1.5, 1.5, 1.5), strict=True):
        assert (bar.value, bar.low, bar.high) == pytest.approx((0.5, low, high))
    assert all(re.search(r"cannot tell: about \d+ texts", bar.verdict) for bar in bars)


@pytest.mark.parametrize("form", ["line", "bars"])
def test_words_in_drawings_are_escaped(form: Literal["line", "bars"]) -> None:
    """The template takes drawings as they are."""
    drawn = drawing.draw(Chart(HOSTILE, HOSTILE, form, (Series(HOSTILE, (Point(HOSTILE, 1.0), Point("b", 2.0))),)))
    shares = drawing.draw_shares(ReportMemory(HOSTILE, "good", ((HOSTILE, 1, HOSTILE, HOSTILE),)))
    limit = drawing.draw_limit(LimitBar(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "good", 0.5, -math.inf, math.inf))
    for text, times in (
        (drawn, 4),
        (shares, 2),
        (limit, 4),
    ):  # spoken: title, unit, label; seen: label or unit, and label
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


def test_builders_who_got_the_image_are_named(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody where there are none."""
    paths, first = made[0], made[1][0]
    said = builders.Confirmations(("ann", "bob"))
    monkeypatch.setattr(builders, "confirmations", lambda project, key, image, allowed: said)
    part = gather(paths, first.recipe).recipes[0]
    assert "confirmed by 2 builders (ann, bob)" in html(Report("2026-01-07T00:00:00Z", "", (part,)))
    said = builders.Confirmations()
    assert not gather(paths, first.recipe).recipes[0].shown.confirmed
