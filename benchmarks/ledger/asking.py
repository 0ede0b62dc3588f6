"""What is asked of a server for the ledger, and for a proof with planted faults. The project's src is on the path.

`invoke quality` and `invoke prove` start containers; this asks an address, in threads, with the same functions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import time
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from compared import PROOF
from sparkpin_sabotage import switch

from sparkpin.core.terminal import say
from sparkpin.measure.prove import run, sessions, verdict
from sparkpin.measure.prove.run import meet
from sparkpin.measure.quality import corpus as texts
from sparkpin.measure.quality import run as quality
from sparkpin.measure.quality.corpus import CorpusText, SkillAnswer
from sparkpin.measure.quality.distance import rows_of
from sparkpin.measure.quality.run import QualityMeasured, Reading
from sparkpin.releases.record import Demands
from sparkpin.smoke import metrics
from sparkpin.smoke.answers import Wrong, json_of, only_choice
from sparkpin.smoke.client import Client, Fault
from sparkpin.smoke.expectations import Case, chat_request, expectations
from sparkpin.smoke.subject import SmokeSubject

DEMANDS = Demands(checks=(), mods=(), acceptance_floor=None, scripted=False)
AT_ONCE = 8  # questions
SHORT = 400  # tokens of an answer: a model of this size may never stop
LENGTHS = (500, 1000, 2000, 4000, 8000, 14000)  # tokens between a needle and where it is wanted
COPIES = 3  # needles of each length
PLACES = (0, 1024, 2048, 4096, 8192)  # tokens: parts of a long text; an answer with more is beyond the client
FILLER = " ".join(f"Log {number}: the gate was opened, then closed." for number in range(99))
CROSSING = (-1, -2, -3, -5, -8, -13)  # tokens, of the 16 that are decoded
FAULTS = {name: way for name, (way, _) in verdict.PLANTED.items()}
FILLING = 240.0  # seconds, as a cold pass goes, whose time decoding takes; filling is faster
SWITCHED = 30.0  # seconds that the engine may take to plant a fault


def subject_at(client: Client) -> SmokeSubject:
    """As if its model could say no more than SHORT tokens."""
    return SmokeSubject(client, "m", expectations("any"), lambda: (b"",), DEMANDS, ("--max-model-len", str(2 * SHORT)))


def measured(client: Client) -> tuple[QualityMeasured, dict[str, Any]]:
    """As `invoke quality`, with shorter answers, and with needles of more lengths."""
    begin, corpus, notes, subject = time.monotonic(), texts.load(), list[str](), subject_at(client)
    readings = quality.read_all(subject, corpus, notes)
    told = drafts_of(client)
    found = needles(client)
    found += texts.ask_tools(subject, corpus)
    client.exchanges.clear()
    told["tool_calls"] = sum(one.right for one in found if one.skill == texts.TOOL_CALLS)
    told["tokens_a_second"] = speed(client)
    seconds = round(time.monotonic() - begin, 1)
    return QualityMeasured(version_of(client), seconds, readings, tuple(found), tuple(notes)), told


def long_texts(client: Client) -> QualityMeasured:
    """Two files of Python's own library, each read in one request, in parts by place: does a loss grow on the way?"""
    begin, readings = time.monotonic(), list[Reading]()
    for module in (argparse, typing):
        name = module.__name__
        text = CorpusText("long", name, inspect.getsource(module))
        whole = quality.read_text(client, "m", text, min(PLACES[-1], room_of(client) - quality.CONTINUED - 1))
        readings += [part(whole, low, high) for low, high in itertools.pairwise(PLACES) if low < len(whole.forced)]
    say(f"long texts: {sum(len(one.forced) for one in readings):,} tokens")
    return QualityMeasured(version_of(client), round(time.monotonic() - begin, 1), tuple(readings), (), ())


def version_of(client: Client) -> str:
    return str(json_of(client.get("/version")).get("version"))


def room_of(client: Client) -> int:
    return int(quality.models_of(client)[0]["max_model_len"])


def part(whole: Reading, low: int, high: int) -> Reading:
    """Its tokens from `low` to `high`; the kind is the place, so that figures are told by place."""
    first = int(whole.forced.tokens[low - 1]) if low else whole.first
    return Reading(f"{whole.name} from {low}", f"from {low:,}", first, whole.forced[low:high], whole.continued)


