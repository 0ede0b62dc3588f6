"""The line of `sparkpin` and of `invoke`: read once, help in one form, and one clear error for each mistake.

invoke's own parser knows no positional that may be left out, its errors name no next step and end with 1, and where a
task still wants a TAG it takes any word for one, `--help` too. So a Program of ours reads what follows its options.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from invoke import main as invoke_main
from invoke.collection import Collection
from invoke.exceptions import Exit, ParseError
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext
from invoke.parser.parser import ParseResult
from invoke.program import Program
from invoke.tasks import Task

import sparkpin
from sparkpin.cli import completion
from sparkpin.core import paths
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.names import did_you_mean
from sparkpin.core.terminal import Verbosity, tame

METAVARS = {
    "allow": "PATHS",
    "bad": "TAG",
    "ca": "FILE",
    "compare": "A",
    "drain": "SECONDS",
    "from": "PLACE",
    "good": "TAG",
    "keep": "COUNT",
    "lines": "COUNT",
    "nodes": "MACHINES",
    "out": "FILE",
    "output": "FILE",
    "rounds": "COUNT",
    "key-env": "NAME",
    "subject": "TAG|FILE",
    "tls-cert": "FILE",
    "tls-key": "FILE",
    "tool": "TOOL",
    "watch": "SECONDS",
    "what": "FILE|NAME",
    "bump hold": "DAYS",
    "bump to": "NAME==VERSION",
    "bump what": "PART",
    "export link": "ADDRESS",
    "recipe what": "FILE|NAME ...",
    "rollback to": "TAG",
    "bisect limit": "SECONDS",
    "serve limit": "LIMITS",
    "prove what": "TAG|URL",
}
HOW_MUCH = {"quiet": "print no progress", "verbose": "print more, and the traceback of an error"}  # -q, -v: every task
SHORT = {"output": "o", "follow": "f", "lines": "n"}
ALONE = {"--watch": "2"}  # what an option without its value stands for
WIDTH = 80


class SparkpinTask(Task[Any]):
    """A task whose signature is its line: what stands before `*` is positional, and may be omitted where it has a
    default; what follows is an option, and is required where it has none. `Annotated[int, "what it is", 8001]`: its
    help and an example. A `tuple[str, ...]` comes last, and takes all words that are left. Options have long names,
    but for those of SHORT: one letter would mean different things."""

    def __init__(self, body: Callable[..., Any], group: str) -> None:
        super().__init__(body, name=body.__name__.rstrip("_"), positional=())
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for number in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C; nohup stays in force
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        with told():
            return super().__call__(*args, **kwargs)

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        types = get_type_hints(self.body, include_extras=True)
        parameters = list(inspect.signature(self.body).parameters.values())[1:]  # the first is invoke's context
        return [TaskArgument(self.name, parameter, types[parameter.name]) for parameter in parameters]


def task(group: str) -> Callable[[Callable[..., Any]], SparkpinTask]:
    return lambda body: SparkpinTask(body, group)


class TaskArgument(Argument):
    """choices: the words that a Literal allows; required: has no default; example: of a value, for an error."""

    def __init__(self, task: str, parameter: inspect.Parameter, annotation: Any) -> None:
        self.task = task
        kind, text, *example = get_args(annotation) if get_origin(annotation) is Annotated else (annotation, "")
        self.choices = get_args(kind) if get_origin(kind) is Literal else ()
        self.required = parameter.default is inspect.Parameter.empty
        self.example = example[0] if example else parameter.default
        name = parameter.name
        super().__init__(
            names=(name.rstrip("_").replace("_", "-"), *filter(None, [SHORT.get(name)])),
            attr_name=name if "_" in name else None,
            kind=list
            if get_origin(kind) is tuple
            else bool
            if kind is bool
            else int
            if int in (kind, *get_args(kind))
            else str,
            default=None if self.required else parameter.default,
            help=text,
            positional=parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
        )

    @property
    def flag(self) -> str:
        return f"--{self.names[0]}"

    @property
    def metavar(self) -> str:
        own = METAVARS.get(f"{self.task} {self.names[0]}") or METAVARS.get(self.names[0])
        return own or "|".join(filter(None, self.choices)) or self.names[0].upper()

    @property
    def shown(self) -> str:
        """As help and usage write it."""
        flags = ", ".join([*(f"-{name}" for name in self.nicknames), self.flag])
        return self.metavar if self.positional else f"{flags} {self.metavar}" if self.takes_value else flags

    def take(self, value: str) -> None:
        """InputError for a word that is none of the choices, or no number: invoke's own conversion of that ends in
        a traceback."""
        if self.choices and value not in self.choices:
            known = ", ".join(filter(None, self.choices))
            what = self.names[0] if self.positional else self.flag
            raise InputError(f"{what}: got {value!r}, expected one of: {known}", next_step=f"choose one of: {known}")
        if self.kind is int and not value.isdecimal():
            raise InputError(
                f"{self.flag}: got {value!r}, expected a whole number, 0 or more",
                next_step=f"for example {self.flag} {self.example}",
            )
        self.value = value


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn a SparkpinError into one message and its own exit code, without a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is one of the errors
    except SparkpinError as error:
        if Verbosity.verbose:
            traceback.print_exception(error)
        raise Exit(f"error: {tame(str(error))}", code=error.exit_code) from None
    except ImportError as error:
        if (error.name or "sparkpin").partition(".")[0] == "sparkpin":
            raise
        step = "rm .venv/.requirements.sha256, then ./install.sh"
        raise Exit(f"error: a package of .venv does not load: {error}\n  next: {step}", code=3) from None
    except KeyboardInterrupt as stop:  # with words: what is kept of it
        told = str(stop) or "nothing half-made will be used; run the same command again"
        raise Exit(f"interrupted: {told}", code=130) from None
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(code=141) from None  # as if the signal had ended it


class TaskProgram(Program):
    """invoke's Program with our own reading of what follows its options."""

    called = "invoke"

    def parse_tasks(self) -> None:
        if self.called == "invoke":  # it is of the folder that it stands in, pins and code alike
            os.environ.pop(paths.PROJECT, None)
        self.parser = self._make_parser()
        contexts: Mapping[str, ParserContext] = self.parser.contexts
        if self.args.complete.value:
            if self.called == "sparkpin" and (named := re.search(r"--project(?: ?= ?| )(\S+)", self.core.remainder)):
                os.environ[paths.PROJECT] = named[1]
            with told():
                for one in completion.candidates(self.core.remainder, contexts, self.core[0]):
                    print(one)
            raise Exit
        with told():
            self.tasks = Line(self.called, contexts, self.core[0]).read(self.core.unparsed)
            Verbosity.quiet, Verbosity.verbose = (self.args[name].value for name in HOW_MUCH)
            if self.args.get("project") and (project := self.core[0].args["project"].value):
                os.environ[paths.PROJECT] = project
            wanted = self.args.help.value
            if isinstance(wanted, str) and wanted not in contexts:
                raise unknown(self.called, wanted, contexts)

    def parse_cleanup(self) -> None:
        with told():  # of `invoke | head`, too
            super().parse_cleanup()

    def print_task_help(self, name: str) -> None:
        print(help_text(self.called, self.parser.contexts[name], summary(self.collection[name])))

    def list_flat(self) -> None:
        """The tasks in groups, both as tasks.py has them."""
        tasks = self.collection.tasks
        width = max(map(len, tasks))
        lines = [f"usage: {self.called} TASK [options]"]
        for group in dict.fromkeys(one.group for one in tasks.values()):
            rows = [f"  {name:{width}}  {summary(one)}" for name, one in tasks.items() if one.group == group]
            lines += ["", f"{group}:", *rows]
        print("\n".join([*lines, "", f"next: {self.called} TASK --help"]), flush=True)

    def print_help(self) -> None:
        self.list_flat()


