"""A launch script as bash reads it, without running bash: the words and variables that its server gets.

Read: quotes, escapes, continuation lines, comments, `;`, `&&`, redirections, `export`, and `$NAME`, `${NAME}` and
`${NAME:-text}` of variables that are known. What only a shell could tell (loops, conditionals, functions, command
substitution) is listed as not carried over, and refused where it starts the server or sets a variable of its words.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
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
COMMAND = re.compile(rf"(?:[\s;]|#[^\n]*\n)*((?:\\\n|{HERE_DOCUMENT}|[^\n;&]|&(?!&))*+)(?:[\n;]|&&|\Z)")
SERVER = re.compile(rf"{START.pattern}|\bvllm[ \t]+serve\b|\bvllm\.entrypoints", re.MULTILINE)  # of a body, anywhere
# What an image sets and a script adds to is no matter of the server's words.
SETTING = re.compile(r"\s*(?:(?:export\s+)?(?!(?:PATH|LD_LIBRARY_PATH|PYTHONPATH)=)[A-Za-z_]\w*\+?=|export\s+-)")
QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
PIECE = re.compile(  # what opens and closes a loop, a conditional, a function's body, a subshell; the rest is skipped
    rf"\\.|{QUOTED}|\$\{{[^{{}}\n]*\}}|(?<!\S)\#[^\n]*|{HERE_DOCUMENT}|(?P<round>[()])(?:[ \t]*&&)?"
    r"|(?:^|(?<=[;&|(){}!])|(?<=then)|(?<=else)|(?<=do))[ \t]*"
    r"(?P<keyword>if|for|while|until|select|case|fi|done|esac|[{}])(?=[\s;&|()<>])(?:[ \t]*&&)?",
    re.DOTALL | re.MULTILINE,
)
CLOSERS = {"if": "fi", "case": "esac", "{": "}", "(": ")"} | dict.fromkeys(("for", "while", "until", "select"), "done")
# Variables that a body sets, as far as its text tells.
CHANGED = re.compile(
    r"(?<![\w$-])([A-Za-z_]\w*+)(?:\+?=|[ \t]+in\b)|\b(?:read|unset)[ \t]+(?:-\w+[ \t]+)*([A-Za-z_]\w*)"
)
TOKEN = re.compile(
    r"(?P<blank>(?:[ \t]|\\\n)+|\#[^\n]*)|(?P<end>\n|;|&&)"
    rf"|(?P<plumbing>{HERE_DOCUMENT}|[\d&]*[<>]+[&|]?[ \t]*(?:{QUOTED}|\$\([^)]*\)|[^\s;|&\"'<>()])++|[|&][^\n]*)"
    rf"|(?P<word>(?:\\.|{QUOTED}|\$\{{[^{{}}'\"\\`$\n]*\}}|[^\s\\'\"`|;&<>()])++)(?=[\s|;&<>]|\\\n|\Z)",
    re.DOTALL,
)
READABLE = re.compile(rf"(?:\\.|{QUOTED}|(?!\$\()[^\s\\'\"`|;&<>()])*+", re.DOTALL)  # the start of a word
VARIABLE = (
    r"\$(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*+)(?!\\\n\w)"
    r"|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<operator>:?-)(?P<default>[^${}'\"\\`]*))?\})"
)
IN_WORD = re.compile(
    rf"(?P<join>\\\n)|(?P<kept>\\.|'[^']*')|\"(?P<double>(?:\\.|[^\"\\])*)\"|(?P<home>^~(?=/|$))|{VARIABLE}"
    r"|(?P<unknown>\$[\w{(@*#?$!'\"-])",
    re.DOTALL,
)
IN_QUOTES = re.compile(
    rf"(?P<join>\\\n)|(?P<kept>\\[\"\\])|\\(?P<escaped>[$`])|{VARIABLE}|(?P<unknown>`|\$[\w{{(@*#?$!-])"
)
BRACES, SEVERAL = re.compile(r"\{[^{}]*+\}"), re.compile(r",|\w\.\.-?\w")
SECRET = SECRET_NAME.pattern.replace("(?:^|_)", r"(?:\b|(?<=_))").replace("$", "")
VALUE = rf"(?:{QUOTED}|\\.|[^\s\"'\\]|[\"'].*)+"
HIDDEN = re.compile(  # by the name of a variable or key, by a flag, by its form
    rf"(?P<whole>(?P<quote>[\"'])\w*?(?:{SECRET})=)(?:(?!(?P=quote))[\s\S])*"
    rf"|(?P<name>(?:{SECRET})(?:=|[\"']?:[ \t]+)){VALUE}"
    r"|(?P<flag>(?:--(?:api[-_]key|(?:hf[-_])?token|password)|\bBearer|\blogin\b[^\n;|&]{0,99}?[ \t]-p)"
    rf"(?:=|\s+|(?<=-p))){VALUE}|(?:{'|'.join(SHAPES.values())})(?:[\w+/=\s]*(?=-----END))?[^\s\"']*",
    re.IGNORECASE,
)
HOME = "/root"  # both runners' containers run as root unless told otherwise
SET_ELSEWHERE = re.compile("|".join(FACTS["set_elsewhere"]))
UNKNOWN = "a variable with a value: set it, or write ${NAME:-VALUE}; no secret is read"
SIMPLE = "closed quotes, plain words, $NAME or ${NAME:-text} with a plain text: only a shell could expand this"
MOST = 100  # commands that cannot be read
WORDS = 500  # of a command, and commands before it; vLLM has some 300 flags


@dataclass
class Launch:
    """How a server is started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    left: list[str] = field(default_factory=list)  # what is not carried over
    image: str = ""
    missing: tuple[str, ...] = ()  # placeholders that nothing fills (version 2)


