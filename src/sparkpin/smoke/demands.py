"""What the smoke test of a stage asks for, from the project's files as they are now: known before anything is built.

`smoke.checks` has the checks themselves, and is slow to import.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparkpin.core.errors import ManifestError
from sparkpin.pins.mods import KERNELS
from sparkpin.pins.schema import ModelPin, Stack, Stage
from sparkpin.releases.record import Demands

# The names that a stage may have under `smoke.checks`.
CHECKS = (
    "completion", "chat", "chat-stream", "tool-call", "tool-call-stream", "tool-answer", "long-text",
    "chat-sampled", "tool-call-sampled", "tool-call-long", "tool-calls-parallel", "tool-call-in-reasoning",
    "tool-examples", "tool-call-required", "unicode", "determinism", "logprobs", "drift", "cancelled",
    "prefix-cache", "long-context", "image", "mods", "acceptance",
)  # fmt: skip
READERS = ("mods", "acceptance")  # they read what the others have left in log and metrics, so they come last


def checks_of(stage: Stage) -> tuple[str, ...]:
    """The checks of a stage of `load_chain` in the order in which they run. An unknown name is a ManifestError.

    So is a stage that asks the server nothing, or does not look at its mods: it would pass without proof.
    """
    file = f"stages/{stage.name}.yaml"
    names = stage.smoke.checks or []
    require_known(names, file, "smoke.add_checks" if stage.smoke.add_checks else "smoke.checks")
    if "acceptance" in names and stage.smoke.acceptance_floor is None:
        raise ManifestError(file, "smoke.acceptance_floor", None, "a share from 0 to 1 for the check acceptance")
    if "drift" in names and stage.parent and stage.smoke.drift is None:
        raise ManifestError(file, "smoke.drift", None, f"nats that the stage may be from {stage.parent}")
    if "mods" not in names or not set(names) - set(READERS):
        raise ManifestError(file, "smoke.checks", names, "the check mods, and one that asks for an answer")
    return tuple(sorted(names, key=lambda name: name in READERS))


def require_known(names: Iterable[str], file: str, key: str) -> None:
    for name in names:
        if name not in CHECKS:
            raise ManifestError(file, key, name, f"one of {', '.join(CHECKS)}")


def demands_of(project: Path, stack: Stack, chain: Sequence[Stage], model: ModelPin) -> Demands:
    """What the smoke test of a chain's last stage asks for; of drafts, what the pin of a drafter says.

    ManifestError where the pin drops a check that does not exist, or the one without which the test proves nothing.
    """
    pinned, floors = model.smoke, chain[-1].smoke
    file = f"pins/models/{model.name}.yaml"
    require_known(pinned.drop_checks, file, "smoke.drop_checks")
    if "mods" in pinned.drop_checks:
        raise ManifestError(file, "smoke.drop_checks", "mods", "others: it shows whether a mod is active")
    checks = tuple(name for name in checks_of(chain[-1]) if name not in pinned.drop_checks)
    drafts = model.drafter.drafts if model.drafter else None
    groups = {mod: entry_points(project, mod) for mod in (*stack.mods, *(mod for stage in chain for mod in stage.mods))}
    # A library for other mods has no entry point of vLLM, and reports nothing.
    reporting = {mod for mod, its in groups.items() if any(group.startswith("vllm.") for group in its)}
    return Demands(
        checks=checks if not drafts or "acceptance" in checks else (*checks, "acceptance"),
        mods=tuple(sorted(reporting - pinned.idle.keys())),
        kernels=tuple(sorted(mod for mod, its in groups.items() if KERNELS in its)) if stack.gpu else (),
        acceptance_floor=(drafts or floors).acceptance_floor,
        position_floors=tuple((drafts or floors).position_floors),
        parent=(chain[-1].parent or "") if floors.drift is not None else "",
        drift=pinned.drift.get(chain[-1].name, floors.drift) if floors.drift is not None else None,
        scripted=pinned.scripted,
        english=pinned.english,
        follows=pinned.follows,
    )


def entry_points(project: Path, name: str) -> set[str]:
    """Groups of the entry points of a mod."""
    path = project / "mods" / name / "pyproject.toml"
    return set(tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {}))
