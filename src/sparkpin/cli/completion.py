"""What a shell may complete a line with: tasks, options, and the names that stand in the project and in the home.

Asked at each TAB, so it reads names of files only: no engine, and nothing that takes long to load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext

from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths

FOLDERS = {"stage": "stages", "model": "pins/models", "recipe": "recipes", "stack": "pins/stacks"}
"""Where the names lie that such an option takes."""
TAGS = ("tag", "against", "before", "after", "compare", "release", "subject")
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


def candidates(line: str, tasks: Mapping[str, ParserContext], core: ParserContext) -> list[str]:
    """line: as the shell has it, from the program's name to the word under the cursor, which may be empty."""
    *before, word = re.sub(r" ?= ?", "=", line).split(" ")[1:] or [""]  # bash takes --stage=v2 for three words
    task, free, option = place(before, tasks)
    flag, equals, _ = word.partition("=")
    if equals and word.startswith("--"):
        found = values_of(task.flags.get(flag)) if task else []
        return [f"{flag}={value}" if line.endswith(word) else value for value in found]
    if option:
        return values_of(option)
    if free and not word.startswith("-"):
        return values_of(free[0])
    if task or word.startswith("-"):
        own = [flag for flag, one in task.flags.items() if not one.positional] if task else list(core.flags)
        return [*own, *(["--help"] if task else [])]
    return list(tasks)


def place(
    before: Sequence[str], tasks: Mapping[str, ParserContext]
) -> tuple[ParserContext | None, list[Argument], Argument | None]:
    """The task of the words before the cursor, the positionals that it may still be given, and the option whose value
    comes next."""
    task: ParserContext | None = None
    free: list[Argument] = []
    option: Argument | None = None
    for word in before:
        if option:
            option = None
        elif task and word.startswith("-"):
            flag = task.flags.get(word)
            option = flag if flag and flag.takes_value else None
        elif word in tasks and not [one for one in free if getattr(one, "required", False)]:
            task, free = tasks[word], list(tasks[word].positional_args)
        elif free and free[0].kind is not list:
            free = free[1:]
    return task, free, option


def values_of(option: Argument | None) -> list[str]:
    if option is None or not option.takes_value:
        return []
    name = "tag" if getattr(option, "metavar", "") == "TAG" else str(option.names[0])
    return values(name, getattr(option, "choices", ()))


def values(argument: str, choices: Sequence[str]) -> list[str]:
    if choices:
        return [choice for choice in choices if choice]
    try:
        return tags() if argument in TAGS else names(argument)
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
