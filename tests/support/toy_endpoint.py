"""An OpenAI endpoint over a toy model: the next token follows from a hash of all that came before, so that any fault of
a cache shows. For what no real server of ours does: other fields, noise. In this process.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from json import dumps
from typing import Any

import httpx

from sparkpin.smoke.client import Client

BLOCK = 16
VOCABULARY = 64
FIRST = ord("0")  # of its tokens as text
MODELS = [{"id": "toy", "max_model_len": 4096}]


@dataclass
class ToyEndpoint:
    """tokens, salts, metrics: what it takes or tells. Without tokens it takes text, answers as llama.cpp does, and does
    not see the first line.

    noise: of its logits; sees: it uses more of its context than the last token; caches: it has a prefix cache; fault:
    "lost", the state of a hit, "kept", nothing is ever cold, "nan", no number after a hit, which vLLM refuses as it
    does, or "mute", no log-probabilities; drafts: it says that it drafts two for each token; off: prompts and lengths
    of hits whose answers are off, a logit by `far`."""

    tokens: bool = True
    salts: bool = True
    metrics: bool = True
    noise: float = 0.0
    sees: bool = True
    caches: bool = True
    fault: str = ""
    drafts: bool = False
    off: Callable[[list[int], int], bool] = lambda ids, hit: False
    far: float = 1.0
    hits: int = 0
    drafted: int = 0
    kept: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self) -> Client:
        transport = httpx.MockTransport(self.answer)
        return Client(httpx.Client(transport=transport, base_url="http://toy"), timeout=10)

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        with self.lock:
            if path == "/v1/models":
                return answered(200, json={"data": MODELS})
            if path == "/version":
                return answered(200, json={"version": "toy"})
            if path == "/metrics" and (self.metrics or self.drafts):
                return answered(200, text=self.scraped())
            if path == "/tokenize" and not self.tokens:
                return answered(200, json={"tokens": []})  # as llama.cpp does
            if path == "/tokenize":
                text = json.dumps(body["messages"]) if "messages" in body else body["prompt"]
                return answered(200, json={"tokens": list(text.encode())})
            if path == "/v1/completions":
                prompt = body["prompt"]
                if self.tokens == isinstance(prompt, str):
                    return answered(400, json={"error": "the prompt is of another type"})
                return self.complete(prompt if self.tokens else list(prompt.encode()), body)
            return answered(404, json={"error": "no such path"})

    def scraped(self) -> str:
        told = ""
        if self.metrics:
            sizes = f'block_size="{BLOCK}",enable_prefix_caching="{self.caches}",num_gpu_blocks="64"'
            told += f"vllm:cache_config_info{{{sizes}}} 1.0\n"
            told += f"vllm:prefix_cache_hits_total {self.hits}\nvllm:num_preemptions_total 0\n"
        if self.drafts:
            told += f"vllm:spec_decode_num_draft_tokens_total {self.drafted}\n"
            told += f"vllm:spec_decode_num_accepted_tokens_total {self.drafted // 2}\n"
        return told

    def complete(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
        if "cache_salt" in body and not self.salts:
            return answered(400, json={"error": "unknown field cache_salt"})
        salt = "" if self.fault == "kept" else body.get("cache_salt", "")
        ends = range(BLOCK, len(ids), BLOCK)
        hit = 0 if not self.caches else max((end for end in ends if (salt, tuple(ids[:end])) in self.kept), default=0)
        self.hits += hit
        if hit and self.fault == "nan":
            return answered(400, json={"error": {"message": "Out of range float values are not JSON compliant"}})
        said, rows, shift = list[int](), list[dict[int, float]](), 0 if self.tokens else FIRST
        for _ in range(body["max_tokens"]):
            rows.append(self.row([*ids, *said], hit, self.off(ids, hit)))
            said.append(shift + max(rows[-1], key=lambda token: rows[-1][token]))
        self.drafted += 2 * len(said)
        whole = [*ids, *said]
        self.kept |= {(salt, tuple(whole[:end])) for end in range(BLOCK, len(whole), BLOCK)}
        if body.get("stream"):
            return answered(200, text="data: {}\n\n")
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(said)}
        tops = [
            {f"token_id:{token}" if self.tokens else chr(FIRST + token): value
             for token, value in sorted(row.items(), key=lambda pair: -pair[1])[:5]} for row in rows
        ]  # fmt: skip
        best = [next(iter(top.items())) for top in tops]
        logprobs: dict[str, Any] = {"tokens": [name for name, _ in best], "top_logprobs": tops}
        logprobs |= {"token_logprobs": [value for _, value in best]}
        if not self.tokens:
            usage |= {"prompt_tokens_details": {"cached_tokens": hit}}
            listed = [[{"token": name, "logprob": value} for name, value in top.items()] for top in tops]
            logprobs = {"content": [own[0] | {"top_logprobs": own} for own in listed]}
        text = "".join(chr(token if shift else FIRST + token) for token in said)
        choice = {"text": text, "logprobs": None if self.fault == "mute" else logprobs}
        return answered(200, json={"choices": [choice], "usage": usage})

    def row(self, ids: list[int], hit: int, off: bool) -> dict[int, float]:
        first = 0 if self.tokens else ids.index(ord("\n")) + 1
        seen = ids[max(first, hit if self.fault == "lost" else 0) :]
        seen = seen if self.sees else seen[-1:]
        digest = hashlib.shake_256(str(seen).encode()).digest(VOCABULARY)
        logits = [value / 16 + self.chance.gauss(0, self.noise) for value in digest]
        if off and hit:
            logits[max(range(VOCABULARY), key=logits.__getitem__)] += self.far
        total = math.log(sum(map(math.exp, logits)))
        return {token: value - total for token, value in enumerate(logits)}


def answered(status: int, *, text: str = "", json: Any = None) -> httpx.Response:
    """A stream, as a client reads it."""
    body = dumps(json) if json is not None else text
    return httpx.Response(status, stream=httpx.ByteStream(body.encode()))
