"""Log-probabilities as a server of OpenAI's API gives them: of a prompt's tokens, and of those that it answers with.

vLLM's names are asked for: `prompt_logprobs`, and token ids in the place of texts, since two tokens may share a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sparkpin.smoke.answers import NOTHING, Wrong, a_dict, json_of, only_choice, require

if TYPE_CHECKING:  # as in subject.py
    from sparkpin.smoke.client import Client

FEWEST = 50  # tokens of a text; a mean over less says little
ID = "token_id:"
Row = tuple[int, dict[int, float]]
"""At one position: the token that follows, and the log-probabilities of the likeliest tokens and of that one."""


def complete(client: Client, model: str, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
    """The whole answer to a greedy request. Wrong or Fault for what is none. prompt: text, or token ids."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "return_tokens_as_token_ids": True, **more}
    return json_of(client.post("/v1/completions", body))


def logprobs_of(client: Client, model: str, text: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probabilities of a text's tokens but the first, which has none."""
    rows = prompt_rows(only_choice(complete(client, model, text, max_tokens=1, prompt_logprobs=0)), "the text")
    require(len(rows) + 1 >= FEWEST, f"prompt_logprobs: got {len(rows) + 1} tokens, expected {FEWEST} at least")
    require(all(row[token] > NOTHING for token, row in rows), f"prompt_logprobs: {NOTHING} stands for minus infinity")
    return tuple(token for token, _ in rows), tuple(row[token] for token, row in rows)


def prompt_rows(choice: dict[str, Any], where: str, tokens: Sequence[int] = ()) -> list[Row]:
    """A row for each token of the prompt but the first. tokens: the prompt's, needed where likelier ones are told."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or (tokens and len(entries) != len(tokens)):
        raise Wrong(f"{where}: prompt_logprobs: got {str(entries)[:80]}, expected a list of {len(tokens) or 'objects'}")
    found = []
    for place, entry in enumerate(entries[1:], start=1):
        named = a_dict(entry, f"{where}: prompt_logprobs[{place}]").items()
        row = row_of(((key, a_dict(value, where).get("logprob")) for key, value in named), f"{where}, token {place}")
        require(bool(tokens) or len(row) == 1, f"prompt_logprobs[{place}]: got {len(row)} tokens, expected one")
        token = tokens[place] if tokens else next(iter(row))
        require(token in row, f"{where}: prompt_logprobs[{place}] lacks the prompt's own token {token}")
        found.append((token, row))
    return found


def answer_rows(choice: dict[str, Any], where: str) -> list[Row]:
    """A row for each token of the answer, of `logprobs` with names such as "token_id:257"."""
    logprobs = a_dict(choice.get("logprobs"), f"{where}: logprobs")
    lists = [logprobs.get(key) for key in ("tokens", "top_logprobs", "token_logprobs")]
    if not all(isinstance(one, list) and len(one) == len(lists[0] or ()) > 0 for one in lists):
        raise Wrong(f"{where}: logprobs: got {str(logprobs)[:80]}, expected tokens, top_logprobs and token_logprobs")
    found = []
    for place, (name, top, value) in enumerate(zip(*lists, strict=True)):
        row = row_of([*a_dict(top, f"{where}: top_logprobs").items(), (name, value)], f"{where}, token {place}")
        found.append((next(reversed(row)), row))
    return found


def row_of(entries: Iterable[tuple[Any, Any]], where: str) -> dict[int, float]:
    """The last entry comes last, also where it is among the others."""
    row = dict[int, float]()
    for name, value in entries:
        key = str(name).removeprefix(ID)
        require(key.isdecimal() and len(key) < 10, f"{where}: got the token {str(name)[:80]!r}, expected its number")
        if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
            raise Wrong(f"{where}: log-probability {value!r}, expected a finite one, 0 at most")
        row.pop(int(key), None)
        row[int(key)] = float(value)
    return row
