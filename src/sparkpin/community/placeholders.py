"""A command template with its placeholders replaced, by the rules of each runner.

Version 1: ``command.format(**defaults)``, one pass; a missing key is an error. Version 2: a placeholder is a span
without braces in it; other braces are text, and ``{{`` anywhere in the template says that its braces are doubled; what
goes in may hold placeholders again, up to ten passes deep; an unknown placeholder stays as it is.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins import vllm_command

SPAN = re.compile(r"\{[^{}]*\}")
OWN = re.compile(r"(?<!\$)\{[^{}]*\}")  # ${NAME} is the shell's, unless `defaults` has a NAME
LAZY = re.compile(r"\{(.*?)\}")  # what the runner looks for once other braces are hidden
NAME = re.compile(r"[A-Za-z_][\w-]*")
OPEN, CLOSED = "\x00", "\x01"  # YAML allows neither in text
PASSES = 10
LONGEST = 1 << 20  # characters of a command; Linux takes 2 MB
BROKEN = re.compile(r"\\[ \t]+\n")
"""A backslash that continues no line: with the blank after it, it is a word of its own, and the command ends."""


def fill_v1(command: str, values: Mapping[str, Any], file: object) -> str:
    if found := re.search(r"\{[^{}]*:[^{}]*\d{5}", command):  # a width that fills the memory
        raise ManifestError(file, "command", found[0], "placeholders {name}")
    require_short(command, values, file)
    return vllm_command.fill(command, values, file)


def fill_v2(command: str, values: Mapping[str, Any], file: object) -> str:
    text = hidden(command.strip())
    for _ in range(PASSES):
        require_short(text, values, file)
        filled = LAZY.sub(lambda found: replacement(found, values), text)
        if filled == text:
            break
        text = filled
    return BROKEN.sub("\\\\\n", text.replace(OPEN, "{").replace(CLOSED, "}"))


def require_short(text: str, values: Mapping[str, Any], file: object) -> None:
    """Before a pass: values that hold each other multiply."""
    sizes = {name: len(str(value)) for name, value in values.items()}
    longest = len(text) + sum(sizes.get(re.split(r"[.\[:!]", name)[0], 0) for name in LAZY.findall(text))
    if longest > LONGEST:
        raise ManifestError(file, "command", f"{longest:,} characters once filled in", f"at most {LONGEST:,}")


def replacement(found: re.Match[str], values: Mapping[str, Any]) -> str:
    value = values.get(found[0].strip("{}"))
    return found[0] if value is None else str(value)


def hidden(template: str) -> str:
    """All braces but those of placeholders replaced, so that no span begins in the midst of JSON."""
    doubled = r"\{\{|\}\}|" if "{{" in template else ""
    return re.sub(rf"{doubled}{SPAN.pattern}|[{{}}]", span_or_mark, template)


def span_or_mark(found: re.Match[str]) -> str:
    return found[0] if SPAN.fullmatch(found[0]) else OPEN if found[0].startswith("{") else CLOSED


def names_v1(command: str) -> set[str] | None:
    """What the template asks for; None where its braces do not fit."""
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(command) if field}
    except ValueError:
        return None
    return {re.split(r"[.\[]", field)[0] for field in fields}


def names_v2(command: str, values: Mapping[str, Any]) -> set[str]:
    """What the template asks for, and what the values that it takes ask for in turn. JSON is no name."""
    found: set[str] = set()
    texts = [hidden(command)]
    while texts:
        spans = OWN.findall(texts.pop())
        new = {name for span in spans if NAME.fullmatch(name := span.strip("{}"))} - found
        found |= new
        texts += [values[name] for name in new if isinstance(values.get(name), str)]
    return found
