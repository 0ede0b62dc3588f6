"""All that is wrong with a recipe, ours or the community's, on a stack of this project."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkpin.core.errors import WHOLE, InputError, SparkpinError
from sparkpin.core.names import did_you_mean, names_in
from sparkpin.pins import drafters, manifests, mods, nodes, schema, values, vllm_command
from sparkpin.pins.vllm_flags import CACHE_TYPE, drop_flags, flag_value
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes import render
from sparkpin.recipes.adopt import Wanted, adopt, place_of, plain_name, useless
from sparkpin.recipes.rules import PlannedServer, RecipeFinding, error, findings, of_error, ordered
from sparkpin.recipes.shell import FACTS
from sparkpin.recipes.vllm_parser import nearest


@dataclass
class CheckedRecipe:
    """machines, model: "?" where the file does not tell; read_as: of a file that is none of recipes/."""

    name: str
    found: list[RecipeFinding] = field(default_factory=list)
    stack: str = "?"
    machines: int | str = "?"
    model: str = "?"
    read_as: str = ""

    @property
    def errors(self) -> list[RecipeFinding]:
        return [finding for finding in self.found if finding.severity == "error"]

    @property
    def verdict(self) -> str:
        return "refused" if self.errors else "passes"


@contextlib.contextmanager
def faults_of(found: list[RecipeFinding], key: str = WHOLE, file: str = "") -> Iterator[None]:
    """What is raised becomes a finding, unless an error is known already: it is that one in other words."""
    try:
        yield
    except SparkpinError as fault:
        finding = of_error(fault, key, file=file)
        if finding.severity != "error" or not any(one.severity == "error" for one in found):
            found.append(finding)


def check(project: Path, what: str, stack: str | None = None) -> CheckedRecipe:
    """what: a file, or a name of recipes/. InputError for what is neither, and for a stack that is not
    there; all other faults are findings."""
    path, is_ours = file_or_name(project, what, stack)
    if stack is not None:
        manifests.load_stack(project, stack)
    checked = CheckedRecipe(f"recipes/{path.name}" if is_ours else what)
    with faults_of(checked.found, file=str(path) if is_ours else ""):
        if is_ours:
            read = manifests.load_recipe(project, path.stem)
            checked.stack, checked.machines, checked.model = read.stack, read.nodes, read.model
            checked.found += own_findings(project, read)
        else:
            check_foreign(checked, project, foreign.load(path), stack)
    checked.found = ordered(checked.found)
    return checked


def check_foreign(
    checked: CheckedRecipe, project: Path, recipe: foreign.CommunityRecipe, stack: str | None = None
) -> None:
    """Also what `add` would print of it, unless an error says the same."""
    chosen = manifests.load_stack(project, place_of(recipe, stack)[0])
    checked.found += foreign_findings(project, recipe, chosen)
    checked.read_as = f"version {recipe.shown_version}, compared with stack {chosen.name} (vLLM {chosen.vllm})"
    checked.stack, checked.model = chosen.name, recipe.model
    checked.machines = render.machines_of(recipe)
    adopted = adopt(project, recipe, plain_name(recipe.path.stem), Wanted(stack=stack))
    known = {one.text.partition(": ")[0] for one in checked.errors} | {
        f"the unknown key {name}" for name in recipe.others
    }
    unmapped = [f"not mapped: {line}" for line in adopted.unmapped if line.partition(": ")[0] not in known]
    checked.found += [RecipeFinding("warning", "add", line) for line in unmapped]
    checked.found += [RecipeFinding("note", "add", line) for line in adopted.notes]


def foreign_findings(project: Path, recipe: foreign.CommunityRecipe, stack: schema.Stack) -> list[RecipeFinding]:
    """Of the community's recipe, as its own runner would start it with the stack's vLLM.

    One that was ours has what stack and stages set, too.
    """
    found = [*of_file(recipe)]
    with faults_of(found):
        machines, server = render.machines_of(recipe), render.as_run_here(recipe)
        argv, env = list(server.argv), server.env
        render.served_model(recipe, argv)
        chain = manifests.load_chain(project, place_of(recipe)[1])
        if recipe.model and argv[2] != recipe.model and not argv[2].startswith("/"):
            text = f"the command serves {argv[2]}, and `model` is {recipe.model}: the wrong one is fetched"
            found.append(error(text, "name the same model"))
        carried = {name: value for name, value in env.items() if not useless(name)}  # by `add`
        found += [of_error(fault) for fault in values.value_faults(argv, carried, recipe.path)]
        if flag_value(argv, CACHE_TYPE) in values.BETTER:  # which is found already
            argv = drop_flags(argv, CACHE_TYPE)
        if recipe.origin:
            argv, env = vllm_command.overlaid(argv, env, stack, chain)
        if machines > 1:
            argv, env = nodes.spread(drop_flags(argv, *nodes.PER_NODE), env, machines, gpu=stack.gpu is not None)
        found += [of_error(fault) for fault in nodes.word_faults(argv, nodes.nodes_of(argv), recipe.path)]
        found += findings(PlannedServer(project, recipe.model, argv, env, stack, recipe.applied, chain))
    return ordered(found)


def of_file(recipe: foreign.CommunityRecipe) -> Iterator[RecipeFinding]:
    """Of keys: what its runner does not know, what nobody uses."""
    for key, line in recipe.repeated.items():
        yield RecipeFinding("warning", key, f"stands twice (line {line}): the last one counts", "remove one")
    for name in recipe.others:
        known = foreign.V1_KEYS if recipe.version == "1" else foreign.V2_KEYS
        yield RecipeFinding("warning", name, "its runner does not know this key", nearest(name, known))
    if recipe.version == "1":
        yield from unused(recipe.defaults, render.names_v1(recipe.command))
    elif recipe.version == "2":
        asked = render.names_v2(recipe.command, recipe.defaults) | {*FACTS["read_anyway"]}
        yield from unused(recipe.defaults, asked if recipe.command else asked | {*FACTS["flags"]})
    for name, value in recipe.env.items():
        if recipe.version == "1" and render.EXPANDED.search(value):
            text, hint = "version 1 has bash expand it; in sparkpin it stays as written", "write the value itself"
            yield RecipeFinding("warning", f"env.{name}", text, hint)


def unused(defaults: Iterable[str], asked: set[str]) -> Iterator[RecipeFinding]:
    for name in sorted({*defaults} - asked):
        hint = nearest(name, asked - {*defaults}) or "remove it"
        yield RecipeFinding("warning", f"defaults.{name}", "nothing uses it", hint)


def own_findings(project: Path, recipe: schema.Recipe) -> list[RecipeFinding]:
    """Of a recipe of recipes/, with what its stack and stages add; also the errors of its first stage, which gets
    what later ones replace."""
    file = str(project / recipe.file)
    found = [RecipeFinding("warning", f"env.{key}", why, "remove it") for key in recipe.env if (why := useless(key))]
    found += unused(recipe.defaults, render.names_v1(recipe.command))
    with faults_of(found, file=file):
        stack, chain = manifests.load_stack(project, recipe.stack), manifests.load_chain(project, recipe.stage)
        with faults_of(found, "mods", file):
            mods.read_templates(project, recipe.mods, file, stack.vllm)
        with faults_of(found, "model", file):
            pin = manifests.model_of(project, recipe)
            if pin.drafter and pin.drafter.drafts:
                plan = drafters.speculation(vllm_command.own_argv(recipe))
                found += [
                    of_error(fault, file=file)
                    for fault in drafters.method_faults(plan, pin.drafter.drafts, recipe.file)
                ]
            for folder in [one.folder for one in pin.repositories.values() if one.folder]:
                if not (project / folder).is_dir():
                    text, hint = f"{folder}: there is no such folder yet", f"pins/models/{pin.name}.yaml says how"
                    found.append(RecipeFinding("warning", "model", text, hint))
            if not pin.is_made:
                manifests.load_model_lock(project, pin)
        found += findings(planned(project, recipe, stack, chain))
        lower = mistakes(project, recipe, stack, chain[:1])
        found += [replace(one, text=f"in stage {chain[0].name}: {one.text}") for one in lower if one not in found]
    return ordered(found)


def planned(project: Path, recipe: schema.Recipe, stack: schema.Stack, chain: Sequence[schema.Stage]) -> PlannedServer:
    argv, env = vllm_command.serve_argv(recipe, stack, chain)
    return PlannedServer(project, recipe.model, argv, env, stack, recipe.mods, chain, recipe.family)


def mistakes(
    project: Path, recipe: schema.Recipe, stack: schema.Stack, chain: Sequence[schema.Stage]
) -> list[RecipeFinding]:
    """What keeps a server from starting, or from doing what is meant: the errors alone."""
    return [one for one in ordered(findings(planned(project, recipe, stack, chain))) if one.severity == "error"]


def file_or_name(project: Path, what: str, stack: str | None = None) -> tuple[Path, bool]:
    """The file that is meant, and whether it is one of recipes/, which a name means. stack: what --stack says."""
    folder, path = project / "recipes", Path(what)
    named = folder / f"{what.removesuffix('.yaml')}.yaml"
    file = named if path.name == what and named.is_file() else path
    if not file.is_file():
        guess = did_you_mean(path.name.removesuffix(".yaml"), names_in(folder), most=3)
        step = f"{guess}`invoke recipe list` has the names; otherwise give a file, or a folder with recipes"
        raise InputError(f"no recipe {what!r}", next_step=step)
    is_ours = file.resolve().parent == folder.resolve()
    if is_ours and stack is not None:
        step = "leave --stack out, or change the key `stack` of the recipe"
        raise InputError(f"--stack {stack} is for a file: {file.stem} of recipes/ names its stack", next_step=step)
    return file, is_ours
