"""`include:` of version 2: a recipe as a change to another one in the same folder.

Mappings merge key by key, but each value of `defaults` and `env` is one setting; a list replaces another, except that
`overrides` grow; null takes a key away. `metadata` of another model is not taken over.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from sparkpin.community import yamlfile
from sparkpin.core.errors import ManifestError

DEEPEST = 8
PLAIN = re.compile(r"[A-Za-z0-9_][\w.+-]*", re.ASCII)
ATOMIC = ("defaults", "env")


def resolved(value: dict[str, Any], path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if "include" not in value:
        return value
    name = value["include"]
    if not isinstance(name, str) or not PLAIN.fullmatch(name.strip()):
        wanted = "the name of a recipe in the same folder: what `@registry/name` means is known to sparkrun alone"
        step = "in sparkrun: sparkrun recipe export writes it as one file, which can be taken over"
        raise ManifestError(path, "include", name, wanted, next_step=step)
    if str(value.get("recipe_version", "2")) == "1":
        raise ManifestError(path, "include", name, "recipe_version 2: version 1 does not know the key")
    chain = (*above, path.resolve())
    endings = ("",) if name.strip().endswith((".yaml", ".yml")) else (".yaml", ".yml")
    places = [path.with_name(name.strip() + ending) for ending in endings]
    base = next((place for place in places if place.is_file()), None)
    if base is None or base.resolve().parent != path.resolve().parent:
        raise ManifestError(path, "include", name, f"a file {places[0].name} beside it")
    if base.resolve() in chain or len(chain) > DEEPEST:
        raise ManifestError(path, "include", name, f"a chain without a circle, of at most {DEEPEST}")
    below, _ = yamlfile.read(base)
    return merged(resolved(below, base, chain), value)


def merged(base: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(base)
    if "model" in outer and outer["model"] != base.get("model"):
        made.pop("metadata", None)
    for key, value in outer.items():
        old = made.get(key)
        if value is None or key == "include":
            made.pop(key, None)
        elif key == "overrides" and isinstance(value, list) and isinstance(old, list):
            made[key] = [*old, *value]
        elif isinstance(value, dict) and isinstance(old, dict):
            made[key] = overlaid(old, value, atomic=key in ATOMIC)
        else:
            made[key] = copy.deepcopy(value)
    return made


def overlaid(base: dict[str, Any], outer: dict[str, Any], *, atomic: bool) -> dict[str, Any]:
    made = dict(base)
    for key, value in outer.items():
        old = made.get(key)
        if value is None:
            made.pop(key, None)
        elif not atomic and isinstance(value, dict) and isinstance(old, dict):
            made[key] = overlaid(old, value, atomic=False)
        else:
            made[key] = copy.deepcopy(value)
    return made
