"""A recipe of the community as a frozen value, whatever its version."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, Field

from sparkpin.core.errors import WHOLE, InputError, ManifestError, clipped
from sparkpin.core.terminal import printable
from sparkpin.pins.reading import YAML_LIMIT, load_yaml, parse, require_size
from sparkpin.recipes.shell import FACTS, START, shown
from sparkpin.recipes.sources import launch_of

NEEDED: Mapping[str, list[str]] = {"1": FACTS["v1_needed"], "2": ["model"]}
V1_KEYS, V2_KEYS = {*FACTS["v1_needed"], *FACTS["v1_keys"]}, {*FACTS["v2_keys"]}
# Keys that say nothing about what is served.
ELSEWHERE = {*FACTS["elsewhere"]}
# What recipes of ours have beside version 1's keys.
OURS = ("stack", "stage", "model_revision", "nodes", "drafter", "drafter_revision", "family")
LINE = "none (a command)"  # the version of what no recipe holds
MOST = 250  # keys of one mapping: each that is not known is compared with all that are
DIGITS = 64  # of a number; those of thousands of digits take Python minutes, or end in an error
# Of YAML's types those that no recipe has, and that no command line could say.
UNREAD = ("set", "omap", "pairs", "binary")
# What no text of a recipe has: `render` marks places with some of these.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ue000\ue001]")


def as_text(value: Any) -> Any:
    return "" if value is None else value if isinstance(value, dict | list) else str(value)


def as_mapping(value: Any) -> Any:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


Text = Annotated[str, BeforeValidator(as_text)]
Texts = tuple[Text, ...]
Named = Annotated[dict[str, Any], BeforeValidator(as_mapping), Field(max_length=MOST)]
Machines = Annotated[int | None, Field(ge=0, lt=1000)]


class RecipeOrigin(BaseModel, frozen=True, protected_namespaces=()):
    """What a recipe was here: the key `sparkpin` of `metadata` in an export, or a file that has our own keys.

    model: the base's repository; model_revision: its commit, or `unresolved`; mods: what is in the image already.
    """

    model: str
    model_revision: str
    stack: str
    stage: str
    mods: Texts = ()


class CommunityRecipe(BaseModel, frozen=True, protected_namespaces=()):
    """version: "1", "2", or LINE; defaults: as written, with values of any type; env: as text, as both runners make it.

    raw: all of a file; repeated: keys that stand twice, with their line; left: what of a container's options is not
    carried over. origin: None for the community's.
    """

    path: Path
    version: str
    raw: dict[Any, Any] = {}
    repeated: dict[str, int] = {}
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

    @property
    def shown_version(self) -> str:
        written = clipped(printable(str(self.raw.get("recipe_version", self.version))))
        return written if written == self.version else f"{written}, read as {self.version}"

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


class Tolerant(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML as the runners do: of a key that stands twice in one mapping, which is noted, the last one counts."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: dict[str, int] = {}

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value that is none of its type is a fault of the file, wherever Python meets it."""
        kind, is_text = node.tag.rpartition(":")[2], isinstance(node, yaml.ScalarNode)
        try:
            if kind in UNREAD or (kind in ("int", "float") and is_text and len(node.value) > DIGITS):
                raise ValueError
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            got = f"{clipped(printable(shown(node.value))) if is_text else 'something'}, which is no {kind} here"
            raise yaml.constructor.ConstructorError(None, None, got, node.start_mark) from None
        if isinstance(value, str) and CONTROL.search(value):
            raise yaml.constructor.ConstructorError(None, None, "a control character in a text", node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        known: set[str] = set()
        for key, _ in node.value:  # before `<<` brings others, which may be changed
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                self.repeated[key.value] = key.start_mark.line + 1
            known.add(str(key.value))
        return super().construct_mapping(node, deep)


def is_recipe(path: Path) -> bool:
    """Whether a file of a folder is to be checked: YAML, or a script that starts a server."""
    if path.suffix == ".sh" and path.stat().st_size <= YAML_LIMIT:
        return bool(START.search(path.read_text(encoding="utf-8", errors="replace")))
    return path.suffix in (".yaml", ".yml")


def load(path: Path) -> CommunityRecipe:
    """ManifestError for what its runner, too, could not start from."""
    if not path.is_file():
        fault = "a folder, expected one file" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {fault}", next_step="give the path of a recipe's file, or hf:OWNER/NAME")
    require_size(path, YAML_LIMIT)
    text = path.read_text(encoding="utf-8-sig", errors="replace").replace("\r\n", "\n")
    value, repeated = None, dict[str, int]()
    try:
        value, loader = load_yaml(path, Tolerant)
        repeated = loader.repeated
    except ManifestError:
        if not START.search(text):  # a script is no YAML
            raise
    if (launch := launch_of(path, text, value, os.environ)) is None:
        return of(value, path, repeated)
    model = launch.argv[2] if launch.argv[:2] == ("vllm", "serve") and len(launch.argv) > 2 else ""
    return CommunityRecipe(
        path=path, version=LINE, model=model, container=launch.image, command=shlex.join(launch.argv), env=launch.env,
        left=tuple(launch.left),
    )  # fmt: skip


def of(value: Any, path: Path, repeated: Mapping[str, int] | None = None) -> CommunityRecipe:
    if not isinstance(value, dict):
        expected = "a recipe, a Compose file, or a line with `vllm serve` or `docker run` of vLLM; no other engine"
        raise ManifestError(path, WHOLE, type(value).__name__, expected)
    if len(value) > MOST:
        raise ManifestError(path, WHOLE, f"{len(value):,} keys", f"a mapping of at most {MOST} keys")
    version = "1" if str(value.get("recipe_version", "2")) == "1" else "2"
    if lacking := [key for key in NEEDED[version] if value.get(key) in (None, "")]:
        raise ManifestError(path, ", ".join(lacking), "(missing)", "a value: the key must be there")
    for key in ("include", "overrides") if version == "2" else ():
        if value.get(key):
            raise ManifestError(path, key, value[key], "one file without it, as `sparkrun recipe export` writes")
    origin, metadata = None, value.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("sparkpin"), dict):
        origin = parse(RecipeOrigin, metadata["sparkpin"], path)
    elif version == "1" and "stack" in value:
        origin = parse(RecipeOrigin, value, path)
    facts = {"path": path, "version": version, "raw": value, "repeated": repeated or {}, "origin": origin}
    keys = {key: value[key] for key in READ & value.keys() if value[key] not in (None, "", [], {})}  # `key:` is empty
    read = parse(CommunityRecipe, keys | facts, path)
    described = read.description or str(read.metadata.get("description") or "")
    revision = origin.model_revision if origin else read.model_revision if version == "2" else ""
    return read.model_copy(update={"description": described, "model_revision": revision})


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, keys in the order given."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def text_of(value: dict[str, Any], comments: Sequence[str]) -> str:
    """A file that begins with comments. Its lines are as long as they are: a command is read line by line."""
    head = "".join(f"# {printable(line)}".rstrip() + "\n" for line in comments)  # a line end would end the comment
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
