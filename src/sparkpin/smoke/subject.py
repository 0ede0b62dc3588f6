"""A server under test, and the ways to ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkpin.pins.vllm_flags import AUTO, Flags
from sparkpin.releases.record import Demands
from sparkpin.smoke.answers import Answer, chat_answer, require, stream_answer
from sparkpin.smoke.client import Client, Exchange
from sparkpin.smoke.expectations import Case, Expectations

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Reference:
    """What another release gave for a text: one log-probability for each of its tokens but the first."""

    release: str
    text: str  # its SHA-256
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class SmokeSubject:
    """A server that runs, and what is known about it."""

    client: Client
    model: str
    expect: Expectations
    logs: Callable[[], tuple[bytes, ...]]  # everything it has logged so far, by rank
    demands: Demands  # of its release
    argv: tuple[str, ...]  # the command that it runs
    reference: Reference | None = None  # what a release of the stage below gave
    leaves: dict[str, Any] = field(default_factory=dict)  # file name -> JSON value, for the evidence

    @property
    def flags(self) -> Flags:
        return Flags(self.argv, "the release's command", {})

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence; None where the command leaves that to vLLM."""
        limit = self.flags.number("--max-model-len", auto=True)
        return None if limit == AUTO else limit

    def post(self, case: Case, **more: Any) -> Exchange:
        path = "/v1/completions" if "prompt" in case.request else CHAT
        return self.client.post(path, {"model": self.model, **case.request, **more}, timeout=case.seconds)

    def chat(self, case: Case) -> Answer:
        return chat_answer(self.post(case))

    def streamed(self, case: Case) -> tuple[Answer, int]:
        """The answer and the number of parts that it came in."""
        for _ in range(2):  # a machine that is busy may join the parts of a short answer, once
            answer, parts = stream_answer(self.post(case, stream=True, stream_options={"include_usage": True}))
            if parts > 1:
                break
        require(parts > 1, f"the stream came in {parts} part(s), expected several")
        return answer, parts
