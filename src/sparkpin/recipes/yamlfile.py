"""YAML files of the community, which are read as their runners read them, and of which keys may stand twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sparkpin.core.errors import InputError, clipped
from sparkpin.core.terminal import printable
from sparkpin.pins.reading import load_yaml

DIGITS = 64  # of a number; those of thousands of digits take Python minutes, or end in an error
UNREAD = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("set", "omap", "pairs", "binary"))
"""Of YAML's types those that no recipe has, and that no command line could say."""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ue000\ue001]")
"""What no text of a recipe has: `placeholders` and `template` mark places with some of these."""


def read(path: Path) -> tuple[Any, Sequence[str]]:
    """The value of a file, and the keys that stand twice in it: the last one counts there, as in both runners."""
    if not path.is_file():
        raise InputError(f"{path}: no such file", next_step="give the path of a recipe's file")
    value, loader = load_yaml(path, Tolerant)
    return value, loader.repeated


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

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        known: set[str] = set()
        for key, _ in node.value:  # before `<<` brings others, which may be changed
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                self.repeated.append(f"{key.value} (line {key.start_mark.line + 1})")
            known.add(str(key.value))
        return super().construct_mapping(node, deep)


def fault(seen: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, seen, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, keys in the order given."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def text_of(value: dict[str, Any], comments: Sequence[str]) -> str:
    """A file that begins with comments. Its lines are as long as they are: a command is read line by line."""
    head = "".join(f"# {printable(line)}".rstrip() + "\n" for line in comments)  # a line end would end the comment
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
