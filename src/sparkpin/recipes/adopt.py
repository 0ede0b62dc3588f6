"""A community's recipe as one of ours: pinned model, stack, stage, and a command that needs no other recipe's rules.

A container there is whatever was newest on the day that it was built, so none maps to the very same software; what is
told is which stack takes its place, and what cannot be had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import InputError, ManifestError, clipped
from sparkpin.core.tags import IMAGE
from sparkpin.core.terminal import printable
from sparkpin.pins import drafters, manifests, mods, values, vllm_flags
from sparkpin.pins.nodes import EXECUTOR, NODES, PER_NODE, PIPELINE, TENSOR
from sparkpin.pins.schema import UNRESOLVED, ChatTemplate
from sparkpin.pins.vllm_flags import MODEL_PATH, drop_flags, flag_value, set_flag
from sparkpin.recipes.export import command_of
from sparkpin.recipes.recipe import ELSEWHERE, OURS, V1_KEYS, V2_KEYS, CommunityRecipe
from sparkpin.recipes.render import REPO, as_run_here, machines_of, served_model
from sparkpin.recipes.rules import LONGEST, PLUGINS, lacks_file
from sparkpin.recipes.shell import FACTS, Launch, shown
from sparkpin.releases import compile_caches

STACK, STAGE = "spark", "base"
HERE = "127.0.0.1"
REVISION = "--revision"


@dataclass
class Adopted:
    """notes: what takes the place of what, what was chosen, what is not known; unmapped: what has no counterpart; mods:
    chat templates, which stay.

    value: of recipes/NAME.yaml, with the commits left open; model_revision, drafter_revision: what the recipe says of
    these.
    """

    notes: list[str] = field(default_factory=list)
    unmapped: list[str] = field(default_factory=list)
    mods: list[str] = field(default_factory=list)
    value: dict[str, Any] = field(default_factory=dict)
    model_revision: str = ""
    drafter: str | None = None
    drafter_revision: str = UNRESOLVED


def plain_name(text: str) -> str:
    """A name of ours from any text."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "recipe"


@dataclass(frozen=True)
class Wanted:
    """What a person asks for, some of it in the place of what a file says.

    what: `hf:OWNER/NAME[@REV]`, or a file; name: of the recipe; model: the repository, where a file serves a folder;
    drafter: a repository as in `what`; nodes: machines; locks: whether a Hub is asked; replaces: a recipe of that
    name.
    """

    what: str = ""
    name: str = ""
    model: str = ""
    drafter: str | None = None
    nodes: int | None = None
    stack: str | None = None
    stage: str | None = None
    locks: bool = True
    replaces: bool = False


def adopt(project: Path, recipe: CommunityRecipe, name: str, wanted: Wanted = Wanted()) -> Adopted:
    """Raises ManifestError for what cannot be served, and for what needs more than one GPU a machine."""
    model, server = as_served(recipe)
    chosen, last = place_of(recipe, wanted.stack, wanted.stage)
    vllm = manifests.load_stack(project, chosen).vllm
    manifests.load_chain(project, last)
    adopted = Adopted(unmapped=[*recipe.left, *unread_keys(recipe)])
    note_container(adopted, recipe, chosen, is_named=wanted.stack is not None)
    take_mods(adopted, recipe, project, vllm)
    adopted.unmapped += server.left
    nodes = wanted.nodes or machines_of(recipe)
    if wanted.nodes:  # tensor parallelism over all of them
        server = replace(server, argv=tuple(vllm_flags.drop_flags(server.argv, TENSOR, PIPELINE)))
    require_one_gpu(recipe.path, server.argv, nodes)
    words = leave_out(adopted, project, server.argv, keeps_backend=recipe.origin is not None and nodes == 1)
    words = take_drafter(adopted, recipe.path, words, model, wanted.drafter)
    if nodes > 1 and not recipe.origin:
        adopted.notes.append(f"for a cluster -> nodes: {nodes}; vLLM itself joins the machines, without Ray")
    if nodes == 1 and str(split := recipe.defaults.get("tensor_parallel", 1)) != "1":
        adopted.notes.append(f"tensor_parallel {split} -> 1: one machine with one GPU")
    if (host := flag_value(words, "--host")) not in (None, HERE):
        adopted.notes.append(f"--host {host} -> {HERE}, where nobody else reaches it")
        words = set_flag(words, "--host", HERE)
    if words[2] != model:
        adopted.notes.append(f"vllm serve {words[2]} -> {model}, which is mounted at {MODEL_PATH}")
    adopted.notes += [f"env {key} -> left out: {why}" for key in server.env if (why := useless(key))]
    command, defaults = command_of([*words[:2], MODEL_PATH, *words[3:]], doubled=True)
    value: dict[str, Any] = {
        "recipe_version": "1",
        "name": name,
        "description": recipe.description or f"{model}, from {recipe.path.name}",
        "model": model,
        "model_revision": UNRESOLVED,
        "drafter": adopted.drafter,
        "drafter_revision": adopted.drafter and UNRESOLVED,
        "family": recipe.raw.get("family") if recipe.origin else None,
        "container": f"sparkpin/{name}",
        "stack": chosen,
        "stage": last,
        "nodes": nodes if nodes > 1 else None,
        "mods": adopted.mods,
        "defaults": defaults,
        "env": {key: text for key, text in server.env.items() if not useless(key)},
        "command": command,
    }
    adopted.value = {key: part for key, part in value.items() if part not in ([], {}, None)}
    adopted.model_revision = recipe.model_revision or flag_value(server.argv, REVISION) or ""
    for lines in (adopted.notes, adopted.unmapped):
        lines[:] = [clipped(printable(shown(line)), LONGEST) for line in lines]
    return adopted


