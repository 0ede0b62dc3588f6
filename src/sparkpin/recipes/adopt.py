"""A community's recipe as one of ours: pinned model, stack, stage, and a command that needs no other recipe's rules."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError, clipped
from sparkpin.core.terminal import printable
from sparkpin.pins import drafters, manifests
from sparkpin.pins.mods import template_names
from sparkpin.pins.nodes import EXECUTOR, NODES, PER_NODE, PIPELINE, TENSOR
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.pins.values import require_values
from sparkpin.pins.vllm_flags import (
    ALIASES,
    MODEL_PATH,
    drop_flags,
    flag_value,
    parse_flags,
    read_json,
    set_flag,
    tls_flags,
)
from sparkpin.recipes import mapping, template
from sparkpin.recipes.finding import LONGEST
from sparkpin.recipes.flags import PLUGINS, lacking_files
from sparkpin.recipes.recipe import CommunityRecipe
from sparkpin.recipes.render import as_run_here, machines_of, served_model
from sparkpin.recipes.sources import RenderedServer

HERE = "127.0.0.1"
REVISION = "--revision"


@dataclass(frozen=True)
class Adopted:
    """value: of recipes/NAME.yaml, with the model's commit left open; model_revision: what the recipe says of that.

    told, unmapped: as `Mapped` has them.
    """

    value: dict[str, Any]
    model_revision: str
    told: tuple[str, ...]
    unmapped: tuple[str, ...]


def plain_name(text: str) -> str:
    """A name of ours from any text."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "recipe"


def as_served(recipe: CommunityRecipe) -> tuple[str, RenderedServer]:
    """The model that its command serves, and what is run of it here. ManifestError for what is not `vllm serve` of a
    repository."""
    rendered = as_run_here(recipe)
    model = served_model(recipe, rendered.argv)
    if rendered.missing:
        raise ManifestError(recipe.path, "command", f"{{{rendered.missing[0]}}}", "a key of `defaults`")
    argv = with_plan(rendered.argv, recipe.path)
    env = {name: value for name, value in rendered.env.items() if not mapping.useless(name)}
    require_values(argv, env, recipe.path)
    return model, replace(rendered, argv=tuple(argv))


def adopt(
    project: Path, recipe: CommunityRecipe, name: str, *, stack: str | None = None, stage: str | None = None
) -> Adopted:
    """Raises ManifestError for what cannot be served, and for what needs more than one GPU a machine."""
    model, server = as_served(recipe)
    made = mapping.mapped(recipe, stack=stack, stage=stage)
    chosen = manifests.load_stack(project, made.stack)
    manifests.load_chain(project, made.stage)
    mapping.take_mods(made, recipe, project, chosen.vllm)
    made.unmapped += server.left
    nodes = machines_of(recipe)
    require_one_gpu(recipe.path, server.argv, nodes)
    dropped, lacking, drafter = left_out(project, server.argv, made.mods)
    made.unmapped += lacking
    if recipe.origin and nodes == 1:  # its backend is for one machine
        dropped.remove(EXECUTOR)
    if nodes > 1 and not recipe.origin:
        made.told.append(f"for a cluster -> nodes: {nodes}; vLLM itself joins the machines, without Ray")
    if nodes == 1 and str(split := recipe.defaults.get("tensor_parallel", 1)) != "1":
        made.told.append(f"tensor_parallel {split} -> 1: one machine with one GPU")
    host = flag_value(server.argv, "--host")
    if host not in (None, HERE):
        made.told.append(f"--host {host} -> {HERE}, where nobody else reaches it")
    if server.argv[2] != model:
        made.told.append(f"vllm serve {server.argv[2]} -> {model}, which is mounted at {MODEL_PATH}")
    made.told += [f"env {key} -> left out: {why}" for key in server.env if (why := mapping.useless(key))]
    words = drop_flags([*server.argv[:2], MODEL_PATH, *server.argv[3:]], *dropped)
    command, defaults = template.command_of(words if host is None else set_flag(words, "--host", HERE), doubled=True)
    value: dict[str, Any] = {
        "recipe_version": "1",
        "name": name,
        "description": recipe.description or f"{model}, from {recipe.path.name}",
        "model": model,
        "model_revision": UNRESOLVED,
        "drafter": drafter,
        "container": f"sparkpin/{name}",
        "stack": made.stack,
        "stage": made.stage,
        "nodes": nodes if nodes > 1 else None,
        "mods": made.mods,
        "defaults": defaults,
        "env": {key: text for key, text in server.env.items() if not mapping.useless(key)},
        "command": command,
    }
    told, unmapped = (
        tuple(clipped(printable(line), LONGEST) for line in lines) for lines in (made.told, made.unmapped)
    )
    revision = recipe.model_revision or flag_value(server.argv, REVISION) or ""
    return Adopted({key: part for key, part in value.items() if part not in ([], {}, None)}, revision, told, unmapped)


def require_one_gpu(file: Path, argv: Sequence[str], nodes: int) -> None:
    for short, flag in ALIASES.items():
        count = flag_value(argv, flag) or "1"
        shared = nodes > 1 and flag in (TENSOR, PIPELINE)
        if flag.endswith("-parallel-size") and count != "1" and not shared:
            raise ManifestError(file, f"command, {short} or {flag}", count, "1: a recipe for one GPU")


def left_out(project: Path, argv: Sequence[str], mods: Sequence[str]) -> tuple[list[str], list[str], str | None]:
    """Flags that cannot be served here, what is told of those that will be missed, and the draft model, if it is pinned
    here."""
    dropped, lacking = [EXECUTOR, REVISION, NODES, *PER_NODE], list[str]()
    given = {flag.key for flag in parse_flags(argv)[1]}
    for flag in tls_flags(argv):
        dropped.append(flag)
        lacking.append(f"{flag}: served by plain HTTP; a proxy before the server can do TLS")
    for flag, file in lacking_files(argv, template_names(project, mods)).items():
        parsers = [parser for parser, plugin in PLUGINS.items() if plugin == flag and parser in given]
        dropped += [flag, *parsers]
        lost = "".join(f", and with it {parser} {flag_value(argv, parser)}" for parser in parsers)
        lacking.append(f"{flag} {file}: that file is not here{lost}")
    draft = drafters.second_model(drafters.speculation(argv))
    if draft is None or draft in pinned_drafters(project):
        return dropped, lacking, draft
    lacking.append(f"{drafters.FLAG}: no pin has the draft model {draft} (docs/drafters.md); served without")
    return [*dropped, drafters.FLAG], lacking, None


def pinned_drafters(project: Path) -> set[str]:
    return {pin.repositories[pin.base].repo for pin in manifests.readable_models(project)[0] if pin.drafts}


def with_plan(argv: Sequence[str], file: object) -> list[str]:
    """The words with parts of --speculative-config, and flags of its keys, in it."""
    given = {key: read_json(value) for flag, key in drafters.SHORTS.items() if (value := flag_value(argv, flag))}
    plan = drafters.speculation(argv, file) | given
    if not given and not any(flag.key.startswith(f"{drafters.FLAG}.") for flag in parse_flags(argv)[1]):
        return list(argv)
    return set_flag(drop_flags(argv, *drafters.SHORTS), drafters.FLAG, json.dumps(plan, ensure_ascii=False))
