"""From what `vllm bench serve` writes down of its requests to figures. Pure.

It notes a time for each part of a stream and the number of tokens that the server tells at the end (`usage`). With
speculative decoding a part carries several tokens, so parts and tokens are kept apart here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from sparkpin.measure.bench.record import Cell, CellResult, Spread
from sparkpin.smoke import metrics

GENERATED = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class TimedAnswer:
    """One request, its tokens as the server counts them."""

    prompt: int
    tokens: int
    ttft: float  # seconds to the first part
    gaps: tuple[float, ...]  # seconds between the parts

    @property
    def decode_rate(self) -> float | None:
        """The first part comes from the prefill and holds one token."""
        seconds = sum(self.gaps)
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None

    @property
    def token_gaps(self) -> tuple[float, ...]:
        if self.tokens < 2:
            return ()
        each = (self.tokens - 1) / len(self.gaps) if self.gaps else 1
        return tuple(gap / each for gap in self.gaps)


def answers_of(result: Mapping[str, Any]) -> list[TimedAnswer]:
    """Of the requests that were answered. result: what the tool's `--save-detailed` saves."""
    rows = zip(
        result["input_lens"], result["output_lens"], result["ttfts"], result["itls"], result["errors"], strict=True
    )
    return [
        TimedAnswer(int(prompt), int(tokens), float(ttft), tuple(map(float, gaps)))
        for prompt, tokens, ttft, gaps, error in rows
        if not error and tokens
    ]


def failures_of(result: Mapping[str, Any]) -> list[str]:
    """The last line of each error."""
    lines = [str(error).strip().splitlines() for error in result["errors"] if error]
    return [line[-1] for line in lines if line]


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p95 = np.quantile(values, (0.5, 0.95))
    return Spread(p50=float(p50), p95=float(p95))


def middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def measured(cell: Cell, result: Mapping[str, Any], before: str, after: str) -> CellResult:
    """before, after: the server's /metrics around the run."""
    answers = answers_of(result)
    seconds = float(result["duration"])
    tokens = sum(answer.tokens for answer in answers)
    drafted, accepted = (grown(before, after, name) for name in (metrics.DRAFTED, metrics.ACCEPTED))
    made = grown(before, after, GENERATED)
    alone = cell.kind == "sweep" and cell.concurrency == 1
    return CellResult(
        cell=cell,
        seconds=seconds,
        completed=len(answers),
        failed=len(result["errors"]) - len(answers),
        prompt_tokens=sum(answer.prompt for answer in answers),
        output_tokens=tokens,
        parts=sum(len(answer.gaps) for answer in answers),
        output_rate=tokens / seconds,
        decode_rate=middle([answer.decode_rate for answer in answers]),
        ttft=spread([answer.ttft for answer in answers]),
        token=spread([gap for answer in answers for gap in answer.token_gaps]),
        prefill_rate=middle([answer.prompt / answer.ttft for answer in answers]) if alone else None,
        drafted=drafted or None,
        accepted=accepted if drafted else None,
        accepted_by_position=positions(before, after) if drafted else (),
        others=None if made is None else made - tokens,
    )


def grown(before: str, after: str, name: str) -> int | None:
    """By how much a counter of /metrics grew; None where the server has no such counter."""
    then, now = metrics.total(before, name), metrics.total(after, name)
    return None if now is None else int(now - (then or 0))


def positions(before: str, after: str) -> tuple[float, ...]:
    """As metrics.by_position, of what came between."""
    drafts = grown(before, after, metrics.DRAFTS)
    then, now = metrics.accepted_by_position(before), metrics.accepted_by_position(after)
    return tuple((now[place] - then.get(place, 0)) / drafts for place in sorted(now)) if drafts else ()