def as_served(recipe: CommunityRecipe) -> tuple[str, Launch]:
    """The model that its command serves, and what is run of it here. ManifestError for what is not `vllm serve` of a
    repository."""
    server = as_run_here(recipe)
    model = served_model(recipe, server.argv)
    if server.missing:
        raise ManifestError(recipe.path, "command", f"{{{server.missing[0]}}}", "a key of `defaults`")
    argv = with_plan(server.argv, recipe.path)
    values.require_values(argv, {name: value for name, value in server.env.items() if not useless(name)}, recipe.path)
    return model, replace(server, argv=tuple(argv))


def place_of(recipe: CommunityRecipe, stack: str | None = None, stage: str | None = None) -> tuple[str, str]:
    """Stack and stage in place of a recipe's container, where nobody names others."""
    if recipe.origin:
        return stack or recipe.origin.stack, stage or recipe.origin.stage
    ours = IMAGE.fullmatch(recipe.container)
    return stack or (ours[1] if ours else STACK), stage or (ours[2] if ours else STAGE)


def note_container(adopted: Adopted, recipe: CommunityRecipe, stack: str, *, is_named: bool) -> None:
    if not (name := recipe.container):
        return  # what it runs on is printed anyway
    there = next((kind for pattern, kind in FACTS["containers"].items() if re.fullmatch(pattern, name)), "")
    why = "the recipe says so" if recipe.origin else there and f"there it is {there}"
    if is_named or IMAGE.fullmatch(name) or why:
        adopted.notes.append(f"container {name} -> stack {stack}" + (f" ({why})" if why else ""))
    else:
        text = f"container {name}: its contents are unknown; stack {stack} takes its place"
        adopted.unmapped.insert(0, text)


def unread_keys(recipe: CommunityRecipe) -> Iterator[str]:
    """Keys that say something about the server and that nothing here reads."""
    changes = [words for words in recipe.build_args if not {*words.split()} <= {*FACTS["build_args_without_effect"]}]
    if changes:
        yield f"build_args {' '.join(changes)}: no stack is built with it"
    read = V1_KEYS | ELSEWHERE | {"model_revision", "runtime", "min_nodes", "max_nodes", "mode", "builder"}
    read |= {*OURS} if recipe.origin else set()
    for name, value in recipe.raw.items():
        has_value = any(value.values()) if isinstance(value, dict) else value
        if name not in read and has_value:
            yield f"the {'' if name in V2_KEYS else 'unknown '}key {name}: {clipped(shown(f'{value}'), 80)}"


def useless(name: str) -> str:
    """Why a variable of the community's containers is of no use in ours; "" where it may be."""
    if name in FACTS["env_of_a_download"]:
        return "nothing is downloaded: the model is mounted"
    if name in FACTS["env_of_another_container"] or name in compile_caches.ENV:
        return "a folder of another container: the caches here lie in a volume"
    return ""


