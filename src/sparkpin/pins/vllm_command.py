"""From a recipe, its stack and its chain of stages to the command line and environment of `vllm serve`.

The community's recipe format, version 1: ``command.format(**defaults)`` in one pass, so that ``{{`` is a brace and JSON
held in a default goes in as it stands; then words as a POSIX shell would split them, without running a shell. Stack and
stages replace what the recipe says; what is right for the family of the model is added where nobody says it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparkpin.core.errors import ManifestError
from sparkpin.pins import drafters, nodes
from sparkpin.pins.schema import Family, FlagValue, Recipe, Scalar, Serve, Stack, Stage, is_within
from sparkpin.pins.values import require_values
from sparkpin.pins.vllm_flags import (
    ADDED,
    MODEL_PATH,
    SERVED_NAME,
    Flag,
    environment,
    flag_value,
    flag_words,
    parse_flags,
    set_flag,
    tls_flags,
)

CPU_SPACE, KV_BYTES = "VLLM_CPU_KVCACHE_SPACE", "--kv-cache-memory-bytes"
DOUBLE = """a brace of JSON is written {{ or }}, as in --flag '{{"key": {name}}}'; or hold JSON in a default"""


def serve_argv(recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> tuple[list[str], dict[str, str]]:
    """The command line of `vllm serve` and the environment that it needs beyond the image's own.

    Args:
        recipe: its `command` is the beginning; the model in it is replaced by MODEL_PATH. Clients keep on asking for
            the repository's id where the command gives no name of its own.
        stack, chain: their flags replace the recipe's, a later stage's those of an earlier one. The same for `env`.
            What several nodes need replaces all of them.

    Raises:
        ManifestError: the command cannot be filled in or split, does not start with `vllm serve <model>`, or asks for
            TLS; a word or variable of any of the files is refused by `value_faults`.
    """
    for file, serve in setters(stack, chain):
        words = [word for name, value in serve.flags.items() for word in flag_words(name, value)]
        require_values(words, environment(serve.env), file)
    argv, gpu = own_argv(recipe), stack.gpu is not None
    if flag_value(argv, SERVED_NAME) is None:
        argv = set_flag(argv, SERVED_NAME, recipe.model)
    argv, env = overlaid(argv, environment(recipe.env), stack, chain)
    argv, env = nodes.spread(argv, env, recipe.nodes, gpu=gpu)
    for flag in tls_flags(argv):
        expected = "no TLS, since health check, smoke test and `serve` speak plain HTTP"
        step = "leave it out, and give `invoke serve` --tls-cert and --tls-key for TLS"
        raise ManifestError(recipe.file, "command", flag, expected, next_step=step)
    for fault in nodes.word_faults(argv, recipe.nodes, recipe.file):
        raise fault
    return argv, env


def overlaid(
    argv: Sequence[str], env: Mapping[str, str], stack: Stack, chain: Sequence[Stage]
) -> tuple[list[str], dict[str, str]]:
    """What stack and stages set, over words and environment."""
    words, variables = list(argv), dict(env)
    for _, serve in setters(stack, chain):
        for name, value in serve.flags.items():
            words = set_flag(words, name, value)
        variables |= environment(serve.env)
    return words, variables


def setters(stack: Stack, chain: Iterable[Stage]) -> list[tuple[str, Serve]]:
    """The files whose settings replace the recipe's, each those of the ones before it."""
    stages = [(f"stages/{stage.name}.yaml", stage.serve) for stage in chain]
    return [(f"pins/stacks/{stack.name}.yaml", stack.serve), *stages]


def own_argv(recipe: Recipe) -> list[str]:
    """The recipe's command alone, filled in and split. Errors: see `serve_argv`."""
    words = split(fill(recipe.command, recipe.defaults, recipe.file), recipe.file)
    if words[2] not in (recipe.model, MODEL_PATH):
        expected = f"{recipe.model!r} (the recipe's model) or {MODEL_PATH!r}"
        raise ManifestError(recipe.file, "command", words[2], expected)
    backend = flag_value(words, nodes.EXECUTOR)
    if recipe.nodes > 1 and backend not in (None, "mp"):
        expected = "mp, vLLM's own executor, or a command without the flag"
        raise ManifestError(recipe.file, "command", f"{nodes.EXECUTOR} {backend}", expected)
    require_values(words, environment(recipe.env), recipe.file)
    drafters.require_pinned(words, recipe)
    return drafters.mounted([*words[:2], MODEL_PATH, *words[3:]], recipe)


