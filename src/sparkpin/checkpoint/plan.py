"""What a checkpoint will hold, decided from headers alone: data that prints, is checked, and is then carried out.

Read top-down: `make_plan` reads the repositories, lets each step change a draft of the base, and lays the draft out as
files to link, shards to write and texts to write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.draft import Change, Draft, generalise
from sparkpin.checkpoint.hybrid import apply_hybrid
from sparkpin.checkpoint.mtp import apply_mtp
from sparkpin.checkpoint.repository import CONFIG, INDEX, Source, read_repository
from sparkpin.checkpoint.safetensors import build_header
from sparkpin.errors import CheckpointError, ManifestError
from sparkpin.schema import LockedFile, ModelLock, ModelPin, Stage

FORMAT = 1
"""Version of the builder: raise it when the same inputs and steps would give other bytes, so that keys change."""


@dataclass(frozen=True, slots=True)
class Link:
    """A file of the base repository that is taken over unchanged."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file that is written anew. tensors: name -> where its bytes come from; size: of the whole file."""

    path: str
    tensors: Mapping[str, Source]
    metadata: Mapping[str, str]
    size: int


@dataclass(frozen=True, slots=True)
class Text:
    """A small file with new content: the index, the config."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """links, shards and texts are the result's files, each path once. kept: what no step touched."""

    model: str
    steps: tuple[str, ...]
    base: str
    links: tuple[Link, ...]
    shards: tuple[Shard, ...]
    texts: tuple[Text, ...]
    weight_map: Mapping[str, str]
    config: Mapping[str, Any]
    changes: tuple[Change, ...]
    kept: tuple[Change, ...]

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
        totals: dict[str, list[int]] = {verb: [0, 0] for verb in ("replaced", "added", "listed", "kept", "dropped")}
        for (verb, pattern, note), group in grouped((*self.changes, *self.kept)).items():
            before, after = sum(c.before for c in group), sum(c.after for c in group)
            size = f"{before:,} -> {after:,}" if verb == "replaced" else f"{max(before, after):,}"
            rows.append((verb, f"{len(group):,}", size, f"{pattern} ({note})"))
            total = totals.setdefault(verb, [0, 0])
            total[0] += len(group)
            total[1] += max(before, after) if verb != "replaced" else after
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]}" for r in rows]
        summary = ", ".join(f"{verb} {count:,} ({size:,} bytes)" for verb, (count, size) in totals.items())
        return [
            f"checkpoint of {self.model}: {' + '.join(self.steps)}",
            *table,
            f"in all: {summary}",
            *(f"write  {shard.path}  {len(shard.tensors):,} tensors, {shard.size:,} bytes" for shard in self.shards),
            *(f"write  {text.path}  {len(text.data):,} bytes" for text in self.texts),
            f"link   {len(self.links)} files of {self.base}, {self.linked_bytes:,} bytes",
        ]


def checkpoint_steps(chain: Iterable[Stage]) -> tuple[str, ...]:
    """The steps of a chain of stages, in order; stages without one (v2, v2-tq) share their parent's checkpoint."""
    steps = tuple(stage.checkpoint for stage in chain if stage.checkpoint is not None)
    check_steps(steps)
    return steps


def check_steps(steps: Sequence[str]) -> None:
    if not steps or steps[0] != "copy" or len(set(steps)) != len(steps):
        raise CheckpointError(
            f"checkpoint steps: saw {list(steps)}, wanted 'copy' first and each step once",
            next_step="correct `checkpoint:` in stages/",
        )
    unknown = set(steps) - {"copy", "hybrid", "mtp"}
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
        used.setdefault(pin.hybrid.source, "hybrid")
    return used


