"""What a checkpoint will hold, decided from headers alone: data that prints, is checked, and is then carried out.

Read top-down: `make_plan` reads the repositories, lets each step change a draft of the base, and lays the draft out as
files to link, shards to write and texts to write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparkpin.checkpoint.content import OWN
from sparkpin.checkpoint.draft import Draft, outside_experts
from sparkpin.checkpoint.formats import Rules, apply_formats, modules_of, taken_names
from sparkpin.checkpoint.layout import Link, Shard, SmallFile, in_order, shards_of, texts_of
from sparkpin.checkpoint.mtp import apply_mtp
from sparkpin.checkpoint.patterns import Patterns
from sparkpin.checkpoint.repository import (
    CONFIG,
    INDEX,
    Listing,
    ReadRepository,
    TensorPlace,
    header_of,
    read_repository,
)
from sparkpin.core import terminal
from sparkpin.core.errors import CheckpointError, ManifestError
from sparkpin.pins.schema import DRAFTER, FormatRule, LockedFile, ModelLock, ModelPin, Stage

FORMAT = 2
"""Version of the builder: raise it when the same inputs and steps would give other bytes, so that keys change."""

PINNED = ("hybrid", "mtp")
"""Steps that a pin has to say something for."""

MTP_FP8 = "mtp-fp8"
"""The step that carries out `mtp.rules`: the layer that drafts in other formats than the base has it in."""

STEPS = ("copy", *PINNED, MTP_FP8, DRAFTER)


class TensorOrigin(NamedTuple):
    """A repository that the plan reads. size: bytes of all its files; outline: of headers, index and config."""

    name: str
    where: str
    size: int
    outline: int


class Placed(NamedTuple):
    """A tensor of the finished checkpoint: file in it, whether its index lists it, where its bytes come from."""

    file: str
    listed: bool
    source: TensorPlace


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
    origins: tuple[TensorOrigin, ...]
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

    @property
    def base_bytes(self) -> int:
        return self.origins[0].size


def checkpoint_steps(chain: Iterable[Stage], pin: ModelPin) -> tuple[str, ...]:
    """The steps of a chain of stages, in order; stages without one (v2, v2-tq) share their parent's checkpoint. Last
    the recipe's drafter, which lies in a folder of the checkpoint, so that both are copied, mounted and kept as one.
    """
    steps: list[str] = [stage.checkpoint for stage in chain if stage.checkpoint is not None]
    steps += [DRAFTER] if pin.drafter else []
    check_steps(steps)
    return tuple(steps)


def all_steps(pin: ModelPin) -> tuple[str, ...]:
    """The steps that the pin says enough for, without those that a stage has to ask for: an MTP layer in FP8, the head
    in INT8."""
    return tuple(step for step in ("copy", *PINNED) if step == "copy" or getattr(pin, step) is not None)


def locked_steps(pin: ModelPin) -> tuple[str, ...]:
    """Those whose tensors a lock has."""
    return (*all_steps(pin), MTP_FP8) if pin.mtp and pin.mtp.rules else all_steps(pin)


def rules_of(pin: ModelPin, steps: Sequence[str]) -> list[FormatRule]:
    """Of all the steps, in their order."""
    hybrid = pin.hybrid.rules if pin.hybrid and "hybrid" in steps else []
    return [*hybrid, *(pin.mtp.rules if pin.mtp and MTP_FP8 in steps else [])]


def lock_for(pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> ModelLock:
    """The lock without the donors' tensors that `mtp.rules` alone take, where that is no step: a lock has what any step
    takes, and a stage fetches, counts and names its own."""
    later = Rules(pin.mtp.rules if pin.mtp and MTP_FP8 not in steps else [])
    if not later.rules:
        return lock
    before = Rules(rules_of(pin, steps))

    def is_taken(name: str) -> bool:
        module = name.rpartition(".")[0]
        return later.rule(module) is None or before.rule(module) is not None

    entries = {
        name: entry.model_copy(update={"tensors": [one for one in entry.tensors if is_taken(one.name)]})
        for name, entry in lock.repositories.items()
    }
    return lock.model_copy(update={"repositories": entries})


def check_steps(steps: Sequence[str]) -> None:
    if not steps or steps[0] != "copy" or len(set(steps)) != len(steps):
        raise CheckpointError(
            f"checkpoint steps: saw {list(steps)}, wanted 'copy' first and each step once",
            next_step="correct `checkpoint:` in stages/",
        )
    if MTP_FP8 in steps and "mtp" not in steps:
        raise CheckpointError(
            f"checkpoint steps: saw {list(steps)}, wanted 'mtp' before {MTP_FP8!r}, which changes what it lists",
            next_step="give the stage a parent with the step `mtp`, such as v2-tq, in stages/",
        )
    unknown = set(steps) - set(STEPS)
    if unknown:
        raise CheckpointError(f"checkpoint steps: {sorted(unknown)} are unknown, wanted some of {', '.join(STEPS)}")


def require(pin: ModelPin, steps: Sequence[str]) -> None:
    """The pin says what each step needs."""
    check_steps(steps)
    if MTP_FP8 in steps and pin.mtp and not pin.mtp.rules:
        raise ManifestError(
            f"pins/models/{pin.name}.yaml",
            "mtp.rules",
            "(missing)",
            f"what the checkpoint step {MTP_FP8!r} takes from where",
            next_step="a stage without that step, such as --stage v2-tq; or write `mtp.rules` (docs/checkpoints.md)",
        )
    for step in PINNED:
        if step in steps and getattr(pin, step) is None:
            kind = "; it is a plain model, served as published" if all_steps(pin) == ("copy",) else ""
            own = f"; or write `{step}` (docs/checkpoints.md)"
            if pin.gguf:
                kind, own = "; a model from a GGUF file has no FP8 repository and no MTP layer to take it from", ""
            raise ManifestError(
                f"pins/models/{pin.name}.yaml",
                step,
                "(missing)",
                f"what the checkpoint step {step!r} takes from where{kind}",
                next_step=f"a stage without that step, such as --stage base{own}",
            )


def used_repositories(pin: ModelPin, steps: Sequence[str]) -> dict[str, str]:
    """Pin's name of each repository that the steps read -> the step that reads it first."""
    require(pin, steps)
    used = {pin.base: "copy"}
    for rule in rules_of(pin, steps):
        if rule.source:
            used.setdefault(rule.source, "hybrid" if pin.hybrid and rule in pin.hybrid.rules else MTP_FP8)
    if "mtp" in steps and pin.mtp and pin.mtp.source:
        used.setdefault(pin.mtp.source, "mtp")
    return used | ({DRAFTER: DRAFTER} if DRAFTER in steps else {})


