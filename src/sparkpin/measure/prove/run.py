"""One server asked for the same prompts in every way.

vLLM takes prompts as tokens: so each length is exact, an answer comes back to it as it was said, and `cache_salt` makes
any of them cold. Another server is asked in words of text. Digits before each keep it apart in the cache in place of
the salt. They move the answers, so that cold ones differ by more than rounding, and a fault must go further to show.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.measure.prove import sessions
from sparkpin.measure.prove.sessions import Message, Prompt, Shape, Turn
from sparkpin.measure.quality.distance import TOP, Rows, distance, rows_of
from sparkpin.measure.quality.run import models_of, tokens_in, tokens_of
from sparkpin.smoke import logprobs, metrics
from sparkpin.smoke.answers import Wrong, a_dict, json_of, only_choice, require
from sparkpin.smoke.client import Client, Fault

INFO = "vllm:cache_config_info"
TEXT = "The build of a node keeps a log of each step, and the index of its files. "
PROBE: list[Message] = [{"role": "user", "content": 14 * TEXT}]
AT_ONCE = 16
TOKENS = 16  # of an answer
BROKEN_OFF = 4 * TOKENS  # of an answer whose client goes away
READ_AT = (TOKENS - 1, TOKENS // 2)  # tokens of an answer that are read again, with its prompt
CONTROLS = 4  # prompts that are asked with other text
SETTLE = 0.5  # seconds in which a server's counters follow its answers
FILL_SECONDS = 90.0  # that filling the cache may take
ROOM = 4096  # tokens, where nobody tells how long a request may be
FEW = 5  # log-probabilities at a position: what OpenAI's API allows of completions
LEAST_BLOCK = 8  # tokens, where nobody tells how many a block has
# In vLLM's error 400 where log-probabilities are NaN: Python's word for what JSON cannot hold.
NO_NUMBERS = "Out of range float values"
NO_VLLM = "asked in text: digits before each prompt add to the noise, and drafts and the cache's size are not known"
NO_TOKEN = 2**31 - 1  # an id that no vocabulary has
REFUSED = (400, 404, 422)  # of a request that the server does not know


@dataclass(frozen=True)
class Step:
    """One request. key: which prompt's answer this is, None where nobody compares it; salt: requests with another one
    share no block of the cache; cancelled: its client goes away while it is answered.
    """

    prompt: Prompt
    salt: str
    key: int | None = None
    tokens: int = TOKENS
    cancelled: bool = False


@dataclass(frozen=True)
class Way:
    """cold: nothing of it may come from the cache. words: as a person says it."""

    name: str
    words: str
    cold: bool = False


COLD = Way("cold", "cold, alone", cold=True)
CONTROL = Way("control", "other text in the first third", cold=True)
CONCURRENT = Way("concurrent", f"cold, {AT_ONCE} at once", cold=True)
WARM = Way("warm", "warm, turn by turn")
EVICTED = Way("evicted", "warm, while others fill the cache")
CANCELLED = Way("cancelled", "warm, after requests that were broken off")
READ = Way("read", "decoded, then read as a prompt", cold=True)
# Those in which something may be found, the simplest to repeat first.
TRIED = (WARM, CANCELLED, EVICTED, CONCURRENT, READ)


@dataclass(frozen=True)
class Completion:
    """parts: of the answer, as a prompt has them; prompt: its tokens, 0 where the answer does not tell; cached: of them
    those that came from the cache, None where it does not tell."""

    rows: Rows
    parts: list[int | str] = field(default_factory=list)
    prompt: int = 0
    cached: int | None = None


@dataclass
class Endpoint:
    """room, block, capacity, caching: None where nobody tells; ids: prompts are tokens, not words; top: how many
    log-probabilities of each token are asked for; wide: tokens of a part of a prompt."""

    client: Client
    model: str
    room: int | None = None
    block: int | None = None
    capacity: int | None = None
    caching: bool | None = None
    version: str = ""
    ids: bool = True
    top: int = TOP
    wide: float = 1.0
    notes: list[str] = field(default_factory=list)

    def ask(self, prompt: Prompt, salt: str = "", tokens: int = TOKENS) -> Completion:
        """Wrong or Fault for what is no answer. salt: "" for one that nobody else has."""
        body = self.body(prompt, salt or new_salt(), tokens) | {"temperature": 0, "logprobs": self.top}
        return completion_of(json_of(self.client.post("/v1/completions", body)), by_text=not self.ids)

    def body(self, prompt: Prompt, salt: str, tokens: int) -> dict[str, Any]:
        prompted: dict[str, Any] = {"prompt": f"{salt}\n{''.join(map(str, prompt))}"}
        if self.ids:
            prompted = {"prompt": prompt, "cache_salt": salt, "ignore_eos": True, "return_tokens_as_token_ids": True}
        return {"model": self.model, "max_tokens": tokens, **prompted}

    def send(self, steps: Sequence[Step], *, at_once: bool = False) -> list[Completion | None]:
        """The answers in the order of the steps; none of a request that was broken off."""
        # More than the cache holds would be broken off and begun again from what is in it: no cold readings any more.
        size = 4 * (max(len(step.prompt) for step in steps) + TOKENS)
        width = min(AT_ONCE, max(2, self.capacity // size if self.capacity else AT_ONCE))
        threads = ThreadPoolExecutor(width if at_once else 1)
        try:
            return list(threads.map(self.send_one, steps))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no answer

    def send_one(self, step: Step) -> Completion | None:
        """An answer without numbers, which a cold prompt had, is far off."""
        if step.cancelled:
            with contextlib.suppress(Fault):  # what is wrong shows in the answer after it
                body = self.body(step.prompt, step.salt, step.tokens)
                self.client.abandon("/v1/completions", body | {"stream": True})
            return None
        try:
            return self.ask(step.prompt, step.salt, step.tokens)
        except Wrong as wrong:
            if NO_NUMBERS not in str(wrong):
                raise
            return Completion(rows_of([(NO_TOKEN, {NO_TOKEN: 0.0})]), [NO_TOKEN])

    def rendered(self, messages: Sequence[Message]) -> Prompt:
        """By the server's own template; by none where that refuses a conversation that begins so, or is not known."""
        text = "\n".join(str(message["content"]) for message in messages)
        if not self.ids:
            return re.findall(r"\s*\S+", text)
        asked = {"model": self.model, "messages": list(messages), "tools": sessions.TOOLS}
        reply = self.client.post("/tokenize", asked | {"add_generation_prompt": True})
        return [*(tokens_in(reply) if reply.status == 200 else tokens_of(self.client, self.model, text))]


