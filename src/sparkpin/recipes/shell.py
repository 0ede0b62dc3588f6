"""A launch script as bash reads it, without running bash: the words and variables that its server gets.

Read: quotes, escapes, continuation lines, comments, `;`, `&&`, redirections, `export`, and `$NAME`, `${NAME}` and
`${NAME:-text}` of variables that are known. What only a shell could tell (loops, conditionals, functions, command
substitution) is listed as not carried over, and refused where it starts the server or sets a variable of its words.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError, short
from sparkpin.pins.values import ENV_NAME, SECRET_NAME, SHAPES
from sparkpin.pins.vllm_flags import drop_flags, flag_value

# What the two runners and Docker know, read in their sources of 2026: keys, settings that become flags, options.
# set_elsewhere: variables that bash, Docker or the usual images set, so that `${HOME:-text}` is not the text.
FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "facts.json").read_text(encoding="utf-8"))
LONGEST = 1 << 17  # characters of a command; Linux takes no longer word, and `bash -c` gets it as one
PROGRAMS, ENGINES = ("vllm", "python", "python3"), ("docker", "podman")
MODULE = ["-m", "vllm.entrypoints.openai.api_server"]
START = re.compile(  # of a line, outside of quotes, and no value of YAML
    r"^(?:[^#\"'\n:]*[\s/])?(?:vllm[ \t]+serve|python3?[ \t]+-m[ \t]+vllm\.entrypoints"
    r"|(?:docker|podman)[ \t]+(?:container[ \t]+)?run)\b",
    re.MULTILINE,
)
HERE_DOCUMENT = (  # one without an end has the rest of the text, as in bash
    r"(?<!<)<<(?!<)-?[ \t]*[\\\"']?(?P<mark>\w+)[^\n]*(?:\n[^\n]*)*?(?:\n[ \t]*(?P=mark)(?=\n)|\Z)"
)
SERVER = re.compile(rf"{START.pattern}|\bvllm[ \t]+serve\b|\bvllm\.entrypoints", re.MULTILINE)  # of a body, anywhere
# What an image sets and a script adds to is no matter of the server's words.
SETTING = re.compile(r"\s*(?:(?:export\s+)?(?!(?:PATH|LD_LIBRARY_PATH|PYTHONPATH)=)[A-Za-z_]\w*\+?=|export\s+-)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
OPAQUE = re.compile(  # what neither ends a word nor a command, whatever characters it has; a comment is a blank
    rf"(?P<comment>(?<![^\s;&|()<>])(?<!\\[ \t])\#[^\n]*)|\\.|{QUOTED}|\$\{{[^{{}}\n]*\}}"
    rf"|\$\([^()\\\n]*\)|`[^`\n]*`|{HERE_DOCUMENT}",
    re.DOTALL,
)
# Of a text without what is opaque: a command, and its pipes, redirections and words.
COMMAND = re.compile(r"\s*((?:&?[<>]+[&|]?|(?:\||&(?!&))[^\n]*|[^\n;&|<>])*+)(?:\n|;|&&|\Z)")
TOKEN = re.compile(r"(?P<plumbing>(?:\d+|&)?[<>]+[&|]?[ \t]*[^\s;|&<>()]+|(?:\||(?<!&)&(?!&))[^\n]*)|[^\s;|&<>]+|[<>]")
KEYWORD = re.compile(  # what opens and closes a loop, a conditional, a function's body, a subshell
    r"[()]|(?:^|(?<=[;&|(){}!])|(?<=then)|(?<=else)|(?<=do))[ \t]*"
    r"(?:if|for|while|until|select|case|fi|done|esac|[{}])(?=[\s;&|()<>])",
    re.MULTILINE,
)
CLOSERS = {"if": "fi", "case": "esac", "{": "}", "(": ")"} | dict.fromkeys(("for", "while", "until", "select"), "done")
# Variables that a body sets, as far as its text tells.
CHANGED = re.compile(
    r"(?<![\w$-])([A-Za-z_]\w*+)(?:\+?=|[ \t]+in\b)|\b(?:read|unset)[ \t]+(?:-\w+[ \t]+)*([A-Za-z_]\w*)"
)
VARIABLE = (
    r"\$(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*+)(?!\\\n\w)"
    r"|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<operator>:?-)(?P<default>[^${}'\"\\`]*))?\})"
)
IN_WORD = re.compile(
    rf"(?P<join>\\\n)|(?P<literal>\\.|'[^']*')|\"(?P<double>(?:\\.|[^\"\\])*)\"|{VARIABLE}"
    r"|(?P<unknown>`|\$[\w{(@*#?$!'\"-])",
    re.DOTALL,
)
IN_QUOTES = re.compile(
    rf"(?P<join>\\\n)|(?P<literal>\\[\"\\])|\\(?P<escaped>[$`])|{VARIABLE}|(?P<unknown>`|\$[\w{{(@*#?$!-])"
)
BRACES, SEVERAL = re.compile(r"\{[^{}]*+\}"), re.compile(r",|\w\.\.-?\w")
SECRET = SECRET_NAME.pattern.replace("(?:^|_)", r"(?:\b|(?<=_))").replace("$", "")
VALUE = rf"(?:{QUOTED}|\\.|[^\s\"'\\]|[\"'].*)+"
HIDDEN = re.compile(  # by the name of a variable or key, by a flag, by its form
    rf"(?P<setting>(?P<quote>[\"'])\w*?(?:{SECRET})=)(?:(?!(?P=quote))[\s\S])*"
    rf"|(?P<name>(?:{SECRET})(?:=|[\"']?:[ \t]+)){VALUE}"
    r"|(?P<flag>(?:--(?:api[-_]key|(?:hf[-_])?token|password)|\bBearer|\blogin\b[^\n;|&]{0,99}?[ \t]-p)"
    rf"(?:=|\s+|(?<=-p))){VALUE}|(?:{'|'.join(SHAPES.values())})(?:(?<=KEY-----)(?:[^-]|-(?!----))*+(?=-----END))?[^\s\"']*",
    re.IGNORECASE,
)
HOME = "/root"  # both runners' containers run as root unless told otherwise
SET_ELSEWHERE = re.compile("|".join(FACTS["set_elsewhere"]))
UNKNOWN = "a variable with a value: set it, or write ${NAME:-VALUE}; no secret is read"
SIMPLE = "closed quotes, plain words, $NAME or ${NAME:-text} with a plain text: only a shell could expand this"
WORDS = 500  # of a command, and commands before it; vLLM has some 300 flags


@dataclass
class Launch:
    """How a server is started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    left: list[str] = field(default_factory=list)  # what is not carried over
    image: str = ""
    missing: tuple[str, ...] = ()  # placeholders that nothing fills (version 2)


