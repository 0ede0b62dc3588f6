"""How a real Chromium shows the report."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from browser import Seen, look_at
from report_samples import HOSTILE, Made
from report_samples import made as made

from sparkpin.report.gather import gather
from sparkpin.report.page import html

WIDTHS = (
    (390, "light", False),
    (390, "dark", True),
    (390, "light", True),
    (1280, "light", False),
    (1280, "dark", False),
)
pytestmark = pytest.mark.slow


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
