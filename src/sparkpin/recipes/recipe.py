"""A recipe of the community as a frozen value, whatever its version."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core.errors import WHOLE, ManifestError, clipped
from sparkpin.core.terminal import printable
from sparkpin.recipes import yamlfile
from sparkpin.recipes.sources import Launch, vllm_serve

RUNNERS: dict[str, Any] = json.loads((Path(__file__).parent / "runners.json").read_text(encoding="utf-8"))
"""What the two runners know: keys of a recipe, settings that become flags. Read in their sources of 2026."""
V1_NEEDED = tuple(RUNNERS["v1_needed"])
V1_KEYS, V2_KEYS, ELSEWHERE = {*V1_NEEDED, *RUNNERS["v1_keys"]}, {*RUNNERS["v2_keys"]}, {*RUNNERS["elsewhere"]}
"""Keys that say nothing about what is served."""

OURS = ("stack", "stage", "model_revision")
"""What every recipe of ours has beside version 1's keys."""
LINE = "line"  # the version of a command that no recipe holds
NODES = "nodes"  # and what some have
MOST = 250  # keys of one mapping: each that is not known is compared with all that are


@dataclass(frozen=True)
class RecipeOrigin:
    """What a recipe was here: the key `sparkpin` of `metadata` in an export, or a file that has our own keys."""

    model: str  # the base's repository
    revision: str  # its commit, or `unresolved`
    stack: str
    stage: str
    mods: tuple[str, ...]  # what is in the image already


@dataclass(frozen=True)
class CommunityRecipe:
    path: Path
    version: str  # "1", "2", or LINE
    name: str  # the key's, of version 2 the file's
    description: str
    model: str
    revision: str
    runtime: str
    container: str
    command: str | None
    build_args: tuple[str, ...]
    mods: tuple[str, ...]
    defaults: Mapping[str, Any]  # as written, with values of any type
    env: Mapping[str, str]  # as text, as both runners make it
    nodes: int  # least number of machines
    most_nodes: int | None  # None: as many as its command divides the model over
    others: tuple[str, ...]  # keys that its runner does not know
    repeated: tuple[str, ...]  # keys that stand twice
    raw: Mapping[str, Any]  # all of it
    origin: RecipeOrigin | None  # None for the community's
    left: tuple[str, ...] = ()  # what of a container's options is not carried over

    @property
    def said_version(self) -> str:
        if self.version == LINE:
            return "none (a command)"
        said = clipped(printable(str(self.raw.get("recipe_version", "2"))))
        return said if said == self.version else f"{said}, read as {self.version}"

    @property
    def applied(self) -> tuple[str, ...]:
        """The mods that its server runs with, whoever applies them."""
        return self.origin.mods if self.origin else self.mods


def load(path: Path) -> CommunityRecipe:
    """ManifestError for what its runner, too, could not start from."""
    if launch := yamlfile.launch(path, os.environ):
        return of_launch(launch, path)
    value, repeated = yamlfile.read(path)
    version = "1" if str(value.get("recipe_version", "2")) == "1" else "2"
    if version == "2":
        require_one_file(value, path)
    return of(value, path, version, repeated)


def of_launch(launch: Launch, path: Path) -> CommunityRecipe:
    """Of a command that no recipe holds."""
    words = vllm_serve(launch.words)
    model = words[2] if words[:2] == ("vllm", "serve") and len(words) > 2 else ""
    return CommunityRecipe(
        path=path, version=LINE, name=path.stem, description="", model=model, revision="", runtime="vllm",
        container=launch.image, command=shlex.join(words), build_args=(), mods=(), defaults={}, env=launch.env, nodes=1,
        most_nodes=None, others=(), repeated=(), raw={}, origin=None, left=tuple(launch.left),
    )  # fmt: skip


def require_one_file(value: Mapping[str, Any], path: Path) -> None:
    """ManifestError for what no public recipe has so far: a change to another file, and settings for some machines."""
    if value.get("include") is not None:
        step = "in sparkrun: sparkrun recipe export writes it as one file, which can be taken over"
        raise ManifestError(path, "include", value["include"], "a recipe in one file", next_step=step)
    if value.get("overrides"):
        step = "write the values for a DGX Spark into `defaults` and `env`"
        raise ManifestError(path, "overrides", value["overrides"], "a recipe without conditions", next_step=step)


