"""One server asked for the same prompts in every way."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sparkpin.core.terminal import say
from sparkpin.measure.prove import judging, passes
from sparkpin.measure.prove.asking import HITS, PREEMPTED, Prompt, ProvedEndpoint, Said
from sparkpin.measure.prove.passes import READ_AT, TOKENS, Pass, Step
from sparkpin.measure.prove.sessions import UNKNOWN_BLOCK, Shape, Turn, other_text, sessions
from sparkpin.measure.quality.distance import Rows, rows_of
from sparkpin.smoke import metrics
from sparkpin.smoke.answers import Wrong

SETTLE = 0.5  # seconds in which a server's counters follow its answers
FILL_SECONDS = 90.0  # that filling the cache may take
ROOM = 8192  # tokens, where nobody tells how long a request may be
LEAST_BLOCK = 8  # tokens, where nobody tells how many a block has
WORDY = 1000  # characters that tell how many make a token
TOLD = 10.0  # seconds between two lines of a pass
NO_NUMBERS = "Out of range float values"
"""In vLLM's error 400 where log-probabilities are NaN: Python's word for what JSON cannot hold."""
NO_TOKEN = 2**31 - 1  # an id that no vocabulary has


@dataclass
class Seen:
    """Of a pass: answers by prompt, in the order of its steps. preempted: requests that had to make room for others and
    were begun again, None where nobody tells."""

    said: list[tuple[int, Said]] = field(default_factory=list)
    hits: int | None = None
    asked: int = 0
    seconds: float = 0.0
    preempted: int | None = None
    drafted: int = 0
    accepted: int = 0


@dataclass
class Proof:
    """A run. cold: the answers that others are compared with; done: by the pass's name."""

    met: ProvedEndpoint
    seed: int
    turns: list[Turn]
    shape: Shape
    prompts: list[Prompt] = field(default_factory=list)
    done: dict[str, Seen] = field(default_factory=dict)
    sent: dict[str, list[Step]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def cold(self) -> list[Said]:
        return [said for _, said in self.done[passes.COLD.name].said]

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that all passes drafted and accepted, (0, 0) where nobody drafts or tells."""
        return sum(seen.drafted for seen in self.done.values()), sum(seen.accepted for seen in self.done.values())

    def run(self) -> None:
        """All passes that are not done yet. Fault or Wrong where the server does not answer."""
        if not self.prompts:
            self.timed(passes.COLD, self.read_cold)
        plans = {
            passes.CONTROL: self.controls(),
            passes.COMPANY: passes.company(self.prompts),
            passes.WARM: passes.warm(self.prompts),
            passes.EVICTED: self.evictions(),
            passes.READ: [
                step
                for key in range(0, len(self.prompts), 2)
                for step in reading(self.prompts[key], self.cold[key], key)
            ],
        }
        self.sent = {one.name: steps for one, steps in plans.items()}
        for one, steps in plans.items():
            if steps and one.name not in self.done:
                self.timed(one, lambda seen, one=one, steps=steps: self.send_all(one, steps, seen))  # type: ignore[misc]

    def timed(self, one: Pass, act: Callable[[Seen], None]) -> None:
        seen, begin, before = Seen(), time.monotonic(), self.counted()
        act(seen)
        seen.seconds = round(time.monotonic() - begin, 1)
        time.sleep(SETTLE)
        after = self.counted()
        seen.hits, seen.preempted = (
            None if old is None or new is None else new - old for old, new in zip(before[:2], after[:2], strict=True)
        )
        seen.drafted, seen.accepted = after[2] - before[2], after[3] - before[3]
        told = [said.cached for _, said in seen.said]
        if seen.hits is None and None not in told:
            seen.hits = sum(cached or 0 for cached in told)
        self.done[one.name] = seen
        self.met.client.exchanges.clear()  # megabytes of log-probabilities
        hits = "" if seen.hits is None else f", {seen.hits:,} of {seen.asked:,} prompt tokens from the cache"
        say(f"{one.words}: {len(self.distances(one))} answers in {seen.seconds:.0f} s{hits}")

    def counted(self) -> tuple[int | None, int | None, int, int]:
        """Tokens from the cache, preemptions, and tokens drafted and accepted, since the server began."""
        text = self.met.scraped()
        found = (metrics.total(text, name) for name in (HITS, PREEMPTED))
        hits, preempted = (None if value is None else int(value) for value in found)
        counts = metrics.acceptance(text)
        return hits, preempted, *((counts.drafted, counts.accepted) if counts else (0, 0))

    def read_cold(self, seen: Seen) -> None:
        """Each turn is built on the answer to the one before it."""
        prompt: Prompt = []
        for key, turn in enumerate(self.turns):
            answer = seen.said[-1][1] if turn.number else None
            prompt = self.met.begun(turn, prompt if turn.number else [], answer)
            self.prompts.append(prompt)
            said = self.met.ask(prompt, passes.new_salt(), TOKENS)
            seen.said.append((key, said))
            seen.asked += said.prompt

    def controls(self) -> list[Step]:
        """Those whose other text is as far from the end as it gets are the strictest: of each length some."""
        keys = list(range(0, len(self.prompts), max(1, len(self.prompts) // passes.CONTROLS)))[: passes.CONTROLS]
        return [Step(other_text(self.prompts[key], key), passes.new_salt(), key) for key in keys]

    def evictions(self) -> list[Step]:
        size, cold = self.met.capacity, self.done[passes.COLD.name]
        if not size:
            untold = "nobody tells how many tokens the cache holds"
            self.note(f"eviction was not tried: {'there is no cache' if self.met.caching is False else untold}")
            return []
        seconds = size * cold.seconds / max(cold.asked, 1)
        if seconds > FILL_SECONDS:
            self.note(f"eviction was not tried: filling {size:,} tokens of cache would take {seconds:.0f} s")
            return []
        chance, known = random.Random(f"filler {self.seed}"), sorted({token for one in self.prompts for token in one})
        length = max(min(self.shape.room, size // 8), 1)
        fillers = [chance.choices(known, k=length) for _ in range(-(-size // length))]
        return passes.evicted(self.prompts, self.turns, fillers)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def send_all(self, one: Pass, steps: Sequence[Step], seen: Seen) -> None:
        told = time.monotonic()
        answers = send(self.met, steps, at_once=one is passes.COMPANY)
        for number, (step, said) in enumerate(zip(steps, answers, strict=True), 1):
            seen.asked += said.prompt
            if step.key is not None:
                seen.said.append((step.key, said))
            if time.monotonic() - told > TOLD:
                told = time.monotonic()
                say(f"  {one.words}: {number} of {len(steps)} requests")

    def distances(self, one: Pass) -> list[tuple[int, float]]:
        """Key and distance of each answer of a pass, from the cold one."""
        seen = self.done.get(one.name)
        if not seen:
            return []
        if one is not passes.READ:
            return [(key, judging.distance(self.cold[key].rows, said.rows)) for key, said in seen.said]
        read = dict[int, list[Said]]()
        for key, said in seen.said:
            read.setdefault(key, []).append(said)
        return [(key, read_distance(self.cold[key], each)) for key, each in read.items()]


def reading(prompt: Prompt, answer: Said, key: int) -> list[Step]:
    """Cold, each with the answer until a token of READ_AT, which comes next."""
    tokens = answer.rows.tokens.tolist()
    return [Step([*prompt, *tokens[:place]], passes.new_salt(), key, 1) for place in READ_AT if place < len(tokens)]


def read_distance(decoded: Said, read: Sequence[Said]) -> float:
    """Between an answer's tokens as they were decoded and as `reading` reads them, as a root mean square."""
    rows = decoded.rows
    places = [slice(place, place + 1) for place in READ_AT if place < len(rows)]
    own = [Rows(rows.ids[one], rows.logprobs[one], rows.tokens[one], rows.chosen[one]) for one in places]
    far = [judging.distance(one, said.rows) for one, said in zip(own, read, strict=True)]
    return math.hypot(*far) / math.sqrt(max(len(far), 1))


def begun(met: ProvedEndpoint, seed: int, count: tuple[int, int]) -> Proof:
    """A run that has asked for nothing yet. count: sessions, and turns of each."""
    text = "The build of a node keeps a log of each step, and the index of its files. " * (WORDY // 70)
    wordy = len(text) / len(met.rendered([{"role": "user", "content": text}]))
    room = (met.room or ROOM) - 5 * TOKENS
    shape = Shape(seed, *count, met.block or max(min(UNKNOWN_BLOCK, room // 4), LEAST_BLOCK), room, wordy)
    return Proof(met, seed, sessions(shape), shape)


def send(met: ProvedEndpoint, steps: Sequence[Step], *, at_once: bool = False) -> Iterator[Said]:
    """The answers in the order of the steps."""
    if at_once:
        with ThreadPoolExecutor(passes.AT_ONCE) as threads:
            yield from threads.map(lambda step: send_one(met, step), steps)
    else:
        yield from (send_one(met, step) for step in steps)


def send_one(met: ProvedEndpoint, step: Step) -> Said:
    """An answer without numbers, which a cold prompt had, is far off."""
    try:
        return met.ask(step.prompt, step.salt, step.tokens)
    except Wrong as wrong:
        if NO_NUMBERS not in str(wrong):
            raise
        return Said(rows_of([{NO_TOKEN: 0.0}], [NO_TOKEN]), len(step.prompt))
