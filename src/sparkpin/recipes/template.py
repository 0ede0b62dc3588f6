"""A command of our own format, made from the words of a server, with its settings as placeholders again.

It is made from words and not from text, so that whatever the other format allowed (comments, plain braces, several
passes) has been read already. What comes out is filled in once more, and must give the same words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sparkpin.pins.vllm_flags import parse_flags

BEGIN, END = "\ue000", "\ue001"  # for private use: in no recipe
MARK = re.compile(f"{BEGIN}([^{END}]*){END}")
INDENT = " \\\n  "


def marked(names: Sequence[str]) -> dict[str, str]:
    """Values that can be told from all others once the words are made."""
    return {name: f"{BEGIN}{name}{END}" for name in names}


def command_of(words: Sequence[str], values: Mapping[str, Any], *, doubled: bool) -> str:
    """One flag a line. words: with marks where a setting goes; values: what the settings are, which says what must be
    quoted. doubled: other braces stand twice.
    """
    head, flags = parse_flags(words)
    lines = [" ".join(quoted(word, values, doubled) for word in group) for group in (head, *(f.words for f in flags))]
    return INDENT.join(lines) + "\n"


def quoted(word: str, values: Mapping[str, Any], doubled: bool) -> str:
    text = MARK.sub(lambda mark: str(values[mark[1]]), word)
    shown = MARK.sub(r"{\1}", re.sub(r"([{}])", r"\1\1", word) if doubled else word)
    if MARK.fullmatch(word) and re.fullmatch(r"[\w@%+=:,./ -]*", text):
        return shown  # a setting of several words stays several words
    return shown if shlex.quote(text) == text else "'" + shown.replace("'", "'\"'\"'") + "'"


def usable(value: Any) -> bool:
    """Whether a value may be a setting of ours: neither JSON as such, nor text that holds placeholders in turn, nor one
    that would end the quotes around its placeholder."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return plain and not re.search(r"\{[\w-]+\}|'", str(value))