def checkpoint_key(pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> str:
    """SHA-256 (hex) over everything that decides the checkpoint's model files, and nothing else.

    A source that gives only tensors counts by its safetensors files, index and config, so that a new README or
    another name of the same bytes changes nothing.
    """
    require(pin, steps)

    def hashes(repository: str, *, all_files: bool) -> list[list[str]]:
        files: list[LockedFile] = lock.repositories[repository].files
        used = (f for f in files if all_files or f.file in (INDEX, CONFIG) or f.file.endswith(".safetensors"))
        return sorted([f.file, f.sha256] for f in used)

    parts: list[Any] = [["format", FORMAT]]
    for step in steps:
        if step == "copy":
            parts.append([step, hashes(pin.base, all_files=True)])
        elif step == "hybrid" and pin.hybrid:
            parts.append([step, pin.hybrid.modules, list(pin.hybrid.block), hashes(pin.hybrid.source, all_files=False)])
        elif step == "mtp" and pin.mtp:
            parts.append([step, pin.mtp.file, pin.mtp.tensors])
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def make_plan(folders: Mapping[str, Path], pin: ModelPin, steps: Sequence[str]) -> Plan:
    """Plan from headers, index and config only. Whatever does not fit is told here, before a byte is written.

    folders: repository's name in the pin -> its folder. Raises CheckpointError, ManifestError, IntegrityError.
    """
    repositories = {name: read_repository(name, folders[name]) for name in used_repositories(pin, steps)}
    draft = Draft.start(repositories[pin.base], repositories)
    for step in steps:
        if step == "hybrid" and pin.hybrid:
            apply_hybrid(draft, pin.hybrid)
        elif step == "mtp" and pin.mtp:
            apply_mtp(draft, pin.mtp)
    return lay_out(draft, pin, steps)


def lay_out(draft: Draft, pin: ModelPin, steps: Sequence[str]) -> Plan:
    """Turn a finished draft into files."""
    base = draft.base
    shards = []
    for file in sorted(draft.rewritten):
        tensors = draft.shards[file]
        header, _ = build_header(((n, s.info.dtype, s.info.shape) for n, s in tensors.items()), base.metadata[file])
        size = len(header) + sum(source.info.nbytes for source in tensors.values())
        shards.append(Shard(file, tensors, base.metadata[file], size))
    texts = []
    if draft.weight_map != base.weight_map or draft.rewritten:
        texts.append(Text(INDEX, index_bytes(draft)))
    if draft.config != base.config:
        texts.append(Text(CONFIG, json_bytes(draft.config)))
    new = {shard.path for shard in shards} | {text.path for text in texts}
    changed = {change.name for change in draft.changes if change.verb != "unused"}
    kept = tuple(
        Change("kept", name, source.info.nbytes, source.info.nbytes, kept_note(draft, name, source))
        for name, source in sorted(base.tensors.items())
        if name not in changed
    )
    return Plan(
        model=pin.name,
        steps=tuple(steps),
        base=pin.base,
        links=tuple(Link(f, (base.folder / f).stat().st_size) for f in base.files if f not in new),
        shards=tuple(shards),
        texts=tuple(texts),
        weight_map=draft.weight_map,
        config=draft.config,
        changes=tuple(draft.changes),
        kept=kept,
    )


def kept_note(draft: Draft, name: str, source: Source) -> str:
    return source.info.dtype if name in draft.weight_map else f"{source.info.dtype}, in {source.file}, not in the index"


def index_bytes(draft: Draft) -> bytes:
    """The index with sorted names; its total_size counts the bytes of what it lists, as Transformers writes it."""
    old = dict(draft.base.index or {})
    total = sum(draft.shards[file][name].info.nbytes for name, file in draft.weight_map.items())
    metadata = {**(old.get("metadata") or {}), "total_size": total}
    return json_bytes({**old, "metadata": metadata, "weight_map": dict(sorted(draft.weight_map.items()))})


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Indented, with the keys in the order of the published file, so that a diff shows only what was changed."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def grouped(changes: Sequence[Change]) -> dict[tuple[str, str, str], list[Change]]:
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.verb, generalise(change.name), change.note), []).append(change)
    order = {verb: i for i, verb in enumerate(("replaced", "added", "listed", "dropped", "kept", "unused"))}
    return dict(sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][1])))
