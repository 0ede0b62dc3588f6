"""The task `add`: a new recipe, from a model's name or from somebody's file."""

from __future__ import annotations

from typing import Annotated

from sparkpin.cli.recipe import MISTAKES
from sparkpin.cli.tasks import DryRun, task
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable, show, show_file, tame
from sparkpin.pins import manifests
from sparkpin.pins.mods import to_fetch
from sparkpin.recipes import add as adding
from sparkpin.recipes.adopt import Wanted
from sparkpin.recipes.check import own_findings


@task("inputs")
def add(
    paths: Paths,
    what: Annotated[str, "model, recipe, `vllm serve` or `docker run` line, Compose file", "hf:OWNER/NAME[@REV]|FILE"],
    *,
    name: Annotated[str, "of the new recipe (default: the model's, or the file's)"] = "",
    model: Annotated[str, "of the Hub, where a file serves a folder", "OWNER/NAME"] = "",
    drafter: Annotated[str | None, "second model that drafts for it", "hf:OWNER/NAME[@REV]"] = None,
    nodes: Annotated[int | None, "machines that serve it together (default: the file's, or one)", "COUNT"] = None,
    stack: Annotated[str | None, "stack of pins/stacks/ (default: spark, or the file's container's)"] = None,
    stage: Annotated[str | None, "stage of stages/ (default: base)"] = None,
    no_lock: Annotated[bool, "ask no Hub: parsers by name alone, vLLM's own sizes; `invoke up` locks"] = False,
    replace: Annotated[bool, "take the place of a recipe of that name; pins and locks that are there stay"] = False,
    dry_run: DryRun = False,
) -> int:
    """Make a recipe of a model or a file; pin and lock it.

    invoke add hf:Qwen/Qwen3-8B
    invoke add their-recipe.yaml --name mine
    """
    wanted = Wanted(what, name, model, drafter, nodes, stack, stage, not no_lock, replace)
    with adding.add(paths, wanted) as added:
        recipe, adopted = added.recipe, added.adopted
        if dry_run:
            show_file(tame((added.paths.project / recipe.file).read_text()))
        else:
            added.write(paths.project)
        new, found = added.new(), own_findings(added.paths.project, recipe)
        # The file that a dry run shows has what was not mapped.
        unmapped = [f"not mapped: {line}" for line in adopted.unmapped if not dry_run]
        lines = [*adopted.notes, *unmapped, *map(str, found)]
        trial = str(added.paths.project)
    show("\n".join(f"{'would write' if dry_run else 'wrote'} {file}" for file in new))
    vllm = manifests.load_stack(paths.project, recipe.stack).vllm
    show(f"{recipe.model} on stack {recipe.stack} (vLLM {vllm}), stage {recipe.stage}:")
    for line in lines:
        show(printable(f"  {line.replace(trial, str(paths.project))}"))
    step = f"invoke up --recipe {recipe.name} --serve"
    if recipe.nodes > 1:
        step = f"invoke up --recipe {recipe.name}, then serve it on its machines (docs/nodes.md)"
    if is_wrong := any(finding.severity == "error" for finding in found):
        step = f"correct {recipe.file}, then invoke recipe check {recipe.name}"
    if dry_run:
        step = "the same command without --dry-run"
    show("next: " + "; ".join([*to_fetch(paths.project, recipe.mods), step]))
    return MISTAKES * is_wrong
