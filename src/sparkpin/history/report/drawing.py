"""Charts as SVG: no script, no style of their own; classes that the page colours. Every value is also text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from sparkpin.core import terminal
from sparkpin.history.report.facts import Chart, LimitBar, Point, ReportMemory, Series

WIDTH, HEIGHT = 340, 160
LEFT, RIGHT, TOP, BOTTOM = 12, 12, 26, 20
BAR = 26
MOST_LABELS = 8
ZERO, SPAN, LEAST, MOST = 50, 80, -0.5, 1.5  # of a limit: no loss, what may be lost, ends of the drawing as its shares
LIMIT_WIDTH = 180
FAR = 4  # times the longest bar: beyond that a ceiling would leave nothing of the bars
CHARACTER = 7  # width in units of the drawing, on average


def draw(chart: Chart) -> str:
    body = "".join(bars(chart) if chart.form == "bars" else lines(chart))
    height = TOP + BAR * len(chart.series[0].points) + 4 if chart.form == "bars" else HEIGHT
    words = escape(f"{chart.title}, {chart.unit}: {spoken(chart)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{words}">{body}</svg>'


def spoken(chart: Chart) -> str:
    return "; ".join(
        ", ".join(f"{point.label} {figure_of(point)}" for point in series.points) for series in chart.series
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def bars(chart: Chart) -> Iterator[str]:
    """From zero, one under the other, so that names of stages have room. A ceiling is a line at its place; one far
    beyond all bars is written only."""
    points = chart.series[0].points
    most = max((point.value for point in points), default=0) or 1
    if (roof := max((point.ceiling or 0 for point in points), default=0)) <= FAR * most:
        most = max(most, roof)
    names = max(len(point.label) for point in points) * CHARACTER + 10
    told = {point: figure_of(point) for point in points}
    room = WIDTH - LEFT - names - RIGHT - max(map(len, told.values())) * CHARACTER - 6
    yield text(LEFT, 14, f"{chart.unit}, {chart.better} is better", "axis")
    for place, point in enumerate(points):
        y, left = TOP + place * BAR, LEFT + names
        width = max(1.0, room * max(0.0, point.value) / most)
        end = width
        yield text(LEFT, y + 14, point.label)
        if point.ceiling and point.ceiling <= most:
            end = max(width, room * point.ceiling / most)
            yield f'<rect x="{left:.1f}" y="{y + 2}" width="{end:.1f}" height="16" rx="2" class="roof"/>'
        yield f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="16" rx="2" class="bar {point.kind}"/>'
        if end > width:
            yield f'<line x1="{left + end:.1f}" x2="{left + end:.1f}" y1="{y}" y2="{y + 20}" class="ceiling"/>'
        yield text(left + end + 6, y + 14, told[point], "value")


def figure_of(point: Point) -> str:
    value = terminal.figure(point.value)
    return f"{value} of {terminal.figure(point.ceiling)}" if point.ceiling else value


def lines(chart: Chart) -> Iterator[str]:
    """From zero, so that a small change looks small. A sweep's places are by number of users; of a second series the
    last value alone is written."""
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
                lower = is_valley(series.points, place) if alone else is_lower(chart, series, point)
                under = y + 18 < floor and lower
                yield text(x, y + 17 if under else y - 8, terminal.figure(point.value), "value", "middle")
    every = -(-len(labels) // MOST_LABELS)
    for place, label in enumerate(labels):
        if place % every == 0 or (place == len(labels) - 1 and place % every > every // 2):
            yield text(at[label], floor + 14, label, "axis", "middle")


def is_lower(chart: Chart, series: Series, point: Point) -> bool:
    """Whether another series lies above the point, where its value would be in the way."""
    others = [one for other in chart.series if other is not series for one in other.points]
    return any(one.label == point.label and one.value >= point.value for one in others)


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


def draw_shares(memory: ReportMemory) -> str:
    """One bar of all that the machine has; the list beside it says which is which, in the same order."""
    used = sum(size for _, size, _, _ in memory.shares)
    whole = max(memory.total, used, 1)
    parts, x = [], 0.0
    for place, (what, size, _, _) in enumerate(memory.shares):
        width = 2 * WIDTH * size / whole
        title = f"<title>{escape(what)}</title>"
        parts.append(f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="18" class="share{place % 6}">{title}</rect>')
        x += width
    taken = 2 * WIDTH * max(0, memory.total - memory.free) / whole
    label = "; ".join(f"{what} {size:,} bytes" for what, size, _, _ in memory.shares)
    if taken:
        parts.append(
            f'<rect x="{2 * WIDTH - taken:.2f}" y="0" width="{taken:.2f}" height="18" class="taken">'
            "<title>in use already</title></rect>"
        )
        label += f"; in use already {memory.total - memory.free:,} of {memory.total:,} bytes"
    box = f'viewBox="0 0 {2 * WIDTH} 18" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'


def draw_limit(bar: LimitBar) -> str:
    """Value and interval between no loss (the first line) and what may be lost (the second). Ends beyond the drawing
    are arrows."""

    def at(share: float) -> float:
        return ZERO + SPAN * min(max(share, LEAST), MOST)

    low, high, value = (at(share) for share in (bar.low, bar.high, bar.value))
    body = [
        f'<rect x="{ZERO}" y="3" width="{SPAN}" height="14" class="room"/>',
        f'<line x1="{ZERO}" x2="{ZERO}" y1="1" y2="19" class="rule"/>',
        f'<line x1="{ZERO + SPAN}" x2="{ZERO + SPAN}" y1="0" y2="20" class="ceiling"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="10" y2="10" class="interval {bar.kind}"/>',
    ]
    for share, place, way in ((bar.low, low, -1), (bar.high, high, 1)):
        beyond = share < LEAST or share > MOST
        tip = f"{place - 5 * way:.1f},5 {place:.1f},10 {place - 5 * way:.1f},15" if beyond else ""
        tip = tip or f"{place:.1f},6 {place:.1f},14"
        body.append(f'<polyline points="{tip}" class="interval {bar.kind}"/>')
    body.append(f'<circle cx="{value:.1f}" cy="10" r="4" class="dot {bar.kind}"/>')
    words = escape(f"{bar.name}: {bar.seen}, {bar.limit}: {bar.verdict}", quote=True)
    return f'<svg viewBox="0 0 {LIMIT_WIDTH} 20" role="img" aria-label="{words}">{"".join(body)}</svg>'