def completion_of(value: dict[str, Any], *, by_text: bool = False) -> Completion:
    """Wrong for an answer of another form."""
    choice, usage = only_choice(value), a_dict(value.get("usage") or {}, "usage")
    details = a_dict(usage.get("prompt_tokens_details") or {}, "prompt_tokens_details")
    prompt, cached = usage.get("prompt_tokens"), details.get("cached_tokens")
    counts = prompt if isinstance(prompt, int) else 0, cached if isinstance(cached, int) else None
    if by_text and not (choice.get("text") and choice.get("logprobs")):  # it ended at once, or amid a character
        return Completion(rows_of([]), [], *counts)
    rows = rows_of(logprobs.answer_rows(choice, "the answer", by_text=by_text))
    return Completion(rows, logprobs.listed(choice, "")["tokens"] if by_text else rows.tokens.tolist(), *counts)


def meet(client: Client, model: str = "") -> Endpoint:
    """What a server is and has. model: its name there, "" for the first that it lists.

    Wrong or Fault where it does not answer with log-probabilities.
    """
    listed = {str(one.get("id")): one for one in models_of(client)}
    met = Endpoint(client, model or next(iter(listed)))
    if met.model not in listed:
        raise Wrong(f"model {met.model}: not among those that it lists, {', '.join(listed)[:160]}")
    about = listed[met.model]
    room = about.get("max_model_len") or a_dict(about.get("meta") or {}, "meta").get("n_ctx")  # vLLM's and llama.cpp's
    met.room = room if isinstance(room, int) else None
    with contextlib.suppress(Fault, Wrong):
        met.version = str(json_of(client.get("/version")).get("version"))
    described = re.search(rf"^{INFO}\{{(.*)\}}", client.metrics(), re.M)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', described[1])) if described else {}
    numbers = {name: int(text) for name, text in labels.items() if text.isdecimal()}
    met.block, blocks = numbers.get("block_size"), numbers.get("num_gpu_blocks")
    met.capacity = numbers.get("kv_cache_size_tokens") or (met.block and blocks and met.block * blocks)
    met.caching = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    if met.caching is False:
        met.block = met.capacity = None
        met.notes.append("prefix caching is off, as /metrics says: no fault of a cache can be found")
    whys = list[str]()
    for ids, top in product((True, False), (TOP, FEW)):
        met.ids, met.top = ids, top
        try:
            answer = met.ask(probe := met.rendered(PROBE), tokens=8)
            require(len(answer.rows) > 0, "an empty answer")
        except Wrong as wrong:
            whys.append(str(wrong))
            last = client.exchanges[-1]
            if last.status in REFUSED or (last.status, last.path) == (200, "/tokenize"):  # llama.cpp: no tokens
                continue
            if last.status == 200:
                break
            raise
        if not ids:
            met.wide = (answer.prompt or len(probe)) / len(probe)
            met.notes.append(f"{NO_VLLM}; tokens were refused: {whys[0]}")
        return met
    raise Wrong(f"prove needs /v1/completions with log-probabilities: {'; '.join(dict.fromkeys(whys))}")


