"""What a run comes to: its record, with one line that says it.

Something is found where other words show it again. Of each way the answer that is furthest beyond its bound is asked
up to TRIES times with other words. It is a find if SHOWN of these are further from their cold answers than the furthest
of NOISE readings that differ by rounding alone, and further than the least that counts. If the way differed by rounding
alone, that would happen in one of 5,100 cases, whatever the distribution: only ranks are counted, of prompts that
nothing was chosen by. So however many turns are asked, all ways together blame fewer than one sound server in 1,000
(`statistics.false_alarm`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from sparkpin.core import files
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.measure.prove import run
from sparkpin.measure.prove.record import Finding, ProveRecord, Verdict, WayResult, path_of
from sparkpin.measure.prove.run import CANCELLED, CONCURRENT, CONTROL, EVICTED, READ, TRIED, WARM, Proof, Step, Way
from sparkpin.measure.prove.sessions import DATA, with_other_words
from sparkpin.measure.statistics import FALSE_ALARMS, false_alarm
from sparkpin.releases.record import now
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import Fault

TRIES, SHOWN, NOISE = 16, 5, 63
assert len(TRIED) * false_alarm(SHOWN, TRIES, NOISE) <= FALSE_ALARMS
LEAST = 0.05  # nats: smaller differences are never told. Hits of a sound server are a few hundredths off
MOVED = 0.1  # nats: other text has to move the answers so much, or the model is blind to its context
IN_CACHE = 1 / 8  # of what other text does: answers in the cache, where nobody can see how reading and decoding differ
SHARED = 0.01  # of all tokens may a server find that is asked in text: digits that two prompts begin with
PLANTED = {name: ({way.name: way for way in TRIED}[way], far) for name, (way, far) in DATA["planted"].items()}


@dataclass(frozen=True)
class Bounds:
    """In nats. floor: distances of cold readings, alone and at once; control: what other text does, the median; grown:
    the least that counts where answers lie in the cache, which were decoded, and so are rounded in another way."""

    floor: tuple[float, ...]
    control: float
    grown: float

    @property
    def first(self) -> float:
        return max(LEAST, min(max(self.floor, default=math.inf), self.control))

    def least(self, way: Way, *, grown: bool) -> float:
        """That counts at all. What was decoded is compared with reading it, by other kernels: a single token of a sound
        server was 0.8 nats off. Answers at once are the noise of all others."""
        if way in (READ, CONCURRENT):
            return max(LEAST, self.control / 2)
        return self.grown if grown else LEAST

    def of(self, way: Way, *, grown: bool) -> float:
        """From which on an answer is asked with other words."""
        return max(self.first, self.least(way, grown=grown))


def bounds(proof: Proof) -> Bounds:
    floor, control, read = ([far for _, far in proof.distances(way)] for way in (CONCURRENT, CONTROL, READ))
    moved = median(control) if control else 0.0
    return Bounds(tuple(floor), moved, max(LEAST, median(read) if read else moved * IN_CACHE))


@dataclass(frozen=True)
class Beyond:
    name: str
    way: Way
    key: int
    distance: float
    least: float


def candidates(proof: Proof, found: Bounds) -> Iterator[Beyond]:
    """Of each way the shortest prompt that is clearly beyond: half as far as the furthest."""
    for way in TRIED:
        beyond = []
        for key, far in proof.distances(way):
            turn = proof.turns[key]
            if far > found.of(way, grown=turn.number > 0):
                name = f"{way.words}, session {turn.session + 1}, turn {turn.number + 1}"
                beyond.append(Beyond(name, way, key, far, found.least(way, grown=turn.number > 0)))
        most = max((one.distance for one in beyond), default=0.0)
        near = [one for one in beyond if one.distance >= most / 2]
        yield from sorted(near, key=lambda one: len(proof.prompts[one.key]))[:1]


def steps_to(proof: Proof, one: Beyond) -> list[Step]:
    """All that was sent until that answer, which comes last, and what was sent at the same time."""
    if one.way is READ:
        return [Step(proof.prompts[one.key], "", one.key)]
    sent = proof.sent[one.way.name]
    last = max(place for place, step in enumerate(sent) if step.key == one.key)
    return [*sent[:last], *(sent[last + 1 :] if one.way is CONCURRENT else []), sent[last]]


def shows(proof: Proof, one: Beyond) -> Finding | None:
    """Asks with other words. None where they do not show it."""
    steps, shown, tries = steps_to(proof, one), 0, 0
    say(f"{one.name}: {one.distance:.2g} nats; asking with other words")
    with waiting(one.name):
        like = [with_other_words([steps[-1].prompt], seed)[0] for seed in range(TRIES, TRIES + NOISE)]
        noise = run.noise_of(proof.met, like, one.way)
        if len(noise) < NOISE:  # some texts became other tokens
            proof.met.notes.append(f"{one.name}: {len(noise)} of {NOISE} readings of its noise could be compared")
            return None
        bound = max(one.least, *noise)
        while shown < SHOWN and tries - shown <= TRIES - SHOWN:
            words = with_other_words([step.prompt for step in steps], tries)
            again = [replace(step, prompt=prompt) for step, prompt in zip(steps, words, strict=True)]
            shown += run.sent_again(proof.met, again, one.way) > bound
            tries += 1
    if shown < SHOWN:
        shares = f"{one.distance:.2g} nats; with other words beyond {bound:.2g} in {shown} of {tries} tries"
        proof.met.notes.append(f"{one.name}: {shares}: rounding")
        return None
    return Finding(one.name, one.way.name, one.distance, bound, shown, tries, len(steps))


def write_session(proof: Proof, one: Beyond, path: Path) -> None:
    answers = [proof.cold[one.key], *proof.done[one.way.name].answers[one.key]]
    session = {
        "how": DATA["how"],
        "seen": one.name,
        "seed": proof.shape.seed,
        "model": proof.met.model,
        "vllm": proof.met.version,
        "difference": one.distance,
        "at_once": one.way is CONCURRENT,
        "read": one.way is READ,
        "steps": [asdict(step) for step in steps_to(proof, one)],
        "answers": [list(zip(a.parts, a.rows.chosen.tolist(), strict=True)) for a in answers],
    }
    files.write_json(path, session)


def hits(proof: Proof, *, cold: bool) -> int | None:
    """Prompt tokens from the cache, of the ways that should find none, or some; None where nobody tells."""
    known = [proof.done[way.name].hits for way in (run.COLD, CONTROL, *TRIED)
             if way.cold == cold and way.name in proof.done]  # fmt: skip
    return None if not known or None in known else sum(value or 0 for value in known)


def unproven(proof: Proof, found: Bounds) -> str:
    """Why nothing found would mean nothing; "" where it means something."""
    warm, cold, drafted = hits(proof, cold=False), hits(proof, cold=True), proof.drafted
    moves = f"other text in the first third of a prompt moves it by {found.control:.2g} nats"
    if found.control < MOVED:
        return f"blind: this model does not use its context: {moves}, expected {MOVED} at least"
    if not found.floor or max(found.floor) >= found.control / 2:
        return f"not stable: cold readings are up to {max(found.floor, default=0):.2g} nats apart, and {moves}"
    if warm is None:
        return "" if drafted else "the server does not say whether a prompt came from its cache"
    shared = 0 if proof.met.ids else SHARED * sum(one.asked for one in proof.done.values())
    if cold and cold > shared:
        return f"{cold:,} tokens that were to be cold came from the cache: it takes no cache_salt, or others ask it"
    if not warm and not drafted:
        return "no token of any prompt came from a cache, and nothing was drafted"
    return ""


def planted(proof: Proof, found: Bounds) -> int:
    """How many of PLANTED would show here, half as far as they go at most: in the ways that were tried, beyond this
    run's noise, if this model is moved in proportion."""
    scale = found.control / DATA["moved"] / 2
    cached = bool(hits(proof, cold=False))
    shows = {WARM: cached, CANCELLED: cached, EVICTED: cached and EVICTED.name in proof.done, READ: proof.drafted > 0}
    return sum(shows[way] and far * scale > found.of(way, grown=False) for way, far in PLANTED.values())


