"""The line of `sparkpin` and of `invoke`, which tasks.py hands over: help in one form, one clear error for a mistake.

invoke's own parser knows no positional that may be left out, takes any word for a TAG that is missing, `--help` too,
and its errors name no next step. So argparse reads the line, and what it takes is the signature of a task.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import os
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import sparkpin
from sparkpin.cli import completion
from sparkpin.cli.tasks import TaskHead, heads
from sparkpin.core import paths, terminal
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.names import did_you_mean
from sparkpin.core.terminal import LOG, tame

SHORT = {"output": "-o", "follow": "-f", "lines": "-n"}


class Parser(argparse.ArgumentParser):
    """argparse with our errors: its own end the program with 2 and a usage of many lines."""

    def __init__(self, program: str, **more: Any) -> None:
        # What is not given is left out: a body has its own defaults, which argparse would read like words of the line.
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **more)
        self.add_argument("-q", "--quiet", action="store_true", help="print no progress")
        self.add_argument("-v", "--verbose", action="store_true", help="print more, and the traceback of an error")
        if program == "sparkpin":
            self.add_argument("--project", type=word, metavar="FOLDER", help="the nearest one upwards by default")

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage().removeprefix("usage: ").strip()
        raise InputError(f"{self.prog}: {message}", next_step=f"{usage} ({self.prog} --help says more)")


class TaskParser(Parser):
    """For the words after a task's name. arguments: what its signature has, without the options of every task."""

    def __init__(self, program: str, name: str) -> None:
        self.body = heads()[name].body
        summary, _, examples = (inspect.getdoc(self.body) or "").partition("\n\n")
        super().__init__(
            program,
            prog=f"{program} {name}",
            description=summary,
            epilog=terminal.typed(f"examples:\n{textwrap.indent(examples, '  ')}") if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        types = get_type_hints(self.body, include_extras=True)
        parameters = dict(inspect.signature(self.body).parameters)
        self.takes_paths = parameters.pop("paths", None) is not None
        self.arguments = [self.add_parameter(one, *get_args(types[name])) for name, one in parameters.items()]
        usage = [" ".join([*one.option_strings[-1:], str(one.metavar)]) for one in self.arguments if one.required]
        usage += [f"[{one.metavar}]" for one in self.arguments if not (one.required or one.option_strings)]
        self.usage = " ".join([self.prog, *usage, "[options]"])

    def add_parameter(
        self, parameter: inspect.Parameter, kind: Any, text: str, metavar: str | None = None
    ) -> argparse.Action:
        name = parameter.name.rstrip("_").replace("_", "-")
        flags = [*filter(None, [SHORT.get(name)]), f"--{name}"]
        how: dict[str, Any] = {"help": text.replace("%", "%%"), "dest": parameter.name}
        if kind is bool:
            return self.add_argument(*flags, action="store_true", **how)
        choices = list(filter(None, get_args(kind))) if get_origin(kind) is Literal else None
        how["type"] = number if int in (kind, *get_args(kind)) else word
        how |= {"default": None, "choices": choices, "metavar": metavar or "|".join(choices or [name.upper()])}
        required = parameter.default is parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY:
            return self.add_argument(*flags, required=required, **how)
        return self.add_argument(nargs="*" if get_origin(kind) is tuple else None if required else "?", **how)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The arguments of the task. InputError for the first mistake."""
        given, surplus = self.parse_known_intermixed_args(words)
        if surplus:
            flags = [flag for one in self.arguments for flag in one.option_strings]
            word = surplus[0].partition("=")[0]
            step = f"{did_you_mean(word, flags) if word.startswith('-') else ''}{self.prog} --help lists what it takes"
            raise InputError(f"{self.prog} does not take {word!r}", next_step=step)
        return {name: value for name, value in vars(given).items() if value is not None}


def number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number, 0 or more")
    return int(text)


def word(text: str) -> str:
    if not text:  # as a script's unset variable
        raise argparse.ArgumentTypeError("got nothing, expected a value")
    return text


def top_parser(program: str) -> Parser:
    parser = Parser(program, prog=program, add_help=False, usage=f"{program} TASK [options]")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-l", "--list", action="store_true")
    parser.add_argument("--version", action="version", version=f"{program} {sparkpin.__version__}")
    parser.add_argument("--print-completion-script", choices=completion.SHELLS)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def find_task(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The task that words begin with, whose name has one or two of them ("" for none), and what follows it."""
    for length in (2, 1):
        if (name := " ".join(words[:length])) in heads():
            return name, words[length:]
    return "", words


def run(program: str, words: Sequence[str]) -> int:
    """Read a line and do what it asks for; returns the exit code. SparkpinError for each mistake."""
    if program == "invoke":  # it is of the folder that it stands in, pins and code alike
        os.environ.pop(paths.PROJECT, None)
    if list(words[:2]) == ["--complete", "--"]:
        complete(program, words[3:])
        return 0
    given, unknown = top_parser(program).parse_known_args(words)
    options = vars(given)
    name, rest = find_task(words := [*unknown, *options.pop("rest", [])])
    if "print_completion_script" in options:
        terminal.show_file(completion.script(options["print_completion_script"]).rstrip())
        return 0
    if "list" in options or not words:
        show_list(program, heads())
        return 0
    if verbs := {head: task for head, task in heads().items() if not name and head.startswith(f"{words[0]} ")}:
        if len(words) == 1 or {"-h", "--help"} & {*words}:
            show_list(program, verbs)
            return 0
        got = f"{program} {words[0]}: got {words[1]}"
        meant = did_you_mean(" ".join(words[:2]), verbs)
        raise InputError(f"{got}, expected one of: {', '.join(verbs)}", next_step=f"{meant}{program} {words[0]} --help")
    if not name:
        meant = did_you_mean(" ".join(words[:2]), heads()) or did_you_mean(words[0], heads())
        raise InputError(f"{program} does not know {words[0]!r}", next_step=f"{meant}`{program}` alone lists the tasks")
    parser = TaskParser(program, name)
    if "help" in options:
        parser.print_help()
        return 0
    values = options | parser.read(rest)  # an option before the task is as good as behind it
    take_common(values)
    if parser.takes_paths:
        values["paths"] = paths.Paths.from_env()
    return parser.body(**values) or 0


def take_common(values: dict[str, Any]) -> None:
    """Take the options of every task out of a line's, and do as they say."""
    if project := values.pop("project", None):
        os.environ[paths.PROJECT] = project
    quiet, verbose = values.pop("quiet", False), values.pop("verbose", False)
    LOG.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)


