"""The words and the environment that a recipe's server gets from its runner: its template filled in, read as a script.

Version 1: ``command.format(**defaults)``, one pass; a missing key is an error. Version 2: a placeholder is a span
without braces in it; other braces are text, and ``{{`` anywhere in the template says that its braces are doubled; what
goes in may hold placeholders again, up to ten passes deep; an unknown placeholder stays as it is. A value that brings
itself back is refused: it would have no end.
"""

from __future__ import annotations

import math
import re
import shlex
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins import vllm_command
from sparkpin.pins.nodes import EXECUTOR, MOST_NODES, PIPELINE, TENSOR
from sparkpin.pins.vllm_flags import SERVED_NAME, flag_value, flag_words
from sparkpin.recipes.recipe import CommunityRecipe
from sparkpin.recipes.shell import FACTS, LONGEST, Launch, Shell, shown

REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
POOLING = re.compile(r"(?:^|[-_./])(?:embed(?:dings?)?|rerank(?:er)?)(?:$|[-_.])", re.IGNORECASE)
TEXT = ("auto", "none", "generate", "draft")  # what --runner, --convert and --task say of a model that writes text
EXPANDED = re.compile(r"(?<!\\)(?:\\\\)*[`$]")
QUOTED = re.compile(r'(?<!\\)(?:\\\\)*"')
SPAN = re.compile(r"\{[^{}]*\}")
OWN = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*)\}")  # ${NAME} is the shell's, unless `defaults` has a NAME
LAZY = re.compile(r"\{([^}\n]*)\}")  # what the runner looks for once other braces are hidden
OPEN, CLOSED = "\x00", "\x01"  # YAML allows neither in text
PASSES = 10
PLAIN_FORM = re.compile(r"[<>^]?\d{0,2}(?:\.\d)?[a-z%]?")  # of {port:5}; more fills the memory
# A backslash that continues no line: with the blank after it, it is a word of its own, and the command ends.
BROKEN = re.compile(r"\\[ \t]+\n")


def render(recipe: CommunityRecipe, *, single: bool = False) -> Launch:
    """single: as on one machine, where version 1 sets tensor_parallel to 1 and leaves the executor backend out.

    ManifestError: what the runner could not start either, or only a shell could tell.
    """
    env = {name: meant(value) for name, value in recipe.env.items()} if recipe.version == "1" else recipe.env
    server = Shell(recipe.path, script_of(recipe, single=single), dict(env), set(env)).launch()
    if recipe.version != "2":
        return server
    values = values_v2(recipe)
    asked = names_v2(recipe.command, values)
    return replace(server, missing=tuple(sorted(name for name in asked if values.get(name) is None)))


def script_of(recipe: CommunityRecipe, *, single: bool = False) -> str:
    """The command with its placeholders filled in, as the runner hands it to bash."""
    if recipe.version == "1":
        values = {**recipe.defaults, **({"tensor_parallel": 1} if single else {})}
        text = fill_v1(recipe.command, values, recipe.path).rstrip().rstrip("\\").rstrip()
        lines = re.sub(rf"{EXECUTOR}(?:=|\s+)\S+", "", text).split("\n")
        return "\n".join(line for line in lines if line.strip() not in ("", "\\")).strip() if single else text.strip()
    if recipe.version != "2":
        return recipe.command
    values = values_v2(recipe)
    text = fill_v2(recipe.command, values, recipe.path) if recipe.command else structured(recipe, values)
    served_name = values.get("served_model_name")
    if served_name is not None and SERVED_NAME not in text and re.match(r"vllm |sglang |python3? -m sglang", text):
        text += f" {SERVED_NAME} {served_name}"
    return text


def structured(recipe: CommunityRecipe, values: Mapping[str, Any]) -> str:
    """The command that sparkrun makes of `defaults` where a recipe has none."""
    if recipe.runtime and "vllm" not in recipe.runtime:
        raise other_engine(recipe, "runtime", recipe.runtime)
    words = ["vllm", "serve", recipe.model]
    for key in ("model_revision", "tensor_parallel", *FACTS["flags"]):
        if (value := values.get(key)) is not None:
            words += flag_words(FACTS["other_flags"].get(key, "--" + key.replace("_", "-")), value)
    return shlex.join(words)


def values_v2(recipe: CommunityRecipe) -> dict[str, Any]:
    known = {**FACTS["on_a_spark"], "model": recipe.model, "resolved_model_path": recipe.model}
    if recipe.model_revision:
        known["model_revision"] = recipe.model_revision
    return known | recipe.defaults


def machines_of(recipe: CommunityRecipe) -> int:
    """Over how many machines with one GPU each its runner divides the model.

    Version 1 serves on one whatever its command says, unless the recipe forbids that. ManifestError where the command
    divides it over fewer or more than the recipe is for.
    """
    if recipe.least == 1 and (recipe.version == "1" or recipe.most == 1):
        return 1
    argv = render(recipe).argv
    counts = {name: count for name in (TENSOR, PIPELINE) if (count := flag_value(argv, name))}
    if argv[:2] != ("vllm", "serve"):
        return recipe.least
    numbers = [int(count) if count.isdecimal() and len(count) < 5 else 0 for count in counts.values()]
    found = math.prod(numbers) if counts else recipe.least
    most = MOST_NODES if recipe.most is None else min(recipe.most, MOST_NODES)
    if not recipe.least <= found <= most:
        got = f"a command for {found}: " + ", ".join(f"{name} {count}" for name, count in counts.items())
        expected = f"{recipe.least}" if recipe.least == most else f"{recipe.least} to {most}"
        raise ManifestError(recipe.path, "nodes", got, f"{expected} machines")
    return found