def conclude(proof: Proof, folder: Path, what: str) -> ProveRecord:
    """Asks the server again where something was beyond its bound."""
    found, time, why = bounds(proof), now(), ""
    finding: Finding | None = None
    path = path_of(folder, time, "-session")
    for first in candidates(proof, found):
        try:
            finding = shows(proof, first)
        except (Wrong, Fault) as fault:
            why = f"the server failed while {first.way.words} was asked again: {fault}; {path}"
        if finding or why:
            write_session(proof, first, path)
            break
    why = why or unproven(proof, found)
    if (compared := len(proof.distances(READ))) < (decoded := len(proof.prompts[::2])):
        proof.met.notes.append(f"read: {compared} of {decoded} could be compared")
    count = planted(proof, found)
    verdict: Verdict = "found" if finding else "cannot tell" if why else "nothing found"
    line = f"cannot tell: {why}"
    if finding:
        shown = f"{finding.shown} of {finding.tries} tries with other words beyond {finding.bound:.2g}"
        line = f"FOUND: {finding.name}: {finding.distance:.2g} nats from the cold answer; {shown}"
        line += f"; {finding.requests} requests: {path}"
    elif not why:
        answers = sum(len(proof.distances(way)) for way in TRIED)
        line = f"nothing found in {answers} answers of {len(proof.prompts)} turns"
        known = {0: "; THE CACHE WAS NOT IN USE", None: "; whether the cache was in use is unknown"}
        line += known.get(hits(proof, cold=False), "")
        line += f"; this run's noise would let {count} of {len(PLANTED)} planted faults show"
        least = f"a difference of {found.first:.2g} nats would have been seen"
        proof.met.notes.append(f"{least}; other text does {found.control:.2g}")
    return ProveRecord(
        time=time,
        what=what,
        model=proof.met.model,
        vllm=proof.met.version,
        verdict=verdict,
        line=line,
        noise=max(found.floor, default=None),
        least=found.first,
        control=found.control,
        planted=count,
        drafted=proof.drafted,
        ways=tuple(result_of(proof, way, found) for way in (CONTROL, *TRIED) if way.name in proof.done),
        finding=finding,
        notes=tuple(proof.met.notes),
    )


def result_of(proof: Proof, way: Way, found: Bounds) -> WayResult:
    responses, far = proof.done[way.name], proof.distances(way)
    limits = () if way is CONTROL else (found.of(way, grown=proof.turns[key].number > 0) for key, _ in far)
    distances = tuple(one for _, one in far)
    return WayResult(way.name, way.words, distances, tuple(limits), responses.hits, responses.asked, responses.seconds)
