"""What a shell may complete a line with: tasks, options, and the names that stand in the project and in the home.

Asked at each TAB, so it reads names of files only: no engine, and nothing that takes long to load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from sparkpin.cli.tasks import TaskArgument, arguments_of, body_of, heads
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import PROJECT, Paths

FOLDERS = {"stage": "stages", "model": "pins/models", "recipe": "recipes", "stack": "pins/stacks"}
"""Where the names lie that such an option takes."""
PROGRAM_OPTIONS = ("--help", "--list", "--version", "--project", "--print-completion-script", "--quiet", "--verbose")
PLAIN = re.compile(r"[A-Za-z0-9][\w.+-]*")  # no word that a shell would take for more than a word
RELEASE = re.compile(rf"({PLAIN.pattern})-[0-9a-f]{{12}}")
SCRIPTS = {
    "bash": """\
_sparkpin() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        if [[ $word == "$2"* ]]; then COMPREPLY+=("$word"); fi
    done < <("$1" --complete -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
}
complete -o default -F _sparkpin sparkpin""",
    "zsh": """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_sparkpin() {
    local -a found
    found=(${(f)"$($words[1] --complete -- "${(@)words[1,CURRENT]}" 2>/dev/null)"})
    compadd -a found || _files
}
compdef _sparkpin sparkpin""",
}


def candidates(line: str) -> list[str]:
    """line: as the shell has it, from the program's name to the word under the cursor, which may be empty."""
    *before, word = re.sub(r" ?= ?", "=", line).split(" ")[1:] or [""]  # bash takes --stage=v2 for three words
    while before and (before[0] == "help" or before[0].startswith("-")):  # the program's own, before the task
        first = before.pop(0)
        if first.startswith("--project"):
            os.environ[PROJECT] = first.partition("=")[2] or (before.pop(0) if before else "")
    if not before:
        return [*PROGRAM_OPTIONS] if word.startswith("-") else list(heads())
    if before[0] not in heads():
        return []
    arguments = arguments_of(body_of(before[0]))
    options = {one.flag: one for one in arguments if not one.positional}
    flag, equals, _ = word.partition("=")
    if equals and flag in options:
        return [f"{flag}={value}" if line.endswith(word) else value for value in values(options[flag])]
    option, free = place(before[1:], options, [one for one in arguments if one.positional])
    if option:
        return values(option)
    if free and not word.startswith("-"):
        return values(free[0])
    return [*options, "--help"]


def place(
    before: Sequence[str], options: Mapping[str, TaskArgument], free: list[TaskArgument]
) -> tuple[TaskArgument | None, list[TaskArgument]]:
    """The option whose value comes next, and the positionals that may still be given."""
    option: TaskArgument | None = None
    for word in before:
        if option:
            option = None
        elif word.startswith("-"):
            option = options.get(word)
            option = None if option and option.kind is bool else option
        elif free and not free[0].repeats:
            free = free[1:]
    return option, free


def values(argument: TaskArgument) -> list[str]:
    if argument.choices:
        return list(argument.choices)
    try:
        return tags() if re.match(r"TAG", argument.metavar) else names(argument.name)
    except (OSError, SparkpinError):
        return []


def names(kind: str) -> list[str]:
    """The recipes, stages, stacks or models of the project; none of another kind."""
    stems = (file.stem for file in (Paths.from_env().project / FOLDERS.get(kind, "-")).glob("*.yaml"))
    return sorted(filter(PLAIN.fullmatch, stems))


def tags() -> list[str]:
    """What a TAG may be: each release without its recipe, the stages of these, `current`."""
    found = [match for file in Paths.from_env().releases.glob("*/*.json") if (match := RELEASE.fullmatch(file.stem))]
    return ["current", *sorted({match[1] for match in found}), *sorted({match[0] for match in found})]