@dataclass
class ShellCommand:
    """words: as the program gets them; assigned: `NAME=value` in front of them; plumbing: pipes and redirections, which
    are no words."""

    words: list[str] = field(default_factory=list)
    assigned: dict[str, str] = field(default_factory=dict)
    plumbing: str = ""


@dataclass
class Shell:
    """values: of variables, which the commands change as they are read; exported: those that a program gets; unread:
    those that a body sets that is not followed; start, at: of the command that is read; place: of what a fault names.
    """

    file: object
    text: str
    values: dict[str, str]
    exported: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    start: int = 0
    at: int = 0
    place: int = 0
    length: int = 0  # of the values that went in so far

    def __post_init__(self) -> None:
        self.text += "\n"  # a script's last line ends
        self.plain = OPAQUE.sub(meaningless, self.text)

    def launch(self) -> Launch:
        """By the command that starts vLLM or a container, or else the last. ManifestError for flags that are lost."""
        before, command, is_sure, skipped = list[str](), ShellCommand(), True, 0
        for is_free in self.commands():
            is_sure = is_sure or is_free  # else it depends on the command before
            has_body, text = self.skips_body(), self.text[self.start : self.at]
            try:
                read = ShellCommand() if has_body else self.read()
            except ManifestError:
                if START.search(text) or (is_sure and SETTING.match(self.plain, self.start)):
                    raise
                read = ShellCommand()
            else:
                command = read if read.words else command
                words, _ = unwrapped(read.words or ["export"])
                if words[:2] == ["vllm", "serve"] or (words[0] in ENGINES and "run" in words[1:3]):
                    break
                if is_sure and not has_body and self.sets(read):
                    before += listed("before", read.plumbing)
                    continue
            before += listed("before", text.strip().rstrip("&;"))
            is_sure = is_sure and read.words[:1] == ["cd"]
            skipped += 1
            if skipped > WORDS:
                raise self.fault(f"{skipped} commands before the server", f"at most {WORDS}")
        else:  # another engine, by whose name it is refused
            before = []
            if not command.words:
                raise self.fault(self.text.strip(), "a command that starts a server")
        after = self.after(command)
        for name in sorted(self.exported & self.unread):
            self.value(name)  # its value is not known: an error
        env = {name: value for name, value in self.values.items() if name in self.exported}
        piped = [f"pipe or redirection: {short(shown(command.plumbing))}"] if command.plumbing else []
        words, given = unwrapped(command.words)
        return Launch(tuple(words), env | command.assigned | given, [*before, *piped, *after])

    def after(self, server: ShellCommand) -> list[str]:
        """What is listed of the lines after the server."""
        rest = self.text[self.at :]
        for line in (shown(server.plumbing), *lines_of(rest)):
            if line.startswith("-"):
                expected = "no flag after the end of the command: a comment or a blank after a backslash ends it"
                raise ManifestError(self.file, "command", line, expected)
            if "vllm" in line and START.search(line):
                raise ManifestError(self.file, "command", short(line), "one server: a recipe is for one")
        return listed("after", rest)

    def commands(self) -> Iterator[bool]:
        """Goes from one command to the next; whether each runs whatever the one before comes to."""
        while found := COMMAND.match(self.plain, self.at):
            self.start, self.at = found.span()
            if found[1].strip():
                self.place = found.start(1)
                yield not self.plain.endswith("&&", 0, self.start)
            elif self.at == len(self.plain):
                return

    def skips_body(self) -> bool:
        """Whether the command begins a body, which is skipped: from there on what it sets is not known."""
        closers, end = list[str](), self.at
        for piece in KEYWORD.finditer(self.plain, self.start):
            if not closers and piece.start() >= end:
                break
            word = piece[0].strip()
            if word in CLOSERS:
                closers.append(CLOSERS[word])
            elif closers and word == closers[-1]:
                closers.pop()
                self.at = max(end, piece.end())
        self.at = len(self.text) if closers else self.at
        text, has_body = self.text[self.start : self.at], self.at > end
        if (has_body or "<<" in text) and (found := SERVER.search(text)):
            self.place = self.start + found.end()
            raise self.fault(found[0].strip(), "a server outside of conditionals, loops and functions: it is not read")
        self.unread |= {name for names in CHANGED.findall(text if has_body else "") for name in names if name}
        return has_body

    def read(self) -> ShellCommand:
        words, assigned, plumbing = list[str](), dict[str, str](), list[str]()
        if quote := re.search(r"[\"'`]", self.plain[self.start : self.at]):
            self.place = self.start + quote.start()
            raise self.fault(quote[0], "closed quotes")
        for token in TOKEN.finditer(self.plain, self.start, self.at):
            text = self.text[token.start() : token.end()]
            self.place = token.end() - len(text.lstrip("\\\n"))  # after line ends that a backslash takes away
            if token["plumbing"]:
                plumbing.append(text.strip())
                continue
            found = self.words(text, token[0])
            if len(words) > WORDS:
                raise self.fault(f"more than {WORDS} words", "fewer")
            if not words and (name := ASSIGNMENT.match(text)):
                known = assigned.get(name[1], self.value(name[1])) if name[2] else ""
                assigned[name[1]] = (known or "") + " ".join(found)[name.end() :]
            else:
                words += found
        return ShellCommand(words, assigned, " ".join(plumbing))

    def sets(self, command: ShellCommand) -> bool:
        """Whether the command is one that sets variables, and nothing else."""
        first, *words = command.words or ["export"]
        pairs = [word.partition("=") for word in words]
        if first == "unset" or (first == "export" and not all(ENV_NAME.fullmatch(name) for name, _, _ in pairs)):
            raise self.fault(" ".join(command.words), "export NAME=value: no shell runs here")
        if first == "export":
            self.exported.update(name for name, _, _ in pairs)
            changed = command.assigned | {name: value for name, equals, value in pairs if equals}
            self.values |= changed
            self.unread -= changed.keys()
        return first in ("export", "set")

    def words(self, raw: str, plain: str) -> list[str]:
        """What a word becomes: one, several, or none where it has a variable outside of quotes."""
        if unread := re.search(r"[()<>]", plain):
            raise self.fault(raw[unread.start() :][:20])
        if any(SEVERAL.search(braces) for braces in BRACES.findall(plain)):
            raise self.fault(raw, "braces in quotes: bash makes several words of these; put single quotes around JSON")
        home = shlex.quote(self.values.get("HOME", HOME))
        return shlex.split(IN_WORD.sub(self.expanded, re.sub(r"^~(?=/|$)", lambda _: home, raw)))

    def expanded(self, found: re.Match[str]) -> str:
        """A piece of a word with its variables replaced, for shlex to take the quotes off."""
        groups = found.groupdict()
        if groups["unknown"]:
            raise self.fault(found.string[found.start() : found.start() + 20])
        if groups["join"]:
            return ""
        if groups.get("double") is not None:
            return f'"{IN_QUOTES.sub(self.expanded, groups["double"])}"'
        if known := groups["literal"] or groups.get("escaped"):
            return known
        self.value(groups["name"] or groups["braced"])  # or an error
        if (value := value_of(found, self.values)) is None:
            raise self.fault(found[0], UNKNOWN)
        self.length += len(value)
        if self.length > LONGEST // 4:
            raise self.fault(f"{self.length:,} characters", f"at most {LONGEST // 4:,} from variables")
        return re.sub(r'["\\]' if "escaped" in groups else r"[^\w \t\n]", r"\\\g<0>", value)

    def value(self, name: str) -> str | None:
        if name in self.unread:
            raise self.fault(name, "a variable that no conditional, loop or function sets: these are not read")
        return self.values.get(name)

    def fault(self, got: str, expected: str = "") -> ManifestError:
        line = self.text.count("\n", 0, self.place) + 1
        return ManifestError(self.file, f"command, line {line}", shown(got), expected or SIMPLE)