class SparkpinProgram(TaskProgram):
    """`sparkpin`: its own tasks, from any folder, for the project of that folder, whose tasks.py is not run."""

    called = "sparkpin"

    def __init__(self) -> None:
        super().__init__(version=sparkpin.__version__, name="sparkpin", binary="sparkpin", namespace=Collection())

    def core_args(self) -> list[Argument]:
        text = "folder with pins/ (default: SPARKPIN_PROJECT, else the nearest one upwards)"
        return [*super().core_args(), Argument(name="project", help=text)]

    def parse_core(self, argv: list[str] | None) -> None:
        with told():
            super().parse_core(argv)

    def parse_core_args(self) -> None:
        try:
            super().parse_core_args()
        except ParseError as error:  # its only one here; the text names the option's class, too
            flag = re.sub(r".*<Argument: ([\w-]+).*", r"--\1", str(error), flags=re.DOTALL)
            raise InputError(f"{flag} wants a value", next_step=f"sparkpin {flag} VALUE TASK") from None
        if shell := self.args["print-completion-script"].value:
            if shell not in completion.SCRIPTS:
                raise Exit(
                    f"error: no completion for {shell!r}\n  next: sparkpin --print-completion-script bash", code=2
                )
            print(completion.SCRIPTS[shell])
            raise Exit

    def parse_collection(self) -> None:
        start_quickly()
        from sparkpin.cli import tasks  # a link to tasks.py, which a wheel has as a file

        self.namespace = Collection.from_module(tasks)
        super().parse_collection()


