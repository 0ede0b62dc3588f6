"""The commands of a launch script with their words as bash makes them, without running bash.

Read: quotes, escapes, continuation lines, comments, `;`, `&&`, `$NAME`, `${NAME}` and `${NAME:-text}` of variables that
are known. ManifestError for what only a shell could tell: command substitution, loops, brace expansion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from sparkpin.community.placeholders import LONGEST
from sparkpin.core.errors import ManifestError

KEY = "command"
NAME_PART = re.compile(r"(\w+)(?:\\\n)*", re.ASCII)
PLAIN = re.compile(r"[^\\'\"$`#~ \t\n;&|<>()]*")
IN_DEFAULT = re.compile(r"[^${}'\"\\`]*")
DEEPEST = 20  # defaults of defaults
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
SEQUENCE = re.compile(r"-?\w+\.\.-?\w+(\.\.-?\d+)?")
ENDS = ("", *"/ \t\n;&|<>()")  # what may follow the ~ of a home
HOME = "/root"  # both runners' containers run as root unless told otherwise
SETS_ITSELF = re.compile(
    r"BASH\w*|E?UID|PPID|PWD|OLDPWD|IFS|_|GROUPS|DIRSTACK|FUNCNAME|LINENO|S?RANDOM|SECONDS|EPOCH(SECONDS|REALTIME)|SHLVL"
    r"|SHELLOPTS|PIPESTATUS|OPT(IND|ERR|ARG)|(HOST|OS|MACH)TYPE|PS4"
)
"""Bash has a value of its own for these. Of most it takes none from the environment, and some cannot be exported."""
GIVEN = {"HOME", "PATH", "HOSTNAME", "SHELL", "TERM", "USER", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VERSION",
         "VIRTUAL_ENV", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}  # fmt: skip
"""Bash, Docker or the usual images set these where the recipe does not."""
SIMPLE = "$NAME or ${NAME:-text}, without quotes and braces in the text: only a shell could tell what this becomes"
KEYWORDS = {"if", "for", "while", "until", "case", "function", "select", "{", "[[", "do", "then"}


@dataclass(frozen=True)
class ShellCommand:
    words: tuple[str, ...]  # as the program gets them
    assigned: tuple[tuple[str, str], ...]  # `NAME=value` in front of them
    plumbing: str  # pipes and redirections as they stand, which are no words
    line: int  # where it begins, from 1


def commands(text: str, variables: Mapping[str, str], file: object) -> Iterator[ShellCommand]:
    """One after the other; `variables` is asked when a command is read, so that an `export` before it counts."""
    yield from iter(ShellReader(text, variables, file).command, None)


class ShellReader:
    def __init__(self, text: str, variables: Mapping[str, str], file: object) -> None:
        self.text, self.variables, self.file = text, variables, file
        self.at = 0  # place in the text
        self.word: list[str] | None = None  # characters of the word that is open; None for no open word
        self.mask: list[str] = []  # the same with what was quoted as `x`
        self.words: list[tuple[str, str]] = []
        self.length = 0  # of all words so far
        self.counted = (0, 1)  # a place and its line

    def command(self) -> ShellCommand | None:
        """The next command that has words or assignments; None at the end."""
        self.words, plumbing, line = [], "", 0
        while self.at < len(self.text):
            begin = self.at
            char = self.text[self.at]
            self.at += 1
            if char == "\\":
                self.escape()
            elif char == "'":
                self.single()
            elif char == '"':
                self.double()
            elif char in "$`":
                self.dollar(begin, quoted=False)
            elif char == "#" and self.word is None:
                self.at = self.end_of_line()
            elif char in " \t":
                self.close()
            elif char in "\n;" or self.text.startswith("&&", begin):
                self.at += char == "&"
                self.close()
                if self.words:
                    return self.made(line, plumbing)
            elif char in "|<>&":
                plumbing = self.plumb(begin)
            elif char in "()":
                self.refuse(char, "plain commands: bash would run this in a shell of its own", begin)
            elif char == "~" and self.word is None and self.text[self.at : self.at + 1] in ENDS:
                self.add(self.variables.get("HOME", HOME), "x")
            else:
                self.at = end = PLAIN.match(self.text, self.at).end()  # type: ignore[union-attr]
                self.add(self.text[begin:end], self.text[begin:end])
            if (self.words or self.word is not None) and not line:
                line = self.line_of(begin)
        self.close()
        return self.made(line, plumbing) if self.words else None

    def made(self, line: int, plumbing: str) -> ShellCommand:
        count = 0
        while count < len(self.words) and ASSIGNMENT.match(self.words[count][1]):
            count += 1
        pairs = [word.partition("=") for word, _ in self.words[:count]]
        words = tuple(word for word, _ in self.words[count:])
        if words and words[0] in KEYWORDS and self.words[count][1] == words[0]:
            self.refuse(words[0], "plain commands, one after the other", self.at)
        return ShellCommand(words, tuple((name, value) for name, _, value in pairs), plumbing, line)

    def add(self, text: str, mask: str) -> None:
        if self.word is None:
            self.word, self.mask = [], []
        self.length += len(text)
        if self.length > LONGEST:
            self.refuse(f"{self.length:,} characters", f"at most {LONGEST:,}, with the values of variables", self.at)
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
                    wanted = "braces in quotes: bash makes several words of these; put single quotes around JSON"
                    self.refuse(word, wanted, self.at)
                inside[-1].append("x")
            else:
                inside[-1].append(part)
        self.words.append((word, mask))

    def escape(self) -> None:
        if self.at >= len(self.text):
            self.add("\\", "x")
            return
        char = self.text[self.at]
        self.at += 1
        if char != "\n":
            self.add(char, "x")

    def single(self) -> None:
        end = self.text.find("'", self.at)
        if end < 0:
            self.refuse("'", "a closing quote", self.at)
        self.add(self.text[self.at : end], "x" * (end - self.at))
        self.at = end + 1

    def double(self) -> None:
        self.add("", "")
        opened = self.at
        while self.at < len(self.text):
            begin = self.at
            char = self.text[self.at]
            self.at += 1
            if char == '"':
                return
            following = self.text[self.at : self.at + 1]
            if char == "\\" and following and following in '$`"\\\n':
                self.at += 1
                self.add(following.strip("\n"), "x" * (following != "\n"))
            elif char in "$`":
                self.dollar(begin, quoted=True)
            else:
                self.at = end = PLAIN.match(self.text, self.at).end()  # type: ignore[union-attr]
                self.add(self.text[begin:end], "x" * (end - begin))
        self.refuse('"', "a closing quote", opened)

    def dollar(self, begin: int, *, quoted: bool) -> None:
        following = self.text[begin + 1 : begin + 2]
        if self.text[begin] == "`" or following == "(" or (following in "'\"" and following and not quoted):
            self.refuse(self.text[begin : begin + 20], "plain words: only a shell could tell what this becomes", begin)
        if not re.match(r"[{A-Za-z_]", following):
            if following and following in "@*#?$!0123456789":
                self.refuse(self.text[begin : begin + 20], SIMPLE, begin)
            self.add("$", "x")
            return
        value = self.variable(0)
        if value is None:
            seen = self.text[begin : self.at]
            self.refuse(seen, "a variable of `env`: what the container has of others is not known", begin)
        if quoted:
            self.add(value, "x" * len(value))
            return
        for index, part in enumerate(re.split(r"[ \t\n]+", value)):  # bash splits what is not quoted
            if index:
                self.close()
            if part:
                self.add(part, "x" * len(part))

    def variable(self, depth: int) -> str | None:
        """The value of one that stands behind a `$`, or the text that stands in for it: with a colon for an empty one,
        too. What a variable holds is not read again: bash does not, either."""
        begin, braced = self.at - 1, self.text[self.at] == "{"
        self.at += braced
        value = self.variables.get(name := self.name())
        operator = next((one for one in (":-", "-") if braced and self.text.startswith(one, self.at)), "")
        self.at += len(operator)
        if SETS_ITSELF.fullmatch(name) or (operator and value is None and name in GIVEN):
            self.refuse(self.text[begin : self.at], "a variable that neither bash nor the container sets", begin)
        if not braced:
            return value
        default = self.default(depth) if operator else None
        if not self.text.startswith("}", self.at) or depth > DEEPEST:
            self.refuse(self.text[begin : begin + 20], SIMPLE, begin)
        self.at += 1
        return default if operator and (value is None or (operator == ":-" and not value)) else value

    def default(self, depth: int) -> str | None:
        """Up to the brace that ends it; None where it holds a variable that is not known."""
        parts: list[str | None] = []
        while plain := IN_DEFAULT.match(self.text, self.at):
            parts.append(plain[0])
            self.at = plain.end()
            if depth > DEEPEST or not re.match(r"\$[{A-Za-z_]", self.text[self.at : self.at + 2]):
                break
            self.at += 1
            parts.append(self.variable(depth + 1))
        return None if None in parts else "".join(part for part in parts if part)

    def name(self) -> str:
        """Of a variable; bash joins lines before it reads one."""
        parts: list[str] = []
        while found := NAME_PART.match(self.text, self.at):
            parts.append(found[1])
            self.at = found.end()
        return "".join(parts)

    def plumb(self, begin: int) -> str:
        """The rest of the line from a pipe, `&` or redirection on. The number before `>` is no word."""
        if self.word is not None and "".join(self.word).isdecimal() and self.text[begin] in "<>":
            begin -= len("".join(self.word))
            self.word = None
        self.close()
        self.at = self.end_of_line()
        return self.text[begin : self.at].strip()

    def end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def line_of(self, at: int) -> int:
        place, line = self.counted if at >= self.counted[0] else (0, 1)
        self.counted = at, line + self.text.count("\n", place, at)
        return self.counted[1]

    def refuse(self, seen: str, wanted: str, at: int) -> NoReturn:
        raise ManifestError(self.file, f"{KEY}, line {self.line_of(at)}", seen, wanted)
