"""`invoke build --checkpoint-only`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkpin.checkpoint.steps import all_steps, checkpoint_steps, lock_for, require
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show
from sparkpin.pins import manifests


@dataclass(frozen=True)
class CheckpointOptions:
    """model: without a recipe; the others: at most one of them."""

    model: str | None
    dry_run: bool
    verify: bool
    deep: bool


def require_one(kinds: Mapping[str, bool], asked: CheckpointOptions, *, offline: bool, stage: str | None) -> None:
    """InputError for options of `build` that do not go together."""
    given = [f"--{kind}" for kind, is_asked in kinds.items() if is_asked]
    own = {"--model": asked.model, "--dry-run": asked.dry_run, "--verify": asked.verify, "--deep": asked.deep}
    of_checkpoint = [option for option, value in own.items() if value]
    if len(given) > 1 or (given and offline):
        others = [*given, *(["--offline"] if offline else [])]
        raise InputError(f"got {' and '.join(others)}, expected one of them", next_step=f"invoke build {given[0]}")
    if stage and kinds["fetch-only"]:
        step = "invoke build --fetch-only, which fetches for every stage"
        raise InputError(f"--stage {stage} does not go with --fetch-only", next_step=step)
    if of_checkpoint and not kinds["checkpoint-only"]:
        words = [f"--model {asked.model}" if option == "--model" else option for option in of_checkpoint]
        step = f"invoke build --checkpoint-only {' '.join(words)}"
        raise InputError(f"{' and '.join(of_checkpoint)}: only with --checkpoint-only", next_step=step)
    if asked.dry_run + asked.verify + asked.deep > 1:
        step = "leave the others out: --verify changes no checkpoint either"
        raise InputError("got more than one of --dry-run, --verify and --deep, expected one", next_step=step)


def checkpoint(*, recipe: str | None, stage: str | None, stack: str | None, asked: CheckpointOptions) -> None:
    """Of a recipe, or of a model alone: with all steps that its pin allows, or those of a stage's chain."""
    from sparkpin.build import checkpoint as building  # slow to import, with all that fetches
    from sparkpin.checkpoint.plan import summary

    if (model := asked.model) and (recipe or stack):
        raise InputError(f"--model {model} goes without --recipe and --stack", next_step="leave one of them out")
    if model:
        paths = Paths.from_env()
        pin = manifests.load_model(paths.project, model)
        steps = checkpoint_steps(manifests.load_chain(paths.project, stage), pin) if stage else all_steps(pin)
        require(pin, steps)  # before the lock, which could not help
        lock = lock_for(pin, manifests.load_model_lock(paths.project, pin), steps)
    else:
        from sparkpin.cli.choose import pairings_of  # slow to import, and a model alone needs no recipe

        paths, pairings = pairings_of(recipe, stage, stack)
        pin, lock, steps = pairings[-1].model, pairings[-1].model_lock, pairings[-1].steps
    if asked.dry_run:
        plan = building.plan_checkpoint(paths, pin, lock, steps)
        for line in [*summary(plan), building.disk_line(paths, pin, lock, plan)]:
            show(line)
    elif asked.verify:
        show(f"{building.verify_built(paths, pin, lock, steps)}: every byte is that of its sources")
    else:
        show(str(building.build_checkpoint(paths, pin, lock, steps, deep=asked.deep)))
