"""`invoke checkpoint`."""

from __future__ import annotations

from sparkpin.build.checkpoint import build_checkpoint, disk_line, disk_lines_ahead, plan_checkpoint, verify_built
from sparkpin.checkpoint import published as shapes
from sparkpin.checkpoint import report as checkpoint_report
from sparkpin.checkpoint.plan import all_steps, checkpoint_steps, lock_for, make_plan, require, used_repositories
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
    published: bool = False,
) -> None:
    """Of a recipe, or of a model alone: with all steps that its pin allows, or those of a stage's chain. published:
    with dry_run, from published shapes."""
    if published and not dry_run:
        raise InputError(
            "--published has shapes and no bytes: nothing can be made of it, only a plan",
            next_step="the same command with --dry-run, or without --published",
        )
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
        lock = shapes.placeholder(pin) if published else lock_for(pin, shapes.model_lock(paths.project, pin), steps)
    else:
        from sparkpin.commands.choose import pairings_of  # slow to import, and a model alone needs no recipe

        paths, pairings = pairings_of(recipe, stage, stack, published=published)
        pin, lock, steps = pairings[-1].model, pairings[-1].model_lock, pairings[-1].steps
    if dry_run:
        if published:
            plan = make_plan(shapes.listings(pin, used_repositories(pin, steps)), pin, steps)
            lines = [*disk_lines_ahead(paths, pin, plan), *(f"note: {note}" for note in shapes.notes(pin))]
        else:
            plan = plan_checkpoint(paths, pin, lock, steps, say)
            lines = [disk_line(paths, pin, lock, plan)]
        for line in [*checkpoint_report.summary(plan), *lines]:
            show(line)
        show()
        terminal.table(checkpoint_report.COLUMNS, checkpoint_report.table(plan.rows))
    elif verify:
        show(f"{verify_built(paths, pin, lock, steps, say)}: every byte is that of its sources")
    else:
        show(str(build_checkpoint(paths, pin, lock, steps, say, deep=deep)))
