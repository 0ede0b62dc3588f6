"""`invoke plan`."""

from __future__ import annotations

from typing import Annotated

from sparkpin.cli.options import Json, Recipe, Stack, Stage
from sparkpin.cli.tasks import task
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.machine import default_recipe
from sparkpin.pins.manifests import load_recipe
from sparkpin.recipes.check import own_findings
from sparkpin.serve.memory import recipe as planning


@task("measure")
def plan(
    paths: Paths,
    *,
    recipe: Recipe = None,
    stage: Stage = None,
    stack: Stack = None,
    memory: Annotated[str, "the machine's memory, such as 128GB (default: this one's, or a DGX Spark's)"] = "",
    free: Annotated[str, "how much of it is free, such as 110GB (default: what is free here now)"] = "",
    bandwidth: Annotated[str, "memory bandwidth in GB/s, for the highest speed (default: 273, a DGX Spark's)"] = "",
    nodes: Annotated[int | None, "plan for this many machines, tensor-parallel", "COUNT"] = None,
    json: Json = False,
    exit_code: Annotated[bool, "exit with 1 if the recipe does not fit"] = False,
) -> int:
    """Estimate a recipe's memory, concurrency and highest speed.

    invoke plan --recipe qwen3.5-122b --stage v2-tq
    """
    recipe = recipe or default_recipe(paths.project, stack)
    asked = planning.PlanOptions(memory=memory, free=free, bandwidth=bandwidth, nodes=nodes, as_json=json)
    fits = planning.plan(recipe=recipe, stage=stage, stack=stack, asked=asked)
    for finding in own_findings(paths.project, load_recipe(paths.project, recipe), pinned=False):
        if finding.severity != "note":  # what has broken for others with such memory, for one
            say(str(finding))
    return int(exit_code and not fits)
