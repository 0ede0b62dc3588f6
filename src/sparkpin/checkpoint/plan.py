"""What a checkpoint will hold, decided from headers alone: data that prints, is checked, and is then carried out.

Read top-down: `make_plan` reads the repositories, lets each step change a draft of the base, and lays the draft out as
files to link, shards to write and texts to write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from sparkpin.checkpoint.draft import Draft, Row
from sparkpin.checkpoint.formats import Rules, apply_formats, modules_of, taken_names
from sparkpin.checkpoint.mtp import apply_mtp
from sparkpin.checkpoint.patterns import Patterns
from sparkpin.checkpoint.repository import CONFIG, INDEX, Kind, Listing, Repository, Source, header_of, read_repository
from sparkpin.checkpoint.safetensors import Header, header_in_order, item_size
from sparkpin.checkpoint.unused import outside_experts, unused_note, unused_rows
from sparkpin.errors import CheckpointError, ManifestError
from sparkpin.schema import LockedFile, ModelLock, ModelPin, Stage

FORMAT = 2
"""Version of the builder: raise it when the same inputs and steps would give other bytes, so that keys change."""

STEPS = ("copy", "hybrid", "mtp")


class Link(NamedTuple):
    """A file of the base repository that is taken over unchanged."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file that is written anew: the base's file of this name, if it has one, with changes.

    added: tensor -> where its bytes come from; dropped: the names that go, also of what is replaced; size: of the whole
    file; tensors: how many it will hold.
    """

    path: str
    in_base: bool
    added: Mapping[str, Source]
    dropped: frozenset[str]
    metadata: Mapping[str, str]
    size: int
    tensors: int


class Text(NamedTuple):
    """A small file with new content: the index, the config."""

    path: str
    data: bytes


class Placed(NamedTuple):
    """A tensor of the finished checkpoint: file in it, whether its index lists it, where its bytes come from."""

    file: str
    listed: bool
    source: Source


@dataclass(frozen=True, slots=True)
class Plan:
    """links, shards and texts are the result's files, each path once. unlisted: tensors that its index leaves out.

    rows: what happens to which tensors, by kind. sizes: repository -> bytes of all its files.
    """

    model: str
    steps: tuple[str, ...]
    base: str
    links: tuple[Link, ...]
    shards: tuple[Shard, ...]
    texts: tuple[Text, ...]
    unlisted: frozenset[str]
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        linked, written = [link.path for link in self.links], [shard.path for shard in self.shards]
        return sorted([*linked, *written, *(text.path for text in self.texts)])

    @property
    def written_bytes(self) -> int:
        return sum(shard.size for shard in self.shards) + sum(len(text.data) for text in self.texts)

    @property
    def linked_bytes(self) -> int:
        return sum(link.size for link in self.links)

    def lines(self) -> list[str]:
        """A table for people: a row for each verb and pattern of names, then the files."""
        rows = [("what", "tensors", "bytes", "name")]
        for row in self.rows:
            size = f"{row.before:,} -> {row.after:,}" if row.verb == "replaced" else f"{max(row.before, row.after):,}"
            rows.append((row.verb, f"{row.tensors:,}", size, f"{row.pattern} ({row.note})"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}" for r in rows]
        return [
            f"checkpoint of {self.model}: {' + '.join(self.steps)}",
            *table,
            *(f"write  {shard.path}  {shard.tensors:,} tensors, {shard.size:,} bytes" for shard in self.shards),
            *(f"write  {text.path}  {len(text.data):,} bytes" for text in self.texts),
            f"link   {len(self.links)} files of {self.base}, {self.linked_bytes:,} bytes",
            *self.notes,
        ]


def checkpoint_steps(chain: Iterable[Stage]) -> tuple[str, ...]:
    """The steps of a chain of stages, in order; stages without one (v2, v2-tq) share their parent's checkpoint."""
    steps = tuple(stage.checkpoint for stage in chain if stage.checkpoint is not None)
    check_steps(steps)
    return steps


def all_steps(pin: ModelPin) -> tuple[str, ...]:
    """The steps that the pin says enough for."""
    return tuple(step for step in STEPS if step == "copy" or getattr(pin, step) is not None)


def check_steps(steps: Sequence[str]) -> None:
    if not steps or steps[0] != "copy" or len(set(steps)) != len(steps):
        raise CheckpointError(
            f"checkpoint steps: saw {list(steps)}, wanted 'copy' first and each step once",
            next_step="correct `checkpoint:` in stages/",
        )
    unknown = set(steps) - set(STEPS)
    if unknown:
        raise CheckpointError(f"checkpoint steps: {sorted(unknown)} are unknown, wanted copy, hybrid or mtp")


