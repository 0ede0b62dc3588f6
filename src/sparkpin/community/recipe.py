"""A recipe of the community as a frozen value, whatever its version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparkpin.community import including, yamlfile
from sparkpin.core.errors import ManifestError

NOTHING: Mapping[str, Any] = MappingProxyType({})
V1_NEEDED = ("name", "recipe_version", "container", "command")
V1_KEYS = {
    *V1_NEEDED, "description", "model", "mods", "defaults", "env", "build_args", "cluster_only", "solo_only",
}  # fmt: skip
V2_KEYS = {
    "benchmark", "builder", "builder_config", "capabilities", "cluster_config", "cluster_only", "command", "container",
    "containers", "defaults", "description", "distribution_config", "env", "executor", "executor_config", "include",
    "layout", "max_nodes", "metadata", "min_nodes", "mode", "model", "model_revision", "mods", "name", "overrides",
    "post_commands", "post_exec", "pre_exec", "readiness", "recipe_version", "runtime", "runtime_cache",
    "runtime_config", "runtime_version", "scheduler", "solo_only", "sparkrun_version", "stop_after_post",
    "unsupported_capabilities",
}  # fmt: skip
ELSEWHERE = {"benchmark", "capabilities", "description", "distribution_config", "draft_model", "maintainer",
             "metadata", "name", "recipe_version", "runbook", "sparkrun_version",
             "unsupported_capabilities"}  # fmt: skip
"""Keys that say nothing about what is served."""

OURS = ("stack", "stage", "model_revision")
"""What a recipe of ours has beside version 1's keys."""


@dataclass(frozen=True)
class RecipeOrigin:
    """What a recipe was here: the key `sparkpin` of `metadata` in an export, or a file that has our own keys.

    model: the base's repository; revision: its commit, or `unresolved`; mods: what is in the image already.
    """

    model: str
    revision: str
    stack: str
    stage: str
    mods: tuple[str, ...]


@dataclass(frozen=True)
class CommunityRecipe:
    """version: "1" or "2"; name: the key's, of version 2 the file's; defaults: as written, with values of any type;
    env: as text, as both runners make it; nodes: least number of machines; others: keys that its runner does not
    know; repeated: keys that stand twice; raw: all of it, with what it includes; origin: None for the community's."""

    path: Path
    version: str
    name: str
    description: str
    model: str
    revision: str
    runtime: str
    container: str
    command: str | None
    build_args: tuple[str, ...] = ()
    mods: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    env: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    nodes: int = 1
    others: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    origin: RecipeOrigin | None = None

    @property
    def applied(self) -> tuple[str, ...]:
        """The mods that its server runs with, whoever applies them."""
        return self.origin.mods if self.origin else self.mods


def load(path: Path) -> CommunityRecipe:
    """ManifestError for what its runner, too, could not start from."""
    value, repeated = yamlfile.read(path)
    version = "1" if str(value.get("recipe_version", "2")) == "1" else "2"
    if version == "2":
        value = including.resolved(value, path)
    return of(value, path, version, repeated)


def of(value: Mapping[str, Any], path: Path, version: str, repeated: tuple[str, ...] = ()) -> CommunityRecipe:
    if lacking := [key for key in (V1_NEEDED if version == "1" else ("model",)) if value.get(key) in (None, "")]:
        wanted = "a value: the key must be there" if len(lacking) == 1 else "a value for each: the keys must be there"
        raise ManifestError(path, ", ".join(lacking), "(missing)", wanted)
    metadata = mapping(value, "metadata", path) if version == "2" else {}
    command = value.get("command")
    if command is not None and not isinstance(command, str):
        raise ManifestError(path, "command", command, "text")
    origin = origin_of(value, path, version)
    known = V1_KEYS | set(OURS) if version == "1" and origin else V1_KEYS if version == "1" else V2_KEYS
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
        build_args=words(value, "build_args", path),
        mods=words(value, "mods", path),
        defaults=MappingProxyType(mapping(value, "defaults", path)),
        env=MappingProxyType({name: str(item) for name, item in mapping(value, "env", path).items()}),
        nodes=nodes_of(value, path),
        others=tuple(str(key) for key in value if key not in known and key not in ELSEWHERE),
        repeated=repeated,
        raw=MappingProxyType(dict(value)),
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
    texts = {key: text(place, key, path) for key in ("model", *OURS)}
    if lacking := [key for key, said in texts.items() if not said]:
        raise ManifestError(path, where + lacking[0], "(missing)", "a value, as in a recipe of recipes/")
    return RecipeOrigin(
        texts["model"], texts["model_revision"], texts["stack"], texts["stage"], words(place, "mods", path)
    )


def nodes_of(value: Mapping[str, Any], path: Path) -> int:
    least = value.get("min_nodes") or 1
    if not isinstance(least, int | str) or not str(least).isdecimal():
        raise ManifestError(path, "min_nodes", least, "a number of machines")
    return max(int(least), 2 if value.get("cluster_only") or value.get("mode") == "cluster" else 1)


def text(value: Mapping[str, Any], key: str, path: Path) -> str:
    found = value.get(key)
    if isinstance(found, dict | list):
        raise ManifestError(path, key, found, "text")
    return "" if found is None else str(found)


def words(value: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    found = value.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, str | int | float) for item in found):
        raise ManifestError(path, key, found, "a list of words")
    return tuple(str(item) for item in found)


def mapping(value: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = value.get(key) or {}  # `key:` with nothing but comments under it, or []
    if not isinstance(found, dict):
        raise ManifestError(path, key, found, "a mapping, NAME: value")
    return {str(name): item for name, item in found.items()}
