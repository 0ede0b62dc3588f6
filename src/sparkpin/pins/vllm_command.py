"""From a recipe, its stack and its chain of stages to the command line and environment of `vllm serve`.

The community's recipe format, version 1: ``command.format(**defaults)`` in one pass, so that ``{{`` is a brace and JSON
held in a default goes in as it stands; then words as a POSIX shell would split them, without running a shell.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparkpin.core.errors import ManifestError
from sparkpin.pins.cache_types import FLAG as CACHE_TYPE
from sparkpin.pins.cache_types import refuse_patched
from sparkpin.pins.schema import FlagValue, Recipe, Scalar, Serve, Stack, Stage
from sparkpin.pins.values import require_values, value_faults

MODEL_PATH = "/model"
ALIASES = {
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


@dataclass(frozen=True)
class Flag:
    """A flag with the words that follow it, as they stand on the command line."""

    words: tuple[str, ...]

    @property
    def key(self) -> str:
        """What the flag sets: ``-tp``, ``--tensor_parallel_size=2`` and ``--tensor-parallel-size`` are one;
        so are ``--enable-x`` and ``--no-enable-x``."""
        name = self.words[0].partition("=")[0]
        name = ALIASES.get(name, name).replace("_", "-")
        return "--" + name.removeprefix("--no-") if name.startswith("--no-") else name

    def sets(self, key: str) -> bool:
        """``--speculative-config.method mtp`` sets a part of ``--speculative-config``."""
        return self.key == key or self.key.startswith(key + ".")

    def same(self, other: Flag) -> bool:
        """Whether both say the same, however the flag and its JSON are spelled."""
        negated = [flag.words[0].startswith("--no-") for flag in (self, other)]
        return self.key == other.key and negated[0] == negated[1] and self.meaning == other.meaning

    @property
    def meaning(self) -> object:
        _, equals, value = self.words[0].partition("=")
        values = [value, *self.words[1:]] if equals else list(self.words[1:])
        try:
            return [json.loads(word) if word.startswith("{") else word for word in values]
        except (ValueError, RecursionError):
            return values

    @property
    def value(self) -> str | None:
        _, equals, value = self.words[0].partition("=")
        return value if equals else (self.words[1] if len(self.words) > 1 else None)


def serve_argv(recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> tuple[list[str], dict[str, str]]:
    """The command line of `vllm serve` and the environment that it needs beyond the image's own.

    Args:
        recipe: its `command` is the beginning; the model in it is replaced by MODEL_PATH. Clients keep on asking for
            the repository's id where the command gives no name of its own.
        stack, chain: their flags replace the recipe's, a later stage's those of an earlier one. The same for `env`.
            What several nodes want replaces all of them.

    Raises:
        ManifestError: the command cannot be filled in or split, does not start with `vllm serve <model>`, or wants TLS;
            a word or variable of any of the files is refused by `value_faults`.
    """
    from sparkpin.pins.nodes import word_faults  # it stands on this file's functions

    for file, serve in setters(stack, chain):
        words = [word for name, value in serve.flags.items() for word in flag_words(name, value)]
        require_values(words, environment(serve.env), file)
    argv, env = settled(own_argv(recipe), recipe, stack, chain)
    for fault in (
        *tls_faults(argv, recipe),
        *word_faults(argv, recipe.nodes, file_of(recipe), gpu=stack.gpu is not None),
    ):
        raise fault
    return argv, env


def settled(argv: list[str], recipe: Recipe, stack: Stack, chain: Sequence[Stage]) -> tuple[list[str], dict[str, str]]:
    """A recipe's own words with what stack, stages and nodes set, and the environment of all."""
    from sparkpin.pins.nodes import spread  # it stands on this file's functions

    if flag_value(argv, "--served-model-name") is None:
        argv = set_flag(argv, "--served-model-name", recipe.model)
    words, env = overlaid(argv, environment(recipe.env), stack, chain)
    return spread(words, env, recipe.nodes, gpu=stack.gpu is not None)


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


def own_argv(recipe: Recipe) -> list[str]:
    """The recipe's command alone, filled in and split. Errors: see `serve_argv`."""
    from sparkpin.pins.drafters import mounted  # it stands on this file's functions

    file = file_of(recipe)
    words = split(fill(recipe.command, recipe.defaults, file), file)
    for fault in own_faults(words, recipe):
        raise fault
    return mounted([*words[:2], MODEL_PATH, *words[3:]], recipe)


def own_faults(words: Sequence[str], recipe: Recipe) -> Iterator[ManifestError]:
    """What is wrong with the words of a recipe's command, whatever vLLM it is for."""
    from sparkpin.pins.drafters import command_faults  # it stands on this file's functions

    file = file_of(recipe)
    if words[2] not in (recipe.model, MODEL_PATH):
        yield ManifestError(file, "command", words[2], f"{recipe.model!r} (the recipe's model) or {MODEL_PATH!r}")
    backend = flag_value(words, "--distributed-executor-backend")
    if recipe.nodes > 1 and backend not in (None, "mp"):
        wanted = "mp, vLLM's own executor, or a command without the flag"
        yield ManifestError(file, "command", f"--distributed-executor-backend {backend}", wanted)
    broken = list(json_faults(words, file))
    yield from broken or command_faults(words, recipe)
    yield from value_faults(words, environment(recipe.env), file)
    try:
        refuse_patched(flag_value(words, CACHE_TYPE), file)
    except ManifestError as fault:
        yield fault


