"""How large a model is, and the context, concurrent requests and memory share that fit it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkpin.checkpoint import shapes
from sparkpin.checkpoint.repository import INDEX
from sparkpin.checkpoint.safetensors import tensor_nbytes
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.fetch.hub import HubRepository
from sparkpin.memory import inputs
from sparkpin.memory.plan import SPARK_FREE, SPARK_TOTAL, MemoryPlan, total
from sparkpin.pins import manifests, schema, vllm_command
from sparkpin.pins.vllm_flags import AUTO, set_flag
from sparkpin.recipes.export import command_of

LENGTH, SEQUENCES, SHARE = "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization"
MOST = 0.85  # of the memory; more has frozen Sparks (memory-share in pins/known_issues.yaml)
FEW, MANY = 4, 16  # concurrent requests: short ones share what a long one would fill
STEP = 1024  # tokens


def words_of(recipe: schema.Recipe) -> list[str]:
    """Of its command, filled in."""
    return vllm_command.split(vllm_command.fill(recipe.command, recipe.defaults, recipe.file), recipe.file)


def with_flags(recipe: schema.Recipe, flags: Mapping[str, schema.FlagValue]) -> schema.Recipe:
    words = words_of(recipe)
    for flag, value in flags.items():
        words = set_flag(words, flag, value)
    command, defaults = command_of(words, doubled=True)
    return recipe.model_copy(update={"command": command, "defaults": defaults})


def plan_of(paths: Paths, recipe: schema.Recipe, flags: Mapping[str, schema.FlagValue]) -> MemoryPlan:
    """On the machine that the recipe's stack is for, without what it serves today: a recipe is made for longer."""
    stack, chain = manifests.load_stack(paths.project, recipe.stack), manifests.load_chain(paths.project, recipe.stage)
    machine = inputs.machine_for(stack)
    system = SPARK_TOTAL - SPARK_FREE if stack.gpu else 0
    idle = replace(machine, free=machine.total - system)
    return inputs.read_inputs(paths, with_flags(recipe, flags), stack, chain).plan(idle)


def requests_of(plan: MemoryPlan) -> str:
    """How many of the longest context fit at once, or why it does not fit."""
    fitting = plan.chosen.requests.get(plan.max_model_len, 0)
    return "; ".join(plan.problems) or f"{fitting} requests of {plan.max_model_len} tokens fit at once"


def fit(paths: Paths, recipe: schema.Recipe) -> tuple[dict[str, schema.FlagValue], list[str]]:
    """Flags for the longest context that fits, up to the model's own, the requests of that length that fit at once, and
    the memory for these; and a reason for each.

    Raises InputError where not even a short context fits, and what the plan raises of a model that it does not know.
    """
    flags: dict[str, Any] = {LENGTH: AUTO, SEQUENCES: FEW, SHARE: MOST}
    plan = plan_of(paths, recipe, flags)
    memory, free = plan.machine.total, plan.machine.free - total(plan.outside)
    if 0 < (share := math.floor(free / memory * 100) / 100) < MOST:
        flags[SHARE] = share
        plan = plan_of(paths, recipe, flags)
    most, longest = plan.geometry.max_positions, plan.max_model_len
    fitting = plan.chosen.requests.get(longest, 0)
    length = most if longest == most else min(most, max(STEP, longest // STEP * STEP))
    flags |= {LENGTH: length, SEQUENCES: max(FEW, min(fitting, MANY))}
    used = sum(line.span[1] for line in plan.inside) + plan.pool_line.bytes * min(1, flags[SEQUENCES] / max(1, fitting))
    flags[SHARE] = min(flags[SHARE], math.ceil(used / memory * 100) / 100)
    if plan.budget is None:  # the stack says how large the cache is, as on a CPU
        del flags[SHARE]
    final = plan_of(paths, recipe, flags)
    if final.problems:
        step = "; ".join(final.hints) or "choose a smaller model, or more machines: --nodes 2"
        raise InputError(f"it does not fit {final.machine.source}: {'; '.join(final.problems)}", next_step=step)
    limit = "the model's own" if length == most else f"the longest that fits (the model's own: {most})"
    reasons = {
        LENGTH: f"{limit}, on {final.machine.source}",
        SEQUENCES: f"{requests_of(final)}; shorter ones share the cache",
        SHARE: "weights and the cache of these requests, by the plan",
    }
    return flags, [f"{flag} {value}: {reasons[flag]}" for flag, value in flags.items()]


def weights_here(project: Path, repo: str) -> tuple[int, str]:
    """Bytes of a repository's weights, and where that is known from; 0 where nothing on this machine says it."""
    for pin in manifests.readable_models(project)[0]:
        if pin.repositories[pin.base].repo == repo and manifests.model_lock_file(project, pin.name).is_file():
            files = manifests.read_lock(schema.ModelLock, project, pin.name).repositories[pin.base].files
            return sum(file.size for file in files if file.file.endswith(".safetensors")), "its lock"
    if known := shapes.load_shapes(project, repo):
        return bytes_of(known), shapes.FOLDER
    with contextlib.suppress(ValueError, KeyError, TypeError):  # no repository's name; an index without its size
        if path := HubRepository(repo, "main").cached(INDEX):
            return int(json.loads(path.read_bytes())["metadata"]["total_size"]), "its index in the Hub's cache"
    return 0, ""


def bytes_of(known: shapes.Shapes) -> int:
    """Of all tensors, of which there may be a hundred thousand."""
    counts = {name: one if isinstance(one, int) else len(one) for name, one in known.numbers.items()}
    alike = {pattern: math.prod(counts[name] for name in shapes.NUMBER.findall(pattern)) for pattern in known.tensors}
    return sum(alike[pattern] * tensor_nbytes(*tensor) for pattern, tensor in known.tensors.items())