def of(value: Mapping[str, Any], path: Path, version: str, repeated: tuple[str, ...]) -> CommunityRecipe:
    if len(value) > MOST:
        raise ManifestError(path, WHOLE, f"{len(value):,} keys", f"at most {MOST}")
    if lacking := [key for key in (V1_NEEDED if version == "1" else ("model",)) if value.get(key) in (None, "")]:
        expected = "a value: the key must be there" if len(lacking) == 1 else "a value for each: the keys must be there"
        raise ManifestError(path, ", ".join(lacking), "(missing)", expected)
    metadata = mapping(value, "metadata", path) if version == "2" else {}
    command = value.get("command")
    if command is not None and not isinstance(command, str):
        raise ManifestError(path, "command", command, "text")
    origin = origin_of(value, path, version)
    known = V1_KEYS | {*OURS, NODES} if version == "1" and origin else V1_KEYS if version == "1" else V2_KEYS
    return CommunityRecipe(
        path=path,
        version=version,
        name=text(value, "name", path) if version == "1" else path.stem,
        description=text(value, "description", path) or str(metadata.get("description") or ""),
        model=text(value, "model", path),
        revision=origin.revision if origin else text(value, "model_revision", path) if version == "2" else "",
        runtime=text(value, "runtime", path) if version == "2" else "vllm",
        container=text(value, "container", path),
        command=command,
        build_args=texts(value, "build_args", path),
        mods=texts(value, "mods", path),
        defaults=mapping(value, "defaults", path),
        env={name: str(item) for name, item in mapping(value, "env", path).items()},
        nodes=least_nodes(value, path),
        most_nodes=most_nodes(value, path),
        others=tuple(str(key) for key in value if key not in known and key not in ELSEWHERE),
        repeated=repeated,
        raw=value,
        origin=origin,
    )


def origin_of(value: Mapping[str, Any], path: Path, version: str) -> RecipeOrigin | None:
    metadata = value.get("metadata")
    said = metadata.get("sparkpin") if isinstance(metadata, dict) else None
    place: Mapping[str, Any]
    if isinstance(said, dict):
        place, where = said, "metadata.sparkpin."
    elif version == "1" and "stack" in value:
        place, where = value, ""
    else:
        return None
    named = {key: text(place, key, path) for key in ("model", *OURS)}
    if lacking := [key for key, said in named.items() if not said]:
        raise ManifestError(path, where + lacking[0], "(missing)", "a value, as in a recipe of recipes/")
    mods = texts(place, "mods", path)
    return RecipeOrigin(named["model"], named["model_revision"], named["stack"], named["stage"], mods)


def least_nodes(value: Mapping[str, Any], path: Path) -> int:
    cluster = value.get("cluster_only") or value.get("mode") == "cluster"
    if cluster and (value.get("solo_only") or value.get("mode") == "solo"):
        raise ManifestError(path, "cluster_only, solo_only, mode", "one and several machines", "one of both")
    said = [number(value, "min_nodes", path), number(value, NODES, path) if "stack" in value else None]
    return max(2 if cluster else 1, *(count or 1 for count in said))


def most_nodes(value: Mapping[str, Any], path: Path) -> int | None:
    if value.get("solo_only") or value.get("mode") == "solo":
        return 1
    most, least = number(value, "max_nodes", path), least_nodes(value, path)
    if most is not None and most < least:
        raise ManifestError(path, "max_nodes", most, f"{least} or more, the least number of machines")
    return most


def number(value: Mapping[str, Any], key: str, path: Path) -> int | None:
    found = value.get(key)
    if found is not None and (isinstance(found, bool) or not whole(found)):
        raise ManifestError(path, key, found, "a number of machines")
    return whole(found)


def whole(value: object) -> int | None:
    """A number of decimal digits, as a text, too; None for all else, and for more digits than a size has."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 20 else None


def divided(recipe: CommunityRecipe) -> list[str]:
    """Settings that divide the model over several machines, `key count`."""
    said = {key: whole(recipe.defaults.get(key)) or 1 for key in ("tensor_parallel", "pipeline_parallel")}
    return [f"{key} {count}" for key, count in said.items() if count > 1]


def text(value: Mapping[str, Any], key: str, path: Path) -> str:
    found = value.get(key)
    if isinstance(found, dict | list):
        raise ManifestError(path, key, found, "text")
    return "" if found is None else str(found)


def texts(value: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    found = value.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, str | int | float) for item in found):
        raise ManifestError(path, key, found, "a list of words")
    return tuple(str(item) for item in found)


def mapping(value: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = value.get(key) or {}  # `key:` with nothing but comments under it, or []
    if not isinstance(found, dict):
        raise ManifestError(path, key, found, "a mapping, NAME: value")
    if len(found) > MOST:
        raise ManifestError(path, key, f"{len(found):,} keys", f"at most {MOST}")
    return {str(name): item for name, item in found.items()}
