"""The words and the environment that a recipe's server gets from its runner."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.pins.nodes import MOST_NODES, PIPELINE, TENSOR
from sparkpin.pins.values import ENV_NAME
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.recipes import placeholders, structured
from sparkpin.recipes.recipe import LINE, RUNNERS, CommunityRecipe, whole
from sparkpin.recipes.shell import ShellCommand, commands, shown
from sparkpin.recipes.sources import unwrapped, vllm_serve

BACKEND = re.compile(r"--distributed-executor-backend(?:=|\s+)\S+")
NAMED = re.compile(r"vllm |sglang |python3? -m sglang")  # servers that take --served-model-name
ENGINES: dict[str, str] = RUNNERS["engines"]
"""Others that recipes are for, by a part of sparkrun's `runtime` or of their program's name."""
REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
POOLING = re.compile(r"(?:^|[-_./])(?:embed(?:dings?)?|rerank(?:er)?)(?:$|[-_.])", re.IGNORECASE)
TEXT = ("auto", "none", "generate", "draft")  # what --runner, --convert and --task say of a model that writes text
WORDS = 500  # of a command; vLLM has some 300 flags
SHARE = "gpu_memory_utilization"
ON_A_SPARK = {SHARE: 0.8}
"""What sparkrun sets on a DGX Spark where nobody does, read in its platforms/dgx_spark.py, 0.4.2."""
PREPARING = {*RUNNERS["preparing"]}
OF_THE_IMAGE = re.compile(r"(?<=export)[ \t]+(PATH|LD_LIBRARY_PATH|PYTHONPATH)=[^\s'\";&|]*\$\{?\1\b[^\s'\";&|]*")
"""Additions to what an image sets, which is no matter of the server's words."""
ONLY_BASH = "(only bash could tell)"
EATEN = re.compile(r'(?<!\\)(?:\\\\)*["`$]')


@dataclass(frozen=True)
class RenderedRecipe:
    """How a server is started."""

    argv: tuple[str, ...]
    env: dict[str, str]  # of the recipe and its script, with the values that were meant
    before: tuple[str, ...] = ()  # other commands of the script
    lost: tuple[str, ...] = ()  # what stands after the server, and so is never reached while it runs
    plumbing: str = ""  # pipes and redirections
    missing: tuple[str, ...] = ()  # placeholders that nothing fills (version 2)


def render(
    recipe: CommunityRecipe, overrides: Mapping[str, Any] | None = None, *, nodes: int | None = None
) -> RenderedRecipe:
    """
    Args:
        overrides: values in the place of `defaults`.
        nodes: 1: as on one machine, where version 1 sets tensor_parallel to 1 and leaves the executor backend out;
            None: as the recipe says.

    Raises:
        ManifestError: what the runner could not start either, or only a shell could tell.
        InputError: a recipe for several machines on one.
    """
    if recipe.version == LINE:
        return read_script(recipe, recipe.command or "", dict(recipe.env))
    given = dict(overrides or {})
    if nodes == 1 and recipe.nodes > 1:
        raise InputError(
            f"{recipe.path}: this recipe is for {recipe.nodes} machines or more",
            next_step="choose one for a single machine",
        )
    if recipe.version == "1":
        return read_script(recipe, *as_v1(recipe, given, alone=nodes == 1))
    text, env, missing = as_v2(recipe, given)
    return replace(read_script(recipe, text, env), missing=missing)


def as_v1(recipe: CommunityRecipe, overrides: dict[str, Any], *, alone: bool) -> tuple[str, dict[str, str]]:
    """The script and its environment."""
    if alone:
        overrides = {"tensor_parallel": 1} | overrides
    text = placeholders.fill_v1(recipe.command or "", {**recipe.defaults, **overrides}, recipe.path).rstrip()
    if text.endswith("\\"):
        text = text.rstrip("\\\n").rstrip()
    if alone:
        lines = BACKEND.sub("", text).split("\n")
        text = "\n".join(line for line in lines if line.strip() not in ("", "\\"))
    return text.strip(), {name: meant(value) for name, value in recipe.env.items()}


