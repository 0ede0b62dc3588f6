"""The line of `sparkpin` and of `invoke`, which tasks.py hands over: help in one form, one clear error for a mistake.

invoke's own parser knows no positional that may be left out, takes any word for a TAG that is missing, `--help` too,
and its errors name no next step. So argparse reads the line, and what it takes is the signature of a task.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import logging
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import sparkpin
from sparkpin.cli import completion
from sparkpin.cli.tasks import SHORT, TaskArgument, arguments_of, body_of, heads
from sparkpin.core import paths, terminal
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.names import did_you_mean
from sparkpin.core.terminal import LOG, tame

WIDTH = 80


class Parser(argparse.ArgumentParser):
    """argparse with our errors: its own end the program with 2 and a usage of many lines."""

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **more)
        self.add_argument("-q", "--quiet", action="store_true", help="print no progress")
        self.add_argument("-v", "--verbose", action="store_true", help="print more, and the traceback of an error")
        if prog.partition(" ")[0] == "sparkpin":
            self.add_argument("--project", type=word, metavar="FOLDER", help="the nearest one upwards by default")

    def print_help(self, file: Any = None) -> None:
        terminal.show(self.format_help().rstrip())  # argparse passes over a reader that has gone

    def error(self, message: str) -> NoReturn:
        required = re.fullmatch(r"the following arguments are required: (.*)", message)
        text = f"{required[1]} missing" if required else message.removeprefix("argument ")
        raise InputError(f"{self.prog}: {text}", next_step=f"{usage_of(self)} ({self.prog} --help says more)")


class Form(argparse.RawDescriptionHelpFormatter):
    """Options as `--stage STAGE`, in a terminal of any width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH)