def needles(client: Client) -> list[SkillAnswer]:
    """A line far up a log, whose beginning stands at its end: the word that follows is copied. Without a template."""
    cases = [(length, copy) for length in LENGTHS for copy in range(COPIES)]
    room, words = room_of(client), expectations("any").recall(64)[0].holds

    def one(case: tuple[int, int]) -> SkillAnswer:
        length, copy = case
        begin, word = f"Note {copy + 1}: the pass word of the north gate is", words[copy]
        filler = quality.tokens_of(client, "m", FILLER)
        head, tail = quality.tokens_of(client, "m", f"{begin} {word}.\n"), quality.tokens_of(client, "m", begin)
        prompt = head + (filler * (length // len(filler) + 1))[: length - len(tail)] + tail
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        name, skill = f"{length:,} tokens, {word}", f"{texts.NEEDLES}, {length:,} tokens"
        try:
            text = str(only_choice(json_of(client.post("/v1/completions", body))).get("text"))
        except (Wrong, Fault) as fault:
            return SkillAnswer(skill, name, False, str(fault)[:200])
        return SkillAnswer(skill, name, text.strip().startswith(word), "" if word in text else repr(text[:60]))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(one, [case for case in cases if case[0] + 100 < room]))
    for case in expectations("any").recall(1000):  # by chat, as the smoke test asks
        found += recalled(client, case)
    say(f"needles: {sum(one.right for one in found)} of {len(found)}")
    return found


def recalled(client: Client, case: Case) -> list[SkillAnswer]:
    subject = subject_at(client)
    short = dataclasses.replace(case, request=case.request | {"max_tokens": SHORT // 2})
    try:
        content = str(subject.chat(short).content)
    except (Wrong, Fault) as fault:
        content = f"({fault})"
    return [SkillAnswer(f"{texts.NEEDLES}, by chat", word, word in content, content[:60]) for word in case.holds]


def speed(client: Client) -> float:
    """Tokens a second of one stream, while others use the GPU, too."""
    asked = chat_request("Count from one to two hundred, please.")
    body = {"model": "m", "temperature": 0, "ignore_eos": True, **asked}
    begin = time.monotonic()
    client.post("/v1/chat/completions", body | {"max_tokens": 1})
    middle = time.monotonic()
    client.post("/v1/chat/completions", body | {"max_tokens": 129})
    return round(128 / max(time.monotonic() - middle - (middle - begin), 1e-3), 1)


def scraped_of(client: Client) -> str:
    return client.get("/metrics").body.decode(errors="replace")


def drafted(client: Client) -> dict[str, Any]:
    """Drafts accepted, of answers of the scripted model; the last prompt alone is longer than a block."""
    for text in ("hello", "something long", "Count from one to two hundred, please.", 80 * "What is in this file? "):
        client.post("/v1/chat/completions", {"model": "m", "temperature": 0, "max_tokens": 256, **chat_request(text)})
    return drafts_of(client)


def drafts_of(client: Client) -> dict[str, Any]:
    """Since the server began; nothing of one that does not draft."""
    counts = metrics.DraftCounts.read(scraped_of(client))
    return {"drafted": counts.drafted, "accepted": counts.accepted, "by_position": counts.shares} if counts else {}


def first_words(client: Client) -> str:
    body = {"model": "m", "prompt": "The build of a node", "max_tokens": 24, "temperature": 0}
    return str(only_choice(json_of(client.post("/v1/completions", body))).get("text"))


def proved(client: Client, what: str, folder: Path) -> tuple[dict[str, Any], run.Proof]:
    met = meet(client)
    warm = run.begin(met, 2, (4, 2))  # kernels are compiled at their first use, and a cold pass's time is used
    warm.ask(run.COLD)
    warm.sent[run.CONCURRENT.name] = warm.steps_of(run.CONCURRENT)
    warm.ask(run.CONCURRENT)
    proof = run.begin(met, 1, (4, 3))
    with mock.patch.object(run, "FILL_SECONDS", FILLING):
        proof.run()
    found = dataclasses.asdict(verdict.conclude(proof, folder, what)) | {"block": proof.shape.block}
    return found | {"accepted": drafts_of(client).get("accepted")}, proof


def answers_of(proof: run.Proof) -> QualityMeasured:
    """The cold answers with their log-probabilities, to compare with those of a server without drafts. A reading's
    name has its prompt, since later prompts hold answers."""
    nothing = rows_of([])
    readings = [
        Reading(f"turn {key}, {hash(tuple(prompt))}", PROOF, prompt[0], nothing, said.rows)
        for key, (prompt, said) in enumerate(zip(proof.prompts, proof.cold, strict=True))
    ]
    return QualityMeasured(proof.met.version, 0.0, tuple(readings), ())


@contextlib.contextmanager
def crossing() -> Iterator[None]:
    once, shape = run.Proof.steps_of, {"EDGES": CROSSING, "STEP": 1.0}
    twice = mock.patch.object(run.Proof, "steps_of", lambda proof, way: once(proof, way) * (1 + (way is run.WARM)))
    with mock.patch.dict(vars(sessions), shape), twice:
        yield


def crossed(client: Client, what: str, folder: Path) -> dict[str, Any]:
    """Turns that end just before a block does, so that decoding fills it; and each asked again from the cache."""
    with crossing():
        proof = run.begin(meet(client), 3, (6, 3))
        proof.done = {run.EVICTED.name: run.WayResponses(hits=0)}  # asked before
        proof.run()
        return dataclasses.asdict(verdict.conclude(proof, folder, f"{what}, crossing"))


def faults(proof: run.Proof) -> list[str]:
    return [name for name, one in FAULTS.items() if one is not run.READ or proof.drafted]


def planted(proof: run.Proof, fault: str, folder: Path, sabotage: Path) -> dict[str, Any]:
    """The pass that should find it, asked again with the fault, and its verdict. What a fault cannot change is not
    asked again."""
    one = FAULTS[fault]
    done = {name: seen for name, seen in proof.done.items() if name != one.name}
    if one is run.READ:  # what was decoded soundly would be compared
        done = {way.name: run.WayResponses() for way in (run.WARM, run.CANCELLED, run.EVICTED)}
    prompts = [] if one is run.READ else proof.prompts
    broken = dataclasses.replace(proof, done=done, prompts=prompts, sent={**proof.sent})
    switch(sabotage, fault, ("engine",), SWITCHED)
    try:
        with mock.patch.object(run, "FILL_SECONDS", FILLING):
            broken.run()
        record = dataclasses.asdict(verdict.conclude(broken, folder, fault))
    finally:
        switch(sabotage, "", ("engine",), SWITCHED)
    sound = [round(distance, 4) for _, distance in proof.distances(one)]  # of the same server, without the fault
    return {"fault": fault, "way": one.name, "sound": sound, "record": record}
