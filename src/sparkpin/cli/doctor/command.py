"""The task `doctor`: read, judge, report."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated

from sparkpin.build.model_needs import needs_of
from sparkpin.build.pair import pair
from sparkpin.checkpoint.steps import checkpoint_steps
from sparkpin.cli.doctor import rules
from sparkpin.cli.doctor.facts import read_facts
from sparkpin.cli.doctor.rules import MachineFinding, NeededMemory
from sparkpin.cli.options import Json, Stack, Stage
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import HostError, InputError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.fetch.model_files import TEXTS, repository_folder
from sparkpin.fetch.store import Store
from sparkpin.host import daemon, preflight
from sparkpin.host import machine as host
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.pins import manifests, schema
from sparkpin.releases.record import Releases
from sparkpin.releases.runs_here import obstacle_of
from sparkpin.serve.address import Address
from sparkpin.serve.memory import recipe as planning


@task("machine")
def doctor(
    *,
    fix: Annotated[bool, "install what is missing and start an engine"] = False,
    stack: Stack = None,
    recipe: Annotated[str | None, "also check what this recipe needs: stack, model, disk, memory, GPU"] = None,
    stage: Stage = None,
    json: Json = False,
) -> None:
    """Check this machine, and print how to fix what is missing."""
    check_machine(Paths.from_env(), fix=fix, stack=stack, as_json=json, recipe_name=recipe, stage=stage)


def check_machine(
    paths: Paths,
    *,
    fix: bool,
    stack: str | None,
    as_json: bool,
    recipe_name: str | None = None,
    stage: str | None = None,
) -> None:
    """HostError, after all is told, where something is MISSING. recipe_name: what this one needs, and its stack; stage:
    up to this one of its chain."""
    machine = host.read_host()
    if recipe_name and stack:
        raise InputError(f"--recipe {recipe_name} names its stack itself", next_step="leave --stack out")
    if stage and not recipe_name:
        raise InputError("--stage is of a recipe", next_step=f"invoke doctor --recipe RECIPE --stage {stage}")
    if recipe_name:
        stack = manifests.load_recipe(paths.project, recipe_name).stack
    chosen = manifests.load_stack(paths.project, stack or host.default_stack(paths.project, machine))
    if not as_json:
        terminal.show(f"{machine.summary}; stack {chosen.name}: {chosen.description}")
    if fix:
        preflight.install(preflight.missing(paths, machine, chosen), machine, terminal.say)
        terminal.say(f"engine: {daemon.start_engine(paths, terminal.say)}")
    recipe = manifests.load_recipe(paths.project, recipe_name or chosen.default_recipe)
    if stage:
        recipe = recipe.model_copy(update={"stage": manifests.load_stage(paths.project, stage).name})
    facts = read_facts(machine, port_of(recipe))
    needed = preflight.requirements(paths, machine, chosen)
    found = [
        MachineFinding(one.name, "ok" if one.ok else "MISSING", one.detail, one.fix)
        for one in needed
        if one.name != preflight.GPU_RUNTIME  # the rules know more of it
    ]
    found += rules.lock_of(lock_fault(paths, chosen))
    cuda = chosen.gpu.cuda if chosen.gpu else None
    found += rules.findings(facts, memory_of(paths, recipe, chosen), cuda)
    found += rules.known(facts, manifests.load_known_issues(paths.project) if cuda else ())
    if recipe_name:
        why = obstacle_of(chosen, host.this_platform(), facts.gpus, facts.docker.elsewhere)
        images = preflight.needs_for(machine, chosen)
        # A Spark whose driver or GPU is to be mended first is to serve it, too.
        served = not why or (machine.is_spark and not facts.docker.elsewhere)
        found += [rules.server(recipe_name, why), *model_of(paths, recipe, images, served=served)]
    if as_json:
        whom = read_fingerprint(facts.docker.version).model_dump(mode="json")
        value = {"host": whom, "is_spark": machine.is_spark, "stack": chosen.name, "findings": list(map(asdict, found))}
        terminal.show_json(value)
    else:
        rows = [(f.state, f.name, f.detail, f.fix) for f in found if f.state != "n/a"]
        terminal.table(("", "what", "found", "fix"), rows)
        if skipped := [finding.name for finding in found if finding.state == "n/a"]:
            terminal.show(f"Not applicable here: {', '.join(skipped)} (--json has the reasons).")
    if lacking := [finding.name for finding in found if finding.state == "MISSING"]:
        raise HostError(
            f"this machine lacks: {', '.join(lacking)}",
            next_step="invoke doctor --fix (as root), or the commands in the table",
        )


def port_of(recipe: schema.Recipe) -> int:
    """The one that `serve` will publish, as far as the recipe's defaults tell."""
    port = str(recipe.defaults.get("port", Address.port))
    return int(port) if port.isdecimal() else Address.port


