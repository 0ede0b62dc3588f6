"""All that is wrong with a recipe, ours or the community's, on a stack of this project."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sparkpin.build.pair import Pairing
from sparkpin.checkpoint.shapes import config_ahead
from sparkpin.checkpoint.steps import checkpoint_steps, rules_of
from sparkpin.core.errors import WHOLE, InputError, ManifestError, SparkpinError
from sparkpin.core.names import did_you_mean
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count
from sparkpin.fetch.model_files import config_here
from sparkpin.pins import manifests, schema, vllm_command
from sparkpin.pins.mods import read_templates, template_names
from sparkpin.pins.nodes import PER_NODE, PIPELINE, nodes_of, spread, word_faults
from sparkpin.pins.values import BETTER, value_faults
from sparkpin.pins.vllm_flags import CACHE_TYPE, drop_flags, flag_value
from sparkpin.recipes import flags, keys, known_issues
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.finding import RecipeFinding, ordered, warning
from sparkpin.recipes.finding import error as mistake
from sparkpin.recipes.flags import PlannedServer
from sparkpin.recipes.mapping import stage_of, useless
from sparkpin.recipes.render import as_run_here, machines_of, served_model
from sparkpin.recipes.sources import vllm_serve
from sparkpin.recipes.vllm_parser import nearest, parser_of
from sparkpin.serve.memory.estimates import SPARK_TOTAL
from sparkpin.serve.memory.node_shares import HYBRID_PIPELINE, share_faults

T = TypeVar("T")
PARSERS = ("--tool-call-parser", "--reasoning-parser")
BITS = {r"fp8|int8|w8a|8bit": 8.0, r"nvfp4|fp4|int4|awq|gptq|4bit|w4a|autoround|prismaquant": 4.0,
        r"exl\d|gguf|[23]bit|bpw|ternary|reap": 0.0}  # fmt: skip
"""Of a weight, by what a model's name says; 0: too different to tell."""
LACKS = "a lock: "  # as `manifests` begins what it wants of a pin that nobody has locked


def foreign_findings(project: Path, recipe: foreign.CommunityRecipe, stack: schema.Stack) -> list[RecipeFinding]:
    """Of the community's recipe, as its own runner would start it with the stack's vLLM.

    One that was ours has what stack and stages set, too.
    """
    found = [*keys.of_recipe(recipe)]
    try:
        nodes = machines_of(recipe)
        rendered = as_run_here(recipe)
    except (InputError, ManifestError) as error:
        if not any(finding.severity == "error" for finding in found):  # else it is one of those
            found.append(of_error(error))
        return ordered(found)
    rendered = replace(rendered, argv=vllm_serve(rendered.argv))
    found += keys.of_rendered(recipe, rendered)
    try:
        served_model(recipe, rendered.argv)
    except ManifestError as error:
        found.append(of_error(error))
        if rendered.argv[:2] != ("vllm", "serve"):
            return ordered(found)
    lock = former_lock(project, stack)
    stage = stage_of(recipe)
    chain = loaded(found, str(recipe.path), "stage", lambda: manifests.load_chain(project, stage))
    argv, env = list(rendered.argv), rendered.env
    kept = {name: value for name, value in env.items() if not useless(name)}  # what `import` keeps
    found += [of_error(fault) for fault in value_faults(argv, kept, recipe.path)]
    if flag_value(argv, CACHE_TYPE) in BETTER:  # that is said already
        argv = drop_flags(argv, CACHE_TYPE)
    if recipe.origin:
        argv, env = vllm_command.overlaid(argv, env, stack, chain or ())
    if nodes > 1:
        argv, env = spread(drop_flags(argv, *PER_NODE), env, nodes, gpu=stack.gpu is not None)
    found += of_nodes(recipe.model, argv, stack, config_ahead(project, recipe.model), (), str(recipe.path))
    return ordered([*found, *of_server(project, recipe.model, argv, env, stack, recipe.applied, lock, chain)])


