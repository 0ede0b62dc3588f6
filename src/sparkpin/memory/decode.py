"""The bytes that a decode step of one request reads, and the speed that they allow. Pure: data in, data out.

A step checks `1 + drafted` tokens at once and then drafts as many again. docs/memory.md has the rules in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparkpin.memory.architecture import UnknownCacheError
from sparkpin.memory.cache import Cache, lay_out
from sparkpin.memory.geometry import Geometry
from sparkpin.memory.settings import Settings
from sparkpin.memory.weights import DRAFTER, EMBEDDINGS, HEAD, MTP, MTP_EXPERTS, TABLES, VISION, WeightKind
from sparkpin.pins.schema import PublishedSpeed

SHORT = 1000  # tokens in the cache, about, with the prompts of published figures


@dataclass(frozen=True, slots=True)
class Read:
    """`size` bytes are read `times` times in a step; times need not be whole."""

    what: str
    size: float
    times: float

    @property
    def bytes(self) -> float:
        return self.size * self.times


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """unknown: why the reads are those of the weights alone."""

    reads: tuple[Read, ...]
    drafted: int
    unknown: str = ""

    @property
    def bytes(self) -> float:
        return sum(read.bytes for read in self.reads)

    def ceiling(self, bandwidth: float, accepted: float = 0.0) -> float:
        """Tokens a second: the token that the model itself adds to each step, and the accepted share of the drafts.
        bandwidth: bytes a second."""
        return (1 + self.drafted * accepted) * bandwidth / self.bytes


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """What a step's bytes follow from, of one of the tensor-parallel ranks. shares_head: a second model drafts with the
    LM head of the first."""

    geometry: Geometry
    settings: Settings
    weights: Sequence[WeightKind]
    shares_head: bool = False

    def step(self, context: int, *, same_experts: bool = False) -> DecodeStep:
        """context: tokens in the cache. same_experts: all tokens of the step reach the experts that one of them
        reaches, the other end of what routing can do; otherwise they are uniform and independent."""
        tokens = 1 if same_experts else 1 + self.settings.draft_tokens
        reads, unknown = list(self.weight_reads(tokens)), ""
        try:
            reads += self.cache_reads(lay_out(self.geometry, self.settings), context)
        except UnknownCacheError as error:
            unknown = str(error)
        return DecodeStep(tuple(read for read in reads if read.bytes), self.settings.draft_tokens, unknown)

    def weight_reads(self, tokens: int) -> Iterator[Read]:
        """Of experts those that a pass reaches. tokens: of the pass that checks, each with experts of its own."""
        sizes = {row.kind: row.read for row in self.weights}
        sizes.setdefault(HEAD, sizes.get(EMBEDDINGS, 0))  # tied: the head is the embedding matrix
        experts, active = (max(1, size) for size in (self.geometry.experts, self.geometry.experts_per_token))
        drafted = self.settings.draft_tokens
        reached = distinct(experts, active, tokens)
        # The MTP layer's first pass takes all tokens that were checked, each other one a single token.
        of_mtp = reached + (drafted - 1) * active
        times = {MTP: drafted, MTP_EXPERTS: of_mtp, DRAFTER: self.settings.draft_passes}
        for kind, size in sizes.items():
            if kind == HEAD:
                yield from self.head_reads(size)
            elif kind.endswith("experts"):
                yield Read(kind, size / experts, times.get(kind, reached))
            elif kind not in (EMBEDDINGS, TABLES, VISION):  # some rows for each token, and what is read with an image
                yield Read(kind, size, times.get(kind, 1))

    def head_reads(self, size: int) -> Iterator[Read]:
        """Once to check; then once a draft, of the rows and in the form that drafting has."""
        settings, rows = self.settings, self.settings.draft_rows
        passes = settings.draft_tokens if settings.draft_layers else settings.draft_passes * self.shares_head
        yield Read(HEAD, size, 1 if rows else 1 + passes)
        share = min(1.0, rows / self.geometry.vocabulary)
        yield Read("LM head to draft", size * share * settings.draft_bits / 8, passes)

    def cache_reads(self, cache: Cache, context: int) -> Iterator[Read]:
        drafted = self.settings.draft_tokens
        passes = {"MTP layer": drafted, "drafter": self.settings.draft_passes}
        for one in cache.kinds:
            part, size = one.part, one.slot * one.part.layers
            records = min(context, part.window or context) / part.ratio
            if part.kind == "state":  # read once and written for each token
                yield Read(f"{part.name} states", size, 2 + drafted)
            elif part.kind != "ring":
                what = f"KV cache of the {part.of}" if part.of in passes else f"KV cache, {part.name}"
                yield Read(what, size * min(records, part.most or records), passes.get(part.of, 1))


def distinct(experts: int, active: int, tokens: int) -> float:
    """Experts of a layer that `tokens` tokens are expected to reach.

    Uniform, independent routing: a token misses a given expert with probability 1 - active / experts, all of them with
    that to the power of `tokens`.
    """
    return experts * (1 - (1 - active / experts) ** tokens)


@dataclass(frozen=True)
class Speed:
    """steps: by the tokens in the cache, of SHORT and of more. bandwidth: bytes a second, None where nobody stated it.
    accepted: share of the drafted tokens, None where nobody knows."""

    steps: Mapping[int, DecodeStep]
    bandwidth: float | None
    accepted: float | None
    published: Sequence[PublishedSpeed]

    def ceiling(self, context: int = SHORT) -> float | None:
        """Tokens a second; None where bandwidth or acceptance are not known."""
        step = self.steps[context]
        share = self.accepted if step.drafted else 0.0
        return None if self.bandwidth is None or share is None else step.ceiling(self.bandwidth, share)

    def to_json(self) -> dict[str, Any]:
        """Bytes, bytes a second, tokens a second."""
        step, ceilings = self.steps[SHORT], {length: self.ceiling(length) for length in self.steps}
        value = {"context": SHORT, "step_bytes": step.bytes, "ceilings": ceilings, "bandwidth": self.bandwidth}
        published = [one.model_dump() for one in self.published]
        return asdict(step) | value | {"accepted": self.accepted, "published": published}
