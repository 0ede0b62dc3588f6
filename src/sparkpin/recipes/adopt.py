"""A community's recipe as one of ours: pinned model, stack, stage, and a command that needs no other recipe's rules."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError, clipped
from sparkpin.core.terminal import printable
from sparkpin.pins import drafters, manifests, vllm_command
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
from sparkpin.recipes.recipe import CommunityRecipe, divided
from sparkpin.recipes.render import ONLY_BASH, RenderedRecipe, as_run_here, eaten, machines_of, served_model
from sparkpin.recipes.sources import vllm_serve

HERE = "127.0.0.1"
REVISION = "--revision"


@dataclass(frozen=True)
class Adopted:
    value: dict[str, Any]  # of recipes/NAME.yaml
    told: tuple[str, ...]  # for people, as unmapped
    unmapped: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.value["name"])


def plain_name(text: str) -> str:
    """A name of ours from any text."""
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return name or "recipe"


def as_served(recipe: CommunityRecipe) -> tuple[CommunityRecipe, RenderedRecipe]:
    """The recipe with the model that its command serves, and what is run on one machine. ManifestError for what is not
    `vllm serve` of a repository."""
    rendered = as_run_here(recipe)
    argv = vllm_serve(rendered.argv)
    model = served_model(recipe, argv)
    if rendered.missing:
        raise ManifestError(recipe.path, "command", f"{{{rendered.missing[0]}}}", "a key of `defaults`")
    argv = tuple(with_plan(argv))
    drafters.speculation(argv, recipe.path)
    kept = {name: value for name, value in rendered.env.items() if not mapping.useless(name)}
    require_values(argv, kept, recipe.path)
    revision = recipe.revision or flag_value(argv, REVISION) or ""
    return replace(recipe, model=model, revision=revision), replace(rendered, argv=argv)


def adopt(
    project: Path, recipe: CommunityRecipe, rendered: RenderedRecipe, name: str, found: mapping.Mapping, version: str
) -> Adopted:
    """recipe, rendered: of `as_served`; version: of the stack's vLLM. The commit of the model is left open.

    Raises ManifestError for what needs more than one GPU a machine.
    """
    told, unmapped = list(found.told), list(found.unmapped)
    kept, mod_lines, mods_missing = mapping.of_mods(recipe, project, version)
    told += mod_lines
    unmapped += mods_missing
    unmapped += [f"command before the server: {line}" for line in rendered.before]
    unmapped += [f"line after the server's command: {line}" for line in rendered.lost]
    unmapped += [f"pipe or redirection: {rendered.plumbing}"] if rendered.plumbing else []
    unmapped += [f"env {key}: {recipe.env[key]}: {value}" for key, value in eaten(recipe).items() if value == ONLY_BASH]
    nodes = machines_of(recipe)
    require_one_gpu(recipe.path, rendered.argv, nodes)
    dropped, lacking, drafter = left_out(project, rendered.argv, kept)
    if recipe.origin and nodes == 1:  # its backend is for one machine
        dropped = tuple(flag for flag in dropped if flag != EXECUTOR)
    if nodes > 1 and not recipe.origin:
        told.append(f"for a cluster -> nodes: {nodes}; vLLM itself joins the machines, without Ray")
    elif EXECUTOR in dropped:
        told.append(f"{EXECUTOR} -> left out: one machine")
    told += [f"{flag} -> the key model_revision" for flag in dropped if flag == REVISION]
    unmapped += lacking
    host = flag_value(rendered.argv, "--host")
    told += [f"--host {host} -> {HERE}, where nobody else reaches it"] if host not in (None, HERE) else []
    if rendered.argv[2] != recipe.model:
        told.append(f"vllm serve {rendered.argv[2]} -> {recipe.model}, which is mounted at {MODEL_PATH}")
    told += [f"env {variable} -> left out: {why}" for variable in rendered.env if (why := mapping.useless(variable))]
    told += [f"{text} -> 1: one machine with one GPU" for text in divided(recipe) if nodes == 1]
    command, defaults = with_settings(recipe, rendered.argv, dropped)
    value: dict[str, Any] = {
        "recipe_version": "1",
        "name": name,
        "description": recipe.description or f"{recipe.model}, from {recipe.path.name}",
        "model": recipe.model,
        "model_revision": UNRESOLVED,
        **({"drafter": drafter} if drafter else {}),
        "container": f"sparkpin/{name}",
        "stack": found.stack,
        "stage": found.stage,
        **({"nodes": nodes} if nodes > 1 else {}),
        "mods": kept,
        "defaults": defaults,
        "env": {variable: text for variable, text in rendered.env.items() if not mapping.useless(variable)},
        "command": command,
    }
    lines = [tuple(clipped(printable(line), LONGEST) for line in part) for part in (told, unmapped)]
    return Adopted({key: part for key, part in value.items() if part not in ([], {})}, *lines)


def require_one_gpu(file: Path, argv: Sequence[str], nodes: int) -> None:
    for short, flag in ALIASES.items():
        count = flag_value(argv, flag) or "1"
        shared = nodes > 1 and flag in (TENSOR, PIPELINE)
        if flag.endswith("-parallel-size") and count != "1" and not shared:
            raise ManifestError(file, f"command, {short} or {flag}", count, "1: a recipe for one GPU")


def left_out(project: Path, argv: Sequence[str], mods: Sequence[str]) -> tuple[tuple[str, ...], list[str], str | None]:
    """Flags that cannot be served here, what is told of those that will be missed, and the draft model, if it is pinned
    here."""
    said = {flag.key for flag in parse_flags(argv)[1]}
    dropped = [flag for flag in (EXECUTOR, REVISION, NODES, *PER_NODE) if flag in said]
    lacking: list[str] = []
    for flag in tls_flags(argv):
        dropped.append(flag)
        lacking.append(f"{flag}: served by plain HTTP; a proxy before the server can do TLS")
    for flag, file in lacking_files(argv, template_names(project, mods)).items():
        parsers = [parser for parser, plugin in PLUGINS.items() if plugin == flag and parser in said]
        dropped += [flag, *parsers]
        lost = "".join(f", and with it {parser} {flag_value(argv, parser)}" for parser in parsers)
        lacking.append(f"{flag} {file}: that file is not here{lost}")
    plan = read_json(flag_value(argv, drafters.FLAG) or "")
    draft = drafters.second_model(plan) if isinstance(plan, dict) else None
    pinned = {pin.repositories[pin.base].repo for pin in manifests.readable_models(project)[0] if pin.drafts}
    if draft and draft not in pinned:
        dropped.append(drafters.FLAG)
        lacking.append(f"{drafters.FLAG}: no pin has the draft model {draft} (docs/drafters.md); served without")
    return tuple(dropped), lacking, draft if draft in pinned else None


def changed(argv: Sequence[str], dropped: Sequence[str]) -> list[str]:
    """The words as they are served here. A mark in the place of the host stays."""
    words = with_plan([*argv[:2], MODEL_PATH, *argv[3:]])
    host = flag_value(words, "--host")
    if host is not None and not template.MARK.fullmatch(host):
        words = set_flag(words, "--host", HERE)
    return drop_flags(words, *dropped)


def with_plan(argv: Sequence[str]) -> list[str]:
    """The words with what stands in flags of its keys in --speculative-config. A mark in the place of a number stays
    one."""
    said = {key: value for flag, key in drafters.SHORTS.items() if (value := flag_value(argv, flag)) is not None}
    plan = read_json(flag_value(argv, drafters.FLAG) or "{}")
    if not said or not isinstance(plan, dict):
        return list(argv)
    text = json.dumps(plan | {key: read_json(value) for key, value in said.items()}, ensure_ascii=False)
    tokens = said.get(drafters.TOKENS, "")
    if template.MARK.fullmatch(tokens):
        text = text.replace(json.dumps(tokens, ensure_ascii=False), tokens)
    return set_flag(drop_flags(argv, *drafters.SHORTS), drafters.FLAG, text)


def with_settings(recipe: CommunityRecipe, argv: Sequence[str], dropped: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command, with `defaults` for placeholders where the recipe's own can stay, else with none."""
    wanted = changed(argv, dropped)
    with contextlib.suppress(ManifestError):  # a placeholder that formats its value, or tells the shell something
        names = [name for name, value in recipe.defaults.items() if template.usable(value)]
        words = changed(as_run_here(recipe, template.marked(names)).argv, dropped)
        marks = {mark for word in words for mark in template.MARK.findall(word)}
        values = {name: recipe.defaults[name] for name in names if name in marks}
        for name, value in (("host", HERE), ("tensor_parallel", 1)):  # what one machine of ours has
            if name in values and not (name == "tensor_parallel" and machines_of(recipe) > 1):
                values[name] = value
        command = template.command_of(words, values, doubled=True)
        if vllm_command.split(vllm_command.fill(command, values, recipe.path), recipe.path) == wanted:
            return command, values
    return template.command_of(wanted, {}, doubled=True), {}