def fill(command: str, defaults: Mapping[str, Scalar], file: object) -> str:
    """The command with its placeholders replaced, in one pass."""
    try:
        return command.format(**defaults)
    except (LookupError, AttributeError, ValueError, TypeError, OverflowError) as error:
        got = "{" + str(error.args[0]) + "}" if isinstance(error, KeyError) else str(error)
        expected = f"placeholders that are keys of `defaults` ({', '.join(sorted(defaults)) or 'none'})"
        raise ManifestError(file, "command", got, expected, next_step=DOUBLE) from None


def split(text: str, file: object) -> list[str]:
    """The words of a filled command, which must start with `vllm serve <model>`."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))
    except ValueError as error:
        expected = "words that a POSIX shell can split (check the quotes)"
        raise ManifestError(file, "command", str(error), expected) from None
    if words[:2] != ["vllm", "serve"] or len(words) < 3 or words[2].startswith("-"):
        raise ManifestError(file, "command", " ".join(words[:3]), "a command that starts with: vllm serve <model>")
    return words


def origins(recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> dict[str, str]:
    """Flag or variable -> the file that has the last word on it."""
    keys = [flag.key for flag in parse_flags(own_argv(recipe))[1]]
    found = dict.fromkeys([*keys, *recipe.env], recipe.file)
    for file, serve in setters(stack, chain):
        found |= dict.fromkeys([*(Flag((name,)).key for name in serve.flags), *serve.env], file)
    return found


def overruled(recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> list[str]:
    """One line for each setting of the recipe that stack or stages replace by another value."""
    argv, env = serve_argv(recipe, stack, chain)
    final, where, ours = parse_flags(argv)[1], origins(recipe, stack, chain), recipe.file
    found = []
    for flag in parse_flags(own_argv(recipe))[1]:
        last = next((other for other in final if flag.sets(other.key)), None)
        if last is not None and where[last.key] != ours and not flag.same(last) and flag.key not in ADDED:
            found.append(f"{ours}: {' '.join(flag.words)} has no effect: {where[last.key]} sets {' '.join(last.words)}")
    for name, value in environment(recipe.env).items():
        if env.get(name) != value:
            why = f"{where[name]} sets {name}={env[name]}" if name in env else "several nodes have one process each"
            found.append(f"{ours}: {name}={value} has no effect: {why}")
    return found


@dataclass(frozen=True)
class Chosen:
    """A flag that was added. value: as in `Serve.flags`."""

    flag: str
    value: FlagValue
    reason: str

    @property
    def line(self) -> str:
        return f"chosen: {' '.join(flag_words(self.flag, self.value))}: {self.reason}"


def family_of(families: Iterable[Family], model: str, named: str | None = None) -> Family | None:
    """model: a repository's id. named: the recipe's `family`, which goes before the name of the model."""
    return next((one for one in families if (one.name == named if named else is_called(one, model))), None)


def is_called(family: Family, model: str) -> bool:
    return any(fnmatchcase(model.lower(), pattern.lower()) for pattern in family.models)


def choices(family: Family | None, vllm: str, argv: Sequence[str]) -> tuple[Chosen, ...]:
    """What to add to a command line: parsers, the form of messages. A flag that stands there, its `--no-` form
    included, is left as it is.

    vllm: its version; "" fits no bounds.
    """
    given = parse_flags(argv)[1]
    found: dict[str, Chosen] = {}
    for choice in family.serve if family else ():
        key = Flag((choice.flag,)).key
        if is_within(choice.vllm, vllm) and not any(flag.sets(key) for flag in given):
            found.setdefault(key, Chosen(choice.flag, choice.value, choice.reason))
    return tuple(found.values())


def completed(argv: Sequence[str], chosen: Iterable[Chosen]) -> list[str]:
    done = list(argv)
    for choice in chosen:
        done = set_flag(done, choice.flag, choice.value)
    return done
