"""How a real Chromium shows the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import Driven, Seen, driven, look_at
from report_samples import HOSTILE, Made
from report_samples import made as made

from sparkpin.history.report.gather import gather
from sparkpin.history.report.page import html

WIDTHS = (
    (390, "light", False),
    (390, "dark", True),
    (390, "light", True),
    (1280, "light", False),
    (1280, "dark", False),
)
TOLD = """new Promise(done => {
  const look = () => BUTTON.textContent === 'Copy' ? setTimeout(look, 20) : done(BUTTON.textContent); look();
})"""


@pytest.fixture(scope="module")
def seen(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The report and, so that no test here passes for nothing, a page that does all that is wrong."""
    bad = (
        "<!doctype html><title>bad</title><p style='width:900px;color:#999;background:#aaa'>faint</p>"
        "<img src='http://elsewhere.invalid/bad.png'><script>console.error('it speaks')</script>"
    )
    frames = [{"path": "report.html", "width": w, "scheme": scheme, "open": o} for w, scheme, o in WIDTHS]
    control = {"path": "bad.html", "width": 390, "scheme": "light"}
    return look_at(
        {"report.html": html(gather(made[0], None)), "bad.html": bad},
        tmp_path_factory.mktemp("chromium"),
        [*frames, control],
    )


def test_the_browser_sees_what_is_wrong(seen: Seen) -> None:
    [bad] = seen.of("bad.html")
    assert bad["scroll"] > bad["width"] and bad["wide"]
    assert min(bad["contrast"].values()) < 2
    assert "http://elsewhere.invalid/bad.png" in seen.urls
    assert any("it speaks" in line for line in seen.said)


def test_chromium_asks_for_nothing_and_complains_of_nothing(seen: Seen) -> None:
    """Not even an icon. What records hold is text: no script of theirs runs, no picture is loaded."""
    own = {url for url in seen.urls if urlsplit(url).netloc == urlsplit(seen.base).netloc}
    assert {urlsplit(url).path for url in own} == {"/", "/look.html", "/report.html", "/bad.html"}
    assert seen.urls - own == {"http://elsewhere.invalid/bad.png"}
    assert [line for line in seen.said if "it speaks" not in line and "bad.png" not in line] == []
    for frame in seen.of("report.html"):
        assert (frame["loaded"], frame["scripts"]) == ([], 1)


def test_a_phone_needs_no_scrolling_to_the_side(seen: Seen) -> None:
    for frame in seen.of("report.html"):
        assert (frame["scroll"], frame["wide"]) == (frame["width"], [])


def test_text_can_be_read_in_light_and_dark(seen: Seen) -> None:
    """WCAG 2.1 AA: 4.5 to 1 for text. Nothing is smaller than 10 pixels."""
    frames = seen.of("report.html")
    assert {frame["scheme"]: frame["background"] for frame in frames} == {
        "light": "rgb(246, 247, 245)",
        "dark": "rgb(18, 22, 20)",
    }
    for frame in frames:
        assert frame["dark"] == (frame["scheme"] == "dark")
        assert {name: ratio for name, ratio in frame["contrast"].items() if ratio < 4.5} == {}
        assert len(frame["contrast"]) > 15
        assert frame["smallest"] >= 10


def test_every_release_and_its_evidence_is_there_to_read(seen: Seen, made: Made) -> None:
    frames = seen.of("report.html")
    for frame in frames:
        for release in made[1]:
            assert release.name in frame["text"]
        assert frame["text"].count("not measured") >= 6
    unfolded = next(frame["text"] for frame in frames if frame["open"])
    assert unfolded.count(HOSTILE) == 2  # of a pin and of a comparison
    assert "invoke rollback --recipe scripted-tiny --serve" in unfolded


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    with driven(tmp_path_factory.mktemp("driven") / "browser") as made:
        yield made


@pytest.fixture(scope="module")
def page(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(gather(made[0], None)))
    return path


@pytest.mark.parametrize("dark", [False, True])
def test_a_screenshot_of_400_pixels_is_whole_and_of_its_scheme(tab: Driven, page: Path, dark: bool) -> None:
    tab.show(page.as_uri(), width=400, dark=dark)
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    seen = tab.pixels(tab.shot())
    assert (seen["width"], len(seen["edge"])) == (400, 1)  # nothing reaches into the right margin
    assert (seen["dark"] if dark else seen["light"]) > 0.8
    assert (seen["light"] if dark else seen["dark"]) < 0.15


def test_a_screenshot_shows_what_is_wrong(tab: Driven, tmp_path: Path) -> None:
    """A page that is too wide, and light where dark is wanted."""
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><p style='width:900px;background:#eee'>wide</p>")
    tab.show(bad.as_uri(), width=400, dark=True)
    seen = tab.pixels(tab.shot())
    assert seen["width"] > 400 and seen["light"] > 0.8


def test_buttons_copy_their_commands(tab: Driven, page: Path, made: Made) -> None:
    """From a file, as people open it."""
    tab.show(page.as_uri())
    tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    commands = tab.run("[...document.querySelectorAll('.commands code')].map(one => one.textContent)")
    assert "invoke rollback --recipe scripted-tiny --serve" in commands and len(commands) > 8
    assert tab.run("document.querySelectorAll('.commands button').length") == len(commands)
    for number in (0, 1, len(commands) - 1):
        button = f"document.querySelectorAll('.commands button')[{number}]"
        assert tab.run("navigator.clipboard.readText()") != commands[number]
        tab.click(button)
        assert tab.run(TOLD.replace("BUTTON", button)) == "Copied"
        assert tab.run("navigator.clipboard.readText()") == commands[number]
    assert tab.run("document.title").startswith("sparkpin: releases of scripted-tiny on made up")
    tab.run("navigator.clipboard.writeText = () => Promise.reject(new Error('not here'))")
    tab.click("document.querySelector('.commands button')")
    tab.run(TOLD.replace("BUTTON", "document.querySelector('.commands button')"))
    assert tab.run("navigator.clipboard.readText()") == commands[0]