def as_run_here(recipe: CommunityRecipe) -> Launch:
    """As on one machine where it runs on one, so that `check` and `import` judge and write the same words."""
    return render(recipe, single=not recipe.origin and machines_of(recipe) == 1)


def served_model(recipe: CommunityRecipe, argv: Sequence[str]) -> str:
    """The repository that is served. ManifestError for another engine, for what is no repository, and for a model that
    makes embeddings or scores."""
    if tuple(argv[:2]) != ("vllm", "serve") or len(argv) < 3 or argv[2].startswith("-"):
        raise other_engine(recipe, "command", " ".join(argv[:3]))
    model = argv[2] if REPO.fullmatch(argv[2]) else recipe.origin.model if recipe.origin else recipe.model
    if not REPO.fullmatch(model):
        step = f"invoke add {recipe.path} --model OWNER/NAME"
        raise ManifestError(recipe.path, "model", model, "a repository of the Hub, OWNER/NAME", next_step=step)
    flags = ("--runner", "--convert", "--task")
    given = {f"{flag} {value}": value for flag in flags if (value := flag_value(argv, flag))}
    if {*given.values()} - {*TEXT} or (not given and POOLING.search(model)):
        expected = "a model that writes text: nothing here checks /v1/embeddings or /rerank, so no release could pass"
        step = "serve it with its own runner, on another port, next to a model of sparkpin's"
        raise ManifestError(recipe.path, "command", " ".join(given) or model, expected, next_step=step)
    return model


def other_engine(recipe: CommunityRecipe, key: str, got: str) -> ManifestError:
    engine = next((f", and {name} is another" for part, name in FACTS["engines"].items() if part in got.lower()), "")
    expected = f"vllm serve MODEL: that is what is served here{engine}"
    return ManifestError(recipe.path, key, shown(got), expected, next_step="take a recipe of this model for vLLM")


def meant(value: str) -> str:
    """A value of version 1's `env`, which the runner writes as `export NAME="value"`: one that was escaped for that
    comes out as from bash, one that bash would spoil was not, and is taken as it stands."""
    spoilt = EXPANDED.search(value) or QUOTED.search(value)
    return value if spoilt else re.sub(r'\\([$`"\\])', r"\1", value)


def escaped(value: str) -> str:
    """What `meant` reads as the value, and bash, too."""
    return re.sub(r'([$`"\\])', r"\\\1", value)


def fill_v1(command: str, values: Mapping[str, Any], file: object) -> str:
    fields = fields_v1(command)
    if not all(re.fullmatch(r"[\w-]+", name) and PLAIN_FORM.fullmatch(form) for name, form in fields):
        raise ManifestError(file, "command", shown(command), "placeholders {name}")  # else a width fills the memory
    require_short(command, [name for name, _ in fields], values, file)
    return vllm_command.fill(command, values, file)


def fill_v2(command: str, values: Mapping[str, Any], file: object) -> str:
    def replacement(found: re.Match[str]) -> str:
        value = values.get(found[0].strip("{}"))
        return found[0] if value is None else str(value)

    text = hidden(command.strip())
    for _ in range(PASSES + 1):
        lines = [line.rpartition("}") for line in text.split("\n")]  # each brace before the last end has an end
        names = [name for line in lines for name in LAZY.findall("".join(line[:2]))]
        require_short(text, names, values, file)
        filled = "\n".join(LAZY.sub(replacement, start + end) + rest for start, end, rest in lines)
        if filled == text and not any(values.get(name) is not None for name in names):
            return BROKEN.sub("\\\\\n", text.replace(OPEN, "{").replace(CLOSED, "}"))
        text = filled
    expected = f"values that hold each other at most {PASSES} deep, and never themselves"
    raise ManifestError(file, "command", ", ".join(f"{{{name}}}" for name in sorted(set(names))), expected)


def require_short(text: str, names: Iterable[str], values: Mapping[str, Any], file: object) -> None:
    """Before a pass: values that hold each other multiply."""
    sizes = {name: len(str(value)) for name, value in values.items()}
    longest = len(text) + sum(sizes.get(name, 0) for name in names)
    if longest > LONGEST:
        raise ManifestError(file, "command", f"{longest:,} characters once filled in", f"at most {LONGEST:,}")


def hidden(template: str) -> str:
    """All braces but those of placeholders replaced, so that no span begins in the midst of JSON."""

    def mark(found: re.Match[str]) -> str:
        return found[0] if SPAN.fullmatch(found[0]) else OPEN if found[0].startswith("{") else CLOSED

    doubled = r"\{\{|\}\}|" if "{{" in template else ""
    return re.sub(rf"{doubled}{SPAN.pattern}|[{{}}]", mark, template)


def fields_v1(command: str) -> list[tuple[str, str]]:
    """Each placeholder with its format; none where the braces do not fit, which `fill` refuses."""
    try:
        return [(field, form or "") for _, field, form, _ in string.Formatter().parse(command) if field]
    except ValueError:
        return []


def names_v1(command: str) -> set[str]:
    return {name for name, _ in fields_v1(command)}


def names_v2(command: str, values: Mapping[str, Any]) -> set[str]:
    """What the template asks for, and what the values that it takes ask for in turn. JSON is no name."""
    found: set[str] = set()
    texts = [hidden(command)]
    while texts:
        new = set(OWN.findall(texts.pop())) - found
        found |= new
        texts += [values[name] for name in new if isinstance(values.get(name), str)]
    return found
