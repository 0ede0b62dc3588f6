"""A command template with its placeholders replaced, by the rules of each runner.

Version 1: ``command.format(**defaults)``, one pass; a missing key is an error. Version 2: a placeholder is a span
without braces in it; other braces are text, and ``{{`` anywhere in the template says that its braces are doubled; what
goes in may hold placeholders again, up to ten passes deep; an unknown placeholder stays as it is. A value that brings
itself back is refused: sparkrun 0.2.40 never ends there.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins import vllm_command

SPAN = re.compile(r"\{[^{}]*\}")
OWN = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*)\}")  # ${NAME} is the shell's, unless `defaults` has a NAME
LAZY = re.compile(r"\{([^}\n]*)\}")  # what the runner looks for once other braces are hidden
OPEN, CLOSED = "\x00", "\x01"  # YAML allows neither in text
PASSES = 10
LONGEST = 1 << 17  # characters of a command; Linux takes no longer word, and `bash -c` gets it as one
WIDTH = 4  # digits in a format, as {port:5}
BROKEN = re.compile(r"\\[ \t]+\n")
"""A backslash that continues no line: with the blank after it, it is a word of its own, and the command ends."""


def fill_v1(command: str, values: Mapping[str, Any], file: object) -> str:
    fields = fields_v1(command)
    widths = [number for _, form in fields for number in re.findall(r"\d+", form)]
    if any("{" in form for _, form in fields) or any(len(number) > WIDTH for number in widths):
        raise ManifestError(file, "command", command, "placeholders {name}")  # else a width fills the memory
    require_short(len(command) + sum(map(int, widths)), [field for field, _ in fields], values, file)
    filled = vllm_command.fill(command, values, file)
    require_short(len(filled), (), values, file)  # {name.__doc__}
    return filled


def fill_v2(command: str, values: Mapping[str, Any], file: object) -> str:
    def replacement(found: re.Match[str]) -> str:
        value = values.get(found[0].strip("{}"))
        return found[0] if value is None else str(value)

    text = hidden(command.strip())
    for _ in range(PASSES + 1):
        lines = [line.rpartition("}") for line in text.split("\n")]  # each brace before the last end has an end
        names = [name for line in lines for name in LAZY.findall("".join(line[:2]))]
        require_short(len(text), names, values, file)
        filled = "\n".join(LAZY.sub(replacement, start + end) + rest for start, end, rest in lines)
        if filled == text and not any(values.get(name) is not None for name in names):
            return BROKEN.sub("\\\\\n", text.replace(OPEN, "{").replace(CLOSED, "}"))
        text = filled
    expected = f"values that hold each other at most {PASSES} deep, and never themselves"
    raise ManifestError(file, "command", ", ".join(f"{{{name}}}" for name in sorted(set(names))), expected)


def require_short(length: int, names: Iterable[str], values: Mapping[str, Any], file: object) -> None:
    """Before a pass: values that hold each other multiply. length: without the values of the names in it."""
    sizes = {name: len(str(value)) for name, value in values.items()}
    longest = length + sum(sizes.get(re.split(r"[.\[:!]", name)[0], 0) for name in names)
    if longest > LONGEST:
        raise ManifestError(file, "command", f"{longest:,} characters once filled in", f"at most {LONGEST:,}")


def hidden(template: str) -> str:
    """All braces but those of placeholders replaced, so that no span begins in the midst of JSON."""

    def mark(found: re.Match[str]) -> str:
        return found[0] if SPAN.fullmatch(found[0]) else OPEN if found[0].startswith("{") else CLOSED

    doubled = r"\{\{|\}\}|" if "{{" in template else ""
    return re.sub(rf"{doubled}{SPAN.pattern}|[{{}}]", mark, template)


def fields_v1(command: str) -> list[tuple[str, str]]:
    """Each placeholder with its format; none where the braces do not fit, which `fill` refuses."""
    try:
        return [(field, form or "") for _, field, form, _ in string.Formatter().parse(command) if field]
    except ValueError:
        return []


def names_v1(command: str) -> set[str]:
    return {re.split(r"[.\[]", field)[0] for field, _ in fields_v1(command)}


def names_v2(command: str, values: Mapping[str, Any]) -> set[str]:
    """What the template asks for, and what the values that it takes ask for in turn. JSON is no name."""
    found: set[str] = set()
    texts = [hidden(command)]
    while texts:
        new = set(OWN.findall(texts.pop())) - found
        found |= new
        texts += [values[name] for name in new if isinstance(values.get(name), str)]
    return found
