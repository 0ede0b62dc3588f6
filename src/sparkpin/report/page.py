"""A report as one HTML file that loads nothing, not even from itself, and as a table for a forum post. Pure."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import partial
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from sparkpin.core import terminal
from sparkpin.core.terminal import gib
from sparkpin.report.drawing import draw_checks, draw_limit, draw_shares, draw_speeds
from sparkpin.report.facts import RecipePart, Report

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
    made = "\n".join(line for part in report.recipes for line in table(part))
    return made or ("No release that can be read." if report.faults else "No release yet: `invoke up`.")


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
