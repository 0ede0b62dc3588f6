"""What the scripted model says, as data: a smoke test compares a server's answers with these, byte by byte.

A request's *mode* is chosen by the model's own chat template (``chat_template.jinja``), as a real model's answer would
depend on its input: the last message is a tool's result -> ``ANSWER``; tools are offered -> ``TOOL``, or if the last
user message contains "both" ``CALLS``, "file" ``WRITE``, "while you think" ``INSIDE``; without tools: it contains the
token of a script -> that one, which attention has to find where it stands; the word "long" -> ``LONG``; anything else
-> ``CHAT``. A completion without a template continues any prompt with ``COMPLETION``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

THINK_CLOSED = "</think>\n\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. ``reasoning`` is None for a completion.

    ``content`` is what follows ``</think>`` and a blank line, with the markup of tool calls; where the reasoning is
    ``open``, neither of these comes between. ``calls`` is what a parser shall make of the markup.
    """

    mode: str
    reasoning: str | None
    content: str
    calls: tuple[ToolCall, ...] = ()
    open: bool = False

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


CHAT = Script(
    "chat",
    "They ask something small, so I give one short reply.\n",
    "Hello from Sparkpin: every part of this server works.",
)

TOOL = Script(
    "tool",
    "Weather needs live data. Let me call that function.\n",
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nAnkara\n</parameter>\n"
    "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
    calls=(ToolCall("get_weather", (("city", "Ankara"), ("unit", "celsius"))),),
)

ANSWER = Script(
    "answer",
    "Function returned a result; write it in Turkish.\n",
    "Ankara'da hava şu anda güneşli, sıcaklık 21 °C. Öğleden sonra hafif rüzgâr bekleniyor; "
    "dışarıda yürüyüş için çok güzel bir gün. İyi eğlenceler!",
)

LONG = Script(
    "long",
    "A longer text was wanted, hence several sentences.\n",
    """The lighthouse keeper counted eleven fishing boats before breakfast. Each captain carried lanterns, rope, salted
bread and patience. Northern winds had pushed heavy clouds across the bay, yet nobody on shore expected trouble.
By noon rain began drumming against copper roofs; gulls vanished under bridges, children raced home laughing.
Old Marta closed her bakery early, wrapped seven warm loaves inside linen cloth, then climbed towards the tower.
Upstairs, brass gears turned slowly. "Will they return tonight?" she asked. Her brother polished one final lens,
adjusted three screws, lit the burner, smiled. A golden beam swept outward over black water, touching mast after
mast. Ten vessels answered with bells. Minutes later another rang, faint but certain, beyond the reef. Together
both siblings shared supper while thunder rolled away eastward, leaving stars above quiet harbour streets.""",
)

COMPLETION = Script(
    "completion",
    None,
    " a pinned build gives equal bytes on any machine, today and next year.",
)

COMPLETION_PROMPT = "In short, reproducible means:"
"""Any prompt whose last token is in no script is continued so; "m" and ":" are such tokens."""

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}

FILE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a text file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "overwrite": {"type": "boolean"},
                "mode": {"type": "integer"},
            },
            "required": ["path", "content", "overwrite", "mode"],
        },
    },
}

CALLS = Script(
    "calls",
    "Two cities, so two requests go out together.\n",
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nİzmir\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nIğdır\n</parameter>\n"
    "<parameter=unit>\nfahrenheit\n</parameter>\n</function>\n</tool_call>",
    calls=(
        ToolCall("get_weather", (("city", "İzmir"),)),
        ToolCall("get_weather", (("city", "Iğdır"), ("unit", "fahrenheit"))),
    ),
)

PAGE = '<article>\n  <p>Çay "demli" olsun; şeker\\tuz yok.</p>\n\n  </tool_call> kapanış etiketi\n</article>'
"""Lines, quotes, a backslash, Turkish, and the tag that closes a call."""

WRITE = Script(
    "write",
    "Writing needs four parameters, typed ones among them.\n",
    "<tool_call>\n<function=write_file>\n<parameter=path>\nnotlar/çay.html\n</parameter>\n"
    f"<parameter=content>\n{PAGE}\n</parameter>\n<parameter=overwrite>\ntrue\n</parameter>\n"
    "<parameter=mode>\n420\n</parameter>\n</function>\n</tool_call>",
    calls=(
        ToolCall("write_file", (("path", "notlar/çay.html"), ("content", PAGE), ("overwrite", True), ("mode", 420))),
    ),
)

INSIDE = Script(
    "inside",
    "No end of thought is said before this call begins.\n",
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nVan\n</parameter>\n</function>\n</tool_call>",
    calls=(ToolCall("get_weather", (("city", "Van"),)),),
    open=True,
)

MODES: tuple[Script, ...] = (CHAT, TOOL, LONG, ANSWER, CALLS, WRITE, INSIDE)
"""The scripts that a chat template can choose. Their order fixes token ids: append, do not reorder."""
