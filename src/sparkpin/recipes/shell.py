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

VARIABLE = (
    r"\$(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*+)(?!\\\n\w)"
    r"|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<operator>:?-)(?P<default>[^${}'\"\\`]*))?\})"
)
BETWEEN = re.compile(  # words
    r"(?P<join>\\\n)|(?P<blank>[ \t]+)|(?P<comment>\#[^\n]*)|(?P<end>\n|;|&&)|(?P<plumbing>(?:\d*[<>]|[|&])[^\n]*)"
)
PIECE = re.compile(  # of a word
    rf"""(?P<join>\\\n) | \\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<double>(?:\\.|[^"\\])*)"
    | (?P<home>(?<![^ \t\n;&|])~(?=[/ \t\n;&|<>]|$)) | (?P<variable>{VARIABLE})
    | (?P<plain>[^\\'"$` \t\n;&|<>()]+ | \$(?![\w{{(@*\#?$!'"-]))""",
    re.VERBOSE | re.DOTALL,
)
IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`\"\\])|(?P<join>\\\n)|{VARIABLE}|(?P<unknown>`|\$[\w{{(@*#?$!-])")
BRACES = re.compile(r"\{[^{}]*(?:,|\w\.\.-?\w)[^{}]*\}")
PAIR = re.compile(r"\{([^{},]*)\}")  # braces that bash leaves alone
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=", re.ASCII)
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
    reader = Reader(text, variables, file)
    words, assigned, plumbing = list[str](), list[tuple[str, str]](), ""
    while reader.at < len(text):
        between = BETWEEN.match(text, reader.at)
        if between:
            reader.at = between.end()
            plumbing = between["plumbing"].strip() if between["plumbing"] else plumbing
        else:
            raw, made = reader.word()
            if not words and (name := ASSIGNMENT.match(raw)):
                assigned.append((name[1], " ".join(made)[name.end() :]))
            elif not words and raw in KEYWORDS:
                reader.refuse(raw)
            else:
                words += made
        is_end = reader.at == len(text) or (between is not None and between["end"])
        if is_end and (words or assigned):
            yield ShellCommand(tuple(words), tuple(assigned), plumbing)
            words, assigned, plumbing = [], [], ""


def shown(command: ShellCommand) -> str:
    words = [*(f"{name}={shlex.quote(value)}" for name, value in command.assigned), shlex.join(command.words)]
    return " ".join(filter(None, [*words, command.plumbing]))


@dataclass
class Reader:
    text: str
    variables: Mapping[str, str]
    file: object
    at: int = 0
    length: int = 0  # of all words so far

    def word(self) -> tuple[str, list[str]]:
        """A word as it stands, and what it becomes: one word, several, or none where it has a variable outside of
        quotes."""
        start = self.at
        made, bare, is_quoted = [""], "", False
        while found := PIECE.match(self.text, self.at):
            kind = found.lastgroup or ""
            if kind == "variable":
                first, *rest = re.split(r"[ \t\n]+", self.value(found))
                made[-1] += first
                made += rest
            elif kind == "double":
                made[-1] += IN_QUOTES.sub(self.in_quotes, found["double"])
            elif kind == "home":
                made[-1] += self.variables.get("HOME", HOME)
            elif kind != "join":
                made[-1] += found[kind]
            self.at = found.end()
            is_quoted = is_quoted or kind in ("single", "double")
            bare += found[0] if kind == "plain" else "" if kind == "join" else "x"
            self.length += sum(map(len, made))
            if self.length > LONGEST * 2:
                self.refuse(f"{self.length:,} characters", f"at most {LONGEST:,}, with the values of variables")
        raw = self.text[start : self.at]
        if not raw or (self.at < len(self.text) and not BETWEEN.match(self.text, self.at)):
            self.refuse(self.text[self.at : self.at + 20])
        while BRACES.search(bare) is None and PAIR.search(bare):
            bare = PAIR.sub("x", bare)
        if BRACES.search(bare):
            self.refuse(raw, "braces in quotes: bash makes several words of these; put single quotes around JSON")
        return raw, [word for word in made if word or is_quoted]

    def in_quotes(self, found: re.Match[str]) -> str:
        if found["unknown"]:
            self.refuse(found.string[found.start() : found.start() + 20])
        return found["escaped"] or ("" if found["join"] else self.value(found))

    def value(self, found: re.Match[str]) -> str:
        """Of a variable, or its default: with a colon for an empty one, too."""
        name, operator = found["name"] or found["braced"], found["operator"] or ""
        value = self.variables.get(name)
        if SET_ELSEWHERE.fullmatch(name) or (operator and value is None and GIVEN.fullmatch(name)):
            self.refuse(found[0], "a variable that neither bash nor the container sets")
        if operator and (value is None or (operator == ":-" and not value)):
            value = found["default"]
        if value is None:
            self.refuse(found[0], "a variable of `env`: what the container has of others is not known")
        return value

    def refuse(self, got: str, expected: str = "") -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        expected = expected or ("a closing quote" if got[:1] in ("'", '"') else SIMPLE)
        raise ManifestError(self.file, f"command, line {line}", got, expected)
