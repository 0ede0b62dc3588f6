"""One text, read by a server: the log-probabilities of its tokens, and of a greedy continuation.

Both come from one request. Reading goes through the prefill's kernels alone; a cache that is compressed, drafts and the
kernels of decoding show in the continuation.
"""

from __future__ import annotations

import math
from typing import Any

from sparkpin.measure.quality.distance import Rows, rows_of
from sparkpin.measure.quality.measured import Reading
from sparkpin.measure.quality.texts import CorpusText
from sparkpin.smoke.answers import Wrong, a_dict, json_of, only_choice, require
from sparkpin.smoke.client import Client
from sparkpin.smoke.replies import Reply

TOP = 20  # what vLLM allows at most, unless --max-logprobs says otherwise
CONTINUED = 48  # tokens
MOST = 768  # tokens read of a text: a vocabulary of 248,320 takes 1 MB of logits a token, in 32 bits
ID = "token_id:"


def version(client: Client) -> str:
    return str(json_of(client.get("/version")).get("version") or "")


def room(client: Client) -> int:
    """Tokens that a request may have in all."""
    found = models_of(client)[0].get("max_model_len")
    if not isinstance(found, int):
        raise Wrong(f"/v1/models: max_model_len: got {found!r}, expected a number")
    return found


def models_of(client: Client) -> list[dict[str, Any]]:
    reply = client.get("/v1/models")
    is_json = reply.body.lstrip().startswith(b"{")  # a page for people is not repeated
    if reply.status == 404 or not is_json:
        seen = "a page that is no JSON" if reply.status == 200 else f"status {reply.status}"
        raise Wrong(f"no OpenAI endpoint: /v1/models: got {seen}, expected a list of models")
    models = json_of(reply).get("data")
    if not isinstance(models, list) or not models:
        raise Wrong(f"/v1/models: got {str(models)[:80]}, expected a list of models")
    return [a_dict(one, "/v1/models") for one in models]


def tokens_of(client: Client, model: str, text: str) -> list[int]:
    return tokens_in(client.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}))


def tokens_in(reply: Reply) -> list[int]:
    tokens = json_of(reply).get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        raise Wrong(f"/tokenize: got {str(tokens)[:80]}, expected a list of numbers")
    return tokens


def reading(client: Client, model: str, text: CorpusText, most: int) -> Reading:
    """most: tokens that may be read of a text. Wrong for an answer that lacks a log-probability."""
    tokens = tokens_of(client, model, text.text)[:most]
    require(len(tokens) > 1, f"{text.name}: {len(tokens)} tokens, expected two at least")
    body = {
        "model": model,
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": CONTINUED,
        "prompt_logprobs": TOP,
        "logprobs": TOP,
        "return_tokens_as_token_ids": True,
    }
    choice = only_choice(json_of(client.post("/v1/completions", body)))
    return Reading(
        text.name, text.kind, tokens[0], forced(choice, tokens, text.name), continued(choice, f"after {text.name}")
    )


def forced(choice: dict[str, Any], tokens: list[int], where: str) -> Rows:
    """Of `prompt_logprobs`: null for the first token, then an object for each, by token id."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        raise Wrong(f"{where}: prompt_logprobs: expected a list of {len(tokens)}, got {str(entries)[:80]}")
    found = []
    for place, (entry, token) in enumerate(zip(entries[1:], tokens[1:], strict=True), start=1):
        row = {
            int(key): finite(a_dict(value, where).get("logprob"), where, place)
            for key, value in a_dict(entry, f"{where}: prompt_logprobs[{place}]").items()
        }
        require(token in row, f"{where}: prompt_logprobs[{place}] lacks the prompt's own token {token}")
        found.append(row)
    return rows_of(found, tokens[1:])


def continued(choice: dict[str, Any], where: str) -> Rows:
    """Of `logprobs` with return_tokens_as_token_ids: names such as "token_id:257"."""
    logprobs = a_dict(choice.get("logprobs"), f"{where}: logprobs")
    names, tops, values = (logprobs.get(key) for key in ("tokens", "top_logprobs", "token_logprobs"))
    if not isinstance(names, list) or not isinstance(tops, list) or not isinstance(values, list) or not names:
        raise Wrong(f"{where}: logprobs: got {str(logprobs)[:80]}, expected tokens, top_logprobs and token_logprobs")
    tokens = [identity(name, where) for name in names]
    found = []
    for place, (token, top, value) in enumerate(zip(tokens, tops, values, strict=True)):
        entry = a_dict(top, f"{where}: top_logprobs[{place}]")
        row = {identity(key, where): finite(one, where, place) for key, one in entry.items()}
        found.append(row | {token: finite(value, where, place)})
    return rows_of(found, tokens)


def identity(name: Any, where: str) -> int:
    if not isinstance(name, str) or not name.removeprefix(ID).isdecimal():
        raise Wrong(f"{where}: got the token {name!r}, expected {ID}<number>")
    return int(name.removeprefix(ID))


def finite(value: Any, where: str, place: int) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
        raise Wrong(f"{where}, token {place}: log-probability {value!r}, expected a finite one, 0 at most")
    return float(value)