def main() -> None:
    SparkpinProgram().run()


def take_over() -> None:
    """`invoke` has made its Program before it loads tasks.py, and has no setting for another: make it one of ours."""
    invoke_main.program.__class__ = TaskProgram
    start_quickly()


def start_quickly() -> None:
    """invoke forbids Python to keep what it compiles, so that each command would compile all that it loads anew. And
    most objects of a short command are code: to look for garbage among them takes a sixth of its time."""
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)
    gc.set_threshold(500_000, 20, 20)


class Line:
    """Reads the words after the program's own options. called: the program; core: its options."""

    def __init__(self, called: str, tasks: Mapping[str, ParserContext], core: ParserContext) -> None:
        self.called, self.tasks, self.core = called, tasks, core
        for name in HOW_MUCH:
            core.add_arg(Argument(names=(name, name[0]), kind=bool, default=False))

    def read(self, words: Sequence[str]) -> ParseResult:
        """The tasks of the line with their values; none where it asks for help: that is noted in core.

        InputError for the first word that nothing takes, or that is missing.
        """
        rest, read = list(words), ParseResult()
        if rest[:1] == ["help"]:
            if not rest[1:]:
                return read  # no task: the list
            self.core.args["help"].value = rest[1]
            return read
        while rest:
            word = rest.pop(0)
            task = read[-1] if read else None
            if task is None and word in self.core.flags and self.core.flags[word].name in HOW_MUCH:
                self.core.flags[word].set_value(True, cast=False)
                continue
            if task is None and word not in self.tasks:
                raise unknown(self.called, word, self.tasks)
            if task is None or (word in self.tasks and not missing(task, positional=True)):
                read.append(copy.deepcopy(self.tasks[word]))
            elif word.startswith("-"):
                if self.option(task, word, rest) in ("-h", "--help"):
                    self.core.args["help"].value = task.name
                    return ParseResult()
            elif free := [one for one in task.positional_args if one.raw_value is None or one.kind is list]:
                self.give(task, free[0], word)
            else:
                raise self.surplus(task, word)
        for task in read:
            if names := [one.shown for one in missing(task)]:
                raise self.error(task, f": {' and '.join(names)} missing", usage(self.called, task))
        return read

    def option(self, task: ParserContext, word: str, rest: list[str]) -> str:
        """Give an option its value, the next word unless it is written with it: --stage=v2, -o=FILE, -oFILE."""
        flag, equals, value = word.partition("=")
        own = {flag: one for flag, one in task.flags.items() if not one.positional}
        own.update({f"-{name}": one for one in task.args.values() for name in one.nicknames})
        if not equals and not word.startswith("--") and word[:2] in own:
            flag, value = word[:2], word[2:]
        flags = own if flag in own else self.core.flags
        if flag not in flags:
            guess = did_you_mean(flag, own)
            step = f"{guess}{self.called} {task.name} --help lists the options"
            raise InputError(f"{self.called} {task.name} has no option {flag}", next_step=step)
        option = flags[flag]
        if option.optional or not option.takes_value:  # --help and --list, of the program's own, are optional
            if equals:
                raise self.error(task, f": {flag} takes no value", f"{self.called} {task.name} {flag}")
            option.set_value(True, cast=False)
        else:
            if not value and not equals and rest and rest[0].partition("=")[0] not in own:
                value = rest.pop(0)
            self.give(task, option, value or ("" if equals else ALONE.get(flag, "")))
        return flag

    def give(self, task: ParserContext, argument: Argument, value: str) -> None:
        if not value:  # which a script's unset variable is, too
            shown = argument.shown if isinstance(argument, TaskArgument) else f"--{argument.name} VALUE"
            raise self.error(task, f": {shown.split()[0]} wants a value", f"{self.called} {task.name} {shown}")
        if isinstance(argument, TaskArgument):
            argument.take(value)
        else:
            argument.value = value

    def surplus(self, task: ParserContext, word: str) -> InputError:
        step = f"{self.meant(task, word)}{self.called} {task.name} --help says what it takes"
        return InputError(f"{self.called} {task.name} does not take {word!r}", next_step=step)

    def meant(self, task: ParserContext, word: str) -> str:
        """By a word too many: the option that takes such a name, else the next task."""
        name = Path(word).name.removesuffix(".yaml")
        for kind in completion.FOLDERS:
            if f"--{kind}" in task.flags and name in completion.names(kind):
                return f"{self.called} {task.name} --{kind} {name}, or "
        near = did_you_mean(word, self.tasks)
        return f"{near}or " if near else ""

    def error(self, task: ParserContext, text: str, step: str) -> InputError:
        step = f"{step} ({self.called} {task.name} --help says more)"
        return InputError(f"{self.called} {task.name}{text}", next_step=step)


