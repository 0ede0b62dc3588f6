"""A report as one HTML file that loads nothing, not even from itself, and as a table for a forum post. Pure.

Its charts are SVG without script or style of their own; the page colours their classes. Every value is also text.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from sparkpin.core import terminal
from sparkpin.core.terminal import gib
from sparkpin.report.facts import LimitBar, RecipePart, Report, ReportMemory, ReportRow, SpeedBar

COLUMNS = ("release", "state", "built", "smoke", "quality", "speed")


def html(report: Report) -> str:
    """Text of records comes from anybody who made a bundle: all of it is escaped, and no script of theirs would run."""
    style, script = resource("page.css"), resource("page.js")
    policy = (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "bytes": terminal.size,
        "draw_checks": lambda rows: Markup(draw_checks(rows)),
        "draw_limit": lambda bar: Markup(draw_limit(bar)),
        "draw_shares": lambda memory: Markup(draw_shares(memory)),
        "draw_speeds": lambda bars: Markup(draw_speeds(bars)),
        "end": partial(re.sub, "^.*:", ""),
        "gib": gib,
        "moment": lambda text: text[:16].replace("T", " "),
        "short": lambda machine: machine.partition("; ")[0],
    }
    template = environment.from_string(resource("page.html.j2"))
    return template.render(report=report, style=Markup(style), script=Markup(script), policy=policy)


def source(text: str) -> str:
    """What a policy calls an inline style or script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def markdown(report: Report) -> str:
    """A table for each recipe, without faults: what is damaged here is nothing for others."""
    rows = "\n".join(line for part in report.recipes for line in table(part))
    return rows or ("No release that can be read." if report.faults else "No release yet: `invoke up`.")


def table(part: RecipePart) -> Iterator[str]:
    yield f"**{plain(part.name)}**{f': {plain(part.description)}' if part.description else ''}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for item in part.items:
        release, evidence = item.release, [plain(one.text) for one in item.evidence]
        yield f"| {' | '.join((f'`{release.name}`', release.state_text, release.created[:10], *evidence))} |"
    yield ""
    for where in dict.fromkeys(item.speed.where for item in part.items if item.speed.where):  # no speed without it
        names = ", ".join(f"`{item.release.name}`" for item in part.items if item.speed.where == where)
        yield f"Speed of {names}: {plain(where)}."
        yield ""
    yield f"{plain(part.memory.headline)}."
    yield ""


def plain(text: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&@-])", r"\\\1", terminal.printable(" ".join(text.split())))


WIDTH, SIDE, TOP, BAR = 340, 12, 26, 26
ZERO, SPAN, LEAST, MOST = 50, 80, -0.5, 1.5  # of a limit: no loss, what may be lost, ends of the drawing as its shares
LIMIT_WIDTH = 180
FAR = 4  # times the longest bar: beyond that a ceiling would leave nothing of the bars
IN_A_ROW = 13  # checks
CHARACTER = 7  # width in units of the drawing, on average


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def svg(box: str, label: str, parts: Sequence[str], more: str = "") -> str:
    words = escape(label, quote=True)
    return f'<svg viewBox="0 0 {box}"{more} role="img" aria-label="{words}">{"".join(parts)}</svg>'


def draw_speeds(bars: Sequence[SpeedBar]) -> str:
    """From zero, one under the other, so that names of stages have room. A ceiling far beyond all bars is written
    only."""
    label = "; ".join(f"{bar.stage} {figure_of(bar)}" for bar in bars)
    return svg(f"{WIDTH} {TOP + BAR * len(bars) + 4}", f"Output by stage, tok/s: {label}", [*rows(bars)])


def figure_of(bar: SpeedBar) -> str:
    value = terminal.figure(bar.rate)
    return f"{value} of {terminal.figure(bar.ceiling)}" if bar.ceiling else value


def rows(bars: Sequence[SpeedBar]) -> Iterator[str]:
    most = max((bar.rate for bar in bars), default=0) or 1
    if (roof := max((bar.ceiling or 0 for bar in bars), default=0)) <= FAR * most:
        most = max(most, roof)
    left = SIDE + max(len(bar.stage) for bar in bars) * CHARACTER + 10
    room = WIDTH - left - SIDE - max(len(figure_of(bar)) for bar in bars) * CHARACTER - 6
    yield text(SIDE, 14, "tok/s, more is better", "axis")
    for place, bar in enumerate(bars):
        y = TOP + place * BAR
        end = width = max(1.0, room * max(0.0, bar.rate) / most)
        yield text(SIDE, y + 14, bar.stage)
        if bar.ceiling and bar.ceiling <= most:
            end = max(width, room * bar.ceiling / most)
            yield f'<rect x="{left:.1f}" y="{y + 2}" width="{end:.1f}" height="16" rx="2" class="roof"/>'
        yield f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="16" rx="2" class="bar {bar.kind}"/>'
        yield text(left + end + 6, y + 14, figure_of(bar), "value")


def draw_shares(memory: ReportMemory) -> str:
    """One bar of all that the machine has; the list under it names the parts, in the same order."""
    used = sum(size for _, size, _ in memory.shares)
    unit = 2 * WIDTH / max(memory.total, used, 1)
    parts, x = [], 0.0
    for place, (what, size, _) in enumerate(memory.shares):
        title = f"<title>{escape(what)}</title>"
        parts.append(share(x, unit * size, f"share{place % 6}", title))
        x += unit * size
    in_use = max(0, memory.total - memory.free)
    parts.append(share(2 * WIDTH - unit * in_use, unit * in_use, "taken", "<title>in use already</title>"))
    label = "; ".join(f"{what} {size:,} bytes" for what, size, _ in memory.shares)
    label += f"; in use already {in_use:,} of {memory.total:,} bytes"
    return svg(f"{2 * WIDTH} 18", label, parts, ' preserveAspectRatio="none"')


def share(x: float, width: float, kind: str, title: str) -> str:
    return f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="18" class="{kind}">{title}</rect>'


def draw_checks(rows: Sequence[ReportRow]) -> str:
    """A square for each, in rows."""
    body = [
        f'<rect x="{SIDE + place % IN_A_ROW * 24}" y="{6 + place // IN_A_ROW * 24}" width="18" height="18" rx="3"'
        f' class="check {row.kind}"><title>{escape(row.name)}</title></rect>'
        for place, row in enumerate(rows)
    ]
    height = 6 + math.ceil(len(rows) / IN_A_ROW) * 24
    return svg(f"{WIDTH} {height}", "; ".join(f"{row.name}: {row.kind}" for row in rows), body)


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
    for end, place, way in ((bar.low, low, -1), (bar.high, high, 1)):
        beyond = end < LEAST or end > MOST
        tip = f"{place - 5 * way:.1f},5 {place:.1f},10 {place - 5 * way:.1f},15" if beyond else ""
        tip = tip or f"{place:.1f},6 {place:.1f},14"
        body.append(f'<polyline points="{tip}" class="interval {bar.kind}"/>')
    body.append(f'<circle cx="{value:.1f}" cy="10" r="4" class="dot {bar.kind}"/>')
    return svg(f"{LIMIT_WIDTH} 20", f"{bar.name}: {bar.measured}, {bar.limit}: {bar.verdict}", body)
