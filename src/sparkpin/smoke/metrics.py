"""Prometheus' text format, as far as /metrics of vLLM uses it, and what it says about drafted tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class DraftCounts:
    """Tokens that the draft model proposed, and how many of them the model itself would have said."""

    drafted: int
    accepted: int

    @property
    def share(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def __str__(self) -> str:
        return f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.share:.1%})"


def total(text: str, name: str) -> float | None:
    """Sum of a metric over all its labels (engines, models). None where there is no such metric."""
    values = [float(found[3]) for line in text.splitlines() if (found := SAMPLE.match(line)) and found[1] == name]
    return sum(values) if values else None


def by_position(text: str) -> tuple[float, ...]:
    """Share of the drafts whose first, second, ... token was accepted. A position counts as accepted only if those
    before it are. Empty where nothing was drafted.
    """
    drafts, accepted = total(text, DRAFTS), accepted_by_position(text)
    return tuple(accepted[place] / drafts for place in sorted(accepted)) if drafts else ()


def accepted_by_position(text: str) -> dict[int, float]:
    """Position in a draft, from 0 -> how many of its tokens were accepted."""
    accepted = dict[int, float]()
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found and found[1] == BY_POSITION and (position := re.search(r'position="(\d+)"', found[2] or "")):
            accepted[int(position[1])] = accepted.get(int(position[1]), 0) + float(found[3])
    return accepted


def acceptance(text: str) -> DraftCounts | None:
    """None where the server does not draft at all."""
    drafted, accepted = total(text, DRAFTED), total(text, ACCEPTED)
    return None if drafted is None or accepted is None else DraftCounts(int(drafted), int(accepted))