@dataclass(frozen=True)
class ShellCommand:
    text: str  # as it stands, one blank between its words
    words: tuple[str, ...]  # as the program gets them
    assigned: dict[str, str]  # `NAME=value` in front of them
    plumbing: str  # pipes and redirections, which are no words


@dataclass
class Shell:
    """values: of variables, which the commands change as they are read; exported: those that a program gets; unread:
    those that a body sets that is not followed."""

    file: object
    text: str
    values: dict[str, str]
    exported: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    at: int = 0
    length: int = 0  # of the values that went in so far

    def launch(self) -> Launch:
        """By the command that starts vLLM or a container, or else the last. ManifestError for flags that are lost."""
        self.text += "\n"  # a script's last line ends
        command, before, faults, is_sure = None, list[str](), list[ManifestError](), True
        while self.at < len(self.text) and len(before) < WORDS:
            start, read = self.at, None
            is_sure = is_sure or not self.text.endswith("&&", 0, start)  # else it depends on the command before
            try:
                read = self.command()
            except ManifestError as error:
                skipped = COMMAND.match(self.text, start)
                is_setting = is_sure and skipped and SETTING.match(skipped[1])
                if skipped is None or len(faults) > MOST or START.search(skipped[1]) or is_setting:
                    raise
                self.at = skipped.end()
                faults.append(error)
            else:
                if read is None:
                    continue
                words, _ = unwrapped(read.words or ("export",))
                if words[:2] == ["vllm", "serve"] or (words[0] in ENGINES and "run" in words[1:3]):
                    command = read
                    break
            if self.skips_body(start):
                read = None
            elif read and is_sure and self.sets(read):
                before += listed("before", read.plumbing)
                continue
            command = read or command
            lines = [read.text] if read else self.text[start : self.at].rstrip("&;").splitlines()
            before += [text for line in lines for text in listed("before", line)]
            is_sure = is_sure and read is not None and read.words[:1] == ("cd",)
        else:
            if command is None:
                raise next(iter(faults), self.fault(self.text.strip(), "a command that starts a server"))
            before.pop()
        words, given = unwrapped(command.words or ("export",))
        rest = re.sub(r"(?m)^[ \t]*#.*$", "", self.text[self.at :])  # a comment ends with its line, backslash or not
        after = [line.strip() for line in rest.replace("\\\n", " ").splitlines()]
        for line in (command.plumbing, *after):
            if line.startswith("-"):
                expected = "no flag after the end of the command: a comment or a blank after a backslash ends it"
                raise ManifestError(self.file, "command", shown(line), expected)
            if "vllm" in line and START.search(line):
                raise ManifestError(self.file, "command", short(shown(line)), "one server: a recipe is for one")
        for name in sorted(self.exported & self.unread):
            self.value(name)  # its value is not known: an error
        env = {name: value for name, value in self.values.items() if name in self.exported}
        piped = [f"pipe or redirection: {short(shown(command.plumbing))}"] if command.plumbing else []
        left = [*before, *piped, *(text for line in after for text in listed("after", line))]
        return Launch(tuple(words), env | command.assigned | given, left)

    def skips_body(self, start: int) -> bool:
        """Whether what begins there has a body, which is skipped, and the variables that it sets are not known."""
        closers, end = list[str](), self.at
        for piece in PIECE.finditer(self.text, start):
            if not closers and piece.start() >= end:
                break
            word = piece["round"] or piece["keyword"]
            if word in CLOSERS:
                closers.append(CLOSERS[word])
            elif closers and word == closers[-1]:
                closers.pop()
                self.at = max(end, piece.end())
        self.at = len(self.text) if closers else self.at
        has_body = self.at > end
        text = self.text[start : self.at]
        if (has_body or "<<" in text) and (found := SERVER.search(text)):
            self.at = start + found.end()
            raise self.fault(found[0].strip(), "a server outside of conditionals, loops and functions: it is not read")
        if has_body:
            self.unread |= {name for names in CHANGED.findall(text) for name in names if name}
        return has_body

    def sets(self, command: ShellCommand) -> bool:
        """Whether the command is one that sets variables, and nothing else."""
        first, *words = command.words or ("export",)
        pairs = [word.partition("=") for word in words]
        if first == "unset" or (first == "export" and not all(ENV_NAME.fullmatch(name) for name, _, _ in pairs)):
            raise ManifestError(self.file, "command", shown(command.text), "export NAME=value: no shell runs here")
        if first == "export":
            self.exported.update(name for name, _, _ in pairs)
            changed = command.assigned | {name: value for name, equals, value in pairs if equals}
            self.values |= changed
            self.unread -= changed.keys()
        return first in ("export", "set")

    def command(self) -> ShellCommand | None:
        """The next one; None where there is none any more."""
        raws, words, assigned, plumbing = list[str](), list[str](), dict[str, str](), list[str]()
        while self.at < len(self.text):
            token = TOKEN.match(self.text, self.at)
            if token is None or len(raws) > WORDS:
                readable = READABLE.match(self.text, self.at)
                end = readable.end() if readable else self.at
                raise self.fault(self.text[end : end + (1 if self.text[end] in "\"'" else 20)])
            if raw := token["word"]:
                raws.append(raw)
                made = self.words(raw)
                if not words and (name := re.match(r"([A-Za-z_]\w*)(\+?)=", raw, re.ASCII)):
                    known = assigned.get(name[1], self.value(name[1])) if name[2] else ""
                    assigned[name[1]] = (known or "") + " ".join(made)[name.end() :]
                else:
                    words += made
            elif token["plumbing"]:
                plumbing.append(token[0].strip())
            self.at = token.end()
            if token["end"] and raws:
                break
        text = " ".join([*raws, *plumbing])
        return ShellCommand(text, tuple(words), assigned, " ".join(plumbing)) if raws else None

    def words(self, raw: str) -> list[str]:
        """What a word becomes: one, several, or none where it has a variable outside of quotes."""
        if len(raw) > LONGEST:
            raise self.fault(f"a word of {len(raw):,} characters", f"at most {LONGEST:,}")
        plain = re.sub(rf"\\.|{QUOTED}|\$\{{[^{{}}]*\}}", "x", raw, flags=re.DOTALL)
        if any(SEVERAL.search(braces) for braces in BRACES.findall(plain)):
            raise self.fault(raw, "braces in quotes: bash makes several words of these; put single quotes around JSON")
        return shlex.split(IN_WORD.sub(self.expanded, raw))

    def expanded(self, found: re.Match[str]) -> str:
        """A piece of a word with its variables replaced, for shlex to take the quotes off."""
        groups = found.groupdict()
        if groups["unknown"]:
            raise self.fault(found.string[found.start() : found.start() + 20])
        if groups["join"]:
            return ""
        if groups.get("double") is not None:
            return f'"{IN_QUOTES.sub(self.expanded, groups["double"])}"'
        if known := groups["kept"] or groups.get("escaped"):
            return known
        is_home, in_quotes = bool(groups.get("home")), "escaped" in groups
        self.value(groups["name"] or groups["braced"])  # or an error
        value = self.values.get("HOME", HOME) if is_home else value_of(found, self.values)
        if value is None:
            raise self.fault(found[0], UNKNOWN)
        self.length += len(value)
        if self.length > LONGEST // 4:
            raise self.fault(f"{self.length:,} characters", f"at most {LONGEST // 4:,} from variables")
        return re.sub(r'["\\]' if in_quotes else r"[^\w \t\n]", r"\\\g<0>", value)

    def value(self, name: str) -> str | None:
        if name in self.unread:
            raise self.fault(name, "a variable that no conditional, loop or function sets: these are not read")
        return self.values.get(name)

    def fault(self, got: str, expected: str = "") -> ManifestError:
        line = self.text.count("\n", 0, self.at) + 1
        return ManifestError(self.file, f"command, line {line}", shown(got), expected or SIMPLE)


def value_of(found: re.Match[str], values: Mapping[str, str]) -> str | None:
    """Of a variable, or its default: with a colon for an empty one, too. None for what is not known."""
    name, operator = found["name"] or found["braced"], found["operator"]
    value = values.get(name)
    if (operator and value is None and not SET_ELSEWHERE.fullmatch(name)) or (operator == ":-" and value == ""):
        return found["default"]
    return value


def listed(when: str, line: str) -> list[str]:
    """For people, and a recipe's file. Empty for a comment."""
    text = shown(line.strip())
    return [f"command {when} the server: {short(text)}"] if text and not text.startswith("#") else []


def shown(text: str) -> str:
    """Text of a file for people, without the values of secrets."""
    return HIDDEN.sub(r"\g<whole>\g<name>\g<flag>...", text)


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
