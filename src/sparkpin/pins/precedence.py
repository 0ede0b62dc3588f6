"""Which file has the last word on a setting of `vllm serve`, and what of a recipe stack and stages replace."""

from __future__ import annotations

from collections.abc import Sequence

from sparkpin.pins import vllm_command
from sparkpin.pins.schema import Recipe, Stack, Stage
from sparkpin.pins.vllm_command import Flag, file_of, own_argv, parse_flags, serve_argv, setters

CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
KV_BYTES = "--kv-cache-memory-bytes"


def origins(recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> dict[str, str]:
    """Flag or variable -> the file that has the last word on it."""
    own = [flag.key for flag in parse_flags(own_argv(recipe))[1]]
    found = dict.fromkeys([*own, *recipe.env], file_of(recipe))
    for file, serve in setters(stack, chain):
        found |= dict.fromkeys([*(Flag((name,)).key for name in serve.flags), *serve.env], file)
    return found


def overruled(recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> list[str]:
    """One line for each setting of the recipe that stack or stages replace by another value."""
    argv, env = serve_argv(recipe, stack, chain)
    final, where, own = parse_flags(argv)[1], origins(recipe, stack, chain), file_of(recipe)
    found = []
    for flag in parse_flags(own_argv(recipe))[1]:
        kept = next((other for other in final if flag.sets(other.key)), None)
        if kept is not None and where[kept.key] != own and not flag.same(kept):
            found.append(f"{own}: {' '.join(flag.words)} has no effect: {where[kept.key]} sets {' '.join(kept.words)}")
    for name, value in vllm_command.environment(recipe.env).items():
        if name not in env:
            found.append(f"{own}: {name}={value} has no effect: several nodes have one process each")
        elif env[name] != value:
            found.append(f"{own}: {name}={value} has no effect: {where[name]} sets {name}={env[name]}")
    # vllm/platforms/cpu.py puts the variable in the place of the flag.
    if stack.platform == "linux/amd64" and where.get(KV_BYTES) == own and env.get(CPU_SPACE):
        flag = next(flag for flag in final if flag.key == KV_BYTES)
        by = f"{where[CPU_SPACE]} sets {CPU_SPACE}={env[CPU_SPACE]}"
        found.append(f"{own}: {' '.join(flag.words)} has no effect: {by}, which goes before it on a CPU")
    return found