def memory_of(paths: Paths, recipe: schema.Recipe, stack: schema.Stack) -> NeededMemory:
    """From the headers that are here: doctor fetches nothing. This machine's own memory, whatever the stack is for."""
    name = f"recipe {recipe.name}"
    default = stack.name == host.default_stack(paths.project) and recipe.name == stack.default_recipe
    command = "invoke plan" if default else f"invoke plan --recipe {recipe.name}"
    try:
        pin = manifests.model_of(paths.project, recipe)
        locked = not manifests.unlocked(paths.project, pin)
        if locked and not is_here(paths, manifests.load_model_lock(paths.project, pin)):
            return NeededMemory(name, None, "its headers are not fetched yet", f"{command} (it fetches them)", command)
        chain = manifests.load_chain(paths.project, recipe.stage)
        machine = planning.machine_for(stack, "", "")
        plan = planning.plan_recipe(paths, recipe, stack, chain, machine)
    except SparkpinError as error:
        return NeededMemory(name, None, f"no plan: {error.message}", error.next_step, command)
    whose = f"{name}, stage {recipe.stage},{'' if locked else ' not locked,'}"
    return NeededMemory(whose, plan.needed, command=command)


def model_of(paths: Paths, recipe: schema.Recipe, images: preflight.Needs, *, served: bool) -> list[MachineFinding]:
    """What a recipe takes of a Hub and of the disk; nothing where all its models are generated. images: what building
    them takes; served: by this machine."""
    try:
        pin = manifests.model_of(paths.project, recipe)
        if all(pin.owner(name).is_made for name in pin.repositories):
            return []
        locked = not manifests.unlocked(paths.project, pin)
        lock = manifests.load_model_lock(paths.project, pin) if locked else None
        chain = manifests.load_chain(paths.project, recipe.stage)
        steps = [checkpoint_steps(chain[:end], pin) for end in range(1, len(chain) + 1)]
        needs = needs_of(paths, pin, lock, steps, terminal.say) if lock and is_here(paths, lock) else None
    except SparkpinError as error:
        return [MachineFinding("model", "advice", error.message, error.next_step)]
    chain_here = False
    with contextlib.suppress(SparkpinError):  # a stack without a lock is told above
        made = pair(paths.project, recipe.name, stage=recipe.stage)
        chain_here = all(Releases(paths).find(one.tag) for one in made)
    rows = needs.disk(paths, None if chain_here else images) if needs else []
    return rules.model(pin.name, recipe.name, locked=locked, needs=needs, disk=rows, served=served)


def lock_fault(paths: Paths, stack: schema.Stack) -> ManifestError | None:
    try:
        manifests.load_stack_lock(paths.project, stack)
    except ManifestError as error:
        return error
    return None


def is_here(paths: Paths, lock: schema.ModelLock) -> bool:
    """Whether a plan can be made of this model without the network: every header and each small text."""
    store = Store(paths.store)
    for entry in lock.repositories.values():
        folder = repository_folder(paths, entry)
        texts = [folder / file.file for file in entry.files if file.file in TEXTS]
        if not all(path.is_file() for path in texts):
            return False
        if not all(store.has(header) or (folder / header.file).is_file() for header in entry.headers):
            return False
    return True
