"""Charts as SVG: no script, no style of their own; classes that the page colours. Every value is also text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from sparkpin.core import terminal
from sparkpin.history.report.facts import Chart, Point

WIDTH, HEIGHT = 340, 160
LEFT, RIGHT, TOP, BOTTOM = 12, 12, 26, 20
BAR = 26
MOST_LABELS = 8
CHARACTER = 7  # width in units of the drawing, on average


def draw(chart: Chart) -> str:
    body = "".join(bars(chart) if chart.form == "bars" else lines(chart))
    height = TOP + BAR * len(chart.series[0].points) + 4 if chart.form == "bars" else HEIGHT
    words = escape(f"{chart.title}, {chart.unit}: {spoken(chart)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{words}">{body}</svg>'


def spoken(chart: Chart) -> str:
    return "; ".join(
        ", ".join(f"{point.label} {terminal.figure(point.value)}" for point in series.points) for series in chart.series
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def bars(chart: Chart) -> Iterator[str]:
    """From zero, one under the other, so that names of stages have room."""
    points = chart.series[0].points
    most = max((point.value for point in points), default=0) or 1
    names = max(len(point.label) for point in points) * CHARACTER + 10
    room = WIDTH - LEFT - names - RIGHT - 52
    yield text(LEFT, 14, f"{chart.unit}, {chart.better} is better", "axis")
    for place, point in enumerate(points):
        y = TOP + place * BAR
        width = max(1.0, room * max(0.0, point.value) / most)
        yield text(LEFT, y + 14, point.label)
        box = f'x="{LEFT + names:.1f}" y="{y + 2}" width="{width:.1f}" height="16"'
        yield f'<rect {box} rx="2" class="bar {point.kind}"/>'
        yield text(LEFT + names + width + 6, y + 14, terminal.figure(point.value), "value")


def lines(chart: Chart) -> Iterator[str]:
    """From zero, so that a small change looks small. A sweep's places are by number of users; of a second series the
    last value alone is written, below its point, where the first one's are not."""
    values = [point.value for series in chart.series for point in series.points]
    most = max(values, default=0) or 1
    by = " by users at once" if chart.form == "sweep" else ""
    yield text(LEFT, 14, f"{chart.unit}{by}, {chart.better} is better", "axis")
    floor, alone = HEIGHT - BOTTOM, len(chart.series) == 1
    yield f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH - RIGHT}" y2="{floor}" class="rule"/>'
    labels = list(dict.fromkeys(point.label for series in chart.series for point in series.points))
    if chart.form == "sweep":
        labels.sort(key=int)
    step = (WIDTH - LEFT - RIGHT - 44) / max(1, len(labels) - 1)
    at = {label: LEFT + 18 + place * step for place, label in enumerate(labels)}
    for number, series in enumerate(chart.series):
        spots = [(at[point.label], floor - (floor - TOP - 16) * point.value / most) for point in series.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        yield f'<polyline points="{joined}" class="series s{number}"/>'
        written = labelled(series.points) if number == 0 else {len(series.points) - 1}
        for place, (point, (x, y)) in enumerate(zip(series.points, spots, strict=True)):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="dot s{number} {point.kind}"/>'
            if place in written:
                under = y + 18 < floor and (number > 0 or (alone and is_valley(series.points, place)))
                yield text(x, y + 17 if under else y - 8, terminal.figure(point.value), "value", "middle")
    every = -(-len(labels) // MOST_LABELS)
    for place, label in enumerate(labels):
        if place % every == 0 or (place == len(labels) - 1 and place % every > every // 2):
            yield text(at[label], floor + 14, label, "axis", "middle")


def is_valley(points: Sequence[Point], place: int) -> bool:
    """Whether the line goes up from there on both sides, so that above the point it is in the way."""
    beside = [*points[max(0, place - 1) : place], *points[place + 1 : place + 2]]
    return bool(beside) and all(point.value > points[place].value for point in beside)


def labelled(points: Sequence[Point]) -> set[int]:
    """Places whose values are written: all of a few; else the first, the last, the most and the least."""
    if len(points) <= MOST_LABELS:
        return set(range(len(points)))
    values = [point.value for point in points]
    return {0, len(points) - 1, values.index(max(values)), values.index(min(values))}


def draw_shares(shares: Sequence[tuple[str, int, str, str]]) -> str:
    """One bar of all of them; the list beside it says which is which, in the same order."""
    total = sum(size for _, size, _, _ in shares) or 1
    parts, x = [], 0.0
    for place, (what, size, _, _) in enumerate(shares):
        width = 2 * WIDTH * size / total
        title = f"<title>{escape(what)}</title>"
        parts.append(f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="18" class="share{place % 6}">{title}</rect>')
        x += width
    label = escape("; ".join(f"{what} {size:,} bytes" for what, size, _, _ in shares), quote=True)
    box = f'viewBox="0 0 {2 * WIDTH} 18" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{label}">{"".join(parts)}</svg>'
