"""What a checkpoint will hold, decided from headers alone: data that prints, is checked, and is then carried out.

Read top-down: `make_plan` reads the repositories, lets each step change a draft of the base, and lays the draft out as
files to link, shards to write and texts to write. Whatever does not fit is found here, before a byte is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparkpin.checkpoint.content import OWN
from sparkpin.checkpoint.draft import Draft, Shard, SmallFile
from sparkpin.checkpoint.formats import Patterns, Rules, apply_formats, modules_of, taken_names
from sparkpin.checkpoint.mtp import apply_mtp
from sparkpin.checkpoint.repository import Listing, ReadRepository, TensorPlace, header_of, read_repository
from sparkpin.checkpoint.steps import rules_of, used_repositories
from sparkpin.core import terminal
from sparkpin.pins.schema import DRAFTER, ModelPin


class Link(NamedTuple):
    """A file that is taken over unchanged. path: in the checkpoint; of: its repository where that is not the base: then
    it lies in a folder of that name."""

    path: str
    size: int
    of: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """links, shards and texts are the result's files, each path once. unlisted: tensors that its index leaves out.

    counts: tensors by what happens to them, see Draft.counts. origins: the repositories, the base first.
    """

    model: str
    steps: tuple[str, ...]
    base: str
    links: tuple[Link, ...]
    shards: tuple[Shard, ...]
    texts: tuple[SmallFile, ...]
    unlisted: frozenset[str]
    config: Mapping[str, Any]
    counts: Mapping[str, int]
    origins: tuple[Listing, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Path -> bytes of each file."""
        written = {shard.path: shard.size for shard in self.shards} | {text.path: len(text.data) for text in self.texts}
        return {link.path: link.size for link in self.links} | written

    @property
    def written_bytes(self) -> int:
        return sum(shard.size for shard in self.shards) + sum(len(text.data) for text in self.texts)

    @property
    def linked_bytes(self) -> int:
        return sum(link.size for link in self.links)


def make_plan(listings: Mapping[str, Listing], pin: ModelPin, steps: Sequence[str]) -> CheckpointPlan:
    """Plan from headers, index and config only.

    listings: of every repository that the steps read, by the pin's name. Raises CheckpointError, ManifestError,
    IntegrityError.
    """
    used = used_repositories(pin, steps)
    rules = Rules(rules_of(pin, steps))
    mtp = pin.mtp if "mtp" in steps else None
    layer = Patterns(mtp.tensors if mtp else ())
    base = read_repository(listings[pin.base], lambda name: rules.wants(name) or bool(layer.all(name)))
    modules = modules_of({name: source for name, source in base.found.items() if rules.wants(name)})

    def read_donor(donor: str) -> ReadRepository:
        names, gives_mtp = taken_names(modules, rules, donor), bool(mtp and mtp.source == donor)
        return read_repository(listings[donor], lambda name: name in names or (gives_mtp and bool(layer.all(name))))

    donors = {donor: read_donor(donor) for donor in used if not pin.is_whole(donor)}
    draft = Draft(base, donors, deepcopy(dict(base.config)))  # the step `copy`
    if rules.rules:
        apply_formats(draft, modules, rules)
    if mtp:
        apply_mtp(draft, mtp)
    return lay_out(draft, pin, steps, listings[DRAFTER] if DRAFTER in steps else None)


def lay_out(draft: Draft, pin: ModelPin, steps: Sequence[str], drafter: Listing | None) -> CheckpointPlan:
    """Turn a finished draft into files. drafter: all of it is linked, in a folder."""
    base, texts = draft.base.listing, draft.texts()
    shards = tuple(draft.shard(file) for file in sorted({*draft.added, *draft.dropped}))
    new = {*OWN, *(shard.path for shard in shards), *(text.path for text in texts)}
    links = [Link(file, size) for file, size in base.files.items() if file not in new]
    origins = [base, *(donor.listing for donor in draft.donors.values())]
    if drafter:
        origins.append(drafter)
        links = [link for link in links if not link.path.startswith(f"{DRAFTER}/")]
        links += [Link(f"{DRAFTER}/{file}", size, DRAFTER) for file, size in drafter.files.items()]
    return CheckpointPlan(
        model=pin.name,
        steps=tuple(steps),
        base=pin.base,
        links=tuple(sorted(links)),
        shards=shards,
        texts=texts,
        unlisted=draft.unlisted(),
        config=draft.config,
        counts=draft.counts(),
        origins=tuple(origins),
    )


def donor_tensors(plan: CheckpointPlan) -> dict[str, list[TensorPlace]]:
    """Per repository other than the base: the tensors that the plan writes from it, sorted by file and place."""
    found: dict[str, list[TensorPlace]] = {origin.name: [] for origin in plan.origins[1:]}
    for shard in plan.shards:
        for source in shard.added.values():
            found[source.repository].append(source)
    return {name: sorted(sources, key=lambda s: (s.file, s.info.begin)) for name, sources in found.items()}


def final_tensors(plan: CheckpointPlan, listings: Mapping[str, Listing]) -> Iterator[TensorPlace]:
    """Every tensor of the finished checkpoint, file by file in the order of the data."""
    base, shards = listings[plan.base], {shard.path: shard for shard in plan.shards}
    for file in sorted({*base.headers, *shards}):
        header = header_of(base, file) if file in base.headers else None
        yield from shards.get(file, Shard(file)).in_order(header, plan.base)


def summary(plan: CheckpointPlan) -> list[str]:
    """The plan for people: what happens to tensors, sizes, what is fetched of donors."""
    before, after = plan.origins[0].size, plan.written_bytes + plan.linked_bytes
    lines = [
        f"checkpoint of {plan.model}, {' + '.join(plan.steps)}: "
        + ", ".join(f"{count:,} {verb}" for verb, count in plan.counts.items()),
        f"size: {terminal.size(before)} as published, {terminal.size(after)} after ({after - before:+,} bytes)",
        f"files: {len(plan.shards) + len(plan.texts)} written ({terminal.size(plan.written_bytes)}), "
        f"{len(plan.links)} linked ({terminal.size(plan.linked_bytes)})",
    ]
    for origin, sources in zip(plan.origins[1:], donor_tensors(plan).values(), strict=True):
        size = terminal.size(sum(source.info.nbytes for source in sources))
        part = "all" if origin.name == DRAFTER else f"{len(sources):,} tensors of {size}, out"
        lines.append(f"of {origin.name} ({origin.origin}): {part} of {terminal.size(origin.size)}")
    return lines