def tls_faults(argv: Sequence[str], recipe: Recipe) -> Iterator[ManifestError]:
    wanted = "no TLS: health check, smoke test and `serve` ask by plain HTTP"
    step = "leave it out, and give `invoke serve` --tls-cert and --tls-key where TLS is wanted"
    for flag in tls_flags(argv):
        yield ManifestError(file_of(recipe), "command", flag, wanted, next_step=step)


def file_of(recipe: Recipe) -> str:
    return f"recipes/{recipe.name}.yaml"


def setters(stack: Stack, chain: Iterable[Stage]) -> list[tuple[str, Serve]]:
    """The files whose settings replace the recipe's, each those of the ones before it."""
    stages = [(f"stages/{stage.name}.yaml", stage.serve) for stage in chain]
    return [(f"pins/stacks/{stack.name}.yaml", stack.serve), *stages]


def fill(command: str, defaults: Mapping[str, Scalar], file: object) -> str:
    """The command with its placeholders replaced, in one pass."""
    try:
        return command.format(**defaults)
    except (KeyError, IndexError, AttributeError) as error:
        seen = error.args[0] if isinstance(error, KeyError) else str(error)
        known = ", ".join(sorted(defaults)) or "none"
        if isinstance(error, KeyError) and not re.fullmatch(r"\w+", str(seen)):  # JSON, and no misspelt name
            raise ManifestError(file, "command", "{" + str(seen) + "}", DOUBLED, next_step=DOUBLE) from None
        raise ManifestError(
            file,
            "command",
            "{" + str(seen) + "}",
            f"a key of `defaults` ({known}); a brace of JSON is written {{{{ }}}}",
        ) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ManifestError(
            file, "command", str(error), "placeholders {name}; a brace of JSON is written {{ }}"
        ) from None


DOUBLED = "a brace of JSON doubled, {{ }}, since { } is a placeholder for a key of `defaults`"
DOUBLE = """write JSON as in --flag '{{"key": {name}}}', or hold it in a default and write '{name}'"""


def split(text: str, file: object) -> list[str]:
    """The words of a filled command, which must start with `vllm serve <model>`."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))
    except ValueError as error:
        raise ManifestError(
            file, "command", str(error), "words that a POSIX shell can split (check the quotes)"
        ) from None
    if words[:2] != ["vllm", "serve"] or len(words) < 3 or words[2].startswith("-"):
        raise ManifestError(file, "command", " ".join(words[:3]), "a command that starts with: vllm serve <model>")
    return words


def check_json(argv: Iterable[str], file: object) -> None:
    """Refuse a word that was meant as JSON and is not: a shell eats the double quotes of JSON that is not quoted."""
    for fault in json_faults(argv, file):
        raise fault


def json_faults(argv: Iterable[str], file: object) -> Iterator[ManifestError]:
    for word in argv:
        if not word.startswith("{"):
            continue
        try:
            json.loads(word)
        except (ValueError, RecursionError) as error:
            if '"' in word:  # so it was quoted
                yield ManifestError(file, "command", word, f"JSON ({error})")
                continue
            yield ManifestError(
                file, "command", word, "JSON; put single quotes around it or its placeholder, as in '{config}'"
            )


def set_flag(argv: Sequence[str], name: str, value: FlagValue) -> list[str]:
    """`argv` with one flag set, in the place of the first flag that sets the same, else at the end.

    None and True give a bare flag, False its opposite (`--x`, `--no-x`), a mapping compact JSON, a list one word an
    item.
    """
    head, flags = parse_flags(argv)
    new = Flag(flag_words(name, value))
    at = next((index for index, flag in enumerate(flags) if flag.sets(new.key)), len(flags))
    kept = [*(flag for flag in flags[:at]), new, *(flag for flag in flags[at:] if not flag.sets(new.key))]
    return [*head, *(word for flag in kept for word in flag.words)]


def drop_flags(argv: Sequence[str], *names: str) -> list[str]:
    head, flags = parse_flags(argv)
    return [*head, *(word for flag in flags if flag.key not in names for word in flag.words)]


def flag_value(argv: Sequence[str], name: str) -> str | None:
    """The first value of a flag; the last one given counts. None where it is absent or bare."""
    values = [flag.value for flag in parse_flags(argv)[1] if flag.key == name]
    return values[-1] if values else None


def served_name(argv: Sequence[str]) -> str:
    """The model's name in requests."""
    return flag_value(argv, "--served-model-name") or argv[2]


def tls_flags(argv: Sequence[str]) -> list[str]:
    """Names of the flags that make a server speak TLS."""
    return [flag.key for flag in parse_flags(argv)[1] if re.match(r"--(enable-)?ssl-", flag.key)]


def parse_flags(argv: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """The words before the first flag, and the flags. A negative number is a value."""
    head: list[str] = []
    groups: list[list[str]] = []
    for word in argv:
        if re.match(r"--?[A-Za-z]", word):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            head.append(word)
    return head, [Flag(tuple(group)) for group in groups]


def flag_words(name: str, value: FlagValue) -> tuple[str, ...]:
    if value is None or value is True:
        return (name,)
    if value is False:
        return ("--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:],)
    if isinstance(value, dict):
        return name, json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if isinstance(value, list):
        return name, *(str(item) for item in value)
    return name, str(value)


def environment(values: Mapping[str, Scalar]) -> dict[str, str]:
    """Text for each value; vLLM reads its switches as 0 and 1."""
    return {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in values.items()}