def new_salt() -> str:
    """Digits: as many tokens each time, by most tokenizers."""
    return f"{secrets.randbelow(10**12):012}"


@dataclass
class WayResponses:
    """Of a way. answers: key of a prompt -> its answers."""

    answers: dict[int, list[Completion]] = field(default_factory=dict)
    hits: int | None = None
    asked: int = 0
    seconds: float = 0.0
    drafted: int = 0


@dataclass
class Proof:
    """A run. prompts: one for each turn; done: by the way's name; sent: the steps of each."""

    met: Endpoint
    turns: list[Turn]
    shape: Shape
    prompts: list[Prompt] = field(default_factory=list)
    done: dict[str, WayResponses] = field(default_factory=dict)
    sent: dict[str, list[Step]] = field(default_factory=dict)

    @property
    def cold(self) -> list[Completion]:
        return [answer for (answer,) in self.done[COLD.name].answers.values()]

    @property
    def drafted(self) -> int:
        """Tokens of all ways, 0 where nobody drafts or tells."""
        return sum(way.drafted for way in self.done.values())

    def run(self) -> None:
        """All ways that are not done yet. Fault or Wrong where the server does not answer."""
        for way in (COLD, CONTROL, CONCURRENT, WARM, CANCELLED, EVICTED, READ):
            if way.name not in self.done:
                self.sent[way.name] = self.steps_of(way)
                if way is COLD or self.sent[way.name]:
                    self.ask(way)

    def steps_of(self, way: Way) -> list[Step]:
        """Warm: all sessions share their beginning, each turn what came before it."""
        salt, keys = new_salt(), range(len(self.prompts))
        if way is CONTROL:  # text as far from the end as it gets is the strictest: of each length some
            some = keys[:: max(1, len(keys) // CONTROLS)][:CONTROLS]
            return [
                Step(sessions.reordered(ids := self.prompts[key], key, len(ids) // 3), new_salt(), key) for key in some
            ]
        if way is EVICTED:
            return self.evictions(salt)
        if way is READ:
            return [step for key in keys[::2] for step in reading(self.prompts[key], self.cold[key], READ_AT, key)]
        found = []
        for key in keys:
            if way is CANCELLED:
                found.append(Step(self.prompts[key], salt, tokens=BROKEN_OFF, cancelled=True))
            found.append(Step(self.prompts[key], new_salt() if way is CONCURRENT else salt, key))
        return found

    def evictions(self, salt: str) -> list[Step]:
        """Each session from the cache, with a part of it filled by strangers between two. Later ones find less."""
        size, cold = self.met.capacity or 0, self.done[COLD.name]
        seconds = size * cold.seconds / max(cold.asked, 1)
        if not size or seconds > FILL_SECONDS:
            self.met.notes.append(f"no eviction was tried: a cache of {size or '?'} tokens, {seconds:.0f} s to fill")
            return []
        chance = random.Random(f"filler {self.shape.seed}")
        known = sorted({part for one in self.prompts for part in one})
        length = max(min(self.shape.room, size // 8), 1)
        fillers = [chance.choices(known, k=length) for _ in range(-(-size // length))]
        found, other = [Step(prompt, salt, tokens=1) for prompt in self.prompts], new_salt()
        for session in range(self.shape.sessions):
            found += [Step(filler, other, tokens=1) for filler in fillers[session :: self.shape.sessions]]
            found += [Step(self.prompts[k], salt, k) for k, turn in enumerate(self.turns) if turn.session == session]
        return found

    def ask(self, way: Way) -> None:
        found, begin, before = WayResponses(), time.monotonic(), self.counted()
        with waiting(way.words):
            self.read_cold(found) if way is COLD else self.send_all(way, found)
        found.seconds = round(time.monotonic() - begin, 1)
        time.sleep(SETTLE)
        after = self.counted()
        cached = [answer.cached for each in found.answers.values() for answer in each]
        if before[0] is not None and after[0] is not None:
            found.hits = after[0] - before[0]
        elif None not in cached:
            found.hits = sum(count or 0 for count in cached)
        found.drafted = after[1] - before[1]
        self.done[way.name] = found
        self.met.client.exchanges.clear()  # megabytes of log-probabilities
        hits = "" if found.hits is None else f", {found.hits:,} of {found.asked:,} prompt tokens from the cache"
        say(f"{way.words}: {len(self.distances(way))} answers in {found.seconds:.0f} s{hits}")

    def counted(self) -> tuple[int | None, int]:
        """Tokens from the cache, and drafted ones, since the server began."""
        text = self.met.client.metrics()
        hits, counts = metrics.total(text, metrics.HITS), metrics.DraftCounts.read(text)
        return None if hits is None else int(hits), counts.drafted if counts else 0

    def read_cold(self, found: WayResponses) -> None:
        """Each turn is built on the answer to the one before it."""
        for key, turn in enumerate(self.turns):
            before = [*self.prompts[-1], *found.answers[key - 1][0].parts] if turn.number else []
            added = sessions.fitted(self.met.rendered(turn.messages), max(turn.tokens - len(before), 1))
            self.prompts.append([*before, *added])
            found.answers[key] = [answer := self.met.ask(self.prompts[-1])]
            found.asked += answer.prompt or len(self.prompts[-1])

    def send_all(self, way: Way, found: WayResponses) -> None:
        steps = self.sent[way.name]
        for step, answer in zip(steps, self.met.send(steps, at_once=way is CONCURRENT), strict=True):
            found.asked += (answer and answer.prompt) or int(len(step.prompt) * self.met.wide)
            if step.key is not None and answer:
                found.answers.setdefault(step.key, []).append(answer)

    def distances(self, way: Way) -> list[tuple[int, float]]:
        """Key and distance of each answer of a way, from the cold one; of those that can be compared."""
        answers = self.done[way.name].answers.items() if way.name in self.done else ()
        if way is READ:
            read = [(key, read_distance(self.cold[key], READ_AT, each)) for key, each in answers]
            return [(key, far) for key, far in read if far is not None]
        return [(key, distance(self.cold[key].rows, each[-1].rows)) for key, each in answers]


def begin(met: Endpoint, seed: int, count: tuple[int, int]) -> Proof:
    """A run that has asked for nothing yet. count: sessions, and turns of each."""
    wordy = len(PROBE[0]["content"]) / len(met.rendered(PROBE))
    room = (met.room or ROOM) - 5 * TOKENS
    block = met.block or max(min(sessions.UNKNOWN_BLOCK, room // 4), LEAST_BLOCK)
    shape = Shape(seed, *count, int(block / met.wide), int(room / met.wide), wordy)
    return Proof(met, sessions.sessions(shape), shape)


def reading(prompt: Prompt, answer: Completion, places: Sequence[int], key: int = 0) -> list[Step]:
    """Cold, each with the answer until a token of `places`, which comes next."""
    known = [place for place in places if place < len(answer.parts)]
    return [Step([*prompt, *answer.parts[:place]], new_salt(), key, 1) for place in known]


def read_distance(decoded: Completion, places: Sequence[int], read: Sequence[Completion | None]) -> float | None:
    """Between an answer's tokens as they were decoded and as `reading` reads them, as a root mean square. Texts that
    became other tokens are left out; None where nothing is left."""
    both = zip([place for place in places if place < len(decoded.rows)], read, strict=True)
    far = [distance(decoded.rows[place : place + 1], answer.rows) for place, answer in both
           if answer and len(answer.rows) and answer.prompt in (0, decoded.prompt + place)]  # fmt: skip
    return math.hypot(*far) / math.sqrt(len(far)) if far else None


def sent_again(met: Endpoint, steps: Sequence[Step], way: Way) -> float:
    """How far the answer to the last step is from the same prompt cold, in nats, when all is sent with new salts. 0
    where that cannot be compared, which shows nothing."""
    new = dict[str, str]()
    again = [replace(step, salt=new.setdefault(step.salt, new_salt())) for step in steps]
    answer, prompt = met.send(again, at_once=way is CONCURRENT)[-1], again[-1].prompt
    assert answer, "the last is never broken off"
    if way is READ:
        return read_distance(answer, READ_AT, met.send(reading(prompt, answer, READ_AT))) or 0.0
    return distance(met.ask(prompt).rows, answer.rows)


def noise_of(met: Endpoint, prompts: Sequence[Prompt], way: Way) -> list[float]:
    """How far rounding alone takes answers to such prompts, in nats: cold, alone and at once. What is found at once is
    compared with asking alone twice; what was decoded, with the second token of an answer, before which no draft was
    refused. Of those that can be compared."""
    single = [met.ask(prompt) for prompt in prompts]
    if way is READ:
        read = [met.send(reading(prompt, answer, (1,))) for prompt, answer in zip(prompts, single, strict=True)]
        found = [read_distance(answer, (1,), each) for answer, each in zip(single, read, strict=True)]
        return [far for far in found if far is not None]
    others = met.send([Step(prompt, new_salt()) for prompt in prompts], at_once=way is not CONCURRENT)
    return [distance(one.rows, other.rows) for one, other in zip(single, others, strict=True) if other]
