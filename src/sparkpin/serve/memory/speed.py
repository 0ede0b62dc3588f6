"""What the memory's bandwidth allows of a recipe's decode, and how much of it others have published. For people and
for machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparkpin.core import terminal
from sparkpin.pins.schema import PublishedSpeed
from sparkpin.serve.memory.decode import DecodeModel, DecodeStep
from sparkpin.serve.memory.estimates import SPARK_BANDWIDTH
from sparkpin.serve.memory.text import Row

SHORT = 1000
"""Tokens in the cache, about, with the prompts of published figures."""
READS = ("part", "read a step", "share", "note")
LEAST = 100_000  # bytes that are worth a row


@dataclass(frozen=True, slots=True)
class Speed:
    """step, same: with uniform routing, and if all tokens of a step reach the same experts; longer: steps with more
    tokens in the cache. bandwidth: bytes a second, None where nobody stated it. accepted: share of the drafted tokens,
    None where nobody knows. ranks: machines that share the weights, of each of which these are the bytes."""

    step: DecodeStep
    same: DecodeStep
    longer: Mapping[int, DecodeStep]
    bandwidth: float | None
    accepted: float | None
    published: tuple[PublishedSpeed, ...]
    ranks: int = 1

    @property
    def ceiling(self) -> float | None:
        """Tokens a second; None where bandwidth or acceptance are not known."""
        return self.rate(self.step)

    def rate(self, step: DecodeStep) -> float | None:
        share = self.accepted if step.drafted else 0.0
        return None if self.bandwidth is None or share is None else step.ceiling(self.bandwidth, share)


def speed_of(
    model: DecodeModel,
    lengths: tuple[int, ...],
    bandwidth: float | None,
    accepted: float | None,
    published: tuple[PublishedSpeed, ...],
) -> Speed:
    """lengths: tokens in the cache that the speed is of interest for, besides the short one."""
    longer = {length: model.step(length) for length in lengths if length > SHORT}
    same = model.step(SHORT, same_experts=True)
    return Speed(model.step(SHORT), same, longer, bandwidth, accepted, published, model.settings.ranks)


def title(speed: Speed) -> str:
    each = f", each of {speed.ranks} machines" if speed.ranks > 1 else ""
    read = terminal.size(int(speed.step.bytes))
    return f"Decode: a step of one request reads {read} ({SHORT:,} tokens in the cache{each})"


def read_rows(speed: Speed) -> list[Row]:
    step = speed.step
    return [
        (r.what, terminal.size(int(r.bytes)), f"{r.bytes / step.bytes:.1%}", r.note)
        for r in step.reads
        if r.bytes >= LEAST
    ]


def speed_lines(speed: Speed) -> Iterator[str]:
    if speed.bandwidth is None:
        yield "for the highest speed give the memory's bandwidth: --bandwidth GB/s"
        return
    step, whose = speed.step, " (a DGX Spark's memory)" if speed.bandwidth == SPARK_BANDWIDTH else ""
    at = f"at {speed.bandwidth / 1e9:g} GB/s{whose} the ceiling is"
    none, every = step.ceiling(speed.bandwidth), step.ceiling(speed.bandwidth, 1.0)
    ceiling, same = speed.ceiling, speed.rate(speed.same)
    if ceiling is None or same is None:
        yield f"{at} {none:.1f} tokens/s if none of {step.drafted} drafted tokens is accepted, {every:.1f} if all are"
        return
    share = f" if {speed.accepted:.0%} of {step.drafted} drafted tokens are accepted" if step.drafted else ""
    yield f"{at} {ceiling:.1f} tokens/s{share}"
    if step.drafted:
        yield f"  {none:.1f} tokens/s if none is accepted, {every:.1f} if all are"
    if same > ceiling * 1.001:
        yield f"  {same:.1f} tokens/s if all tokens of a step use the same experts"
    for length, longer in speed.longer.items():
        yield f"  {speed.rate(longer):.1f} tokens/s with {length:,} tokens in the cache"
    if speed.ranks > 1:
        yield "  without the time that the machines take to exchange their results"
    for figure in speed.published:
        rate = figure.tokens_per_second
        yield f"published: {rate:g} tokens/s, {rate / ceiling:.0%} of the ceiling, {figure.date}, {figure.source}"
        yield f"  {figure.says}"


def to_json(speed: Speed) -> dict[str, Any]:
    """Bytes, bytes a second, tokens a second."""
    return {
        "context": SHORT,
        "drafted": speed.step.drafted,
        "step_bytes": speed.step.bytes,
        "reads": [asdict(read) | {"bytes": read.bytes} for read in speed.step.reads],
        "bandwidth": speed.bandwidth,
        "accepted": speed.accepted,
        "ceiling": speed.ceiling,
        "ceiling_same_experts": speed.rate(speed.same),
        "ceilings": {length: speed.rate(step) for length, step in speed.longer.items()},
        "published": [figure.model_dump() for figure in speed.published],
    }
