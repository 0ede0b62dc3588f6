"""YAML files of the community, which are read as their runners read them, and of which keys may stand twice."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparkpin.core.errors import WHOLE, InputError, ManifestError, clipped
from sparkpin.core.terminal import printable
from sparkpin.pins.reading import YAML_LIMIT, load_yaml
from sparkpin.recipes.sources import Launch, launch_of

DIGITS = 64  # of a number; those of thousands of digits take Python minutes, or end in an error
UNREAD = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("set", "omap", "pairs", "binary"))
"""Of YAML's types those that no recipe has, and that no command line could say."""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ue000\ue001]")
"""What no text of a recipe has: `placeholders` and `template` mark places with some of these."""


def read(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The mapping in a file, and the keys that stand twice in it: the last one counts there, as in both runners.

    InputError for no file, ManifestError for what is no mapping in YAML.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file", next_step="give the path of a recipe's file")
    value, loader = load_yaml(path, Tolerant)
    if not isinstance(value, dict):
        raise ManifestError(path, WHOLE, type(value).__name__, "a mapping of keys")
    return value, tuple(loader.repeated)


def launch(path: Path, environment: Mapping[str, str]) -> Launch | None:
    """How a file that is no recipe starts a server; None for a recipe, and for what is neither."""
    if not path.is_file() or path.stat().st_size > YAML_LIMIT:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    except ValueError:
        return None
    value: object = None
    with contextlib.suppress(ManifestError):
        value, _ = load_yaml(path, Tolerant)
    return launch_of(path, text, value, environment)


class Tolerant(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Notes a key that stands twice in one mapping."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value that is none of its type is a fault of the file, wherever Python meets it."""
        kind, is_text = node.tag.rpartition(":")[2], isinstance(node, yaml.ScalarNode)
        try:
            if node.tag in UNREAD or (kind in ("int", "float") and is_text and len(node.value) > DIGITS):
                raise ValueError
            made = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            raise fault(f"{clipped(node.value) if is_text else 'something'}, which is no {kind} here", node) from None
        if isinstance(made, str) and (found := CONTROL.search(made)):
            raise fault(f"the character {found[0]!r} in a text", node)
        return made


def fault(seen: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, seen, node.start_mark)


def _mapping(loader: Tolerant, node: Any) -> dict[Any, Any]:
    own = {id(key_node) for key_node, _ in node.value}  # another value for what `<<` brings is no repetition
    loader.flatten_mapping(node)
    pairs = loader.construct_pairs(node, deep=True)
    made: dict[Any, Any] = {}
    seen: set[Any] = set()
    for (key, value), (key_node, _) in zip(pairs, node.value, strict=True):
        if not isinstance(key, str | int | float | bool | None):
            raise fault("a key that is no text", key_node)
        if id(key_node) in own:
            if key in seen:
                loader.repeated.append(f"{key} (line {key_node.start_mark.line + 1})")
            seen.add(key)
        made[key] = value
    return made


Tolerant.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, keys in the order given."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def text_of(value: dict[str, Any], comments: list[str]) -> str:
    """A file that begins with comments. Its lines are as long as they are: a command is read line by line."""
    head = "".join(f"# {printable(line)}".rstrip() + "\n" for line in comments)  # a line end would end the comment
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
