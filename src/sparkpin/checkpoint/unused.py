"""What the donors have and nothing takes, so that a person sees that nothing was forgotten.

Outside of experts a tensor counts if the base has none of its name: weights that the base holds in another format. A
tensor of the MTP layer counts, too, though the base may have the same: that is how the published scripts count, whose
numbers pins repeat (408 for Qwen3.5-122B-A10B). Another one that the base has by the same name is left to the base.
Experts of a donor are not meant to be taken, and stand by themselves.
"""

from __future__ import annotations

from sparkpin.checkpoint.draft import Draft, PlanRow
from sparkpin.checkpoint.patterns import generalise

EXPERTS, MTP = ".experts.", "mtp."
UNUSED, LEFT = "unused", "left"


def outside_experts(name: str) -> bool:
    return EXPERTS not in name


def unused_rows(draft: Draft) -> list[PlanRow]:
    """By pattern, type and donor; the donors' `found` hold every tensor outside of experts."""
    taken = {(s.repository, name) for tensors in draft.added.values() for name, s in tensors.items()}
    tally: dict[tuple[str, str, str, str], list[int]] = {}

    def count(verb: str, pattern: str, dtype: str, note: str, tensors: int, size: int) -> None:
        row = tally.setdefault((verb, pattern, dtype, note), [0, 0])
        row[0] += tensors
        row[1] += size

    for donor in draft.donors.values():
        for name, source in donor.found.items():
            if outside_experts(name) and (donor.name, name) not in taken:
                verb = UNUSED if is_without_counterpart(draft, name) else LEFT
                note = f"of {donor.name}; {why(draft, name)}"
                count(verb, generalise(name), source.info.dtype, note, 1, source.info.nbytes)
        experts = {kind: list(held) for kind, held in donor.kinds.items() if EXPERTS in kind.pattern}
        for tensors in draft.added.values():
            for source in tensors.values():
                if source.repository == donor.name and (kind := donor.kind(source)) in experts:
                    experts[kind][0] -= 1
                    experts[kind][1] -= source.info.nbytes
        for kind, (tensors_left, size) in experts.items():
            if tensors_left:
                note = f"of {donor.name}; no rule takes experts"
                count(UNUSED, kind.pattern, kind.dtype, note, tensors_left, size)
    return [PlanRow(*key, tensors, size, 0) for key, (tensors, size) in tally.items()]


def is_without_counterpart(draft: Draft, name: str) -> bool:
    return name.startswith(MTP) or draft.base.file_of(name) is None


def why(draft: Draft, name: str) -> str:
    """Why a tensor outside of experts stays unused."""
    module = name.rpartition(".")[0]
    if not is_without_counterpart(draft, name):
        return "the base's own of that name is used"
    if draft.base.file_of(f"{module}.qweight"):
        return "the base holds INT4 there"
    if draft.base.file_of(f"{module}.weight"):
        return "the base has its own"
    return "the base has no such module"


def unused_note(rows: list[PlanRow], expected: int | None) -> str:
    """How many stay unused outside of experts, against what the pin says."""
    seen = sum(row.tensors for row in rows if row.verb == UNUSED and outside_experts(row.pattern))
    if expected is None:
        return f"{seen:,} tensors outside of experts stay unused"
    if seen == expected:
        return f"{seen:,} tensors outside of experts stay unused, as the pin expects"
    return (
        f"{seen:,} tensors outside of experts stay unused, where hybrid.unused of the pin expects {expected:,}: "
        "compare the rows above with docs/checkpoints.md; it may be another revision"
    )
