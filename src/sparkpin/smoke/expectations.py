"""What is asked of a server and what is known about the answers.

A scripted model's answers are known to the byte. Of any other model's only the shape is known: that there is text,
that it is of some variety, that a tool call fits the tool.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from sparkpin.releases import Demands
from sparkpin.tinymodel import scripts
from sparkpin.tinymodel.scripts import Script

LONG_TOKENS = 100


@dataclass(frozen=True)
class Case:
    """One request, without `model` and `stream`. None stands for an answer that is not known.

    reasoning "" means that there must be none; least_tokens counts completion tokens.
    """

    request: dict[str, Any]
    content: str | None = None
    reasoning: str | None = None
    tool_name: str | None = None
    arguments: dict[str, Any] | None = None
    least_tokens: int = 1

    @property
    def exact(self) -> bool:
        return self.content is not None or self.arguments is not None


class Expectations(Protocol):
    """One case for each kind of request that the checks make."""

    @property
    def completion(self) -> Case: ...
    @property
    def chat(self) -> Case: ...
    @property
    def chat_sampled(self) -> Case: ...
    @property
    def tool_call(self) -> Case: ...
    @property
    def tool_answer(self) -> Case: ...
    @property
    def long_text(self) -> Case: ...


@dataclass(frozen=True)
class Known:
    completion: Case
    chat: Case
    chat_sampled: Case
    tool_call: Case
    tool_answer: Case
    long_text: Case


GREEDY = {"temperature": 0, "max_tokens": 400}
ROOMY = {"temperature": 0, "max_tokens": 3000}  # a real model thinks before it answers
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "seed": 1}
TOOLS = {"tools": [scripts.WEATHER_TOOL], "tool_choice": "auto"}
WEATHER_QUESTION = "What is the weather in Ankara now, in celsius? Use the tool."
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


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def scripted_case(request: dict[str, Any], script: Script, least_tokens: int = 1) -> Case:
    return Case(
        request | GREEDY,
        content=script.expected_content,
        reasoning=script.reasoning,
        tool_name=script.tool_name,
        arguments=script.expected_arguments if script.tool_name else None,
        least_tokens=least_tokens,
    )


def sampled(case: Case) -> Case:
    return dataclasses.replace(case, request=case.request | SAMPLED)


def scripted() -> Known:
    return Known(
        completion=scripted_case({"prompt": scripts.COMPLETION_PROMPT}, scripts.COMPLETION),
        chat=scripted_case(said("Hello"), scripts.CHAT),
        # The script's next token leads by more than 12 logits: at this temperature top_p leaves no other.
        chat_sampled=sampled(scripted_case(said("Hello"), scripts.CHAT)),
        tool_call=scripted_case(said(WEATHER_QUESTION) | TOOLS, scripts.TOOL),
        tool_answer=scripted_case({"messages": WEATHER_TURN} | TOOLS, scripts.ANSWER),
        long_text=scripted_case(said("Tell me a long story."), scripts.LONG, LONG_TOKENS),
    )


def shape_only() -> Known:
    return Known(
        completion=Case({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 32}),
        chat=Case(said("Say hello in one sentence.") | ROOMY),
        chat_sampled=sampled(Case(said("Say hello in one sentence.") | ROOMY)),
        tool_call=Case(said(WEATHER_QUESTION) | TOOLS | ROOMY, tool_name="get_weather"),
        tool_answer=Case({"messages": WEATHER_TURN} | TOOLS | ROOMY),
        long_text=Case(said("Tell a long story, of about two hundred words.") | ROOMY, least_tokens=LONG_TOKENS),
    )


def expectations_of(demands: Demands) -> Expectations:
    return scripted() if demands.scripted else shape_only()
