"""What a stage's smoke test will ask for, from the project's files as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import ModelPin, Stack, Stage
from sparkpin.releases.record import Demands
from sparkpin.smoke import mods
from sparkpin.smoke.checks import checks_of, require_known


def demands_of(project: Path, stack: Stack, chain: Sequence[Stage], model: ModelPin) -> Demands:
    """Of the last stage of a chain; of drafts, what the pin of a drafter says. ManifestError when it names a check that
    does not exist, or proves nothing."""
    own, floors = model.smoke, chain[-1].smoke
    file = f"pins/models/{model.name}.yaml"
    require_known(own.drop_checks, file, "smoke.drop_checks")
    if "mods" in own.drop_checks:
        raise ManifestError(file, "smoke.drop_checks", "mods", "others: it says whether a mod is at work")
    checks = tuple(name for name in checks_of(chain[-1]) if name not in own.drop_checks)
    drafts = model.drafter.drafts if model.drafter else None
    names = (*stack.mods, *(mod for stage in chain for mod in stage.mods))
    return Demands(
        checks=checks if not drafts or "acceptance" in checks else (*checks, "acceptance"),
        mods=tuple(sorted(mods.expected(project, names) - own.idle.keys())),
        kernels=tuple(sorted(mods.with_kernels(project, names))) if stack.gpu else (),
        acceptance_floor=(drafts or floors).acceptance_floor,
        position_floors=tuple((drafts or floors).position_floors),
        draft_lengths=tuple(floors.draft_lengths),
        parent=(chain[-1].parent or "") if floors.drift is not None else "",
        drift=own.drift.get(chain[-1].name, floors.drift) if floors.drift is not None else None,
        scripted=own.scripted,
        english=own.english,
        follows=own.follows,
    )