def take_mods(adopted: Adopted, recipe: CommunityRecipe, project: Path, version: str) -> None:
    """Mods that stay (chat templates), what takes the place of others, and those that are refused."""
    known = manifests.load_community_mods(project)
    for mod in recipe.applied:
        name = mods.mod_of(mod)
        one = known.get(name)
        if one and one.template:
            adopted.mods.append(name)
            adopted.notes.append(about(name, one.template))
        elif one and mods.is_needless(one, version):
            adopted.notes.append(f"mod {name} -> nothing: {one.reason}")
        else:
            why = f"{one.reason}; instead: {one.instead or f'vLLM {one.needless}'}" if one else "no run.sh is run here"
            adopted.unmapped.append(f"mod {mod}: {why}")


def about(mod: str, template: ChatTemplate) -> str:
    return f"mod {mod} -> the template {template.name} ({template.licence}) and no run.sh: {'; '.join(template.mends)}"


def require_one_gpu(file: Path, argv: Sequence[str], nodes: int) -> None:
    for short, flag in vllm_flags.ALIASES.items():
        count = flag_value(argv, flag) or "1"
        shared = nodes > 1 and flag in (TENSOR, PIPELINE)
        if flag.endswith("-parallel-size") and count != "1" and not shared:
            raise ManifestError(file, f"command, {short} or {flag}", count, "1: a recipe for one GPU")


def leave_out(adopted: Adopted, project: Path, argv: Sequence[str], *, keeps_backend: bool = False) -> list[str]:
    """The words without flags that cannot be served here."""
    dropped = [REVISION, NODES, *PER_NODE, *([] if keeps_backend else [EXECUTOR])]
    for flag in vllm_flags.tls_flags(argv):
        dropped.append(flag)
        adopted.unmapped.append(f"{flag}: served by plain HTTP; a proxy before the server can do TLS")
    templates = mods.template_names(project, adopted.mods)
    for flag in FACTS["flags_of_files"]:
        if lacks_file(flag, file := flag_value(argv, flag) or "", argv[2], templates):
            parsers = [name for name, plugin in PLUGINS.items() if plugin == flag and flag_value(argv, name)]
            dropped += [flag, *parsers]
            lost = "".join(f", and with it {parser} {flag_value(argv, parser)}" for parser in parsers)
            adopted.unmapped.append(f"{flag} {file}: that file is not here{lost}")
    return drop_flags(argv, *dropped)


def take_drafter(adopted: Adopted, file: Path, argv: Sequence[str], model: str, drafter: str | None) -> list[str]:
    """The words with the second model by its repository; its commit goes to `adopted`. ManifestError for a model that
    is none of a Hub: a recipe without its drafter would be another one; InputError for the model itself."""
    plan = drafters.speculation(argv, file)
    if sum(flag.key == drafters.FLAG for flag in vllm_flags.parse_flags(argv)[1]) > 1:
        expected = "it once: one drafter, or one number of MTP drafts"
        raise ManifestError(file, f"command, {drafters.FLAG}", "it more than once", expected)
    if drafter == model:
        raise InputError(f"--drafter: got {drafter}, the model itself", next_step="leave it out: MTP needs no drafter")
    draft = drafter or drafters.second_model(plan)
    if draft in (None, model, MODEL_PATH):  # a head of its own that the model's files have
        return set_flag(argv, drafters.FLAG, plan | {"model": MODEL_PATH}) if draft == model else list(argv)
    if not REPO.fullmatch(draft):
        step = f"invoke add {file} --drafter hf:OWNER/NAME"
        expected = "a repository of the Hub, OWNER/NAME"
        raise ManifestError(file, f"command, {drafters.FLAG}: model", draft, expected, next_step=step)
    asked = {key: value for key, value in plan.items() if key != "revision"} | {"model": draft}
    adopted.drafter, adopted.drafter_revision = draft, str(plan.get("revision") or UNRESOLVED)
    if not drafter:
        adopted.notes.append(f"draft model {draft} -> `drafter`: it is pinned, locked and fetched as the model is")
    elif (replaced := drafters.second_model(plan)) not in (None, drafter):
        adopted.notes.append(f"draft model {replaced} -> {drafter}, as --drafter says")
    return list(argv) if asked == plan else set_flag(argv, drafters.FLAG, asked)


def with_plan(argv: Sequence[str], file: object) -> list[str]:
    """The words with parts of --speculative-config, and flags of its keys, in it."""
    plan = drafters.speculation(argv, file)
    keys = {flag.key.partition(".") for flag in vllm_flags.parse_flags(argv)[1]}
    if not any(key in vllm_flags.SHORTS or (key == drafters.FLAG and part) for key, _, part in keys):
        return list(argv)
    return set_flag(drop_flags(argv, *vllm_flags.SHORTS), drafters.FLAG, plan)
