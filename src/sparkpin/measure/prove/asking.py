"""One server that takes prompts as tokens, as vLLM does: each length is exact, and an answer is read as it was said."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkpin.measure.prove.sessions import TOOLS, Message, Turn, fitted
from sparkpin.measure.quality.asking import TOP, continued, models_of, tokens_in, tokens_of, version
from sparkpin.measure.quality.distance import Rows
from sparkpin.smoke.answers import Wrong, a_dict, json_of, only_choice
from sparkpin.smoke.client import Client
from sparkpin.smoke.replies import Fault

HITS = "vllm:prefix_cache_hits_total"
PREEMPTED = "vllm:num_preemptions_total"
INFO = "vllm:cache_config_info"
PATH = "/v1/completions"
PROBE: list[Message] = [{"role": "user", "content": "Read the file notes.txt, and say what it holds."}]
PROBED = 8  # tokens

Prompt = list[int]  # token ids


@dataclass(frozen=True)
class Said:
    """cached: tokens of the prompt that came from the cache, None where the answer does not tell."""

    rows: Rows
    prompt: int
    cached: int | None = None


@dataclass
class ProvedEndpoint:
    """room, block, capacity, caching: None where nobody tells."""

    client: Client
    model: str
    room: int | None = None
    block: int | None = None
    capacity: int | None = None
    caching: bool | None = None
    version: str = ""
    notes: list[str] = field(default_factory=list)

    def body(self, prompt: Prompt, salt: str, tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_tokens": tokens, "logprobs": TOP, "return_tokens_as_token_ids": True}
        return {"model": self.model, "prompt": prompt, "cache_salt": salt, **sampling}

    def ask(self, prompt: Prompt, salt: str, tokens: int) -> Said:
        """Wrong or Fault for what is no answer."""
        return said(json_of(self.client.post(PATH, self.body(prompt, salt, tokens))))

    def begun(self, turn: Turn, before: Prompt, answer: Said | None) -> Prompt:
        """The prompt of a turn: that before, what was answered, and the turn's messages."""
        ids = [*before, *(int(token) for token in answer.rows.tokens)] if answer else []
        return [*ids, *fitted(self.rendered(turn.messages), max(turn.tokens - len(ids), 1))]

    def rendered(self, messages: Sequence[Message]) -> list[int]:
        """By the server's own template; by none where that refuses a conversation that begins so."""
        asked = {"model": self.model, "messages": list(messages), "add_generation_prompt": True, "tools": list(TOOLS)}
        reply = self.client.post("/tokenize", asked)
        if reply.status == 200:
            return tokens_in(reply)
        return tokens_of(self.client, self.model, "\n".join(str(message["content"]) for message in messages))

    def scraped(self) -> str:
        """/metrics, "" where there is none."""
        with contextlib.suppress(Fault):
            reply = self.client.get("/metrics")
            if reply.status == 200:
                return reply.body.decode(errors="replace")
        return ""


def said(value: dict[str, Any]) -> Said:
    """Wrong for an answer of another form."""
    try:
        rows, usage = continued(only_choice(value), "the answer"), a_dict(value.get("usage"), "usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Said(rows, int(usage.get("prompt_tokens") or 0), cached if isinstance(cached, int) else None)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        seen = str(value)[:160]
        raise Wrong(f"the answer: got {seen} ({type(error).__name__}: {error}), expected one of OpenAI's") from None


def meet(client: Client, model: str = "") -> ProvedEndpoint:
    """What a server is and has. model: its name there, "" for the first that it lists.

    Wrong or Fault where it does not answer prompts of tokens with log-probabilities.
    """
    listed = models_of(client)
    names = [str(one.get("id")) for one in listed]
    met = ProvedEndpoint(client, model or names[0])
    if met.model not in names:
        raise Wrong(f"model {met.model}: not among those that it lists, {', '.join(names)[:160]}")
    room = next((one.get("max_model_len") for one in listed if one.get("id") == met.model), None)
    met.room = room if isinstance(room, int) else None
    with contextlib.suppress(Fault, Wrong):
        met.version = version(client)
    described = re.search(rf"^{INFO}\{{(.*)\}}", met.scraped(), re.M)
    told = dict(re.findall(r'(\w+)="([^"]*)"', described[1])) if described else {}
    met.block = number_of(told.get("block_size"))
    blocks = number_of(told.get("num_gpu_blocks"))
    met.capacity = number_of(told.get("kv_cache_size_tokens")) or (met.block and blocks and met.block * blocks)
    met.caching = {"True": True, "False": False}.get(told.get("enable_prefix_caching", ""))
    if met.caching is False:
        met.block = met.capacity = None
        met.notes.append("prefix caching is off, as /metrics says: no fault of a cache can be found")
    try:
        met.ask(met.rendered(PROBE), "probe", PROBED)
    except Wrong as wrong:
        raise Wrong(f"prove needs prompts as tokens, cache_salt and log-probabilities, as of vLLM: {wrong}") from None
    return met


def number_of(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
