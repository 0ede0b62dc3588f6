"""What a run comes to: its record, with one line that says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from sparkpin.core.terminal import say
from sparkpin.measure.prove import judging, passes, record, session
from sparkpin.measure.prove.passes import Pass
from sparkpin.measure.prove.record import Finding, PassResult, ProveRecord
from sparkpin.measure.prove.run import Proof
from sparkpin.measure.prove.session import Session
from sparkpin.measure.prove.sessions import Turn
from sparkpin.releases.record import now
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.replies import Fault

FEW = 2  # prompts beyond their bound that may be near ties
NEAR = 0.5  # nats: the furthest near tie that was seen was 0.178 off (docs/prove.md); more is no rounding
AGAIN = 2  # times that all is sent once more
OTHERS = 5  # tries with other words
SHOWN = 2  # of them that have to show it, too


@dataclass(frozen=True)
class Bounds:
    """In nats, of a prompt that was come to in another way.

    first: where all that came from the cache was read; grown: where answers lie in it, which were decoded, and so are
    rounded in another way; decoded: of what was decoded itself, against reading it, where the kernels differ and a
    single token may be far off.
    """

    floor: tuple[float, ...]  # distances of two cold readings
    first: float
    grown: float
    decoded: float
    control: tuple[float, ...]

    @property
    def noise(self) -> float | None:
        return median(self.floor) if self.floor else None

    @property
    def moved(self) -> float:
        return median(self.control) if self.control else 0.0

    def of(self, one: Pass, turn: Turn) -> float:
        """A cold prompt is read as a whole, whatever it holds."""
        if one is passes.READ:
            return self.decoded
        return self.grown if turn.number and not one.cold else self.first


def bounds(proof: Proof) -> Bounds:
    floor = tuple(distance for _, distance in proof.distances(passes.COMPANY))
    control = tuple(distance for _, distance in proof.distances(passes.CONTROL))
    moved = median(control) if control else 0.0
    first = judging.bound(floor, sum(len(proof.distances(one)) for one in passes.TRIED))
    if not judging.is_blind(control):
        first = min(first, moved)
    read = [distance for _, distance in proof.distances(passes.READ)]
    grown = max(first, median(read) if read else moved * judging.IN_CACHE)
    return Bounds(floor, first, grown, max(first, moved), control)


@dataclass(frozen=True)
class Beyond:
    one: Pass
    key: int
    distance: float
    bound: float

    def session(self, proof: Proof) -> Session:
        return session.session_of(proof, self.one, self.key, self.distance, self.bound)


def judged(proof: Proof) -> list[Pass]:
    """A request that was preempted reads what it had decoded, so it is no cold one: nothing is concluded from such."""
    crowd = proof.done.get(passes.COMPANY.name)
    return [one for one in passes.TRIED if one is not passes.COMPANY or (crowd and crowd.preempted == 0)]


def beyond(proof: Proof, found: Bounds) -> list[Beyond]:
    """The simplest way first, of each the shortest prompt that is clearly beyond: half as far as the furthest."""
    every = []
    for one in judged(proof):
        far = [Beyond(one, key, far, found.of(one, proof.turns[key])) for key, far in proof.distances(one)]
        own = [each for each in far if each.distance > each.bound]
        most = max((each.distance for each in own), default=0.0)
        every += sorted(own, key=lambda each: (each.distance < most / 2, len(str(proof.prompts[each.key]))))
    return every


def hits(proof: Proof) -> tuple[int | None, int | None]:
    """Prompt tokens from the cache, of the passes that should find some, and of those that should find none."""

    def of(cold: bool) -> int | None:
        known = [proof.done[one.name].hits for one in passes.EVERY if one.cold == cold and one.name in proof.done]
        return None if not known or None in known else sum(value or 0 for value in known)

    return of(cold=False), of(cold=True)


def unproven(proof: Proof, found: Bounds, drafted: int) -> str:
    """Why nothing found would mean nothing; "" where it means something."""
    warm, cold = hits(proof)
    if judging.is_blind(found.control):
        return (
            f"blind: this model does not use its context: other text in the first third of a prompt moves it by "
            f"{found.moved:.2g} nats, expected {judging.MOVED} at least"
        )
    if judging.is_unstable(found.floor, found.control):
        far = f"up to {max(found.floor):.2g} nats apart" if found.floor else "none"
        other = f"other text in the first third of a prompt does {found.moved:.2g}"
        return f"not stable: cold readings are {far}, and {other}"
    if warm is None:
        return "" if drafted else "the server does not say whether a prompt came from its cache"
    if cold:
        return f"{cold:,} tokens that were to be cold came from the cache: it takes no cache_salt, or others ask it"
    if not warm and not drafted:
        why = {False: "prefix caching is off", True: "prompts are too short for its blocks"}
        known = why.get(proof.met.caching, "both are off, or prompts are too short")  # type: ignore[arg-type]
        return f"no token of any prompt came from a cache, and nothing was drafted: {known}"
    return ""


def concluded(proof: Proof, folder: Path, what: str) -> ProveRecord:
    """Asks the server again where something was found."""
    found, time = bounds(proof), now()
    seconds, (drafted, accepted) = sum(seen.seconds for seen in proof.done.values()), proof.drafts
    warm, _ = hits(proof)
    every, why = beyond(proof, found), unproven(proof, found, drafted)
    if passes.COMPANY.name in proof.done and passes.COMPANY not in judged(proof):
        proof.note(f"{passes.COMPANY.words}: not judged, since requests may have been preempted")
    unstable = why.startswith("not stable")
    notes: list[str] = []
    results = tuple(result_of(proof, one, found) for one in (passes.CONTROL, *passes.TRIED) if one.name in proof.done)
    turns = sum(len(proof.distances(one)) for one in passes.TRIED)
    finding: Finding | None = None
    verdict: Literal["nothing found", "found", "cannot tell"]
    first = None if unstable else first_to_tell(proof, every, found)
    if first:
        finding, line = told(proof, first, folder / f"{record.file_name(time)}-session.json")
        verdict = "found"
        if not finding.again and first.distance <= NEAR:  # a bound lets some rounding through
            verdict, line = "cannot tell", f"cannot tell: seen once, {line.removeprefix('FOUND: ')}"
    elif why:
        verdict, line = "cannot tell", f"cannot tell: {why}"
    else:
        verdict = "nothing found"
        parts = [f"nothing found in {turns} answers of {len(proof.prompts)} turns"]
        if every:
            far = max(one.distance for one in every)
            parts.append(f"{far:.2g} nats with some words alone were taken for rounding")
        parts += ["THE CACHE WAS NOT IN USE"] if warm == 0 else []
        line = "; ".join(parts)
        grown = f" ({found.grown:.2g} where answers lie in the cache)" if found.grown > found.first else ""
        notes += [
            f"a difference of {found.first:.2g} nats{grown} would have been seen; other text does {found.moved:.2g} "
            "on the median",
            f"{'nobody tells how many' if warm is None else f'{warm:,}'} prompt tokens came from the cache; "
            f"{f'{drafted:,} tokens were' if drafted else 'nothing was'} drafted",
        ]
    return ProveRecord(
        time=time,
        what=what,
        model=proof.met.model,
        vllm=proof.met.version,
        verdict=verdict,
        line=line,
        turns=turns,
        seconds=round(seconds, 1),
        noise=found.noise,
        least=found.first if found.noise is not None else None,
        control=found.moved if found.control else None,
        block=proof.met.block,
        drafted=drafted or None,
        accepted=accepted if drafted else None,
        passes=results,
        finding=finding,
        others=len(every) - 1 if first else 0,
        notes=(*proof.met.notes, *proof.notes, *notes),
    )


def first_to_tell(proof: Proof, every: Sequence[Beyond], found: Bounds) -> Beyond | None:
    """Cold readings that are alike to the bit say nothing of rounding. One or two prompts beyond a bound that they made
    may be where a model is near a tie, of experts say. A fault depends on places, and shows with other words."""
    prompts = {one.key: one for one in reversed(every)}  # of each the simplest way
    if clear := [one for one in every if one.distance > NEAR]:
        return clear[0]
    if len(prompts) > FEW or found.first > judging.LEAST:
        return every[0] if every else None
    for one in reversed(prompts.values()):
        asked = one.session(proof)
        say(f"{asked.seen}: {one.distance:.2g} nats; asking with other words")
        shown = shows(proof, [session.with_other_words(asked, seed) for seed in range(OTHERS)])
        if shown is None or shown >= SHOWN:
            return one
        proof.note(
            f"{asked.seen}: {one.distance:.2g} nats, bound {one.bound:.2g}; beyond with other words in {shown} of "
            f"{OTHERS} tries, so it is taken for rounding"
        )
    return None


def shows(proof: Proof, sessions: Sequence[Session]) -> int | None:
    """How many of them show a difference when they are sent. None where the server dies of it, say."""
    try:
        return sum(session.repeated(proof.met, one) > one.bound for one in sessions)
    except (Wrong, Fault) as fault:
        proof.note(f"{sessions[0].seen}: not sent again: {fault}")
        return None


def result_of(proof: Proof, one: Pass, found: Bounds) -> PassResult:
    seen = proof.done[one.name]
    return PassResult(
        name=one.name,
        words=one.words,
        distances=tuple(distance for _, distance in proof.distances(one)),
        hits=seen.hits,
        asked=seen.asked,
        seconds=seen.seconds,
        preempted=seen.preempted,
        bounds=()
        if one is passes.CONTROL
        else tuple(found.of(one, proof.turns[key]) for key, _ in proof.distances(one)),
    )


def told(proof: Proof, first: Beyond, path: Path) -> tuple[Finding, str]:
    asked = first.session(proof)
    session.write(path, asked)
    say(f"found: {asked.seen}: {first.distance:.2g} nats; sending it again")
    finding = Finding(
        way=first.one.words,
        turn=proof.turns[first.key].name,
        distance=first.distance,
        bound=first.bound,
        again=shows(proof, [asked] * AGAIN) or 0,
        requests=len(asked.steps),
    )
    line = (
        f"FOUND: {asked.seen}: {first.distance:.2g} nats from the cold answer, where {first.bound:.2g} may be "
        f"rounding; seen again in {finding.again} of {AGAIN} tries; {finding.requests} requests: {path}"
    )
    return finding, line
