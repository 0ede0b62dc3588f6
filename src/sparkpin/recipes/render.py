"""The words and the environment that a recipe's server gets from its runner."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.pins.nodes import MOST_NODES, PIPELINE, TENSOR
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.recipes import placeholders
from sparkpin.recipes.recipe import CommunityRecipe, whole
from sparkpin.recipes.sources import RUNNERS, RenderedServer, Variables, server_of, vllm_serve

BACKEND = re.compile(r"--distributed-executor-backend(?:=|\s+)\S+")
NAMED = re.compile(r"vllm |sglang |python3? -m sglang")  # servers that take --served-model-name
REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
POOLING = re.compile(r"(?:^|[-_./])(?:embed(?:dings?)?|rerank(?:er)?)(?:$|[-_.])", re.IGNORECASE)
TEXT = ("auto", "none", "generate", "draft")  # what --runner, --convert and --task say of a model that writes text
WORDS = 500  # of a command; vLLM has some 300 flags
EXPANDED = re.compile(r"(?<!\\)(?:\\\\)*[`$]")
QUOTED = re.compile(r'(?<!\\)(?:\\\\)*"')


def render(recipe: CommunityRecipe, *, alone: bool = False) -> RenderedServer:
    """alone: as on one machine, where version 1 sets tensor_parallel to 1 and leaves the executor backend out.

    Raises:
        ManifestError: what the runner could not start either, or only a shell could tell.
        InputError: a recipe for several machines on one.
    """
    if alone and recipe.least > 1:
        step = "choose one for a single machine"
        raise InputError(f"{recipe.path}: this recipe is for {recipe.least} machines or more", next_step=step)
    env = {name: meant(value) for name, value in recipe.env.items()} if recipe.version == "1" else recipe.env
    server = server_of(recipe.path, script_of(recipe, alone=alone), Variables(dict(env), set(env)))
    if len(server.argv) > WORDS:
        raise ManifestError(recipe.path, "command", f"{len(server.argv):,} words", f"at most {WORDS:,}")
    if recipe.version != "2":
        return server
    values = values_v2(recipe)
    asked = placeholders.names_v2(recipe.command, values)
    return replace(server, missing=tuple(sorted(name for name in asked if values.get(name) is None)))


def script_of(recipe: CommunityRecipe, *, alone: bool = False) -> str:
    """The command with its placeholders filled in, as the runner hands it to bash."""
    if recipe.version == "2":
        values = values_v2(recipe)
        text = (
            placeholders.fill_v2(recipe.command, values, recipe.path) if recipe.command else structured(recipe, values)
        )
        text = with_flag(text, "--distributed-executor-backend", values.get("distributed_executor_backend"), force=True)
        if not NAMED.match(text):
            return text
        return with_flag(text, "--served-model-name", values.get("served_model_name"), force=False)
    if recipe.version != "1":
        return recipe.command
    values = {**recipe.defaults, **({"tensor_parallel": 1} if alone else {})}
    text = placeholders.fill_v1(recipe.command, values, recipe.path).rstrip().rstrip("\\").rstrip()
    if alone:
        lines = BACKEND.sub("", text).split("\n")
        text = "\n".join(line for line in lines if line.strip() not in ("", "\\"))
    return text.strip()


def structured(recipe: CommunityRecipe, values: Mapping[str, Any]) -> str:
    """The command that sparkrun makes of `defaults` where a recipe has none."""
    if recipe.runtime and "vllm" not in recipe.runtime:
        raise other_engine(recipe, "runtime", recipe.runtime)
    parts = ["vllm", "serve", recipe.model]
    if recipe.model_revision:
        parts += ["--revision", shlex.quote(recipe.model_revision)]
    if values.get("tensor_parallel"):
        parts += ["-tp", str(values["tensor_parallel"])]
    short = {"pipeline_parallel": "-pp", "data_parallel": "--data-parallel-size"}
    for key in RUNNERS["flags"]:
        value, flag = values.get(key), short.get(key, "--" + key.replace("_", "-"))
        if value is None:
            continue
        if key not in RUNNERS["bare"]:
            is_json = isinstance(value, dict | list) or str(value).lstrip()[:1] in ("{", "[")
            text = (
                value
                if isinstance(value, str)
                else json.dumps(value, separators=(",", ":"), default=str)
                if is_json
                else str(value)
            )
            parts += [flag, shlex.quote(text) if is_json else text]
        elif str(value).lower() in ("true", "yes", "1", "on", "t", "y"):
            parts.append(flag)
        elif key in RUNNERS["on_by_default"]:
            parts.append(f"--no-{flag[2:]}")
    return " ".join(parts)


def with_flag(text: str, flag: str, value: Any, *, force: bool) -> str:
    """A setting that the command does not mention at its end; `force`: in the place of what it says."""
    if value is None or (flag in text and not force):
        return text
    if flag in text:
        return re.sub(re.escape(flag) + r"\s+\S+", lambda _: f"{flag} {value}", text, count=1)
    return f"{text.rstrip()} {flag} {value}"


def values_v2(recipe: CommunityRecipe) -> dict[str, Any]:
    known = {**RUNNERS["on_a_spark"], "model": recipe.model, "resolved_model_path": recipe.model}
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
    argv = vllm_serve(render(recipe).argv)
    counts = {name: count for name in (TENSOR, PIPELINE) if (count := flag_value(argv, name))}
    if argv[:2] != ("vllm", "serve") or not counts:
        return recipe.least
    found = math.prod(whole(count) or 0 for count in counts.values())
    most = min(recipe.most or MOST_NODES, MOST_NODES)
    if not recipe.least <= found <= most:
        got = f"a command for {found}: " + ", ".join(f"{name} {count}" for name, count in counts.items())
        expected = f"{recipe.least}" if recipe.least == most else f"{recipe.least} to {most}"
        raise ManifestError(recipe.path, "nodes", got, f"{expected} machines")
    return found


def as_run_here(recipe: CommunityRecipe) -> RenderedServer:
    """As on one machine where it runs on one, so that `check` and `import` judge and write the same words."""
    server = render(recipe, alone=not recipe.origin and machines_of(recipe) == 1)
    return replace(server, argv=vllm_serve(server.argv))


def served_model(recipe: CommunityRecipe, argv: Sequence[str]) -> str:
    """The repository that is served. ManifestError for another engine, for what is no repository, and for a model that
    makes embeddings or scores."""
    if tuple(argv[:2]) != ("vllm", "serve") or len(argv) < 3 or argv[2].startswith("-"):
        raise other_engine(recipe, "command", " ".join(argv[:3]))
    model = argv[2] if REPO.fullmatch(argv[2]) else recipe.origin.model if recipe.origin else recipe.model
    if not REPO.fullmatch(model):
        step = f"say which one it is: invoke recipe import {recipe.path} --model OWNER/NAME"
        raise ManifestError(recipe.path, "model", model, "a repository of the Hub, OWNER/NAME", next_step=step)
    said = [f"{flag} {value}" for flag in ("--runner", "--convert", "--task") if (value := flag_value(argv, flag))]
    pooled = [text for text in said if text.partition(" ")[2] not in TEXT]
    if pooled or (not said and POOLING.search(model)):
        expected = "a model that writes text: nothing here checks /v1/embeddings or /rerank, so no release could pass"
        step = "serve it with its own runner, on another port, beside a model of sparkpin's"
        raise ManifestError(recipe.path, "command", pooled[0] if pooled else model, expected, next_step=step)
    return model


def other_engine(recipe: CommunityRecipe, key: str, got: str) -> ManifestError:
    names = [name for part, name in RUNNERS["engines"].items() if part in got.lower()]
    expected = "vllm serve MODEL: that is what is served here" + "".join(
        f", and {name} is another" for name in names[:1]
    )
    return ManifestError(recipe.path, key, got, expected, next_step="take a recipe of this model for vLLM")


def meant(value: str) -> str:
    """A value of version 1's `env`, which the runner writes as `export NAME="value"`: one that was escaped for that
    comes out as from bash, one that bash would spoil was not, and is taken as it stands."""
    spoilt = EXPANDED.search(value) or QUOTED.search(value)
    return value if spoilt else re.sub(r'\\([$`"\\])', r"\1", value)


def escaped(value: str) -> str:
    """What `meant` reads as the value, and bash, too."""
    return re.sub(r'([$`"\\])', r"\\\1", value)
