"""What is asked of a server and what is known about the answers: cases.yaml, which explains its keys.

A scripted model's answers are known to the byte (scripts.json). Of any other model's only the shape is known: that
there is text, that it is of some variety, that a tool call fits the tool, that what stood in the prompt is found. A
model that is too small to do what it is told goes on with what stood in the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparkpin.pins.reading import read_yaml
from sparkpin.releases.record import Demands

SECONDS = 120.0  # that any answer may take
SLOWEST = 16  # tokens a second that a CPU reads of a long prompt
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


@cache
def table() -> dict[str, Any]:
    """cases.yaml."""
    return dict(read_yaml(Path(__file__).with_name("cases.yaml")))


@cache
def scripts() -> dict[str, dict[str, Any]]:
    data = json.loads(Path(__file__).with_name("scripts.json").read_bytes())
    return {script["mode"]: script for script in (*data["modes"], data["completion"])}


def case_of(row: Mapping[str, Any], **more: Any) -> Case:
    """row: of cases.yaml; more: as of a Case."""
    request = {key: value for part in row.get("use", ()) for key, value in table()["requests"][part].items()}
    request |= row.get("request", {})
    messages = [("system", row.get("system")), ("user", row.get("say"))]
    if asked := [{"role": role, "content": text} for role, text in messages if text] + [*row.get("messages", ())]:
        request["messages"] = asked
    calls: Calls = tuple((name, None) for name in row.get("calls", ()))
    if "script" in row:
        script = scripts()[row["script"]]
        calls = tuple((name, arguments) for name, arguments in script.get("calls", ()))
        # vLLM's qwen3 parser keeps the blank line after </think>; beside a tool call it gives None for blanks alone.
        blank = "" if script["reasoning"] is None else "\n\n"
        more |= {"content": None if calls else blank + script["content"], "reasoning": script["reasoning"]}
    more |= {key: row[key] for key in ("least_tokens", "ends") if key in row}
    return Case(request, calls=calls or None, holds=tuple(row.get("holds", ())), **more)


def chat_request(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@dataclass(frozen=True)
class Expectations:
    """Of a model that is scripted, any, or led."""

    kind: str
    cases: Mapping[str, Case]
    text: str  # its tokens' log-probabilities are compared (the check `drift`)

    @property
    def tools(self) -> bool:
        """Whether it can call any."""
        return self.kind != "led"

    def recall(self, tokens: int) -> tuple[Case, ...]:
        """Of so many tokens: what stands far up a prompt must be said again."""
        cases = []
        for row in table()["recall"][self.kind]:
            lines = [row["line"].format(number=number) for number in range(tokens // row["tokens"])]
            for depth, note in row["notes"].items():
                lines.insert(int(len(lines) * depth), note)
            asked = row["case"] | {"say": "".join(lines) + row.get("end", "")}
            cases.append(case_of(asked, seconds=SECONDS + tokens / SLOWEST))
        return tuple(cases)


def expectations(kind: str) -> Expectations:
    rows = {name: kinds.get(kind, kinds["any"] if kind == "led" else None) for name, kinds in table()["cases"].items()}
    return Expectations(kind, {name: case_of(row) for name, row in rows.items() if row}, table()["texts"][kind])


def expectations_of(demands: Demands) -> Expectations:
    return expectations("scripted" if demands.scripted else "any" if demands.follows else "led")
