"""One server, as far as it lets itself be asked: prompts as tokens where it takes those, else messages.

With tokens every length is exact, and what a model said is read again as it said it. With messages alone (another
maker's endpoint) lengths are about right, and the server's template decides what of an answer comes back to it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkpin.measure.prove.sessions import TOOLS, Message, Turn, fitted, other_messages, other_text
from sparkpin.measure.quality.asking import continued, finite
from sparkpin.measure.quality.distance import Rows, rows_of
from sparkpin.smoke.answers import Wrong, a_dict, json_of, only_choice, text_of
from sparkpin.smoke.client import Client
from sparkpin.smoke.replies import Fault
from sparkpin.smoke.sse import BadStream, parse_chunks

TOPS = (20, 5, 1)  # likeliest tokens: as many as the server tells
HITS = "vllm:prefix_cache_hits_total"
PREEMPTED = "vllm:num_preemptions_total"
INFO = "vllm:cache_config_info"
PROBE: list[Message] = [{"role": "user", "content": "Read the file notes.txt, and say what it holds."}]
PROBED = 8  # tokens

Prompt = list[Any]  # token ids, or messages


@dataclass(frozen=True)
class Said:
    """rows: of its tokens; without log-probabilities a row for each character. cached: None where nobody tells."""

    rows: Rows
    text: str
    prompt: int
    cached: int | None = None


@dataclass
class ProvedEndpoint:
    """top: likeliest tokens that it tells, 0 for none; exact: prompts are tokens; room, caching: None where nobody
    tells."""

    client: Client
    model: str
    top: int = 0
    exact: bool = False
    salted: bool = True
    room: int | None = None
    block: int | None = None
    capacity: int | None = None
    caching: bool | None = None
    version: str = ""
    notes: list[str] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)  # tokens that have no number here
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)  # of `known`

    @property
    def path(self) -> str:
        return "/v1/completions" if self.exact else "/v1/chat/completions"

    def body(self, prompt: Prompt, salt: str, tokens: int, **more: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": tokens}
        if self.exact:
            asked |= {"prompt": prompt, "logprobs": self.top, "return_tokens_as_token_ids": True}
        else:
            asked |= {"messages": prompt, "tools": list(TOOLS)}
            asked |= {"logprobs": True, "top_logprobs": self.top} if self.top else {}
        return asked | ({"cache_salt": salt} if self.salted else {}) | more

    def ask(self, prompt: Prompt, salt: str, tokens: int) -> Said:
        """Wrong or Fault for what is no answer."""
        return self.said(json_of(self.client.post(self.path, self.body(prompt, salt, tokens))))

    def said(self, value: dict[str, Any]) -> Said:
        """Wrong for an answer of another form."""
        try:
            return self.read(value)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            seen = str(value)[:160]
            raise Wrong(f"the answer: saw {seen} ({type(error).__name__}: {error}), wanted one of OpenAI's") from None

    def read(self, value: dict[str, Any]) -> Said:
        choice = only_choice(value)
        usage = a_dict(value.get("usage"), "usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if self.exact:
            rows, text = continued(choice, "the answer"), text_of(choice.get("text"), "text")
        else:
            message = a_dict(choice.get("message"), "message")
            text = text_of(message.get("content"), "content")
            thought = message.get("reasoning") or message.get("reasoning_content")  # all that a few tokens may hold
            rows = (
                self.chat_rows(choice) if self.top else letters(text or str(thought or message.get("tool_calls") or ""))
            )
        return Said(rows, text, int(usage.get("prompt_tokens") or 0), cached if isinstance(cached, int) else None)

    def chat_rows(self, choice: dict[str, Any]) -> Rows:
        content = a_dict(choice.get("logprobs"), "logprobs").get("content")
        if not isinstance(content, list) or not content:
            raise Wrong(f"logprobs.content: saw {str(content)[:80]}, wanted a list of tokens")
        entries, tokens = [], []
        for place, one in enumerate(content):
            named = [*(one.get("top_logprobs") or []), one]
            entry = {self.number(str(each["token"])): finite(each["logprob"], "logprobs", place) for each in named}
            entries.append(entry)
            tokens.append(self.number(str(one["token"])))
        return rows_of(entries, tokens)

    def number(self, token: str) -> int:
        with self.lock:  # up to 16 answers come at once
            return self.known.setdefault(token, len(self.known))

    def begun(self, turn: Turn, before: Prompt, answer: Said | None) -> Prompt:
        """The prompt of a turn: that before, what was answered, and the turn's messages."""
        if not self.exact:
            said: list[Message] = [{"role": "assistant", "content": answer.text}] if answer else []
            return [*before, *said, *turn.messages]
        ids = [*before, *(int(token) for token in answer.rows.tokens)] if answer else []
        return [*ids, *fitted(self.rendered(turn.messages), max(turn.tokens - len(ids), 1))]

    def rendered(self, messages: Sequence[Message]) -> list[int]:
        """By the server's own template; by none where that refuses a conversation that begins so."""
        asked = {"model": self.model, "messages": list(messages), "add_generation_prompt": True, "tools": list(TOOLS)}
        reply = self.client.post("/tokenize", asked)
        if reply.status != 200:
            text = "\n".join(str(message["content"]) for message in messages)
            reply = self.client.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        tokens = json_of(reply).get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
            raise Wrong(f"/tokenize: saw {str(tokens)[:80]}, wanted a list of numbers")
        return tokens

    def other(self, prompt: Prompt, seed: int) -> Prompt:
        return other_text(prompt, seed) if self.exact else other_messages(prompt, seed)

    def scraped(self) -> str:
        """/metrics, "" where there is none."""
        with contextlib.suppress(Fault):
            reply = self.client.get("/metrics")
            if reply.status == 200:
                return reply.body.decode(errors="replace")
        return ""


