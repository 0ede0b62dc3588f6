"""YAML files of the community, which are read as their runners read them, and of which keys may stand twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sparkpin.core.errors import WHOLE, InputError, ManifestError
from sparkpin.pins.manifests import YAML_LIMIT, require_plain_yaml, require_size


def read(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The mapping in a file, and the keys that stand twice in it: the last one counts there, as in both runners.

    InputError for no file, ManifestError for what is no mapping in YAML.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file", next_step="give the path of a recipe's file")
    require_size(path, YAML_LIMIT)
    try:
        text = path.read_text(encoding="utf-8-sig")
        require_plain_yaml(path, text)
        loader = Tolerant(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    except UnicodeDecodeError as error:
        raise ManifestError(path, WHOLE, f"byte {error.start} is no UTF-8", "text in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else WHOLE
        raise ManifestError(path, where, getattr(error, "problem", str(error)), "valid YAML") from None
    if not isinstance(value, dict):
        raise ManifestError(path, WHOLE, type(value).__name__, "a mapping of keys")
    return value, tuple(loader.repeated)


class Tolerant(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Notes a key that stands twice in one mapping."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []


def _mapping(loader: Tolerant, node: Any) -> dict[Any, Any]:
    own = {id(key_node) for key_node, _ in node.value}  # another value for what `<<` brings is no repetition
    loader.flatten_mapping(node)
    pairs = loader.construct_pairs(node, deep=True)
    made: dict[Any, Any] = {}
    seen: set[Any] = set()
    for (key, value), (key_node, _) in zip(pairs, node.value, strict=True):
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key_node.start_mark)
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
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
