"""Prometheus' text format, as far as /metrics of vLLM uses it, and what it says about drafted tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([-+]?\d[\d.]*(?:e[-+]?\d+)?)(?:\s+-?\d+)?$", re.I)
HITS = "vllm:prefix_cache_hits_total"  # tokens
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def samples(text: str, name: str) -> list[tuple[str, float]]:
    """Labels and value of each of a metric's."""
    found = filter(None, map(SAMPLE.match, text.splitlines()))
    return [(one[2] or "", float(one[3])) for one in found if one[1] == name]


def total(text: str, name: str) -> float | None:
    """Sum of a metric over all its labels (engines, models). None where there is no such metric."""
    values = [value for _, value in samples(text, name)]
    return sum(values) if values else None


@dataclass(frozen=True)
class DraftCounts:
    """drafts: how often a draft model proposed tokens; drafted: these; accepted: those that the model itself would have
    said; places: of the first token of a draft, the second, ... how many. A token is accepted only if those before it
    are."""

    drafts: int
    drafted: int
    accepted: int
    places: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str) -> DraftCounts | None:
        """None where the server does not draft at all."""
        drafted, accepted = total(text, DRAFTED), total(text, ACCEPTED)
        if drafted is None or accepted is None:
            return None
        places = dict[int, float]()
        for labels, value in samples(text, BY_POSITION):
            if position := re.search(r'position="(\d+)"', labels):
                places[int(position[1])] = places.get(int(position[1]), 0) + value
        every = tuple(int(places[place]) for place in sorted(places))
        return cls(int(total(text, DRAFTS) or 0), int(drafted), int(accepted), every)

    def since(self, before: DraftCounts | None) -> DraftCounts:
        if before is None:  # a counter appears with its first value
            return self
        places = tuple(now - then for now, then in zip_longest(self.places, before.places, fillvalue=0))
        drafted, accepted = self.drafted - before.drafted, self.accepted - before.accepted
        return DraftCounts(self.drafts - before.drafts, drafted, accepted, places)

    @property
    def share(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """By position, of all drafts: also of those that had no token there. Empty where nothing was drafted."""
        return tuple(accepted / self.drafts for accepted in self.places) if self.drafts else ()

    def __str__(self) -> str:
        lacking = self.drafts * len(self.places) - self.drafted
        short = f", which had {lacking} tokens fewer than they could have" if lacking > 0 else ""
        shares = ", ".join(f"{share:.1%}" for share in self.shares) or "nothing"
        accepted = f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.share:.1%})"
        return f"{accepted}; by position {shares} of {self.drafts} drafts{short}"
