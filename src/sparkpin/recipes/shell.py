"""The commands of a launch script with their words as bash makes them, without running bash.

Read: quotes, escapes, continuation lines, comments, `;`, `&&`, `$NAME`, `${NAME}` and `${NAME:-text}` of variables that
are known. ManifestError for what only a shell could expand: command substitution, loops, brace expansion, and a text
that holds variables or quotes itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from sparkpin.core.errors import ManifestError
from sparkpin.recipes.placeholders import LONGEST

KEY = "command"
TOKEN = re.compile(
    r"""(?P<join>\\\n) | \\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<double>(?:\\.|[^"\\])*)" | (?P<blank>[ \t]+)
    | (?P<end>\n|;|&&) | (?P<plumbing>[|<>&][^\n]*) | (?P<dollar>\$) | (?P<plain>[^\\'"$`\ \t\n;&|<>()]+)""",
    re.VERBOSE | re.DOTALL,
)
IN_QUOTES = re.compile(r"\\(?P<escaped>[$`\"\\])|(?P<join>\\\n)|(?P<dollar>\$)|(?P<plain>[^$`\\]+|\\)")
VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*+)(?!\\\n\w)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?-)(?P<default>[^${}'\"\\`]*))?\})",
    re.ASCII,
)
SPECIAL = re.compile(r"\$[{(\w@*#?$!-]", re.ASCII)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
SEQUENCE = re.compile(r"-?\w+\.\.-?\w+(\.\.-?\d+)?")
HOME_MARK = re.compile(r"~(?=[/ \t\n;&|<>()]|$)")
HOME = "/root"  # both runners' containers run as root unless told otherwise
SETS_ITSELF = re.compile(
    r"BASH\w*|E?UID|PPID|PWD|OLDPWD|IFS|_|GROUPS|DIRSTACK|FUNCNAME|LINENO|S?RANDOM|SECONDS|EPOCH(SECONDS|REALTIME)|SHLVL"
    r"|SHELLOPTS|PIPESTATUS|OPT(IND|ERR|ARG)|(HOST|OS|MACH)TYPE|PS4"
)
"""Bash has a value of its own for these. Of most it takes none from the environment, and some cannot be exported."""
GIVEN = {"HOME", "PATH", "HOSTNAME", "SHELL", "TERM", "USER", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VERSION",
         "VIRTUAL_ENV", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}  # fmt: skip
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
    yield from iter(ShellReader(text, variables, file).command, None)


class ShellReader:
    def __init__(self, text: str, variables: Mapping[str, str], file: object) -> None:
        self.text, self.variables, self.file = text, variables, file
        self.at = 0  # place in the text
        self.word: list[str] | None = None  # parts of the word that is open; None for no open word
        self.mask: list[str] = []  # the same with what was quoted as `x`
        self.words: list[tuple[str, str]] = []
        self.length = 0  # of all words so far

    def command(self) -> ShellCommand | None:
        """The next command that has words or assignments; None at the end."""
        self.words, plumbing = [], ""
        while self.at < len(self.text):
            begin = self.at
            if self.word is None and self.text[begin] == "#":
                self.at = (self.text + "\n").index("\n", begin)
                continue
            if self.word is None and HOME_MARK.match(self.text, begin):
                self.add(self.variables.get("HOME", HOME), "x")
                self.at += 1
                continue
            found = TOKEN.match(self.text, begin)
            if not found:
                self.refuse(begin)
            self.at, kind = found.end(), found.lastgroup or ""
            if kind == "blank":
                self.close()
            elif kind == "end":
                self.close()
                if self.words:
                    return self.made(plumbing)
            elif kind == "plumbing":
                plumbing = self.number_before(found[kind]) + found[kind].strip()
                self.close()
            elif kind == "double":
                self.quoted(found[kind], begin)
            elif kind == "dollar":
                self.unquoted(begin)
            elif kind != "join":
                self.add(found[kind], found[kind] if kind == "plain" else "x" * len(found[kind]))
        self.close()
        return self.made(plumbing) if self.words else None

    def made(self, plumbing: str) -> ShellCommand:
        count = 0
        while count < len(self.words) and ASSIGNMENT.match(self.words[count][1]):
            count += 1
        pairs = [word.partition("=") for word, _ in self.words[:count]]
        words = tuple(word for word, _ in self.words[count:])
        if words and words[0] in KEYWORDS and self.words[count][1] == words[0]:
            self.refuse(self.at, words[0], "plain commands, one after the other")
        return ShellCommand(words, tuple((name, value) for name, _, value in pairs), plumbing)

    def add(self, text: str, mask: str) -> None:
        if self.word is None:
            self.word, self.mask = [], []
        self.length += len(text)
        if self.length > LONGEST:
            got, most = f"{self.length:,} characters", f"at most {LONGEST:,}, with the values of variables"
            self.refuse(self.at, got, most)
        self.word.append(text)
        self.mask.append(mask)

    def close(self) -> None:
        """End the open word."""
        if self.word is None:
            return
        word, mask = "".join(self.word), "".join(self.mask)
        self.word = None
        inside: list[list[str]] = [[]]  # of each brace that is open what stands in it, other braces as `x`
        for part in re.split(r"([{}])", mask):
            if part == "{":
                inside.append([])
            elif part == "}" and len(inside) > 1:
                text = "".join(inside.pop())
                if "," in text or SEQUENCE.fullmatch(text):
                    step = "braces in quotes: bash makes several words of these; put single quotes around JSON"
                    self.refuse(self.at, word, step)
                inside[-1].append("x")
            else:
                inside[-1].append(part)
        self.words.append((word, mask))

    def quoted(self, text: str, begin: int) -> None:
        """What stands in double quotes."""
        self.add("", "")
        at = 0
        while at < len(text):
            variable = self.variable(text, at, begin + 1 + at)
            found = variable or IN_QUOTES.match(text, at)
            if not found:
                self.refuse(begin + 1 + at)
            value = variable and self.value(variable, begin + 1 + at)
            value = found[found.lastgroup or 0].replace("\\\n", "") if value is None else value
            self.add(value, "x" * len(value))
            at = found.end()

    def unquoted(self, begin: int) -> None:
        """A `$` outside of quotes: bash splits what it stands for."""
        found = self.variable(self.text, begin, begin)
        if not found:
            if self.text[begin + 1 : begin + 2] in ("'", '"'):
                self.refuse(begin)
            self.add("$", "x")
            return
        self.at = found.end()
        for index, part in enumerate(re.split(r"[ \t\n]+", self.value(found, begin))):
            if index:
                self.close()
            if part:
                self.add(part, "x" * len(part))

    def variable(self, text: str, at: int, place: int) -> re.Match[str] | None:
        """The variable that begins there; None for other text, such as a `$` alone."""
        found = VARIABLE.match(text, at)
        if not found and SPECIAL.match(text, at):
            self.refuse(place)
        return found

    def value(self, found: re.Match[str], begin: int) -> str:
        """Of a variable, or its default: with a colon for an empty one, too. It is not read again, as in bash."""
        name, operator = found["plain"] or found["name"], found["operator"] or ""
        value = self.variables.get(name)
        if SETS_ITSELF.fullmatch(name) or (operator and value is None and name in GIVEN):
            self.refuse(begin, found[0], "a variable that neither bash nor the container sets")
        if operator and (value is None or (operator == ":-" and not value)):
            return found["default"]
        if value is None:
            self.refuse(begin, found[0], "a variable of `env`: what the container has of others is not known")
        return value

    def number_before(self, plumbing: str) -> str:
        """The number of a redirection, such as 2>, which is no word."""
        number = "".join(self.word or ())
        if not (number.isdecimal() and plumbing[0] in "<>"):
            return ""
        self.word = None
        return number

    def refuse(self, at: int, got: str = "", expected: str = "") -> NoReturn:
        char = self.text[at : at + 1]
        expected = expected or ("a closing quote" if char in ("'", '"') else SIMPLE)
        line = self.text.count("\n", 0, at) + 1
        raise ManifestError(self.file, f"{KEY}, line {line}", got or self.text[at : at + 20], expected)
