"""A command line of `invoke`, before invoke reads it: help in one form, and one clear error for each mistake.

invoke loads tasks.py first. Its own errors name no next step and end with 1, and where a task still wants a TAG it
takes any word for one, `--help` too.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from invoke.collection import Collection
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext
from invoke.parser.parser import Parser
from invoke.program import Program

from sparkpin.core.errors import InputError

NEEDED = {"copy": "--to ENGINE", "export": "-o FILE"}  # the option without which such a task does nothing
BEFORE = {"other": "--compare A"}  # the option that such a positional belongs to
NAMES = {
    "action": "list|check|import|export",
    "what": "FILE|NAME",
    "keep": "COUNT",
    "compare": "A",
    "lines": "COUNT",
    "other": "B",
    "output": "FILE",
    "release": "TAG",
    "rounds": "COUNT",
    "subject": "TAG|FILE",
    "to": "ENGINE",
}
SAME = "the same"  # the help of an option that is another name of the one before it
WIDTH = 80
PLACES = {"--stage": "stages", "--model": "pins/models", "--recipe": "recipes", "--stack": "pins/stacks"}
"""Where the names lie that such an option takes."""
PROJECT = Path(__file__).resolve().parents[3]


def recipe_words(argv: Sequence[str]) -> list[str]:
    """The positionals of `invoke recipe` on this line: `import` and `export` want a second one, and invoke knows none
    that may be left out."""
    action, *rest = (argv[argv.index("recipe") + 1 :] if "recipe" in argv else []) or ("-",)
    alone = not rest or rest[0].startswith("-")
    wants = action.startswith("-") or action in ("import", "export")
    return ["action"] if alone and not wants else ["action", "what"]


def compare_words(argv: Sequence[str]) -> list[str]:
    """The positional of `invoke bench` on this line: `--compare A B` names two releases, an option of invoke one.
    Where the second comes by its name it is none: invoke knows no argument that may stand either way."""
    after = argv[argv.index("bench") + 1 :] if "bench" in argv else []
    given = {word.partition("=")[0] for word in after}
    return ["other"] if "--compare" in given and "--other" not in given else []


def is_invoke(program: str) -> bool:
    """Whether this process is `invoke`, and not a test that imports tasks.py."""
    path = Path(program)
    return path.name in ("invoke", "inv") or (path.name == "__main__.py" and path.parent.name == "invoke")


def answered(argv: Sequence[str], tasks: ModuleType) -> bool:
    """Whether the line has its answer, which is printed, and no task is to run."""
    text = answer(argv, Collection.from_module(tasks))
    if text is not None:
        print(text, flush=True)
    return text is not None


def answer(argv: Sequence[str], collection: Collection) -> str | None:
    """What to print instead of running a task; None when there is a task to run, or invoke itself has the answer.

    InputError for a line that invoke would refuse, or in which it would take an option for a TAG. Call it once: what a
    task's options mean is told once only.
    """
    program = Program()
    core = ParserContext(args=[*program.core_args(), *program.task_args()])
    read = Parser(initial=core, ignore_unknown=True).parse_argv(list(argv[1:]))
    given, words = read[0].args, read.unparsed
    tasks = {str(context.name): context for context in collection.to_contexts()}
    summaries = {name: (collection[name].__doc__ or "").partition("\n")[0] for name in tasks}
    wanted = given["help"].value
    if words[:1] == ["help"]:
        wanted = words[1] if len(words) > 1 else None
        words = words[1:]
    if given["list"].value or given["complete"].value:
        return None
    if not wanted and not words:
        return overview(summaries)
    wanted = wanted or help_wanted(words, tasks, core)
    if wanted is None:
        return None
    if wanted not in tasks:
        raise unknown_task(wanted, tasks)
    return help_text(tasks[wanted], summaries[wanted])


def help_wanted(words: Iterable[str], tasks: Mapping[str, ParserContext], core: ParserContext) -> str | None:
    """The task that --help stands after. InputError for the first word that nothing takes, or that is missing."""
    rest = list(words)
    task: ParserContext | None = None
    missing: list[Argument] = []
    while rest:
        word = rest.pop(0)
        if task is None:
            task = context_of(word, tasks)
            missing = list(task.positional_args)
        elif word.startswith("-"):
            flag, value = split(word, {**task.flags, **task.inverse_flags, **core.flags})
            if flag in ("-h", "--help"):
                return str(task.name)
            known = {*options(task), *(() if missing else core.flags)}
            if flag not in known:
                raise unknown_option(task, flag)
            option = task.flags.get(flag) or core.flags.get(flag)
            if option and option.takes_value and not option.optional and value is None:
                value = "" if not rest or rest[0].partition("=")[0] in task.flags else rest.pop(0)
            if option and option.takes_value and value == "":  # which a script's unset variable is, too
                raise InputError(
                    f"invoke {task.name}: {flag} wants a value",
                    next_step=f"invoke {task.name} {shown(option)} (invoke {task.name} --help says more)",
                )
        elif missing:
            missing.pop(0)
        elif word in tasks:  # invoke runs several tasks, one after the other
            task = tasks[word]
            missing = list(task.positional_args)
        else:
            raise surplus(task, word, tasks)
    if task is not None and missing:
        raise InputError(
            f"invoke {task.name}: {' and '.join(metavar(argument) for argument in missing)} missing",
            next_step=f"{usage(task)} (invoke {task.name} --help says more)",
        )
    return None


def split(word: str, known: Iterable[str]) -> tuple[str, str | None]:
    """An option and the value that is written with it: --stage=v2, -o=FILE, -oFILE."""
    flag, equals, value = word.partition("=")
    if equals or word.startswith("--") or word[:2] not in known:
        return flag, value if equals else None
    return word[:2], word[2:] or None


def context_of(word: str, tasks: Mapping[str, ParserContext]) -> ParserContext:
    if word not in tasks:
        raise unknown_task(word, tasks)
    return tasks[word]


def unknown_task(word: str, tasks: Iterable[str]) -> InputError:
    kind = "option" if word.startswith("-") else "task"
    near = nearest(word, tasks)
    guess = f"did you mean {near}? " if near else ""
    return InputError(f"invoke has no {kind} {word!r}", next_step=f"{guess}`invoke` alone lists the tasks")


def options(task: ParserContext) -> list[str]:
    """invoke takes a positional for an option, too, and then has one value too many."""
    named = [flag for flag, argument in task.flags.items() if not argument.positional]
    return [*named, *task.inverse_flags]


def unknown_option(task: ParserContext, flag: str) -> InputError:
    near = nearest(flag, options(task))
    guess = f"did you mean {near}? " if near else ""
    return InputError(
        f"invoke {task.name} has no option {flag}", next_step=f"{guess}invoke {task.name} --help lists the options"
    )


def surplus(task: ParserContext, word: str, tasks: Iterable[str]) -> InputError:
    """A word too many: the tag or stage that an option wants, or the next task, misspelt."""
    known = (flag for flag, folder in PLACES.items() if (PROJECT / folder / f"{Path(word).name}.yaml").is_file())
    named = next((flag for flag in known if flag in task.flags), None)
    option = named or next((flag for flag in ("--release", *PLACES) if flag in task.flags), None)
    near = "" if named else nearest(word, tasks)
    guess = f"invoke {task.name} {option} {word}, or " if option else ""
    guess = f"did you mean {near}? or " if near else guess
    return InputError(
        f"invoke {task.name} does not take {word!r}", next_step=f"{guess}invoke {task.name} --help says what it takes"
    )


def nearest(word: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def overview(summaries: Mapping[str, str]) -> str:
    width = max(map(len, summaries))
    lines = [f"  {name:{width}}  {summary}" for name, summary in sorted(summaries.items())]
    return "\n".join(["usage: invoke TASK [options]", "", *lines, "", "next: invoke TASK --help"])


def help_text(task: ParserContext, summary: str) -> str:
    rows: list[tuple[str, str]] = []
    for argument in [*task.positional_args, *(a for a in task.args.values() if not a.positional)]:
        if argument.help == SAME:
            rows[-1] = f"-{argument.name}, {rows[-1][0]}", rows[-1][1]
        else:
            rows.append((metavar(argument) if argument.positional else shown(argument), argument.help or ""))
    width = max((len(left) for left, _ in rows), default=0)
    blank = " " * (width + 4)
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"  {left:{width}}  ", subsequent_indent=blank)
        if text
        else f"  {left}"
        for left, text in rows
    ]
    return "\n".join([f"usage: {usage(task)}", "", summary, *([""] if lines else []), *lines])


def usage(task: ParserContext) -> str:
    """`invoke export TAG -o FILE [options]`."""
    words = [word for argument in task.positional_args for word in (BEFORE.get(str(argument.name)), metavar(argument))]
    parts = [*filter(None, words), *filter(None, [NEEDED.get(str(task.name))])]
    others = len(task.args) > len(task.positional_args)
    return " ".join(["invoke", str(task.name), *parts, *(["[options]"] if others else [])])


def shown(argument: Argument) -> str:
    flag = "-" * (1 if len(argument.names[0]) == 1 else 2) + argument.names[0]
    return f"{flag} {metavar(argument)}" if argument.takes_value else flag


def metavar(argument: Argument) -> str:
    name = str(argument.names[0])
    return NAMES.get(name, name.upper())