def usage_of(parser: argparse.ArgumentParser) -> str:
    """`invoke export TAG PLACE [options]`."""
    return parser.format_usage().removeprefix("usage: ").strip()


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def choice(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected one of: {', '.join(choices)}")
        return text

    return choice


def number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number, 0 or more")
    return int(text)


def word(text: str) -> str:
    if not text:  # as a script's unset variable
        raise argparse.ArgumentTypeError("got nothing, expected a value")
    return text


def task_parser(program: str, name: str, body: Callable[..., Any], arguments: Sequence[TaskArgument]) -> Parser:
    summary, _, examples = (inspect.getdoc(body) or "").partition("\n\n")
    parser = Parser(
        f"{program} {name}",
        description=textwrap.fill(summary, WIDTH),
        epilog=terminal.typed(f"examples:\n{textwrap.indent(examples, '  ')}") if examples else None,
        formatter_class=Form,
    )
    for argument in arguments:
        add(parser, argument)
    words = [one.metavar if one.required else f"[{one.metavar}]" for one in arguments if one.positional]
    words += [f"{one.flag} {one.metavar}" for one in arguments if one.required and not one.positional]
    parser.usage = " ".join([parser.prog, *words, *["[options]"] * any(not one.positional for one in arguments)])
    return parser


def add(parser: Parser, argument: TaskArgument) -> None:
    how: dict[str, Any] = {"help": argument.help.replace("%", "%%")}
    flags = [*filter(None, [SHORT.get(argument.name)]), argument.flag]
    if argument.kind is bool:
        parser.add_argument(*flags, action="store_true", **how)
        return
    # No default here: argparse would read it like a word of the line.
    taken = one_of(argument.choices) if argument.choices else number if argument.kind is int else word
    how |= {"metavar": argument.metavar, "type": taken}
    if argument.positional:
        how["nargs"] = "*" if argument.repeats else None if argument.required else "?"
        parser.add_argument(argument.name.replace("-", "_"), **how)
    else:
        parser.add_argument(*flags, required=argument.required, **how)


def run(program: str, words: Sequence[str]) -> int:
    """Read a line and do what it asks for; returns the exit code. SparkpinError for each mistake."""
    if program == "invoke":  # it is of the folder that it stands in, pins and code alike
        os.environ.pop(paths.PROJECT, None)
    if list(words[:2]) == ["--complete", "--"]:
        for candidate in completion.candidates(" ".join(words[2:])):
            terminal.show(candidate)
        return 0
    own, unknown = top_parser(program).parse_known_args(words)
    if own.print_completion_script:
        terminal.show(completion.SCRIPTS[own.print_completion_script])
        return 0
    rest = [*unknown, *own.rest]
    if rest[:1] == ["help"]:
        own.help, rest = True, rest[1:]
    if own.list or not rest:
        show_list(program)
        return 0
    if rest[0] not in heads():
        kind = "option" if rest[0].startswith("-") else "task"
        step = f"{did_you_mean(rest[0], heads())}`{program}` alone lists the tasks"
        raise InputError(f"{program} has no {kind} {rest[0]!r}", next_step=step)
    early = ["-q"] * own.quiet + ["-v"] * own.verbose  # what stood before the task is as good as behind it
    if project := getattr(own, "project", None):
        early += ["--project", project]
    body, values = read_task(program, rest[0], ["--help"] if own.help else [*early, *rest[1:]])
    return body(**values) or 0


def top_parser(program: str) -> Parser:
    parser = Parser(program, add_help=False, usage=f"{program} TASK [options]")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-l", "--list", action="store_true")
    parser.add_argument("--version", action="version", version=f"{program} {sparkpin.__version__}")
    parser.add_argument("--print-completion-script", choices=completion.SCRIPTS)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def read_task(program: str, name: str, words: Sequence[str]) -> tuple[Callable[..., int | None], dict[str, Any]]:
    """The task and the arguments that the words after its name come to. InputError for the first mistake."""
    body = body_of(name)
    arguments = arguments_of(body)
    parser = task_parser(program, name, body, arguments)
    given, surplus = parser.parse_known_args(words)
    values = {name: value for name, value in vars(given).items() if value is not None}
    if project := values.pop("project", None):
        os.environ[paths.PROJECT] = project
    verbose, quiet = values.pop("verbose"), values.pop("quiet")
    LOG.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    for argument in arguments:
        if argument.repeats:  # argparse ends it at the first option
            more = [one for one in surplus if not one.startswith("-")]
            values[argument.name] = (*values.get(argument.name, ()), *more)
            surplus = [one for one in surplus if one not in more]
    if surplus:
        raise not_taken(parser.prog, surplus[0], arguments)
    parameters = {name.rstrip("_"): name for name in inspect.signature(body).parameters}
    return body, {parameters[name]: value for name, value in values.items()}


def not_taken(prog: str, given: str, arguments: Sequence[TaskArgument]) -> InputError:
    """By a word too many, what was meant: an option of nearly that name, or the one that takes such a name."""
    flags = [one.flag for one in arguments if not one.positional]
    if given.startswith("-"):
        flag = given.partition("=")[0]
        step = f"{did_you_mean(flag, flags)}{prog} --help lists the options"
        return InputError(f"{prog} has no option {flag}", next_step=step)
    name = os.path.basename(given).removesuffix(".yaml")
    kinds = [kind for kind in completion.FOLDERS if f"--{kind}" in flags and name in completion.names(kind)]
    meant = f"{prog} --{kinds[0]} {name}, or " if kinds else ""
    return InputError(f"{prog} does not take {given!r}", next_step=f"{meant}{prog} --help says what it takes")


def show_list(program: str) -> None:
    width = max(map(len, heads()))
    lines, group = [f"usage: {program} TASK [options]"], ""
    for head in heads().values():
        if head.group != group:
            lines += ["", f"{head.group}:"]
        group = head.group
        lines.append(f"  {head.name:{width}}  {head.summary}")
    terminal.show("\n".join([*lines, "", f"next: {program} TASK --help"]))


@contextlib.contextmanager
def ends() -> Iterator[None]:
    """Turn a SparkpinError into one message and its own exit code, without a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is one of the errors
    except SparkpinError as error:
        if LOG.isEnabledFor(logging.DEBUG):
            traceback.print_exception(error)
        fail(f"error: {tame(str(error))}", error.exit_code)
    except ImportError as error:
        if (error.name or "sparkpin").partition(".")[0] == "sparkpin":
            raise
        step = "rm .venv/.requirements.sha256, then ./install.sh"
        fail(f"error: a package of .venv does not load: {error}\n  next: {step}", 3)
    except KeyboardInterrupt as stop:  # with words: what is kept of it
        fail(f"interrupted: {str(stop) or 'nothing half-made will be used; run the same command again'}", 130)
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as if the signal had ended it


def fail(text: str, code: int) -> NoReturn:
    print(terminal.typed(text), file=sys.stderr, flush=True)
    sys.exit(code)


def main(program: str = "sparkpin", words: Sequence[str] | None = None) -> NoReturn:
    """Run a line, by default the words that this program was started with, and end it."""
    terminal.Typed.program = program
    # A short command lives on objects of code, and looking for garbage among them takes a sixth of its time.
    gc.set_threshold(500_000, 20, 20)
    for stop in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C; nohup stays in force
        if signal.getsignal(stop) is signal.SIG_DFL:
            signal.signal(stop, signal.default_int_handler)
    code = 0
    with ends():
        code = run(program, sys.argv[1:] if words is None else words)
    sys.exit(code)


def take_over() -> None:
    """Read the line of the `invoke` that loads tasks.py, and end it; nothing where no invoke runs."""
    import invoke.main

    if argv := getattr(invoke.main.program, "argv", None):
        sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)  # invoke forbids it: each start would compile
        main("invoke", argv[1:])
