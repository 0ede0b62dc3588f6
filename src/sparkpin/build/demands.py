"""What a stage's smoke test will ask for, from the project's files as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkpin.pins.schema import ModelPin, Stack, Stage
from sparkpin.releases.record import Demands
from sparkpin.smoke import mods
from sparkpin.smoke.checks import checks_of


def demands_of(project: Path, stack: Stack, chain: Sequence[Stage], model: ModelPin) -> Demands:
    """Of the last stage of a chain; of drafts, what the pin of a drafter says. ManifestError when it names a check that
    does not exist, or proves nothing."""
    checks, floors = checks_of(chain[-1]), chain[-1].smoke
    drafts = model.drafter.drafts if model.drafter else None
    names = (*stack.mods, *(mod for stage in chain for mod in stage.mods))
    return Demands(
        checks=checks if not drafts or "acceptance" in checks else (*checks, "acceptance"),
        mods=tuple(sorted(mods.expected(project, names) - model.smoke.idle.keys())),
        kernels=tuple(sorted(mods.with_kernels(project, names))) if stack.gpu else (),
        acceptance_floor=(drafts or floors).acceptance_floor,
        position_floors=tuple((drafts or floors).position_floors),
        draft_lengths=tuple(chain[-1].smoke.draft_lengths),
        parent=(chain[-1].parent or "") if chain[-1].smoke.drift is not None else "",
        drift=chain[-1].smoke.drift,
        scripted=model.generator is not None,
        english=model.smoke.english,
        follows=model.smoke.follows,
    )
