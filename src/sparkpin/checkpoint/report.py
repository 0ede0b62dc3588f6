"""A plan in words: a table with a row for each kind of module, and lines for sizes, fetching and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from sparkpin.checkpoint.draft import PlanRow
from sparkpin.checkpoint.plan import CheckpointPlan, taken
from sparkpin.checkpoint.rows import ORDER
from sparkpin.core import terminal
from sparkpin.pins.schema import DRAFTER

COLUMNS = ("what", "count", "size", "after", "tensors", "type", "why")


class TensorLine(NamedTuple):
    """Rows that are told together. parent: what their names have in common; modules, parts: the two parts behind it."""

    verb: str
    parent: str
    note: str
    modules: tuple[str, ...]
    parts: tuple[str, ...]
    dtypes: tuple[str, ...]
    tensors: int
    before: int
    after: int

    def cells(self) -> tuple[str, ...]:
        after = exact(self.after) if self.after and self.after != self.before else ""
        name = ".".join(filter(None, (self.parent, braced(self.modules), braced(self.parts))))
        size = exact(self.before) if self.before else ""
        return self.verb, f"{self.tensors:,}", size, after, name, ", ".join(self.dtypes), self.note


def table(rows: Iterable[PlanRow]) -> list[tuple[str, ...]]:
    """A module's tensors (qweight, qzeros, scales) are told in one line, and so are its siblings of the same kind."""
    lines = [line_of(row) for row in rows]
    lines = joined(lines, lambda line: (line.verb, line.parent, line.note, line.modules))
    lines = joined(lines, lambda line: (line.verb, line.parent, line.note, line.parts, line.dtypes))
    return [line.cells() for line in lines]


def line_of(row: PlanRow) -> TensorLine:
    module, _, part = row.pattern.rpartition(".")
    parent, _, module = module.rpartition(".")
    return TensorLine(row.verb, parent, row.note, (module,), (part,), (row.dtype,), row.tensors, row.before, row.after)


def joined(lines: Iterable[TensorLine], alike: Callable[[TensorLine], Hashable]) -> list[TensorLine]:
    groups: dict[Hashable, list[TensorLine]] = {}
    for line in lines:
        groups.setdefault(alike(line), []).append(line)
    return [
        group[0]._replace(
            modules=union(line.modules for line in group),
            parts=union(line.parts for line in group),
            dtypes=union(line.dtypes for line in group),
            tensors=sum(line.tensors for line in group),
            before=sum(line.before for line in group),
            after=sum(line.after for line in group),
        )
        for group in groups.values()
    ]


def union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in names for name in group))


def braced(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


def summary(plan: CheckpointPlan) -> list[str]:
    """What the table comes to: counts, sizes before and after, what is fetched of each repository, notes."""
    counts: Counter[str] = Counter()
    for row in plan.rows:
        counts[row.verb] += row.tensors
    did = ", ".join(f"{counts[verb]:,} {verb}" for verb in ORDER)
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


def exact(size: int) -> str:
    """Small ones in bytes: a row of scales must not say 0.0 MB."""
    return terminal.size(size) if size >= 100_000 else f"{size:,} B"
