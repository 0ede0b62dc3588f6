"""The page: one HTML file that loads nothing, not even from itself, and runs no script but its own for copying."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from sparkpin.core import terminal
from sparkpin.core.tags import OURS
from sparkpin.core.terminal import gib
from sparkpin.history.report.drawing import draw, draw_limit, draw_shares
from sparkpin.history.report.facts import Item, Report

TITLE = "<title>sparkpin: releases"
"""How a page is known as one."""


def html(report: Report) -> str:
    """Text of records comes from anybody who made a bundle: all of it is escaped, and no script of theirs would run."""
    style, script = resource("page.css"), resource("page.js")
    policy = (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "anchor": anchor,
        "bytes": terminal.size,
        "draw": lambda chart: Markup(draw(chart)),
        "draw_limit": lambda bar: Markup(draw_limit(bar)),
        "draw_shares": lambda memory: Markup(draw_shares(memory)),
        "end": partial(re.sub, "^.*:", ""),
        "gib": gib,
        "moment": moment,
        "short": lambda machine: machine.partition("; ")[0],
    }
    template = environment.from_string(resource("page.html.j2"))
    return template.render(report=report, style=Markup(style), script=Markup(script), policy=policy)


def source(text: str) -> str:
    """What a policy calls an inline style or script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def anchor(item: Item) -> str:
    """An id for links within the page."""
    return re.sub(r"[^a-z0-9.-]+", "-", item.tag.removeprefix(OURS))


def moment(text: str) -> str:
    """`2026-11-22 05:31` of ISO 8601."""
    return text[:16].replace("T", " ")
