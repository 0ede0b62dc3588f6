"""The tasks of the command line: `@task("group")` on the function that has the body, in a file of this package.

Its signature is its line: what stands before `*` is positional, what follows are options. Each parameter is
`Annotated[type, help]` or `Annotated[type, help, METAVAR]`; the docstring's first line is the summary, what follows
it are examples. A task returns its exit code, or None for 0.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

HERE = Path(__file__).parent
F = TypeVar("F", bound=Callable[..., Any])
GROUPS = ("serve", "releases", "measure", "build", "inputs", "prove and carry", "machine", "for developers")
SHORT = {"output": "-o", "follow": "-f", "lines": "-n"}
FIRST = ("up", "serve", "images", "promote", "rollback", "smoke", "bench", "test")
"""Of their groups."""
HEAD = re.compile(r'^@task\("([\w ]+)"\)\ndef (\w+?)_?\((?:[^"]|"[^"\n]*")*?\n?\) -> [^\n]*:\n    """([^"\n]*)', re.M)


@dataclass(frozen=True)
class TaskHead:
    """What is known of a task without loading its file, which can take a second."""

    name: str
    group: str
    summary: str
    file: str


@dataclass(frozen=True)
class TaskArgument:
    """choices: the words that a Literal allows; repeats: it takes all words that are left."""

    name: str
    kind: type
    help: str
    metavar: str
    positional: bool
    required: bool
    default: Any
    choices: tuple[str, ...]
    repeats: bool

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @classmethod
    def of(cls, parameter: inspect.Parameter, annotation: Any) -> TaskArgument:
        kind, text, *metavar = get_args(annotation) if get_origin(annotation) is Annotated else (annotation, "")
        name = parameter.name.rstrip("_").replace("_", "-")
        choices = tuple(filter(None, get_args(kind))) if get_origin(kind) is Literal else ()
        return cls(
            name=name,
            kind=bool if kind is bool else int if int in (kind, *get_args(kind)) else str,
            help=text,
            metavar=metavar[0] if metavar else "|".join(choices) or name.upper(),
            positional=parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
            required=parameter.default is inspect.Parameter.empty,
            default=None if parameter.default is inspect.Parameter.empty else parameter.default,
            choices=choices,
            repeats=get_origin(kind) is tuple,
        )


def task(group: str) -> Callable[[F], F]:
    """Mark the function below as a task. `heads` reads this line, and the ones that follow it, as text."""
    if group not in GROUPS:
        raise ValueError(f"@task: got {group!r}, expected one of {', '.join(GROUPS)}")
    return lambda body: body


@functools.cache
def heads() -> dict[str, TaskHead]:
    """All tasks by name, in the order of their groups."""
    found = [
        TaskHead(match[2], match[1], match[3], ".".join(file.relative_to(HERE).with_suffix("").parts))
        for file in sorted(HERE.rglob("*.py"))
        for match in HEAD.finditer(file.read_text(encoding="utf-8"))
    ]
    rank = {name: place for place, name in enumerate(FIRST)}
    order = sorted(found, key=lambda head: (GROUPS.index(head.group), rank.get(head.name, len(FIRST))))
    return {head.name: head for head in order}


def body_of(name: str) -> Callable[..., int | None]:
    module = import_module(f"sparkpin.cli.{heads()[name].file}")
    body: Callable[..., int | None] = getattr(module, name, None) or getattr(module, f"{name}_")
    return body


def arguments_of(body: Callable[..., Any]) -> list[TaskArgument]:
    types = get_type_hints(body, include_extras=True)
    return [TaskArgument.of(one, types[one.name]) for one in inspect.signature(body).parameters.values()]