def require(pin: ModelPin, steps: Sequence[str]) -> None:
    """The pin says what each step needs."""
    check_steps(steps)
    for step in ("hybrid", "mtp"):
        if step in steps and getattr(pin, step) is None:
            raise ManifestError(
                f"pins/models/{pin.name}.yaml", step, "(missing)", f"what the checkpoint step {step!r} takes from where"
            )


def used_repositories(pin: ModelPin, steps: Sequence[str]) -> dict[str, str]:
    """Pin's name of each repository that the steps read -> the step that reads it first."""
    require(pin, steps)
    used = {pin.base: "copy"}
    if "hybrid" in steps and pin.hybrid:
        for rule in pin.hybrid.rules:
            if rule.source:
                used.setdefault(rule.source, "hybrid")
    if "mtp" in steps and pin.mtp and pin.mtp.source:
        used.setdefault(pin.mtp.source, "mtp")
    return used


def checkpoint_key(pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> str:
    """SHA-256 (hex) over everything that decides the checkpoint's model files, and nothing else.

    A donor counts by the tensors that are taken of it, the headers that describe them, its index and config, so that a
    new README or another name of the same bytes changes nothing.
    """
    used = used_repositories(pin, steps)
    parts: list[Any] = [["format", FORMAT]]
    for step in steps:
        if step == "copy":
            parts.append([step, hashes(lock.repositories[pin.base].files)])
        elif step == "hybrid" and pin.hybrid:
            parts.append([step, [rule.model_dump(mode="json") for rule in pin.hybrid.rules]])
        elif step == "mtp" and pin.mtp:
            parts.append([step, pin.mtp.model_dump(mode="json")])
    for name in used:
        if name != pin.base:
            donor = lock.repositories[name]
            texts = [file for file in donor.files if file.file in (INDEX, CONFIG)]
            files = {tensor.file for tensor in donor.tensors}
            whole = [file for file in donor.files if file.file.endswith(".safetensors") and not donor.tensors]
            headers = [header for header in donor.headers if header.file in files]
            parts.append([name, hashes([*texts, *whole]), hashes(headers), hashes(donor.tensors)])
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def hashes(files: Iterable[LockedFile]) -> list[list[str]]:
    return sorted([file.name, file.sha256] for file in files)


def make_plan(listings: Mapping[str, Listing], pin: ModelPin, steps: Sequence[str]) -> Plan:
    """Plan from headers, index and config only. Whatever does not fit is told here, before a byte is written.

    listings: of every repository that the steps read, by the pin's name. Raises CheckpointError, ManifestError,
    IntegrityError.
    """
    used = used_repositories(pin, steps)
    rules = Rules(pin.hybrid if "hybrid" in steps else None)
    mtp = pin.mtp if "mtp" in steps else None
    layer = Patterns(mtp.tensors if mtp else ())
    base = read_repository(listings[pin.base], lambda name: rules.wants(name) or layer.first(name) is not None)
    modules = modules_of({name: source for name, source in base.found.items() if rules.wants(name)})
    donors = {}
    for name in used:
        if name != pin.base:
            names = taken_names(modules, rules, name)
            given = layer if mtp and mtp.source == name else Patterns(())
            donors[name] = read_donor(listings[name], names, given)
    draft = Draft.start(base, donors)
    for step in steps:
        if step == "hybrid":
            apply_formats(draft, modules, rules)
        elif step == "mtp" and mtp:
            apply_mtp(draft, mtp)
    return lay_out(draft, pin, steps)


def read_donor(listing: Listing, names: set[str], given: Patterns) -> Repository:
    def wanted(name: str) -> bool:
        return outside_experts(name) or name in names or given.first(name) is not None

    return read_repository(listing, wanted)


def taken(plan: Plan) -> dict[str, list[Source]]:
    """Per repository other than the base: the tensors that the plan writes from it, sorted by file and place."""
    found: dict[str, list[Source]] = {name: [] for name in plan.sizes if name != plan.base}
    for shard in plan.shards:
        for source in shard.added.values():
            found[source.repository].append(source)
    return {name: sorted(sources, key=lambda s: (s.file, s.info.begin)) for name, sources in found.items()}


def final_tensors(plan: Plan, listings: Mapping[str, Listing]) -> Iterator[Placed]:
    """Every tensor of the finished checkpoint, file by file in the order of the data."""
    base = listings[plan.base]
    shards = {shard.path: shard for shard in plan.shards}
    for file in sorted({*base.headers, *shards}):
        header = header_of(base, file) if file in base.headers else None
        shard = shards.get(file) or Shard(file, True, {}, frozenset(), {}, 0, 0)
        for source in in_order(shard, header, plan.base):
            yield Placed(file, source.info.name not in plan.unlisted, source)


def in_order(shard: Shard, header: Header | None, base: str) -> list[Source]:
    """The tensors of a shard as its data lies: falling item size, so that each is aligned to it, as loaders that view
    a mapped file need; within that first the base's in the order of its file, so that long runs stay long, then what
    is added, by name.
    """
    infos = header.tensors.values() if header else ()
    kept = [Source(base, shard.path, info) for info in infos if info.name not in shard.dropped]
    sources = kept + [shard.added[name] for name in sorted(shard.added)]
    sources.sort(key=lambda source: -item_size(source.info.dtype))
    return sources


def header_for(shard: Shard, sources: Sequence[Source]) -> bytes:
    return header_in_order(((s.info.name, s.info.dtype, s.info.shape) for s in sources), shard.metadata)


def lay_out(draft: Draft, pin: ModelPin, steps: Sequence[str]) -> Plan:
    """Turn a finished draft into files."""
    base = draft.base
    shards = [lay_out_shard(draft, file) for file in sorted({*draft.added, *draft.dropped})]
    unlisted = frozenset(name for name in base.unlisted if not draft.is_listed(name) and draft.file_of(name))
    texts = []
    if shards or draft.listed:
        texts.append(Text(INDEX, index_bytes(draft)))
    if draft.config != base.config:
        texts.append(Text(CONFIG, json_bytes(draft.config)))
    new = {shard.path for shard in shards} | {text.path for text in texts}
    order = {verb: i for i, verb in enumerate(("replaced", "added", "listed", "dropped", "kept", "unused"))}
    changed = [Row(*key, *row) for key, row in draft.tally.items()]
    rows = sorted([*changed, *kept_rows(draft), *unused_rows(draft)], key=lambda row: (order[row.verb], row))
    if "hybrid" in steps and pin.hybrid:
        draft.notes.append(unused_note(rows, pin.hybrid.unused))
    repositories: list[Repository] = [base, *draft.donors.values()]
    return Plan(
        model=pin.name,
        steps=tuple(steps),
        base=pin.base,
        links=tuple(Link(file, size) for file, size in sorted(base.listing.files.items()) if file not in new),
        shards=tuple(shards),
        texts=tuple(texts),
        unlisted=unlisted,
        config=draft.config,
        rows=tuple(rows),
        sizes={repository.name: sum(repository.listing.files.values()) for repository in repositories},
        notes=tuple(draft.notes),
    )


def lay_out_shard(draft: Draft, file: str) -> Shard:
    header = draft.base.header(file) if file in draft.base.listing.headers else None
    metadata = header.metadata if header else {"format": "pt"}
    added, dropped = draft.added.get(file, {}), frozenset(draft.dropped.get(file, {}))
    shard = Shard(file, header is not None, added, dropped, metadata, 0, 0)
    sources = in_order(shard, header, draft.base.name)
    size = len(header_for(shard, sources)) + sum(source.info.nbytes for source in sources)
    return Shard(file, header is not None, added, dropped, metadata, size, len(sources))


def kept_rows(draft: Draft) -> list[Row]:
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
        Row("kept", kind.pattern, kind_note(kind), count, size, size) for kind, (count, size) in left.items() if count
    ]