def checkpoint_key(pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> str:
    """SHA-256 (hex) over everything that decides the checkpoint's model files, and nothing else.

    A donor counts by the tensors that are taken of it, the headers that describe them, its index and config, so that a
    new README or another name of the same bytes changes nothing.
    """
    used, lock = used_repositories(pin, steps), lock_for(pin, lock, steps)
    parts: list[Any] = [["format", FORMAT]]
    for step in steps:
        if step == "copy":
            parts.append([step, hashes(lock.repositories[pin.base].files)])
        elif step == "hybrid" and pin.hybrid:
            parts.append([step, [rule.model_dump(mode="json") for rule in pin.hybrid.rules]])
        elif step == "mtp" and pin.mtp:
            parts.append([step, pin.mtp.model_dump(mode="json", exclude={"rules"})])
        elif step == MTP_FP8 and pin.mtp:
            parts.append([step, [rule.model_dump(mode="json") for rule in pin.mtp.rules]])
        elif step == DRAFTER:
            parts.append([step, hashes(lock.repositories[DRAFTER].files)])
    for name in used:
        if not pin.is_whole(name):
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


def make_plan(listings: Mapping[str, Listing], pin: ModelPin, steps: Sequence[str]) -> CheckpointPlan:
    """Plan from headers, index and config only. Whatever does not fit is told here, before a byte is written.

    listings: of every repository that the steps read, by the pin's name. Raises CheckpointError, ManifestError,
    IntegrityError.
    """
    used = used_repositories(pin, steps)
    rules = Rules(rules_of(pin, steps))
    mtp = pin.mtp if "mtp" in steps else None
    layer = Patterns(mtp.tensors if mtp else ())
    base = read_repository(listings[pin.base], lambda name: rules.wants(name) or layer.first(name) is not None)
    modules = modules_of({name: source for name, source in base.found.items() if rules.wants(name)})
    donors = {}
    for name in used:
        if not pin.is_whole(name):
            names = taken_names(modules, rules, name)
            given = layer if mtp and mtp.source == name else Patterns(())
            donors[name] = read_donor(listings[name], names, given)
    draft = Draft.start(base, donors)
    if rules.rules:
        apply_formats(draft, modules, rules)
    if mtp:
        apply_mtp(draft, mtp)
    return lay_out(draft, pin, steps, listings[DRAFTER] if DRAFTER in steps else None)


def read_donor(listing: Listing, names: set[str], given: Patterns) -> ReadRepository:
    def wanted(name: str) -> bool:
        return outside_experts(name) or name in names or given.first(name) is not None

    return read_repository(listing, wanted)


def taken(plan: CheckpointPlan) -> dict[str, list[TensorPlace]]:
    """Per repository other than the base: the tensors that the plan writes from it, sorted by file and place."""
    found: dict[str, list[TensorPlace]] = {origin.name: [] for origin in plan.origins[1:]}
    for shard in plan.shards:
        for source in shard.added.values():
            found[source.repository].append(source)
    return {name: sorted(sources, key=lambda s: (s.file, s.info.begin)) for name, sources in found.items()}


def final_tensors(plan: CheckpointPlan, listings: Mapping[str, Listing]) -> Iterator[Placed]:
    """Every tensor of the finished checkpoint, file by file in the order of the data."""
    base = listings[plan.base]
    shards = {shard.path: shard for shard in plan.shards}
    for file in sorted({*base.headers, *shards}):
        header = header_of(base, file) if file in base.headers else None
        shard = shards.get(file) or Shard(file, in_base=True)
        for source in in_order(shard, header, plan.base):
            yield Placed(file, source.info.name not in plan.unlisted, source)


def lay_out(draft: Draft, pin: ModelPin, steps: Sequence[str], drafter: Listing | None) -> CheckpointPlan:
    """Turn a finished draft into files. drafter: all of it is linked, in a folder."""
    base = draft.base
    shards, texts, counts = shards_of(draft), texts_of(draft), draft.counts()
    if "hybrid" in steps and pin.hybrid:
        expected = counts["unused"] if MTP_FP8 in steps or pin.hybrid.unused is None else pin.hybrid.unused
        if counts["unused"] != expected:
            draft.notes.append(
                f"{counts['unused']:,} tensors outside of experts stay unused; hybrid.unused of the pin expects "
                f"{expected:,}: it may be another revision (docs/checkpoints.md)"
            )
    new = {shard.path for shard in shards} | {text.path for text in texts}
    left_out = [file for file in OWN if file in base.listing.files]
    if left_out:
        draft.notes.append(f"left out: {', '.join(left_out)} of the base; a checkpoint has its own")
    links = [Link(file, size) for file, size in base.listing.files.items() if file not in {*new, *OWN}]
    origins = [origin_of(repository) for repository in (base, *draft.donors.values())]
    if drafter:
        size = sum(drafter.files.values())
        links = [link for link in links if not link.path.startswith(f"{DRAFTER}/")]
        links += [Link(f"{DRAFTER}/{file}", size, DRAFTER) for file, size in drafter.files.items()]
        origins.append(TensorOrigin(DRAFTER, drafter.origin, size, size))
        draft.notes.append(f"the drafter, {terminal.size(size)} of {drafter.origin}, lies in {DRAFTER}/")
    return CheckpointPlan(
        model=pin.name,
        steps=tuple(steps),
        base=pin.base,
        links=tuple(sorted(links)),
        shards=shards,
        texts=texts,
        unlisted=draft.unlisted(),
        config=draft.config,
        counts=counts,
        origins=tuple(origins),
        notes=tuple(draft.notes),
    )


def origin_of(repository: ReadRepository) -> TensorOrigin:
    listing = repository.listing
    outline = sum(listing.files[text] for text in listing.texts) + repository.header_bytes
    return TensorOrigin(repository.name, repository.origin, sum(listing.files.values()), outline)
