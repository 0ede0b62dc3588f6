"""What a shell may complete a task's line with: options, and the names that stand in the project and in the home.

Asked at each TAB, so it reads names of files only: no engine, and nothing that takes long to load.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from sparkpin.core.errors import SparkpinError
from sparkpin.core.names import names_in
from sparkpin.core.paths import Paths

FOLDERS = {"stage": "stages", "model": "pins/models", "recipe": "recipes", "stack": "pins/stacks"}
"""Where the names lie that such an option takes."""
PLAIN = re.compile(r"[A-Za-z0-9][\w.+-]*")  # no word that a shell would take for more than a word
RELEASE = re.compile(rf"({PLAIN.pattern})-[0-9a-f]{{12}}")
SHELLS = ("bash", "zsh")


def script(shell: str) -> str:
    """What such a shell reads to complete our lines."""
    return Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")


def candidates(arguments: Sequence[argparse.Action], given: Sequence[str], last: str) -> list[str]:
    """arguments: of the task; given: the words after its name; last: the one under the cursor, which may be empty."""
    options = {flag: one for one in arguments for flag in one.option_strings}
    before = options.get(given[-1]) if given else None
    if before and before.nargs != 0:
        return values(before)
    free = [one for one in arguments if not one.option_strings]
    if free and not last.startswith("-"):
        return [value for one in free for value in values(one)]
    return [*(flag for flag in options if flag.startswith("--")), "--help"]


def values(argument: argparse.Action) -> list[str]:
    if argument.choices:
        return list(argument.choices)
    try:
        return tags() if str(argument.metavar).startswith("TAG") else names(argument.dest)
    except (OSError, SparkpinError):
        return []


def names(kind: str) -> list[str]:
    """The recipes, stages, stacks or models of the project; none of another kind."""
    return list(filter(PLAIN.fullmatch, names_in(Paths.from_env().project / FOLDERS.get(kind, "-"))))


def tags() -> list[str]:
    """What a TAG may be: each release without its recipe, the stages of these, `current`."""
    found = [match for file in Paths.from_env().releases.glob("*/*.json") if (match := RELEASE.fullmatch(file.stem))]
    return ["current", *sorted({match[1] for match in found}), *sorted({match[0] for match in found})]