def kind_note(kind: Kind) -> str:
    return f"{kind.dtype}, in {kind.file}, not in the index" if kind.file else kind.dtype


def index_bytes(draft: Draft) -> bytes:
    """The index with sorted names; its total_size counts the bytes of what it lists, as Transformers writes it."""
    old = dict(draft.base.index or {})
    gone = {name for tensors in draft.dropped.values() for name in tensors}
    weight_map = {name: file for name, file in draft.base.listed.items() if name not in gone} | draft.listed
    total = sum(size for kind, (_, size) in draft.base.kinds.items() if not kind.file)
    for file, tensors in draft.dropped.items():
        total -= sum(s.info.nbytes for name, s in tensors.items() if draft.base.listed.get(name) == file)
    for name, file in draft.listed.items():
        source = draft.added.get(file, {}).get(name) or draft.base.found[name]
        total += source.info.nbytes
    metadata = {**(old.get("metadata") or {}), "total_size": total}
    # Line by line: for 100,000 names the encoder of the standard library takes a second and 60 MB.
    lines = (f"    {encode_basestring(name)}: {encode_basestring(weight_map[name])}" for name in sorted(weight_map))
    parts = {key: indented(value) for key, value in {**old, "metadata": metadata}.items() if key != "weight_map"}
    parts["weight_map"] = "{\n" + ",\n".join(lines) + "\n  }"
    return ("{\n" + ",\n".join(f"  {encode_basestring(key)}: {text}" for key, text in parts.items()) + "\n}\n").encode()


def indented(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Indented, with the keys in the order of the published file, so that a diff shows only what was changed."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
