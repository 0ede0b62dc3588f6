"""`invoke checkpoint`."""

from __future__ import annotations

from sparkpin.build.checkpoint import build_checkpoint, disk_line, plan_checkpoint, verify_built
from sparkpin.checkpoint import report as checkpoint_report
from sparkpin.checkpoint.plan import all_steps, checkpoint_steps, lock_for, require
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.pins import manifests


def checkpoint(
    *,
    recipe: str | None,
    model: str | None,
    stage: str | None,
    stack: str | None,
    dry_run: bool,
    verify: bool,
    deep: bool,
) -> None:
    """Of a recipe, or of a model alone: with all steps that its pin allows, or those of a stage's chain."""
    if model and (recipe or stack):
        raise InputError(f"--model {model} goes without --recipe and --stack", next_step="leave one of them out")
    if dry_run + verify + deep > 1:
        raise InputError(
            "--dry-run tells what would be built, --deep builds from a base read anew, --verify reads what is built: "
            "one of them",
            next_step="leave the others out: --verify changes no checkpoint either",
        )
    if model:
        paths = Paths.from_env()
        pin = manifests.load_model(paths.project, model)
        steps = checkpoint_steps(manifests.load_chain(paths.project, stage), pin) if stage else all_steps(pin)
        require(pin, steps)  # before the lock, which could not help
        lock = lock_for(pin, manifests.load_model_lock(paths.project, pin), steps)
    else:
        from sparkpin.commands.choose import pairings_of  # slow to import, and a model alone needs no recipe

        paths, pairings = pairings_of(recipe, stage, stack)
        pin, lock, steps = pairings[-1].model, pairings[-1].model_lock, pairings[-1].steps
    if dry_run:
        plan = plan_checkpoint(paths, pin, lock, steps, say)
        for line in [*checkpoint_report.summary(plan), disk_line(paths, pin, lock, plan)]:
            show(line)
        show()
        terminal.table(checkpoint_report.COLUMNS, checkpoint_report.table(plan.rows))
    elif verify:
        show(f"{verify_built(paths, pin, lock, steps, say)}: every byte is that of its sources")
    else:
        show(str(build_checkpoint(paths, pin, lock, steps, say, deep=deep)))
