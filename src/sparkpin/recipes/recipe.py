"""A recipe of the community as a frozen value, whatever its version."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sparkpin.core.errors import WHOLE, ManifestError, clipped
from sparkpin.core.terminal import printable
from sparkpin.pins.reading import YAML_LIMIT, parse
from sparkpin.recipes import yamlfile
from sparkpin.recipes.sources import RUNNERS, launch_of, vllm_serve

NEEDED: Mapping[str, list[str]] = {"1": RUNNERS["v1_needed"], "2": ["model"]}
V1_KEYS, V2_KEYS = {*RUNNERS["v1_needed"], *RUNNERS["v1_keys"]}, {*RUNNERS["v2_keys"]}
ELSEWHERE = {*RUNNERS["elsewhere"]}
"""Keys that say nothing about what is served."""
OURS = ("stack", "stage", "model_revision", "nodes")
"""What recipes of ours have beside version 1's keys."""
LINE = "line"  # the version of a command that no recipe holds
MOST = 250  # keys of one mapping: each that is not known is compared with all that are


def as_text(value: Any) -> Any:
    return "" if value is None else value if isinstance(value, dict | list) else str(value)


def as_list(value: Any) -> Any:
    return value or []


def as_mapping(value: Any) -> Any:
    """`key:` with nothing but comments under it, or [], is empty."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value or {}


def whole(value: Any) -> int | None:
    """A number of decimal digits, as a text, too; None for all else, and for more digits than a size has."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 20 else None


Text = Annotated[str, BeforeValidator(as_text)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_list)]
Named = Annotated[dict[str, Any], BeforeValidator(as_mapping), Field(max_length=MOST)]
Machines = Annotated[int | None, Field(ge=0, lt=1000)]


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class RecipeOrigin(FrozenModel):
    """What a recipe was here: the key `sparkpin` of `metadata` in an export, or a file that has our own keys.

    model: the base's repository; model_revision: its commit, or `unresolved`; mods: what is in the image already.
    """

    model: str
    model_revision: str
    stack: str
    stage: str
    mods: Texts = ()


class CommunityRecipe(FrozenModel):
    """version: "1", "2", or LINE; defaults: as written, with values of any type; env: as text, as both runners make it.

    raw: all of a file; repeated: keys that stand twice; left: what of a container's options is not carried over.
    origin: None for the community's.
    """

    path: Path
    version: str
    raw: dict[Any, Any] = {}
    repeated: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    origin: RecipeOrigin | None = None
    description: Text = ""
    model: Text = ""
    model_revision: Text = ""
    runtime: Text = ""
    container: Text = ""
    command: Text = ""
    build_args: Texts = ()
    mods: Texts = ()
    defaults: Named = {}
    env: Annotated[dict[str, Text], BeforeValidator(as_mapping), Field(max_length=MOST)] = {}
    metadata: Named = {}
    min_nodes: Machines = None
    max_nodes: Machines = None
    nodes: Machines = None
    mode: Any = None
    cluster_only: Any = False
    solo_only: Any = False

    @property
    def least(self) -> int:
        """Number of machines."""
        ours = self.nodes if "stack" in self.raw else None
        cluster = self.cluster_only or self.mode == "cluster"
        return max(2 if cluster else 1, self.min_nodes or 1, ours or 1)

    @property
    def most(self) -> int | None:
        """None: as many as its command divides the model over."""
        return 1 if self.solo_only or self.mode == "solo" else self.max_nodes

    @model_validator(mode="after")
    def require_machines(self) -> CommunityRecipe:
        if self.most is not None and self.most < self.least:
            raise ValueError(f"{self.least} machines or more where it says one or max_nodes {self.most}")
        return self

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

    @property
    def others(self) -> list[str]:
        """Keys that its runner does not know."""
        known = V2_KEYS if self.version == "2" else V1_KEYS | {*OURS} if self.origin else V1_KEYS
        return [str(key) for key in self.raw if key not in known and key not in ELSEWHERE]


READ = CommunityRecipe.model_fields.keys() - {"path", "version", "raw", "repeated", "left", "origin"}


def load(path: Path) -> CommunityRecipe:
    """ManifestError for what its runner, too, could not start from."""
    if path.is_file() and path.stat().st_size <= YAML_LIMIT:
        value: Any = None
        with contextlib.suppress(ValueError):  # no text
            text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
            with contextlib.suppress(ManifestError):  # no YAML
                value, _ = yamlfile.read(path)
            if launch := launch_of(path, text, value, os.environ):
                words = vllm_serve(launch.words)
                model = words[2] if words[:2] == ("vllm", "serve") and len(words) > 2 else ""
                return CommunityRecipe(
                    path=path, version=LINE, model=model, container=launch.image, command=shlex.join(words),
                    env=launch.env, left=tuple(launch.left),
                )  # fmt: skip
    value, repeated = yamlfile.read(path)
    return of(value, path, repeated)


def of(value: Any, path: Path, repeated: Sequence[str] = ()) -> CommunityRecipe:
    if not isinstance(value, dict) or len(value) > MOST:
        got = f"{len(value):,} keys" if isinstance(value, dict) else type(value).__name__
        raise ManifestError(path, WHOLE, got, f"a mapping of at most {MOST} keys")
    version = "1" if str(value.get("recipe_version", "2")) == "1" else "2"
    if lacking := [key for key in NEEDED[version] if value.get(key) in (None, "")]:
        raise ManifestError(path, ", ".join(lacking), "(missing)", "a value: the key must be there")
    for key in ("include", "overrides") if version == "2" else ():
        if value.get(key):
            step = (
                "`sparkrun recipe export` writes one file; the values for a DGX Spark belong into `defaults` and `env`"
            )
            raise ManifestError(path, key, value[key], "a recipe in one file, without conditions", next_step=step)
    origin, metadata = None, value.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("sparkpin"), dict):
        origin = parse(RecipeOrigin, metadata["sparkpin"], path)
    elif version == "1" and "stack" in value:
        origin = parse(RecipeOrigin, value, path)
    own = {"path": path, "version": version, "raw": value, "repeated": tuple(repeated), "origin": origin}
    read = parse(CommunityRecipe, {key: value[key] for key in READ & value.keys()} | own, path)
    described = read.description or str(read.metadata.get("description") or "")
    revision = origin.model_revision if origin else read.model_revision if version == "2" else ""
    return read.model_copy(update={"description": described, "model_revision": revision})
