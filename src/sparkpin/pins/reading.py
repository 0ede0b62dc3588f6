"""YAML and plain data into frozen models. Nothing else reads YAML that people of this project edit.

Raises ManifestError (file, key, value got, value expected).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sparkpin.core.errors import WHOLE, ManifestError

M = TypeVar("M", bound=BaseModel)
L = TypeVar("L", bound="yaml.CSafeLoader | yaml.SafeLoader")
YAML_LIMIT, LOCK_LIMIT = 256 << 10, 24 << 20  # bytes; each locked tensor takes 150
SCALAR = {"str", "int", "float", "bool"}  # schema.Scalar, as pydantic names what a value could have been
DEPTH, NODES = 50, 50_000  # of a YAML file, aliases counted as what they stand for


def parse(kind: type[M], value: Any, file: object, *, next_step: str = "") -> M:
    """Validate plain data against a model; the error is of the first fault, a misspelt key before what it lacks."""
    if not isinstance(value, dict):
        raise ManifestError(file, WHOLE, type(value).__name__, "a mapping of keys", next_step=next_step)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = error.errors()
    fault = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    place, got, known = fault["loc"], fault["input"], list[str]()
    expected = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if fault["type"] == "extra_forbidden":
        known = sorted(known_keys(kind, place[:-1]))
        expected = f"one of the keys {', '.join(known)}"
    elif fault["type"] == "missing":
        got, expected = "(missing)", "a value: the key must be there"
    elif place and {other["loc"][-1] for other in faults if other["loc"][:-1] == place[:-1]} == SCALAR:
        place, expected = place[:-1], "text, a number, true or false"  # of each kind it is none
    key = ".".join(str(part) for part in place) or WHOLE
    raise ManifestError(file, key, got, expected, next_step=next_step, known=known)


def known_keys(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that the mapping at `location` may have, as far as the types tell."""
    current: Any = kind
    for part in location:
        fields = getattr(current, "model_fields", {})
        current = next(iter(model_types(fields[part].annotation if part in fields else current)), current)
    return [name for name, field in getattr(current, "model_fields", {}).items() if not field.exclude]


def model_types(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in model_types(part)]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice, which plain YAML readers let the last one win."""


def _mapping(loader: Any, node: Any) -> dict[Any, Any]:
    pairs = loader.construct_pairs(node, deep=True)
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(place for place, key in enumerate(keys) if key in keys[:place])
        mark = node.value[twice][0].start_mark
        raise yaml.constructor.ConstructorError(None, None, f"key {keys[twice]!r} stands twice", mark)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> Any:
    """A file of this project, or of a bundle from anybody."""
    return load_yaml(path, _Loader)[0]


def load_yaml(path: Path, kind: Callable[[str], L]) -> tuple[Any, L]:
    """A file's value, and the loader that made it of its text. ManifestError for what is too large, or no YAML."""
    require_size(path, YAML_LIMIT)
    try:
        text = path.read_text(encoding="utf-8-sig")
        require_plain_yaml(path, text)
        loader = kind(text)
        try:
            return loader.get_single_data(), loader
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, TypeError) as error:  # no UTF-8, no such date, a list as a key
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else WHOLE
        raise ManifestError(path, where, getattr(error, "problem", str(error)), "valid YAML") from None


def require_size(path: Path, limit: int) -> None:
    """limit: bytes."""
    if (size := path.stat().st_size) > limit:
        raise ManifestError(path, WHOLE, f"{size:,} bytes", f"{limit:,} or less")


def require_plain_yaml(path: Path, text: str) -> None:
    """Counts before anything is made of it: the loader of C recurses until it crashes, and aliases multiply."""
    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor; nodes in all that is open so far, when it began
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 1)
        count += 1
        if len(open_nodes) > DEPTH or count > NODES:
            where = f"line {event.start_mark.line + 1}" if event.start_mark else WHOLE
            got = f"{len(open_nodes)} levels, {count:,} nodes"
            raise ManifestError(path, where, got, f"at most {DEPTH} and {NODES:,}")