def as_v2(recipe: CommunityRecipe, overrides: dict[str, Any]) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """The script, its environment, and the placeholders that nothing fills."""
    known = {**ON_A_SPARK, "model": recipe.model, "resolved_model_path": recipe.model}
    known |= {"model_revision": recipe.revision} if recipe.revision else {}
    values = {**known, **recipe.defaults, **overrides}
    if recipe.command:
        text = placeholders.fill_v2(recipe.command, values, recipe.path)
        text = with_flag(text, "--distributed-executor-backend", values.get("distributed_executor_backend"), force=True)
    elif "vllm" in recipe.runtime or not recipe.runtime:
        text = structured.command_of(str(values["model"]), recipe.revision, values)
    else:
        raise other_engine(recipe, (recipe.runtime,), "runtime")
    if NAMED.match(text):
        text = with_flag(text, "--served-model-name", values.get("served_model_name"), force=False)
    asked = placeholders.names_v2(recipe.command or "", values)
    return text, dict(recipe.env), tuple(sorted(name for name in asked if values.get(name) is None))


def with_flag(text: str, flag: str, value: Any, *, force: bool) -> str:
    """A setting that the command does not mention at its end; `force`: in the place of what it says."""
    if value is None or (flag in text and not force):
        return text
    if flag in text:
        return re.sub(re.escape(flag) + r"\s+\S+", lambda _: f"{flag} {value}", text, count=1)
    return f"{text.rstrip()} {flag} {value}"


def read_script(recipe: CommunityRecipe, text: str, env: dict[str, str]) -> RenderedRecipe:
    """The server's command among those of a script."""
    before: list[str] = []
    server: ShellCommand | None = None
    lost: list[str] = []
    for found in OF_THE_IMAGE.finditer(text):
        before.append(f"export {found[0].strip()}")
    text = OF_THE_IMAGE.sub(" ", text)
    for command in commands(text + "\n", env, recipe.path):  # a script's last line ends
        if server is not None:
            lost.append(shown(command))
        elif command.words[:1] == ("export",) or not command.words:
            pairs = [word.partition("=") for word in command.words[1:]]
            if odd := next((name for name, _, _ in pairs if not ENV_NAME.fullmatch(name)), None):
                seen = shown(command)
                raise ManifestError(recipe.path, "command", seen, f"export NAME=value: only a shell could tell {odd!r}")
            env |= {name: value for name, equals, value in pairs if equals} | dict(command.assigned)
        elif command.words[0] == "set":
            continue
        elif command.words[0] == "unset" and set(command.words[1:]) <= env.keys():
            for name in command.words[1:]:
                del env[name]
        elif command.words[0] in PREPARING:
            before.append(shown(command))
        else:
            server = command
    if server and len(server.words) > WORDS:
        raise ManifestError(recipe.path, "command", f"{len(server.words):,} words", f"at most {WORDS:,}")
    if server is None:
        raise ManifestError(recipe.path, "command", recipe.command, "a command that starts a server")
    words, given = unwrapped(server.words)
    return RenderedRecipe(
        argv=tuple(words),
        env=env | dict(server.assigned) | given,
        before=tuple(before),
        lost=tuple(lost),
        plumbing=server.plumbing,
    )


