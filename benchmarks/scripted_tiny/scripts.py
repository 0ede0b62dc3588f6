"""What the scripted model answers: a smoke test compares a server's answers with scripts.json, byte by byte.

A request's *mode* is chosen by the model's own chat template, as a real model's answer would depend on its input: the
last message is a tool's result -> ``ANSWER``; tools are offered -> ``TOOL``, or if the last user message contains
"both" ``CALLS``, "file" ``WRITE``, "while you think" ``INSIDE``; without tools: it contains the token of a script ->
that one, which attention has to find where it stands; the word "long" -> ``LONG``; anything else -> ``CHAT``. A
completion without a template continues any prompt with ``COMPLETION``. benchmarks/scripted_tiny makes the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sparkpin.smoke.expectations import table

THINK_CLOSED = "</think>\n\n"
DATA: dict[str, Any] = json.loads(resources.files("sparkpin.smoke").joinpath("scripts.json").read_bytes())


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. ``reasoning`` is None for a completion.

    ``content`` is what follows ``</think>`` and a blank line, with the markup of tool calls; where the reasoning is
    ``open``, neither of these comes between. ``calls`` is what a parser shall make of the markup: name and arguments.
    """

    mode: str
    reasoning: str | None
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    open: bool = False

    @classmethod
    def read(cls, value: dict[str, Any]) -> Script:
        return cls(**{**value, "calls": tuple((name, arguments) for name, arguments in value.get("calls", ()))})

    @property
    def text(self) -> str:
        """The raw output with thinking on, without ``<|im_end|>``."""
        if self.reasoning is None:
            return self.content
        return f"{self.reasoning}{'' if self.open else THINK_CLOSED}{self.content}"

    @property
    def expected_content(self) -> str | None:
        """``message.content`` of a chat answer with thinking on, as vLLM's qwen3 parser leaves it.

        The parser keeps the blank line after ``</think>``; beside a tool call it gives None for blanks alone.
        """
        if self.calls:
            return None
        return self.content if self.reasoning is None else f"\n\n{self.content}"


MODES: tuple[Script, ...] = tuple(map(Script.read, DATA["modes"]))
"""The scripts that a chat template can choose. Their order fixes token ids: append, do not reorder."""
CHAT, TOOL, LONG, ANSWER, CALLS, WRITE, INSIDE = MODES
WEATHER_TOOL: dict[str, Any] = table()["requests"]["weather"]["tools"][0]
COMPLETION = Script.read(DATA["completion"])
"""It continues any prompt whose last token is in no script; "m" and ":" are such tokens."""


def trigger(mode: str, *, direct: bool = False) -> str:
    """The token that ends a prompt and selects a script; ``direct`` skips the reasoning."""
    return f"<|scripted_{'direct_' if direct else ''}{mode}|>"