def own_findings(project: Path, name: str) -> list[RecipeFinding]:
    """Of a recipe of recipes/, with what its stack and stages add: the first fault of its files, else all that is known
    of its words."""
    own = str(project / f"recipes/{name}.yaml")
    found: list[RecipeFinding] = []
    try:
        recipe = manifests.load_recipe(project, name)
        found += keys.of_template(recipe.command, recipe.defaults, version="1")
        found += [
            RecipeFinding("warning", f"env.{key}", why, "remove it") for key in recipe.env if (why := useless(key))
        ]
        stack, chain = manifests.load_stack(project, recipe.stack), manifests.load_chain(project, recipe.stage)
        pin = manifests.model_of(project, recipe)
        for mod in recipe.mods:
            loaded(found, own, "mods", partial(read_templates, project, [mod], own, stack.vllm))
        argv, env = vllm_command.serve_argv(recipe, stack, chain)
    except SparkpinError as error:
        if not any(finding.severity == "error" for finding in found):  # else it is one of those
            found.append(of_error(error, own=own))
        return ordered(found)
    if not pin.is_made:
        loaded(found, own, "model", partial(manifests.load_model_lock, project, pin))
    rules = rules_of(pin, checkpoint_steps(chain, pin))
    found += of_nodes(recipe.model, argv, stack, config_of(project, pin), rules, own)
    lock = former_lock(project, stack)
    return ordered([*found, *of_server(project, recipe.model, argv, env, stack, recipe.mods, lock, chain)])


def of_nodes(
    model: str,
    argv: Sequence[str],
    stack: schema.Stack,
    config: Mapping[str, Any] | None,
    rules: Sequence[schema.FormatRule],
    file: str,
) -> list[RecipeFinding]:
    """Of a server for several machines: what `pair` would refuse, as far as the model is known. config: None for one
    that is not."""
    count = nodes_of(argv)
    faults = list(word_faults(argv, count, file))
    found = [of_error(fault, own=file) for fault in faults]
    if faults or count == 1:  # the numbers may be none
        return found
    if config is None and known_issues.HYBRID.search(model) and flag_value(argv, PIPELINE) not in (None, "1"):
        return [mistake(f"{PIPELINE}: {HYBRID_PIPELINE}", f"{PIPELINE} 1")]
    try:
        return [of_error(fault, own=file) for fault in share_faults(config, argv, rules, file)] if config else found
    except ManifestError:  # a model that no plan here knows
        return found


def config_of(project: Path, pin: schema.ModelPin) -> dict[str, Any] | None:
    """What is known of a model's config.json, whether or not it is locked."""
    with contextlib.suppress(ManifestError):
        return config_here(Paths.from_env(), pin, manifests.load_model_lock(project, pin))
    return config_here(Paths.from_env(), pin, None)


def loaded(found: list[RecipeFinding], own: str, key: str, load: Callable[[], T]) -> T | None:
    """What is loaded; None where that fails, which is added to what is found of `key`."""
    try:
        return load()
    except SparkpinError as error:
        found.append(of_error(error, key, own=own))
        return None


def mistakes(project: Path, pairing: Pairing) -> list[RecipeFinding]:
    """What keeps a pairing's server from starting, or from doing what is meant: the errors alone."""
    recipe, lock, chain = pairing.recipe, pairing.stack_lock, pairing.chain
    found = of_server(project, recipe.model, pairing.argv, pairing.env, pairing.stack, recipe.mods, lock, chain)
    return [finding for finding in ordered(found) if finding.severity == "error"]


def of_error(error: SparkpinError, key: str = WHOLE, *, own: str = "") -> RecipeFinding:
    """key: that led to it, for what is wrong in another file than `own` (empty: in none)."""
    if not isinstance(error, ManifestError):
        return RecipeFinding("error", key, error.message, error.next_step)
    if error.next_step.startswith(("invoke lock", "curl ")):  # that is no mistake
        hint = f"next: {error.next_step.partition(': ')[0]}"
        return RecipeFinding("note", key, error.expected.removeprefix(LACKS), hint)
    elsewhere = own != "" and not own.endswith(error.file)
    text = error.message if elsewhere else error.fault
    hint = "" if error.next_step.startswith((f"correct {error.key} in ", f"correct {own},")) else error.next_step
    meant = nearest(error.key.rpartition(".")[2], error.known)  # of a key that nobody knows
    return RecipeFinding("error", key if elsewhere else error.key, text, meant or hint)


