"""Measure a release: its image serves its checkpoint, one server at a time, and only for what nobody has kept.

    SPARKPIN_CACHE/quality/<release key>-<what was asked>/measured.npz

A release's key decides its image, and so its vLLM: what one version has answered is never taken for another's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.measure.own_server import own_server
from sparkpin.measure.quality import corpus as asking
from sparkpin.measure.quality.corpus import Corpus, CorpusText, SkillAnswer
from sparkpin.measure.quality.distance import TOP, Rows, rows_of
from sparkpin.releases.quality_record import KEY_DIGITS
from sparkpin.releases.record import Release
from sparkpin.smoke import logprobs
from sparkpin.smoke.answers import Wrong, json_of, only_choice, require, require_valid
from sparkpin.smoke.client import Client, Exchange, Fault
from sparkpin.smoke.evidence import replaced
from sparkpin.smoke.expectations import expectations_of, table
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.subject import SmokeSubject

FORM = 3  # grows when a measurement of before would mean something else
CONTINUED = 48  # tokens
MOST = 768  # tokens read of a text: a vocabulary of 248,320 takes 1 MB of logits a token, in 32 bits
MEASURED = "measured.npz"
PARTS = tuple(Rows.__dataclass_fields__)


@dataclass(frozen=True)
class Reading:
    """Of one text."""

    name: str
    kind: str
    first: int  # its first token, which no log-probability belongs to
    forced: Rows  # a row for each token after it
    continued: Rows  # a row for each token of the greedy continuation


@dataclass(frozen=True)
class QualityMeasured:
    vllm: str  # what the server says it is
    seconds: float  # of measuring, the start of the server aside
    readings: tuple[Reading, ...]
    asked: tuple[SkillAnswer, ...]
    notes: tuple[str, ...] = ()  # what was left out, and why


def folder_of(paths: Paths, release: Release, corpus: Corpus) -> Path:
    """Of what is asked of the release. Answers to other questions are kept elsewhere."""
    text = json.dumps([FORM, corpus.digest(expectations_of(release.demands)), TOP, CONTINUED, MOST])
    return paths.cache / "quality" / f"{release.key[:KEY_DIGITS]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def measure(paths: Paths, engine: Engine, release: Release, corpus: Corpus) -> QualityMeasured:
    """From the cache as far as it goes, else from a server.

    Raises:
        DiskError, HostError, InputError, SmokeError: as `own_server`; SmokeError also without log-probabilities.
    """
    folder = folder_of(paths, release, corpus)
    if known := load(folder):
        say(f"{release.tag}: measured before")
        return known
    with own_server(paths, engine, release) as (server, client):
        found = ask_all(subject_of(release, client, server), corpus)
        # Else what it was asked after its end would be kept as wrong answers. An engine that is gone may leave a
        # container that runs for some seconds more.
        if server.exit_reason() or not any(client.healthy() for _ in range(3)):
            raise Fault("the server ended during the questions")
        save(folder, found)
    return found


def ask_all(subject: SmokeSubject, corpus: Corpus) -> QualityMeasured:
    """Wrong or Fault where the server gives no log-probabilities; a wrong answer to a question is a result."""
    begin, notes = time.monotonic(), list[str]()
    version = str(json_of(subject.client.get("/version")).get("version") or "")
    readings = read_all(subject, corpus, notes)
    with waiting("questions"):
        asked = [*asking.ask_tools(subject, corpus), *asking.ask_needles(subject, quick=corpus.quick)]
    if not any(one.skill.startswith(asking.NEEDLES) for one in asked):
        notes.append("no needles: --max-model-len leaves no room for a long prompt")
    say(f"{sum(one.right for one in asked)} of {len(asked)} questions answered")
    subject.client.exchanges.clear()  # megabytes of log-probabilities; what they say is kept
    return QualityMeasured(version, round(time.monotonic() - begin, 1), readings, tuple(asked), tuple(notes))


def read_all(subject: SmokeSubject, corpus: Corpus, notes: list[str]) -> tuple[Reading, ...]:
    limit = models_of(subject.client)[0].get("max_model_len")
    most = min(MOST, (limit if isinstance(limit, int) else MOST) - CONTINUED)
    if most < 2:
        raise Wrong(f"max_model_len {limit} leaves no room for a text and {CONTINUED} tokens after it")
    # A first answer may come from kernels that are still being tuned, and one more request is cheap.
    read_text(subject.client, subject.model, corpus.texts[0], min(most, 64))
    found = []
    for number, text in enumerate(corpus.texts, start=1):
        with waiting(f"reading text {number} of {len(corpus.texts)}"):
            found.append(read_text(subject.client, subject.model, text, most))
    if cut := sum(len(reading.forced) + 1 == most for reading in found):
        notes.append(f"{cut} of {len(found)} texts were read up to {most} tokens")
    return tuple(found)


def read_text(client: Client, model: str, text: CorpusText, most: int) -> Reading:
    """The text, and a greedy continuation, by one request. Reading goes through the prefill's kernels alone; a cache
    that is compressed, drafts and the kernels of decoding show in the continuation.

    most: tokens that may be read. Wrong for an answer that lacks a log-probability.
    """
    tokens = tokens_of(client, model, text.text)[:most]
    require(len(tokens) > 1, f"{text.name}: {len(tokens)} tokens, expected two at least")
    answer = logprobs.complete(client, model, tokens, max_tokens=CONTINUED, prompt_logprobs=TOP, logprobs=TOP)
    choice = only_choice(answer)
    forced = logprobs.prompt_rows(choice, text.name, tokens)
    continued = logprobs.answer_rows(choice, f"after {text.name}")
    return Reading(text.name, text.kind, tokens[0], rows_of(forced), rows_of(continued))


def models_of(client: Client) -> list[dict[str, Any]]:
    reply = client.get("/v1/models")
    # A page for people is not repeated.
    require(reply.body.lstrip().startswith(b"{"), f"no OpenAI endpoint: /v1/models: status {reply.status}, and no JSON")
    found = json_of(reply)
    require_valid(found, table()["schemas"]["models"], "/v1/models")
    return list(found["data"])


def tokens_of(client: Client, model: str, text: str) -> list[int]:
    return tokens_in(client.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}))


def tokens_in(reply: Exchange) -> list[int]:
    found = json_of(reply)
    require_valid(found, table()["schemas"]["tokens"], "/tokenize")
    return list(found["tokens"])


def save(folder: Path, measured: QualityMeasured) -> None:
    """In the place of what another run found meanwhile."""
    arrays = {
        f"{number}-{which}-{part}": getattr(getattr(reading, which), part)
        for number, reading in enumerate(measured.readings)
        for which in ("forced", "continued")
        for part in PARTS
    }
    value = {
        **{name: getattr(measured, name) for name in ("vllm", "seconds", "notes")},
        "readings": [[r.name, r.kind, r.first] for r in measured.readings],
        "asked": [asdict(one) for one in measured.asked],
    }
    with replaced(folder) as partial:
        np.savez_compressed(partial / MEASURED, **arrays, value=np.array(json.dumps(value)))


def load(folder: Path) -> QualityMeasured | None:
    """None where nothing was kept."""
    with contextlib.suppress(FileNotFoundError), np.load(folder / MEASURED) as arrays:
        value = json.loads(str(arrays["value"]))

        def rows(number: int, which: str) -> Rows:
            return Rows(*(arrays[f"{number}-{which}-{part}"] for part in PARTS))

        readings = tuple(
            Reading(name, kind, first, rows(number, "forced"), rows(number, "continued"))
            for number, (name, kind, first) in enumerate(value["readings"])
        )
        asked = tuple(SkillAnswer(**one) for one in value["asked"])
        return QualityMeasured(value["vllm"], value["seconds"], readings, asked, tuple(value["notes"]))
    return None
