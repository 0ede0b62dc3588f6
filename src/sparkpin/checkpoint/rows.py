"""What a plan says of the tensors, kind by kind: rows for people and for tests."""

from __future__ import annotations

from sparkpin.checkpoint.draft import Draft, PlanRow
from sparkpin.checkpoint.repository import Kind
from sparkpin.checkpoint.unused import unused_rows

ORDER = ("replaced", "added", "listed", "dropped", "kept", "left", "unused")


def rows_of(draft: Draft) -> tuple[PlanRow, ...]:
    """What was done to the base's tensors, what stays as it was, and what donors have that nothing takes."""
    changed = [PlanRow(*key, *row) for key, row in draft.tally.items()]
    return tuple(
        sorted([*changed, *kept_rows(draft), *unused_rows(draft)], key=lambda row: (ORDER.index(row.verb), row))
    )


def kept_rows(draft: Draft) -> list[PlanRow]:
    """What no step touched, from the counts of the base less what was dropped or listed."""
    left = {kind: list(count) for kind, count in draft.base.kinds.items()}
    gone = [source for tensors in draft.dropped.values() for source in tensors.values()]
    gone += [
        draft.base.found[name]
        for name in draft.listed
        if (file := draft.base.unlisted.get(name)) and name not in draft.dropped.get(file, {})
    ]
    for source in gone:
        count = left[draft.base.kind(source)]
        count[0] -= 1
        count[1] -= source.info.nbytes
    return [
        PlanRow("kept", kind.pattern, kind.dtype, kind_note(kind), count, size, size)
        for kind, (count, size) in left.items()
        if count
    ]


def kind_note(kind: Kind) -> str:
    return f"in {kind.file}; the index leaves it out, and so do loaders" if kind.file else ""