def letters(text: str) -> Rows:
    """A server that tells no log-probabilities: each character is as sure as can be."""
    return rows_of([{ord(character): 0.0} for character in text], [ord(character) for character in text])


def meet(client: Client, model: str = "") -> ProvedEndpoint:
    """Find out what a server takes and tells. model: its name there, "" for the first that it lists.

    Wrong or Fault where it answers no chat at all.
    """
    listed = models_of(client)
    names = [str(one.get("id")) for one in listed]
    met = ProvedEndpoint(client, model or names[0])
    room = next((one.get("max_model_len") for one in listed if one.get("id") == met.model), None)
    met.room = room if isinstance(room, int) else None
    with contextlib.suppress(Fault, Wrong):
        met.version = str(json_of(client.get("/version")).get("version") or "")
    described = re.search(rf"^{INFO}\{{(.*)\}}", met.scraped(), re.M)
    told = dict(re.findall(r'(\w+)="([^"]*)"', described[1])) if described else {}
    met.block = number_of(told.get("block_size"))
    met.capacity = number_of(told.get("kv_cache_size_tokens")) or product(met.block, told.get("num_gpu_blocks"))
    met.caching = {"True": True, "False": False}.get(told.get("enable_prefix_caching", ""))
    if met.caching is False:
        met.block = met.capacity = None
        met.notes.append("prefix caching is off, as /metrics says: no fault of a cache can be found")
    try:
        find_form(met)
    except Wrong as wrong:
        if met.model in names:
            raise
        raise Wrong(f"model {met.model}: not among those that it lists, {', '.join(names)[:160]}; {wrong}") from None
    find_salt(met)
    note_usage(met)
    return met


def models_of(client: Client) -> list[dict[str, Any]]:
    reply = client.get("/v1/models")
    is_json = reply.body.lstrip().startswith(b"{")  # a page for people is not repeated
    if reply.status == 404 or not is_json:
        seen = "a page that is no JSON" if reply.status == 200 else f"status {reply.status}"
        raise Wrong(f"no OpenAI endpoint: /v1/models: saw {seen}, wanted a list of models")
    models = json_of(reply).get("data")
    if not isinstance(models, list) or not models:
        raise Wrong(f"/v1/models: saw {str(models)[:80]}, wanted a list of models")
    return [a_dict(one, "/v1/models") for one in models]


def number_of(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def product(block: int | None, blocks: str | None) -> int | None:
    count = number_of(blocks)
    return block * count if block and count else None


def find_form(met: ProvedEndpoint) -> None:
    """Tokens first, then messages with log-probabilities, then without."""
    refused = ""
    met.salted = False  # another thing that it may refuse
    for met.exact in (True, False):
        for met.top in TOPS:
            try:
                prompt = met.rendered(PROBE) if met.exact else PROBE
                met.ask(prompt, "", PROBED)
                return
            except (Wrong, Fault) as wrong:
                refused = str(wrong)
    met.top = 0
    met.ask(PROBE, "", PROBED)
    met.notes.append(f"no log-probabilities ({refused[:160]}): words alone are compared, and small faults go unseen")


def find_salt(met: ProvedEndpoint) -> None:
    met.salted = True
    try:
        met.ask(met.rendered(PROBE) if met.exact else PROBE, "probe", PROBED)
    except (Wrong, Fault):
        met.salted = False


def note_usage(met: ProvedEndpoint) -> None:
    """What a stream counts must be what the same answer in one piece has."""
    prompt = met.rendered(PROBE) if met.exact else PROBE
    whole = json_of(met.client.post(met.path, met.body(prompt, "usage", PROBED)))
    asked = met.body(prompt, "usage", PROBED, stream=True, stream_options={"include_usage": True})
    usage = a_dict(whole.get("usage"), "usage")
    wanted = {key: usage.get(key) for key in ("prompt_tokens", "completion_tokens")}
    if met.exact and wanted["prompt_tokens"] != len(prompt):
        met.notes.append(f"usage: saw {wanted['prompt_tokens']} prompt tokens of {len(prompt)} that were sent")
    try:
        chunks = parse_chunks(met.client.post(met.path, asked).body)
        usages = [a_dict(chunk["usage"], "usage") for chunk in chunks if chunk.get("usage")]
    except (BadStream, Fault, Wrong) as fault:
        met.notes.append(f"its stream cannot be read: {str(fault)[:160]}")
        return
    seen = {key: usages[-1].get(key) for key in wanted} if usages else None
    if seen != wanted:
        met.notes.append(f"streams wrong usage: saw {seen}, wanted {wanted} as of the whole answer")