def missing(task: ParserContext, *, positional: bool = False) -> list[TaskArgument]:
    given = [one for one in task.args.values() if one.required and one.raw_value is None]
    return [one for one in given if one.positional or not positional]


def unknown(called: str, word: str, tasks: Iterable[str]) -> InputError:
    kind = "option" if word.startswith("-") else "task"
    step = f"{did_you_mean(word, tasks)}`{called}` alone lists the tasks"
    return InputError(f"{called} has no {kind} {word!r}", next_step=step)


def summary(task: SparkpinTask) -> str:
    return (task.__doc__ or "").partition("\n")[0]


def usage(called: str, task: ParserContext) -> str:
    """`invoke export TAG PLACE [options]`."""
    arguments: list[TaskArgument] = list(task.args.values())
    first = [one for one in arguments if one.positional or one.required]
    words = [re.sub(r"^(-\w), --[\w-]+", r"\1", one.shown) for one in first]
    words = [word if one.required else f"[{word}]" for word, one in zip(words, first, strict=True)]
    return " ".join([called, str(task.name), *words, *(["[options]"] if len(arguments) > len(first) else [])])


def help_text(called: str, task: ParserContext, about: str) -> str:
    rows = [(one.shown, one.help or "") for one in task.args.values()]
    rows += [(f"-{name[0]}, --{name}", text) for name, text in HOW_MUCH.items()]
    width = max(len(left) for left, _ in rows)
    blank = " " * (width + 4)
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"  {left:{width}}  ", subsequent_indent=blank)
        if text
        else f"  {left}"
        for left, text in rows
    ]
    return "\n".join([f"usage: {usage(called, task)}", "", about, "", *lines])