def meaningless(found: re.Match[str]) -> str:
    """As many characters of a plain word, of which a here-document has its `<<`, or blanks for a comment."""
    return ("<<" if found["mark"] else "").ljust(len(found[0]), " " if found["comment"] else "x")


def value_of(found: re.Match[str], values: Mapping[str, str]) -> str | None:
    """Of a variable, or its default: with a colon for an empty one, too. None for what is not known."""
    name, operator = found["name"] or found["braced"], found["operator"]
    value = values.get(name)
    if (operator and value is None and not SET_ELSEWHERE.fullmatch(name)) or (operator == ":-" and value == ""):
        return found["default"]
    return value


def listed(when: str, text: str) -> list[str]:
    """For people, and a recipe's file."""
    return [f"command {when} the server: {short(line)}" for line in lines_of(text)]


def lines_of(text: str) -> list[str]:
    """Without comments, blanks and the values of secrets, which may have several lines: hidden before it is split."""
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)  # a comment ends with its line, backslash or not
    return [line.strip() for line in shown(text).splitlines() if line.strip()]


def shown(text: str) -> str:
    """Text of a file for people, without the values of secrets; lines that a backslash continues are joined."""
    return HIDDEN.sub(r"\g<setting>\g<name>\g<flag>...", text.replace("\\\n", ""))


def unwrapped(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words and variables of what `exec`, `nice`, `env NAME=value` and their like start; `vllm serve MODEL ...`,
    where that is what the words mean: vLLM by its path, its module, the model as a flag."""
    names = [word.rpartition("/")[2] for word in command]
    starts = [at for at, name in enumerate(names) if name in (*ENGINES, *PROGRAMS)]
    at = starts[0] if starts and names[0] in FACTS["wrappers"] else 0
    pairs = [word.partition("=") for word in command[:at]]
    given = {name: value for name, equals, value in pairs if equals and ENV_NAME.fullmatch(name)}
    words = [names[at] if at in starts else command[at], *command[at + 1 :]]
    if words[1:3] == MODULE:
        words[:3] = ["vllm", "serve"]
    if words[:2] == ["vllm", "serve"] and (named := flag_value(words, "--model")):
        words[2:] = [named, *drop_flags(words, "--model")[2:]]
    return words, given
