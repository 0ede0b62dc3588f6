"""Log-probabilities as a server of OpenAI's API gives them: of a prompt's tokens, and of those that it answers with.
How far a stage's are from those of the stage below it (the check `drift`).

vLLM's names are asked for: `prompt_logprobs`, and token ids in the place of texts, since two tokens may share a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any
from zlib import crc32

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.answers import NOTHING, NotApplicable, Wrong, a_dict, json_of, only_choice, require, require_valid
from sparkpin.smoke.client import Client
from sparkpin.smoke.evidence import evidence_folder
from sparkpin.smoke.expectations import table
from sparkpin.smoke.subject import Reference, SmokeSubject

FILE = "logprobs.json"
SAME = 0.01  # nats: what the same text may differ by when it is asked again, on the mean
FEWEST = 50  # tokens of a text; a mean over less says little
ID = "token_id:"
# At one position: the token that follows, and the log-probabilities of the likeliest tokens and of that one.
Row = tuple[int, dict[int, float]]


def complete(client: Client, model: str, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
    """The whole answer to a greedy request. Wrong or Fault for what is none. prompt: text, or token ids."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "return_tokens_as_token_ids": True, **more}
    return json_of(client.post("/v1/completions", body))


def logprobs_of(client: Client, model: str, text: str) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of a text's tokens but the first, which has none."""
    rows = prompt_rows(only_choice(complete(client, model, text, max_tokens=1, prompt_logprobs=0)), "the text")
    require(len(rows) + 1 >= FEWEST, f"prompt_logprobs: got {len(rows) + 1} tokens, expected {FEWEST} at least")
    require(all(row[token] > NOTHING for token, row in rows), f"prompt_logprobs: {NOTHING} stands for minus infinity")
    return [token for token, _ in rows], [row[token] for token, row in rows]


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


def listed(choice: dict[str, Any], where: str) -> dict[str, Any]:
    """Its `logprobs` as completions have them, also where they come as those of a chat do (llama.cpp)."""
    found = a_dict(choice.get("logprobs"), f"{where}: logprobs")
    if "content" not in found:
        return found
    require_valid(choice, table()["schemas"]["logprobs"], where)
    keys = {"tokens": "token", "token_logprobs": "logprob"}
    tops = [{one["token"]: one["logprob"] for one in row["top_logprobs"]} for row in found["content"]]
    return {name: [row[key] for row in found["content"]] for name, key in keys.items()} | {"top_logprobs": tops}


def answer_rows(choice: dict[str, Any], where: str, *, by_text: bool = False) -> list[Row]:
    """A row for each token of the answer, of `logprobs` with names such as "token_id:257"; or with texts, each of which
    gets a number."""
    logprobs = listed(choice, where)
    lists = [logprobs.get(key) for key in ("tokens", "top_logprobs", "token_logprobs")]
    if not all(isinstance(one, list) and len(one) == len(lists[0] or ()) > 0 for one in lists):
        raise Wrong(f"{where}: logprobs: got {str(logprobs)[:80]}, expected tokens, top_logprobs and token_logprobs")
    found = []
    for place, (name, top, value) in enumerate(zip(*lists, strict=True)):
        named = [*a_dict(top, f"{where}: top_logprobs").items(), (name, value)]
        entries = ((crc32(str(key).encode()) % 10**9, value) for key, value in named) if by_text else named
        row = row_of(entries, f"{where}, token {place}")
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


def drift(subject: SmokeSubject) -> str:
    """The text's log-probabilities, twice with another request between, and against the reference if there is one.

    An answer can survive wrong numbers: with all logits halved the likeliest token stays the likeliest.
    """
    text, demands = subject.expect.text, subject.demands
    tokens, first = logprobs_of(subject.client, subject.model, text)
    subject.post(subject.expect.cases["completion"])
    same, second = logprobs_of(subject.client, subject.model, text)
    require(same == tokens, "asked again the text has other tokens")
    again = fmean(differences(first, second))
    require(again <= SAME, f"asked again the text differs by {again:.3f} on the mean, expected at most {SAME}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    subject.leaves[FILE] = {"text": digest, "tokens": tokens, "logprobs": first}
    summary, below, limit = f"{len(first)} tokens, on the mean {fmean(first):.2f}", subject.reference, demands.drift
    if limit is None:
        return f"{summary}; no stage below to compare with"
    if below is None:
        cause = f"no release of stage {demands.parent}, which it is compared with, has passed: test that first"
        raise NotApplicable(cause)
    if (below.text, below.tokens) != (digest, tokens):
        raise NotApplicable(f"{below.release} was asked another text, or has other tokens: test that again first")
    nats = differences(first, below.logprobs)
    detail = f"{fmean(nats):.4f} from {below.release}, expected at most {limit:g}"
    require(fmean(nats) <= limit, f"{detail}; the most {max(nats):.2f}")
    return f"{summary}; {detail}"


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def reference(paths: Paths, release: Release) -> Reference | None:
    """Of the newest release of the stage below, of the same recipe and model, that has passed and left its own."""
    if not release.demands.parent:
        return None
    known, _ = Releases(paths).readable(release.recipe)
    for other in reversed(known):
        if other.stage == release.demands.parent and other.model == release.model and other.smoke_passed:
            with contextlib.suppress(FileNotFoundError):
                return Reference(other.tag, **json.loads((evidence_folder(paths, other) / FILE).read_text()))
    return None
