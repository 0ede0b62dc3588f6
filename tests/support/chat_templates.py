"""A chat template of the project's own, as a mod that recipes name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import yaml

from sparkpin.pins.manifests import COMMUNITY_MODS
from sparkpin.pins.mods import TEMPLATES


def add_template(project: Path, name: str = "fix-own", text: str = "{{ 1 }}\n") -> Path:
    """Add it, or change it, and return its file."""
    path, pins = project / f"{TEMPLATES}/{name}.jinja", project / COMMUNITY_MODS
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    template = {"name": f"{name}.jinja", "sha256": hashlib.sha256(text.encode()).hexdigest(), "licence": "MIT"}
    entry = {
        "name": name,
        "reason": "a test",
        "template": template | {"mends": ["nothing"]},
        "evidence": [{"source": "a test", "date": "2026", "says": "so"}],
    }
    mods = [mod for mod in yaml.safe_load(pins.read_text())["mods"] if mod["name"] != name]
    pins.unlink()  # a copy of a project may have links in it
    pins.write_text(yaml.safe_dump({"mods": [*mods, entry]}))
    return path
