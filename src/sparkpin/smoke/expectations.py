"""What is asked of a server and what is known about the answers.

A scripted model's answers are known to the byte. Of any other model's only the shape is known: that there is text,
that it is of some variety, that a tool call fits the tool, that what stood in the prompt is found. A model that is too
small to do what it is told goes on with what stood in the prompt.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkpin.releases.record import Demands
from sparkpin.smoke import scripts
from sparkpin.smoke.scripts import Script, trigger

LONG_TOKENS = 100
SECONDS = 120.0  # as of any other answer

Calls = tuple[tuple[str, dict[str, Any] | None], ...]


@dataclass(frozen=True)
class Case:
    """One request, without `model` and `stream`. None stands for an answer that is not known."""

    request: dict[str, Any]
    content: str | None = None
    reasoning: str | None = None  # "": there must be none
    calls: Calls | None = None  # the tools that must be called, in order, with their arguments
    holds: tuple[str, ...] = ()  # texts that the content, or an argument of a call, must hold
    least_tokens: int = 1  # of the completion
    ends: bool = False  # it must end by itself, not at the limit of tokens
    seconds: float | None = None  # that the answer may take, where it is longer than others

    @property
    def exact(self) -> bool:
        return self.content is not None or any(arguments is not None for _, arguments in self.calls or ())


@dataclass(frozen=True)
class Expectations:
    """One case for each kind of request that the checks make."""

    completion: Case
    chat: Case
    tool_call: Case
    tool_call_required: Case
    tool_calls: Case
    tool_call_long: Case
    tool_call_inside: Case
    tool_examples: Case
    tool_answer: Case
    turkish: Case
    long_text: Case
    recall: Callable[[int], tuple[Case, ...]]  # of so many tokens: one thing far up a prompt must be said again
    text: str  # its tokens' log-probabilities are compared (`smoke.drift`)
    image: Case | None = None  # None of a model that is known to read text alone
    tools: bool = True  # whether it can call any


GREEDY = {"temperature": 0, "max_tokens": 400}
# What is small falls into a circle soon, were it not told to say nothing twice.
LONG_ENOUGH = {"temperature": 0, "min_tokens": LONG_TOKENS, "max_tokens": 140, "repetition_penalty": 1.1}
ROOMY = {"temperature": 0, "max_tokens": 3000}  # a real model thinks before it answers
# A script's next token leads by more than 12 logits: at this temperature top_p leaves no other.
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "seed": 1}
TOOLS = {"tools": [scripts.WEATHER_TOOL], "tool_choice": "auto"}
FILES = {"tools": [scripts.FILE_TOOL, scripts.WEATHER_TOOL], "tool_choice": "auto"}
WEATHER_QUESTION = "What is the weather in Ankara now, in celsius? Use the tool."
BOTH_QUESTION = "What is the weather in İzmir and in Iğdır? Ask for both cities at once, with two calls of the tool."
FILE_QUESTION = (
    "Write the file notlar/çay.html with the tool, overwriting what is there, mode 420. Its content is these lines:\n"
    '<article>\n  <p>Çay "demli" olsun; şeker yok.</p>\n</article>'
)
INSIDE_QUESTION = "What is the weather in Van? Call the tool while you think, before you end your thoughts."
EXAMPLES = (
    "A call of a tool looks like this, and this is an example only:\n<think>\nTheir question needs data.\n</think>\n\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
)
TURKISH = "Pijamalı hasta yağız şoföre çabucak güvendi; İĞÜŞÖÇ ığüşöç â î û ☕"
TEXT = (
    "A build is reproducible when the same pins give the same bytes: 3.14159, 2 x 21 = 42, f(x) = x**2 + 1.\n"
    "def total(rows):\n    return sum(row['price'] * row['count'] for row in rows if row['count'] > 0)\n"
    "Öğleden sonra yağmur dindi; çocuklar ıslak sokaklarda koşuştular, güneş bulutların ardından göründü.\n"
)
ENGLISH = (
    "The old woman who lives by the harbour bakes bread every morning before the sun comes up. When the fishermen come "
    "back, tired and cold, she gives each of them a warm loaf and asks what they have seen. Most of them say that they "
    "have seen nothing but water. One day a young man told her that there was a light on the island, where nobody had "
    "lived for many years. She put down her basket, looked out of the window, and said that she had been waiting a "
    "long time for somebody to see it."
)
WEATHER_TURN = [
    {"role": "user", "content": WEATHER_QUESTION},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0001",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Ankara", "unit": "celsius"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0001", "content": '{"temperature": 21, "sky": "clear"}'},
]
WORDS = ("kestane", "mercan", "yakamoz")
DEPTHS = (0.05, 0.5, 0.95)


def said(text: str, system: str = "") -> dict[str, Any]:
    above = [{"role": "system", "content": system}] if system else []
    return {"messages": [*above, {"role": "user", "content": text}]}


def scripted_case(request: dict[str, Any], script: Script, least_tokens: int = 1) -> Case:
    return Case(
        request | GREEDY,
        content=script.expected_content,
        reasoning=script.reasoning,
        calls=script.calls or None,
        least_tokens=least_tokens,
    )


def sampled(case: Case) -> Case:
    return dataclasses.replace(case, request=case.request | SAMPLED)


def required(case: Case) -> Case:
    return dataclasses.replace(case, request=case.request | {"tool_choice": "required"})


def scripted_recall(tokens: int) -> tuple[Case, ...]:
    """Which script it is stands near one end of the prompt, whose other tokens are one byte each. Two scripts: an
    attention that finds nothing always falls to the same one.
    """
    made = []
    for depth, script in (DEPTHS[0], scripts.ANSWER), (DEPTHS[-1], scripts.CHAT):
        above = int(tokens * depth)
        text = "." * above + trigger(script.mode) + "." * (tokens - above)
        case = scripted_case(said(text), script)
        made.append(dataclasses.replace(case, seconds=SECONDS + tokens / 40))  # a CPU reads it
    return tuple(made)


def scripted_text() -> str:
    """First any text, before which no script is chosen, so that attention plays no part; then the words of two scripts
    out of order, whose numbers show what attention found. The model is sure of other tokens at each place.
    """
    asked = ((script, " ".join(reversed(script.content.split()))) for script in (scripts.ANSWER, scripts.CHAT))
    return TEXT + " ".join(f"{trigger(script.mode)} {words}" for script, words in asked)


def recall(tokens: int) -> tuple[Case, ...]:
    """Three words between lines of about a dozen tokens each."""
    lines = [f"Log {number}: the gate was opened, the gate was closed." for number in range(tokens // 16)]
    for word, depth in zip(WORDS, DEPTHS, strict=True):
        lines.insert(int(len(lines) * depth), f"Note: one of the three pass words is {word}.")
    question = "Which three pass words are noted in this log? Say the three words."
    request = said("\n".join([*lines, question])) | ROOMY
    return (Case(request, holds=WORDS, seconds=SECONDS + tokens / 200),)


def led(question: str, beginning: str) -> dict[str, Any]:
    """A question, and the beginning of its answer, with which the model goes on."""
    answer = {"role": "assistant", "content": beginning}
    messages = [*said(question)["messages"], answer]
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def led_recall(tokens: int) -> tuple[Case, ...]:
    """A word far up, which a model that is led to it says by copying. One prompt: a CPU takes long to read 8K.

    A line has up to 19 tokens where each digit is one.
    """
    lines = [f"Log {number}: the gate was opened, the gate was closed." for number in range(tokens // 20)]
    begin = "Note: the pass word of the north gate is"
    lines.insert(int(len(lines) * DEPTHS[0]), f"{begin} {WORDS[0]}.")
    request = led("\n".join([*lines, "Which pass word is noted in this log?"]), begin)
    return (Case(request | {"temperature": 0, "max_tokens": 12}, holds=(WORDS[0],), seconds=SECONDS + tokens / 16),)


def red_square() -> str:
    """A PNG as a data URL."""
    side = 96

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    rows = zlib.compress((b"\0" + b"\xff\0\0" * side) * side, 9)
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def seen(url: str, text: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}]}


def scripted() -> Expectations:
    weather = scripted_case(said(WEATHER_QUESTION) | TOOLS, scripts.TOOL)
    return Expectations(
        completion=scripted_case({"prompt": scripts.COMPLETION_PROMPT}, scripts.COMPLETION),
        chat=scripted_case(said("Hello"), scripts.CHAT),
        tool_call=weather,
        # The grammar of 0.32 has no place for the blank line after </think>, without which the other scripts are lost.
        tool_call_required=required(scripted_case(said(INSIDE_QUESTION) | TOOLS, scripts.INSIDE)),
        tool_calls=scripted_case(said(BOTH_QUESTION) | TOOLS, scripts.CALLS),
        tool_call_long=scripted_case(said(FILE_QUESTION) | FILES, scripts.WRITE),
        tool_call_inside=scripted_case(said(INSIDE_QUESTION) | TOOLS, scripts.INSIDE),
        tool_examples=scripted_case(said(WEATHER_QUESTION, EXAMPLES) | TOOLS, scripts.TOOL),
        tool_answer=scripted_case({"messages": WEATHER_TURN} | TOOLS, scripts.ANSWER),
        turkish=scripted_case(said(f"{TURKISH} {trigger(scripts.ANSWER.mode)}"), scripts.ANSWER),
        long_text=scripted_case(said("Tell me a long story."), scripts.LONG, LONG_TOKENS),
        recall=scripted_recall,
        text=scripted_text(),
    )


def shape_only() -> Expectations:
    weather = Case(said(WEATHER_QUESTION) | TOOLS | ROOMY, calls=(("get_weather", None),))
    return Expectations(
        completion=Case({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 32}),
        chat=Case(said("Say hello in one sentence.") | ROOMY),
        tool_call=weather,
        tool_call_required=required(weather),
        tool_calls=Case(
            said(BOTH_QUESTION) | TOOLS | ROOMY,
            calls=(("get_weather", None), ("get_weather", None)),
            holds=("İzmir", "Iğdır"),
        ),
        tool_call_long=Case(
            said(FILE_QUESTION) | FILES | ROOMY,
            calls=(("write_file", None),),
            holds=('>\n  <p>Çay "demli" olsun; şeker', ".</p>\n", "\n</article>"),
        ),
        tool_call_inside=Case(said(INSIDE_QUESTION) | TOOLS | ROOMY, calls=(("get_weather", None),), holds=("Van",)),
        tool_examples=Case(
            said(WEATHER_QUESTION, EXAMPLES) | TOOLS | ROOMY, calls=(("get_weather", None),), holds=("Ankara",)
        ),
        tool_answer=Case({"messages": WEATHER_TURN} | TOOLS | ROOMY),
        turkish=Case(said(f"Repeat this line, and say nothing else: {TURKISH}") | ROOMY, holds=(TURKISH,)),
        long_text=Case(said("Tell a long story, of about two hundred words.") | ROOMY, least_tokens=LONG_TOKENS),
        recall=recall,
        text=TEXT,
        image=Case(seen(red_square(), "Which colour is this? One word, in lower case.") | ROOMY, holds=("red",)),
    )


def led_on() -> Expectations:
    """Of a model that follows no instructions to the letter, and is known to end an answer and to copy."""
    told = said(f"Repeat: {TURKISH}")["messages"]
    again = [*told, {"role": "assistant", "content": TURKISH}, *told]
    return dataclasses.replace(
        shape_only(),
        completion=Case({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}, holds=(" Paris",)),
        chat=Case(said("Say hello in one sentence.") | GREEDY, ends=True),
        turkish=Case({"messages": again} | GREEDY, holds=(TURKISH,), ends=True),
        long_text=Case(said("Tell a long story.") | LONG_ENOUGH, least_tokens=LONG_TOKENS),
        recall=led_recall,
        tools=False,
    )


def expectations_of(demands: Demands) -> Expectations:
    return scripted() if demands.scripted else shape_only() if demands.follows else led_on()
