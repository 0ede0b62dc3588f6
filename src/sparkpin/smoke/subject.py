"""A server under test, and the ways to ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkpin.pins.vllm_flags import AUTO, Flags
from sparkpin.releases.record import Demands
from sparkpin.smoke.answers import Answer, chat_answer, json_of, require, stream_answer
from sparkpin.smoke.expectations import Case, Expectations
from sparkpin.smoke.replies import Reply

if TYPE_CHECKING:  # it is slow to import, and every task reads which checks there are
    from sparkpin.smoke.client import Client
    from sparkpin.smoke.drift import Reference

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class SmokeSubject:
    """A server that runs, and what is known about it."""

    client: Client
    model: str
    expect: Expectations
    log: Callable[[], bytes]  # everything it has logged so far
    demands: Demands  # of its release
    argv: tuple[str, ...]  # the command that it runs
    other_logs: Callable[[], tuple[bytes, ...]] = tuple  # of its other nodes
    length: int = 0  # tokens that it drafts
    reference: Reference | None = None  # what a release of the stage below gave
    leaves: dict[str, Any] = field(default_factory=dict)  # file name -> JSON value, for the evidence

    @property
    def floors(self) -> tuple[float, ...]:
        """Least share of the tokens at each position of a draft that must be accepted; () where nobody says one."""
        return self.demands.position_floors[: self.length]

    @property
    def flags(self) -> Flags:
        return Flags(self.argv, "the release's command", {})

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence; None where the command leaves that to vLLM."""
        limit = self.flags.number("--max-model-len", auto=True)
        return None if limit == AUTO else limit

    def post(self, case: Case, **more: Any) -> Reply:
        return self.client.post(CHAT, {"model": self.model, **case.request, **more}, timeout=case.seconds)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a prompt without a template."""
        return json_of(self.client.post("/v1/completions", {"model": self.model, **request}))

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