def machines_of(recipe: CommunityRecipe) -> int:
    """Over how many machines with one GPU each its runner divides the model.

    Version 1 serves on one whatever its command says, unless the recipe forbids that. ManifestError where the command
    divides it over fewer or more than the recipe is for.
    """
    if recipe.nodes == 1 and (recipe.version == "1" or recipe.most_nodes == 1):
        return 1
    argv = vllm_serve(render(recipe).argv)
    counts = {name: flag_value(argv, name) for name in (TENSOR, PIPELINE)}
    if argv[:2] != ("vllm", "serve") or not any(counts.values()):
        return recipe.nodes
    numbers = [whole(count or 1) for count in counts.values()]
    found = math.prod(number or 0 for number in numbers)
    if None in numbers:
        raise ManifestError(recipe.path, "command", counts, "numbers of machines")
    most = min(recipe.most_nodes or MOST_NODES, MOST_NODES)
    if not recipe.nodes <= found <= most:
        seen = f"a command for {found}: " + ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        expected = f"{recipe.nodes}" if recipe.nodes == most else f"{recipe.nodes} to {most}"
        raise ManifestError(recipe.path, "nodes", seen, f"{expected} machines")
    return found


def as_run_here(recipe: CommunityRecipe, overrides: Mapping[str, Any] | None = None) -> RenderedRecipe:
    """As on one machine where it runs on one, so that `check` and `import` judge and write the same words."""
    return render(recipe, overrides, nodes=None if recipe.origin or machines_of(recipe) > 1 else 1)


def other_engine(recipe: CommunityRecipe, argv: Sequence[str], key: str = "command") -> ManifestError:
    """Of a program that is not vLLM, or of sparkrun's name for one."""
    seen, program = " ".join(argv[:3]), argv[2] if argv[1:2] == ("-m",) and argv[2:] else argv[0]
    engine = next((name for part, name in ENGINES.items() if part in program.lower()), "")
    expected = "vllm serve MODEL: that is what is served here"
    expected += f", and {engine} is another engine" if engine else ""
    return ManifestError(recipe.path, key, seen, expected, next_step="take a recipe of this model for vLLM")


def served_model(recipe: CommunityRecipe, argv: Sequence[str]) -> str:
    """The repository that is served. ManifestError for another engine, for what is no repository, and for a model that
    makes embeddings or scores."""
    if tuple(argv[:2]) != ("vllm", "serve") or len(argv) < 3 or argv[2].startswith("-"):
        raise other_engine(recipe, argv)
    model = argv[2] if REPO.fullmatch(argv[2]) else recipe.origin.model if recipe.origin else recipe.model
    if not REPO.fullmatch(model):
        step = f"say which one it is: invoke recipe import {recipe.path} --model OWNER/NAME"
        raise ManifestError(recipe.path, "model", model, "a repository of the Hub, OWNER/NAME", next_step=step)
    said = [f"{flag} {value}" for flag in ("--runner", "--convert", "--task") if (value := flag_value(argv, flag))]
    pooled = [text for text in said if text.partition(" ")[2] not in TEXT]
    if pooled or (not said and POOLING.search(model)):
        expected = (
            "a model that writes text: nothing here checks /v1/embeddings or /rerank, so no release of it could pass"
        )
        step = "serve it with its own runner, on another port, beside a model of sparkpin's"
        raise ManifestError(recipe.path, "command", pooled[0] if pooled else model, expected, next_step=step)
    return model


def meant(value: str) -> str:
    """A value of version 1's `env`, which the runner writes as `export NAME="value"`: one that was escaped for that
    comes out as from bash, one that bash would spoil was not, and is taken as it stands."""
    return value if EATEN.search(value) else re.sub(r'\\([$`"\\])', r"\1", value)


def escaped(value: str) -> str:
    """What `meant` reads as the value, and bash, too."""
    return re.sub(r'([$`"\\])', r"\\\1", value)


def eaten(recipe: CommunityRecipe) -> dict[str, str]:
    """Variables of version 1 whose value the runner's script changes, `export NAME="value"`: what the server gets.

    ONLY_BASH where the value is expanded.
    """
    found = {}
    for name, value in recipe.env.items():
        if recipe.version == "1" and EATEN.search(value):
            found[name] = ONLY_BASH if re.search(r"[`$]", value) else value.replace('"', "")
    return found
