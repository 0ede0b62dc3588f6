"""A plan in words: what happens to tensors, sizes, what is fetched, disk."""

from __future__ import annotations

from sparkpin.checkpoint.plan import CheckpointPlan, taken
from sparkpin.core import terminal
from sparkpin.pins.schema import DRAFTER


def summary(plan: CheckpointPlan) -> list[str]:
    did = ", ".join(f"{count:,} {verb}" for verb, count in plan.counts.items())
    after = plan.written_bytes + plan.linked_bytes
    lines = [
        f"checkpoint of {plan.model}, {' + '.join(plan.steps)}: {did}",
        f"size: {terminal.size(plan.base_bytes)} as published, {terminal.size(after)} after "
        f"({after - plan.base_bytes:+,} bytes)",
        f"files: {len(plan.shards) + len(plan.texts)} written ({terminal.size(plan.written_bytes)}), "
        f"{len(plan.links)} linked ({terminal.size(plan.linked_bytes)})",
    ]
    wanted = taken(plan)
    for origin in plan.origins[1:]:
        if origin.name == DRAFTER:  # taken whole; a note has its size
            continue
        sources = wanted[origin.name]
        size = sum(source.info.nbytes for source in sources)
        share = 100 * (size + origin.outline) / origin.size if origin.size else 0
        lines.append(
            f"of {origin.name} ({origin.where}): {len(sources):,} tensors of {terminal.size(size)}, and "
            f"{terminal.size(origin.outline)} of headers, index and config: {share:.2f} % of its "
            f"{terminal.size(origin.size)}"
        )
    return [*lines, *plan.notes]


def disk(needed: int, free: int, folder: object) -> str:
    enough = "" if free >= needed else ": NOT ENOUGH"
    return f"disk: {terminal.size(needed)} needed in {folder}, {terminal.size(free)} free{enough}"