def complete(program: str, words: Sequence[str]) -> None:
    """Print what may stand in the place of a line's last word. words: the line's, without the program."""
    *before, last = [one for one in words if one != "="] or [""]  # bash takes --stage=v2 for three words
    values = vars(top_parser(program).parse_known_args(before)[0])
    name, given = find_task(values.pop("rest", []))
    take_common(values)
    if name:
        found = completion.candidates(TaskParser(program, name).arguments, given, last)
    else:
        found = [head.split()[len(given)] for head in heads() if head.split()[: len(given)] == given]
    for one in dict.fromkeys(found):
        terminal.show(one)


def show_list(program: str, tasks: Mapping[str, TaskHead]) -> None:
    width = max(map(len, tasks))
    lines, group = [f"usage: {program} TASK [options]"], ""
    for head in tasks.values():
        if head.group != group:
            lines += ["", f"{head.group}:"]
        group = head.group
        lines.append(f"  {head.name:{width}}  {head.summary}")
    terminal.show("\n".join([*lines, "", f"next: {program} TASK --help"]))


def fail(text: str, code: int) -> int:
    print(terminal.typed(text), file=sys.stderr, flush=True)
    return code


def main(program: str = "sparkpin", words: Sequence[str] | None = None) -> NoReturn:
    """Run a line, by default the words that this program was started with, and end it. A SparkpinError is one message
    and its own exit code, without a traceback."""
    path = sys.argv[0]  # `.venv/bin/invoke`, where the shell finds no `invoke`
    terminal.Typed.program = path if os.path.basename(path) == program and not shutil.which(program) else program
    # A short command lives on objects of code, and looking for garbage among them takes a sixth of its time.
    gc.set_threshold(500_000, 20, 20)
    for stop in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C; nohup stays in force
        if signal.getsignal(stop) is signal.SIG_DFL:
            signal.signal(stop, signal.default_int_handler)
    try:
        code = run(program, sys.argv[1:] if words is None else words)
        sys.stdout.flush()  # here, where a reader that has gone is one of the errors
    except SparkpinError as error:
        if LOG.isEnabledFor(logging.DEBUG):
            traceback.print_exception(error)
        code = fail(f"{error.label}: {tame(str(error))}", error.exit_code)
    except ModuleNotFoundError as error:  # after `git pull`, say
        if str(error.name).partition(".")[0] == "sparkpin":
            raise
        code = fail(f"error: .venv is incomplete: {error}\n  next: rm .venv/.requirements.sha256, then ./install.sh", 3)
    except KeyboardInterrupt as stop:  # with words: what is kept of it
        code = fail(f"interrupted: {str(stop) or 'nothing half-made will be used; run the same command again'}", 130)
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141  # as if the signal had ended it
    sys.exit(code)


def take_over() -> None:
    """Read the line of the `invoke` that loads tasks.py, and end it; nothing where no invoke runs."""
    import invoke.main

    if argv := getattr(invoke.main.program, "argv", None):
        sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)  # invoke forbids it: each start would compile
        main("invoke", argv[1:])
