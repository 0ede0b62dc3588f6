"""Context, concurrent requests and memory share of a model that nobody has served yet, from its memory plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.memory import inputs
from sparkpin.memory.geometry import text_of
from sparkpin.memory.plan import MemoryPlan
from sparkpin.pins import manifests, schema, vllm_command
from sparkpin.pins.schema import FlagValue
from sparkpin.pins.vllm_flags import AUTO, set_flag
from sparkpin.recipes.export import command_of

LENGTH, SEQUENCES, SHARE = "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"
MOST = 0.85  # of the memory; more has frozen Sparks (memory-share in pins/known_issues.yaml)
FEW, MANY = 4, 16  # concurrent requests: short ones share what a long one would fill
STEP = 1024  # tokens


def words_of(recipe: schema.Recipe) -> list[str]:
    """Of its command, filled in."""
    return vllm_command.split(vllm_command.fill(recipe.command, recipe.defaults, recipe.file), recipe.file)


def with_flags(recipe: schema.Recipe, flags: Mapping[str, FlagValue]) -> schema.Recipe:
    words = words_of(recipe)
    for flag, value in flags.items():
        words = set_flag(words, flag, value)
    command, defaults = command_of(words, doubled=True)
    return recipe.model_copy(update={"command": command, "defaults": defaults})


def plan_of(paths: Paths, recipe: schema.Recipe) -> MemoryPlan:
    """On the machine that the recipe's stack is for."""
    stack, chain = manifests.load_stack(paths.project, recipe.stack), manifests.load_chain(paths.project, recipe.stage)
    return inputs.read_inputs(paths, recipe, stack, chain).plan(inputs.machine_for(stack))


def fit(paths: Paths, recipe: schema.Recipe, config: Mapping[str, Any]) -> tuple[schema.Recipe, list[str]]:
    """The recipe with the longest context that fits, up to the model's own, the requests of that length that fit at
    once, and the memory for these; and a reason for each flag.

    Raises InputError where not even a short context fits, and what the plan raises of a model that it does not know.
    """
    plan = plan_of(paths, with_flags(recipe, {LENGTH: AUTO, SHARE: MOST}))
    share: dict[str, float] = {}
    if plan.budget is not None:  # else the stack says how large the cache is, as on a CPU
        free = (plan.machine.free - plan.around) / plan.machine.total
        share = {SHARE: min(MOST, math.floor(free * 100) / 100)}
        plan = plan_of(paths, with_flags(recipe, {LENGTH: AUTO, **share}))
    own, longest = text_of(config).get("max_position_embeddings"), plan.max_model_len
    if longest < STEP:
        raise InputError(f"it does not fit {plan.machine.source}: {'; '.join(plan.problems)}")
    length = longest if longest == own else longest // STEP * STEP
    fitting = max(1, int(plan.chosen.concurrency))
    flags: dict[str, float] = {LENGTH: length, SEQUENCES: max(FEW, min(fitting, MANY))}
    if share:
        used = sum(line.span[1] for line in plan.inside) + plan.pool * min(1, flags[SEQUENCES] / fitting)
        smaller = {SHARE: min(share[SHARE], math.ceil(used / plan.machine.total * 100) / 100)}
        share = smaller if plan_of(paths, with_flags(recipe, flags | smaller)).fits else share
    whole = "the model's own" if length == own else f"the longest that fits (the model's own: {own})"
    reasons = [
        f"{LENGTH} {length}: {whole}, on {plan.machine.source}",
        f"{SEQUENCES} {flags[SEQUENCES]}: {fitting} requests of that length fit at once; shorter ones share the cache",
        *(f"{SHARE} {value}: weights and the cache of these requests, by the plan" for value in share.values()),
    ]
    return with_flags(recipe, flags | share), reasons
