"""The commands of a launch script with their words as bash makes them, without running bash.

Read: quotes, escapes, continuation lines, comments, `;`, `&&`, `$NAME`, `${NAME}` and `${NAME:-text}` of variables that
are known. ManifestError for what only a shell could expand: command substitution, loops, brace expansion. `shlex` alone
forgets which dollar stood in single quotes, so it cannot be asked for the words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from sparkpin.core.errors import ManifestError
from sparkpin.recipes.placeholders import LONGEST

KEY = "command"
TOKEN = re.compile(
    r"""(?P<join>\\\n) | (?P<blank>[ \t]+) | (?P<end>\n|;|&&) | (?P<comment>\#[^\n]*)
    | (?P<plumbing>(?:\d*[<>]|[|&])[^\n]*)
    | (?P<word>(?:\$\{\w+:?-[^${}'"\\`]*\} | \\. | '[^']*' | "(?:\\.|[^"\\])*" | (?!\$\()[^\\'"`\ \t\n;&|<>()])+)""",
    re.VERBOSE | re.DOTALL,
)
PART = re.compile(
    r"""(?P<join>\\\n) | \\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<double>(?:\\.|[^"\\])*)"
    | (?P<variable>\$[\w{@*\#?$!-]) | (?P<plain>[^\\'"$]+|\$)""",
    re.VERBOSE | re.DOTALL,
)
IN_QUOTES = re.compile(
    r"""\\(?P<escaped>[$`"\\]) | (?P<join>\\\n) | (?P<variable>\$[\w{(@*\#?$!-]) | (?P<plain>[^$`\\]+|\\|\$)""",
    re.VERBOSE,
)
VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*+)(?!\\\n\w)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?-)(?P<default>[^${}'\"\\`]*))?\})",
    re.ASCII,
)
BRACES = re.compile(r"\{[^{}]*(?:,|\w\.\.-?\w)[^{}]*\}")
PAIR = re.compile(r"\{([^{},]*)\}")  # braces that bash leaves alone
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
HOME = "/root"  # both runners' containers run as root unless told otherwise
SET_ELSEWHERE = re.compile(
    r"BASH\w*|E?UID|PPID|PWD|OLDPWD|IFS|_|GROUPS|DIRSTACK|FUNCNAME|LINENO|S?RANDOM|SECONDS|EPOCH\w+|SHLVL|SHELLOPTS"
    r"|PIPESTATUS|OPT(?:IND|ERR|ARG)|(?:HOST|OS|MACH)TYPE|PS4"
)
"""Bash has a value of its own for these, and of most it takes none from the environment."""
GIVEN = re.compile(r"HOME|PATH|HOSTNAME|SHELL|TERM|USER|LD_LIBRARY_PATH|CUDA_(?:HOME|VERSION)|VIRTUAL_ENV|NVIDIA_\w+")
"""Bash, Docker or the usual images set these where the recipe does not."""
SIMPLE = "plain words, $NAME or ${NAME:-text} without quotes and variables in the text: only a shell could expand this"
KEYWORDS = {"if", "for", "while", "until", "case", "function", "select", "{", "[[", "do", "then"}


@dataclass(frozen=True)
class ShellCommand:
    words: tuple[str, ...]  # as the program gets them
    assigned: tuple[tuple[str, str], ...]  # `NAME=value` in front of them
    plumbing: str  # pipes and redirections as they stand, which are no words


def commands(text: str, variables: Mapping[str, str], file: object) -> Iterator[ShellCommand]:
    """One after the other; `variables` is asked when a command is read, so that an `export` before it counts."""
    reader = Reader(variables, file)
    at, words, assigned, plumbing, raw = 0, list[str](), list[tuple[str, str]](), "", ""
    while at < len(text):
        found = TOKEN.match(text, at)
        kind = found.lastgroup if found else None
        if found is None or (kind == "comment" and raw):
            reader.refuse(text[at : at + 20])
        reader.line += text[at : found.end()].count("\n")
        at = found.end()
        if kind == "word" or (kind == "join" and raw):
            raw += found[0]
            following = TOKEN.match(text, at)
            if following and following.lastgroup in ("word", "join"):
                continue
            made = reader.words_of(raw)
            if not words and (name := ASSIGNMENT.match(raw)):
                assigned.append((name[1], " ".join(made)[name.end() :]))
            elif not words and raw in KEYWORDS:
                reader.refuse(raw)
            else:
                words += made
            raw = ""
        elif kind == "plumbing":
            plumbing = found[0].strip()
        if (kind == "end" or at == len(text)) and (words or assigned):
            yield ShellCommand(tuple(words), tuple(assigned), plumbing)
            words, assigned, plumbing = [], [], ""


def shown(command: ShellCommand) -> str:
    words = [*(f"{name}={shlex.quote(value)}" for name, value in command.assigned), shlex.join(command.words)]
    return " ".join(filter(None, [*words, command.plumbing]))


@dataclass
class Reader:
    variables: Mapping[str, str]
    file: object
    line: int = 1
    length: int = 0  # of all words so far

    def words_of(self, raw: str) -> list[str]:
        """A word as it stands becomes one, or several or none where it has a variable outside of quotes."""
        made, bare, is_quoted = [""], "", False
        if re.match(r"~(?:/|$)", raw):
            made, raw = [self.variables.get("HOME", HOME)], raw[1:]
        at = 0
        while at < len(raw):
            found = PART.match(raw, at)
            if found is None:
                self.refuse(raw)
            at, kind = found.end(), found.lastgroup
            if kind == "variable":
                value, at = self.value(raw, found.start())
                first, *rest = re.split(r"[ \t\n]+", value)
                made[-1] += first
                made += rest
            elif kind == "double":
                made[-1] += self.quoted(found["double"])
            elif kind == "plain" and found[0] == "$" and raw[at : at + 1] in ("'", '"'):
                self.refuse(raw)
            elif kind != "join":
                made[-1] += found[kind or 0]
            is_quoted = is_quoted or kind in ("single", "double")
            bare += found[0] if kind == "plain" else "" if kind == "join" else "x"
            self.length += sum(map(len, made))
            if self.length > LONGEST * 2:
                self.refuse(f"{self.length:,} characters", f"at most {LONGEST:,}, with the values of variables")
        while BRACES.search(bare) is None and PAIR.search(bare):
            bare = PAIR.sub("x", bare)
        if BRACES.search(bare):
            step = "braces in quotes: bash makes several words of these; put single quotes around JSON"
            self.refuse(raw, step)
        return made if is_quoted and len(made) == 1 else [word for word in made if word or is_quoted]

    def quoted(self, text: str) -> str:
        made, at = "", 0
        while at < len(text):
            found = IN_QUOTES.match(text, at)
            if found is None:
                self.refuse(text[at:])
            at = found.end()
            if found["variable"]:
                value, at = self.value(text, found.start())
                made += value
            elif not found["join"]:
                made += found[found.lastgroup or 0]
        return made

    def value(self, text: str, at: int) -> tuple[str, int]:
        """Of the variable that begins there, or its default: with a colon for an empty one, too; and where it ends."""
        found = VARIABLE.match(text, at)
        if found is None:
            self.refuse(text[at : at + 20])
        name, operator = found["plain"] or found["name"], found["operator"] or ""
        value = self.variables.get(name)
        if SET_ELSEWHERE.fullmatch(name) or (operator and value is None and GIVEN.fullmatch(name)):
            self.refuse(found[0], "a variable that neither bash nor the container sets")
        if operator and (value is None or (operator == ":-" and not value)):
            value = found["default"]
        if value is None:
            self.refuse(found[0], "a variable of `env`: what the container has of others is not known")
        return value, found.end()

    def refuse(self, got: str, expected: str = "") -> NoReturn:
        expected = expected or ("a closing quote" if got[:1] in ("'", '"') else SIMPLE)
        raise ManifestError(self.file, f"{KEY}, line {self.line}", got, expected)
