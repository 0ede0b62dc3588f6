"""The task `doctor`: read, judge, report."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated

from sparkpin.build.checkpoint import ModelNeeds, needs_of
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
        preflight.install(preflight.missing(paths, machine, chosen), machine)
        terminal.say(f"engine: {daemon.start_engine(paths)}")
    recipe = manifests.load_recipe(paths.project, recipe_name or chosen.default_recipe)
    if stage:
        recipe = recipe.model_copy(update={"stage": manifests.load_stage(paths.project, stage).name})
    facts = read_facts(machine, port_of(recipe))
    found = [
        MachineFinding(one.name, "ok" if one.ok else "MISSING", one.detail, one.fix)
        for one in preflight.requirements(paths, machine, chosen)
        if one.name != preflight.GPU_RUNTIME  # the rules know more of it
    ]
    found += lock_of(paths, chosen)
    cuda = chosen.gpu.cuda if chosen.gpu else None
    memory = memory_of(paths, recipe, chosen)
    found += rules.findings(facts, memory, cuda)
    found += rules.known(facts, manifests.load_known_issues(paths.project) if cuda else ())
    if recipe_name:
        why = obstacle_of(chosen, host.this_platform(), facts.gpus, facts.elsewhere)
        detail = f"images of recipe {recipe_name} can be built here, and not served: {why}" if why else "can run here"
        found.append(MachineFinding("server", "advice" if why else "ok", detail))
        # A Spark whose driver or GPU is to be fixed first is to serve it, too.
        is_served = not why or (machine.is_spark and not facts.elsewhere)
        found += model_of(paths, recipe, memory, preflight.needs_for(machine, chosen), served=is_served)
    if as_json:
        whom = read_fingerprint(facts.docker).model_dump(mode="json")
        value = {"host": whom, "is_spark": machine.is_spark, "stack": chosen.name, "findings": list(map(asdict, found))}
        terminal.show_json(value)
    else:
        terminal.table(("", "what", "found", "fix"), [(f.state, f.name, f.detail, f.fix) for f in found])
    if lacking := [finding.name for finding in found if finding.state == "MISSING"]:
        given = {"--recipe": recipe_name, "--stage": stage, "--stack": None if recipe_name else chosen.name}
        typed = " ".join(f"{option} {value}" for option, value in given.items() if value)
        raise HostError(
            f"this machine lacks: {', '.join(lacking)}",
            next_step=f"invoke doctor {typed} --fix (as root), or the commands in the table",
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
    return NeededMemory(whose, plan.needed, command=command, stored=sum(kind.stored for kind in plan.weights))


def model_of(
    paths: Paths, recipe: schema.Recipe, memory: NeededMemory, images: preflight.Needs, *, served: bool
) -> list[MachineFinding]:
    """What a recipe takes of a Hub and of the disk; nothing where all its models are generated. images: what building
    them takes; served: by this machine."""
    try:
        pin = manifests.model_of(paths.project, recipe)
        if all(pin.owner(name).is_made for name in pin.repositories):
            return []
        chain = manifests.load_chain(paths.project, recipe.stage)
        steps = [checkpoint_steps(chain[:end], pin) for end in range(1, len(chain) + 1)]
        locked = not manifests.unlocked(paths.project, pin)
        lock = manifests.load_model_lock(paths.project, pin) if locked else None
        if lock and is_here(paths, lock):
            name, needs = pin.name, needs_of(paths, pin, lock, steps)
        else:  # doctor fetches no headers: a download and a checkpoint, each as large as what is known of the weights
            size = sum(file.size for file in lock.repositories[pin.base].files) if lock else memory.stored
            if not size:
                step = f"invoke up --recipe {recipe.name} locks it"
                return [MachineFinding("model", "advice", f"{pin.name}: not locked, so its size is not known", step)]
            needs = ModelNeeds((pin.repositories[pin.base].repo,), size, size)
            name = f"{pin.name} ({'headers not here' if lock else 'not locked'}, so these are estimates)"
    except SparkpinError as error:
        return [MachineFinding("model", "advice", error.message, error.next_step)]
    chain_here = False
    with contextlib.suppress(SparkpinError):  # a stack without a lock has a row of its own
        pairings = pair(paths.project, recipe.name, stage=recipe.stage)
        chain_here = all(Releases(paths).find(one.tag) for one in pairings)
    disk = needs.disk(paths, None if chain_here else images)
    return rules.model(name, recipe.name, needs, disk, served=served)


def lock_of(paths: Paths, stack: schema.Stack) -> list[MachineFinding]:
    """What keeps a stack from being built whatever the machine has; nothing where its lock is good."""
    try:
        manifests.load_stack_lock(paths.project, stack)
    except ManifestError as error:
        return [MachineFinding("lock", "advice", error.fault, error.next_step)]
    return []


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