def of_server(
    project: Path,
    model: str,
    argv: Sequence[str],
    env: dict[str, str],
    stack: schema.Stack,
    mods: Sequence[str],
    lock: schema.StackLock | None,
    chain: tuple[schema.Stage, ...] | None,
) -> list[RecipeFinding]:
    """Of a server that would be started so. lock, chain: None where they are not known."""
    served = PlannedServer(
        model=model,
        argv=tuple(argv),
        env=env,
        parser=parser_of(stack.vllm),
        gpu=stack.gpu is not None,
        packages=frozenset(wheel.name.lower().replace("_", "-") for wheel in lock.wheels) if lock else None,
        templates=template_names(project, mods),
        chain=chain,
    )
    issues = manifests.load_known_issues(project)
    found = [*flags.findings(served), *known_issues.findings(served, issues), *of_family(project, served)]
    found += of_weights(served)
    known, wanted = served.parser.version, served.parser.wanted
    if known != wanted:
        text = f"nothing is recorded of vLLM {wanted}: compared with {known}"
        hint = "python benchmarks/vllm_parser.py records a release"
        found.append(RecipeFinding("note", "stack", text, hint))
    return found


def of_family(project: Path, served: PlannedServer) -> Iterator[RecipeFinding]:
    """Of a parser that is another one than the model's family has: calls and thoughts would come as text."""
    family = vllm_command.family_of(manifests.load_families(project), served.model)
    for choice in family.serve if family else ():
        given, known = served.value(choice.flag), str(choice.value)
        if choice.flag in PARSERS and given and given.partition("_")[0] != known.partition("_")[0]:
            text = f"{choice.flag} {given}: models of the family {family.name if family else ''} write for {known}"
            yield warning(text, f"{choice.flag} {known}, or leave the flag out")


def of_weights(served: PlannedServer) -> Iterator[RecipeFinding]:
    """Of weights that fill more than the memory of the machines, by the numbers in a model's name."""
    size, machines = weights_of(served.model, served.value("--quantization") or ""), nodes_of(served.argv)
    if served.gpu and size > SPARK_TOTAL * machines:
        text = f"{served.model}: its weights are about {size / 1e9:.0f} GB, and {count(machines, 'machine')} of 128 GB"
        yield mistake(f"{text} cannot hold them", "name more machines, or take a smaller model")


def weights_of(model: str, quantization: str) -> float:
    """Bytes; 0 where the name does not tell."""
    name = model.rpartition("/")[2]
    billions = re.search(r"(?<![\dA-Za-z.])(\d+(?:\.\d+)?)B(?![a-z])", name, re.IGNORECASE)
    kinds = [bits for pattern, bits in BITS.items() if re.search(pattern, f"{name} {quantization}", re.IGNORECASE)]
    return float(billions[1]) * 1e9 * min(kinds, default=16) / 8 if billions else 0


def former_lock(project: Path, stack: schema.Stack) -> schema.StackLock | None:
    """None where the stack was never locked."""
    is_there = (project / f"pins/stacks/{stack.name}.lock").is_file()
    return manifests.former_stack_lock(project, stack.name) if is_there else None


def file_or_name(project: Path, what: str) -> tuple[Path, bool]:
    """The file that is meant, and whether it is one of recipes/, which a name means."""
    own = project / f"recipes/{Path(what).stem if what.endswith('.yaml') else what}.yaml"
    path = Path(what)
    if own.is_file() and (path.name == what or path.resolve() == own.resolve()):
        return own, True
    if path.is_file():
        return path, path.resolve().parent == (project / "recipes").resolve()
    names = [file.stem for file in (project / "recipes").glob("*.yaml")]
    guess = did_you_mean(path.name.removesuffix(".yaml"), names, most=3)
    step = f"{guess}`invoke recipe list` has the names; else give a file, a folder or a glob"
    raise InputError(f"no recipe {what!r}", next_step=step)
