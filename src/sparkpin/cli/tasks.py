"""The tasks of the command line: `@task("group")` on the function that has the body, in a file of this package.

Its name and its signature are its line: `recipe_check` is typed `recipe check`, what stands before `*` is positional,
what follows are options. Each parameter is `Annotated[type, help]` or `Annotated[type, help, METAVAR]`, except
`paths`, which the line gives; the docstring's first line is the summary, what follows it are examples. A task returns
its exit code, or None for 0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

HERE = Path(__file__).parent
F = TypeVar("F", bound=Callable[..., Any])
GROUPS = ("serve", "releases", "measure", "build", "inputs", "verify and distribute", "machine", "for developers")
FIRST = ("up", "serve", "images", "promote", "rollback", "smoke", "bench", "test")
"""Of their groups."""
HEAD = re.compile(r'^@task\("([\w ]+)"\)\ndef (\w+)\((?:[^"]|"[^"\n]*")*?\n?\) -> [^\n]*:\n    """([^"\n]*)', re.M)


# Options that several tasks have.
Recipe = Annotated[str | None, "recipe of recipes/ (default: the stack's)"]
KnownRecipe = Annotated[str | None, "recipe with releases (default: the one promoted last)"]
ServedRecipe = Annotated[str | None, "recipe whose server is meant (default: the running one)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's)"]
Stack = Annotated[str | None, "stack of pins/stacks/ (default: the one for this machine)"]
Json = Annotated[bool, "machine-readable"]
DryRun = Annotated[bool, "print what would be done, and change nothing"]
Machines = Annotated[str | None, "for a release of several: such as here,ssh://me@spark2 (default: the last ones)"]
Link = Annotated[str | None, "interface, address or network that connects them (default: the last one)"]
SharedLink = Annotated[bool, "allow a link that other machines share (insecure)"]
Authority = Annotated[str, "PEM file of the registry's own certificate authority", "FILE"]


@dataclass(frozen=True)
class TaskHead:
    """What is known of a task without loading its file, which can take a second."""

    name: str
    group: str
    summary: str
    module: str
    function: str

    @property
    def body(self) -> Callable[..., int | None]:
        body: Callable[..., int | None] = getattr(import_module(self.module), self.function)
        return body


def task(group: str) -> Callable[[F], F]:
    """Mark the function below as a task. `heads` reads this line, and the ones that follow it, as text."""
    return lambda body: body


@functools.cache
def heads() -> dict[str, TaskHead]:
    """All tasks by name, in the order of their groups."""
    found = []
    for file in sorted(HERE.glob("*.py")):
        for group, function, summary in HEAD.findall(file.read_text(encoding="utf-8")):
            name = function.rstrip("_").replace("_", " ")
            found.append(TaskHead(name, group, summary, f"sparkpin.cli.{file.stem}", function))
    rank = {name: place for place, name in enumerate(FIRST)}
    found.sort(key=lambda head: (GROUPS.index(head.group), rank.get(head.name, len(FIRST))))
    return {head.name: head for head in found}
