"""The steps that make a checkpoint: those of a chain of stages, what they read, and the key that follows from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from sparkpin.checkpoint.formats import Rules
from sparkpin.checkpoint.repository import CONFIG, INDEX
from sparkpin.core.errors import CheckpointError, ManifestError
from sparkpin.pins.schema import DRAFTER, FormatRule, LockedFile, ModelLock, ModelPin, Stage

FORMAT = 2
"""Version of the builder: raise it when the same inputs and steps would give other bytes, so that keys change."""

MTP_FP8 = "mtp-fp8"
"""The step that carries out `mtp.rules`: the layer that drafts in other formats than the base has it in."""


def checkpoint_steps(chain: Iterable[Stage], pin: ModelPin) -> tuple[str, ...]:
    """The steps of a chain of stages, in order; stages without one (v2, v2-tq) share their parent's checkpoint. Last
    the recipe's drafter, which lies in a folder of the checkpoint, so that both are copied, mounted and kept as one.
    """
    steps: list[str] = [stage.checkpoint for stage in chain if stage.checkpoint is not None]
    steps += [DRAFTER] if pin.drafter else []
    check_steps(steps)
    return tuple(steps)


def all_steps(pin: ModelPin) -> tuple[str, ...]:
    """The steps that the pin suffices for, without an MTP layer in FP8, which a stage has to ask for."""
    return ("copy", *(step for step in ("hybrid", "mtp") if getattr(pin, step)))


def locked_steps(pin: ModelPin) -> tuple[str, ...]:
    """Those whose tensors a lock has."""
    return (*all_steps(pin), MTP_FP8) if pin.mtp and pin.mtp.rules else all_steps(pin)


def rules_of(pin: ModelPin, steps: Sequence[str]) -> list[FormatRule]:
    """Of all the steps, in their order."""
    hybrid = pin.hybrid.rules if pin.hybrid and "hybrid" in steps else []
    return [*hybrid, *(pin.mtp.rules if pin.mtp and MTP_FP8 in steps else [])]


def lock_for(pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> ModelLock:
    """The lock without the donors' tensors that only `mtp.rules` take, where that is no step: a lock has what any step
    takes, and a stage fetches, counts and names what its own steps take."""
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
    expected = "" if steps and steps[0] == "copy" and len(set(steps)) == len(steps) else "'copy' first, each step once"
    if MTP_FP8 in steps and "mtp" not in steps:
        expected = f"'mtp' before {MTP_FP8!r}, which changes what it lists"
    if expected:
        cause = f"checkpoint steps: got {list(steps)}, expected {expected}"
        raise CheckpointError(cause, next_step="correct `checkpoint:` or `parent:` in stages/")


def require(pin: ModelPin, steps: Sequence[str]) -> None:
    """ManifestError unless the pin has what each step needs."""
    check_steps(steps)
    kind = "; it is a plain model, served as published" if all_steps(pin) == ("copy",) else ""
    has = {"hybrid": pin.hybrid, "mtp": pin.mtp, MTP_FP8: pin.mtp is None or pin.mtp.rules}
    if lacking := [step for step, part in has.items() if step in steps and not part]:
        key, stage = ("mtp.rules", "v2-tq") if lacking[0] == MTP_FP8 else (lacking[0], "base")
        advice = f"a stage without that step, such as --stage {stage}; or write `{key}` (docs/checkpoints.md)"
        expected = f"what the checkpoint step {lacking[0]!r} takes from where{kind}"
        raise ManifestError(f"pins/models/{pin.name}.yaml", key, "(missing)", expected, next_step=advice)


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
            shards = [file for file in donor.files if file.file.endswith(".safetensors") and not donor.tensors]
            headers = [header for header in donor.headers if header.file in files]
            parts.append([name, hashes([*texts, *shards]), hashes(headers), hashes(donor.tensors)])
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def hashes(files: Iterable[LockedFile]) -> list[list[str]]:
    return sorted([file.name, file.sha256] for file in files)
