"""The tasks `doctor` and `plan`: what a build and a recipe's server need of a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

from sparkpin.build.checkpoint import ModelNeeds, needs_of
from sparkpin.checkpoint.steps import checkpoint_steps
from sparkpin.cli.tasks import Json, Recipe, Stack, Stage, task
from sparkpin.core import terminal
from sparkpin.core.errors import HostError, InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch.model_files import TEXTS, repository_folder
from sparkpin.fetch.store import Store
from sparkpin.host import machine as host
from sparkpin.host import preflight
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.host.gpu import loaded_driver
from sparkpin.host.machine import Gpu, Host, Requirement, State, checked
from sparkpin.pins import manifests, schema
from sparkpin.recipes import rules
from sparkpin.recipes.check import own_findings
from sparkpin.releases.runs_here import obstacle_of
from sparkpin.serve.memory import recipe as planning


@task("machine")
def doctor(
    paths: Paths,
    *,
    fix: Annotated[bool, "install what is missing and start an engine"] = False,
    stack: Stack = None,
    recipe: Annotated[str | None, "also check what this recipe needs: stack, model, disk, memory, GPU"] = None,
    stage: Stage = None,
    json: Json = False,
) -> None:
    """Check this machine, and print how to fix what is missing."""
    machine, gpus, engine = host.read_host(), host.read_gpus(), None
    subject = manifests.load_recipe(paths.project, recipe or host.default_recipe(paths.project, stack))
    if stack not in (None, subject.stack):
        raise InputError(f"--recipe {recipe} names its stack itself", next_step="leave --stack out")
    chosen = manifests.load_stack(paths.project, subject.stack)
    if stage:
        subject = subject.model_copy(update={"stage": manifests.load_stage(paths.project, stage).name})
    if fix:
        preflight.install(preflight.missing(paths, machine, chosen), machine)
        terminal.say(f"engine: {engine_of(paths).version}")
    found = preflight.requirements(paths, machine, chosen, gpus=gpus)
    with contextlib.suppress(SparkpinError):  # it has a row of its own
        engine = Engine.connect()
    try:
        elsewhere = engine.elsewhere if engine else ""
        found += rows_of_recipe(paths, machine, gpus, elsewhere, subject, is_asked=recipe is not None)
    except SparkpinError as error:
        found.append(Requirement("recipe", "advice", f"{subject.name}: {error.message}", error.next_step))
    whom = read_fingerprint(engine.version if engine else "", gpus)
    if json:
        value = {"host": whom.model_dump(mode="json"), "is_spark": machine.is_spark, "stack": chosen.name}
        terminal.show_json(value | {"findings": list(map(asdict, found))})
    else:
        terminal.show(f"{whom.line}; stack {chosen.name}: {chosen.description}")
        terminal.table(("", "what", "found", "fix"), [(one.state, one.name, one.detail, one.fix) for one in found])
    if lacking := [one.name for one in found if one.state == "MISSING"]:
        step = "the same command with --fix (as root), or the commands in the table"
        raise HostError(f"this machine lacks: {', '.join(lacking)}", next_step=step)


def rows_of_recipe(
    paths: Paths, machine: Host, gpus: Sequence[Gpu], elsewhere: str, recipe: schema.Recipe, *, is_asked: bool
) -> Iterator[Requirement]:
    """What has broken for others with such a machine and, where the recipe is asked for, whether it can be served here
    and the disk that it takes. elsewhere: the engine's machine, where that is another."""
    stack = manifests.load_stack(paths.project, recipe.stack)
    why = obstacle_of(stack, host.this_platform(), gpus, elsewhere)
    # A Spark whose driver or GPU is to be fixed first is to serve it, too.
    is_served = not why or (machine.is_spark and not elsewhere)
    if is_served and stack.gpu:
        yield from known(machine, loaded_driver(gpus), manifests.load_known_issues(paths.project))
    if not is_asked:
        return
    detail = f"images of recipe {recipe.name} can be built here, and not served: {why}" if why else "can run here"
    yield checked("server", not why, detail, lack="advice")
    lack: State = "MISSING" if is_served else "advice"
    for disk in needs_of_model(paths, recipe, stack).disk(paths, preflight.needs_for(stack)):
        detail = f"model, checkpoints, images: {disk.text}"
        yield checked("disk in all", not disk.short, detail, preflight.MORE_DISK, lack)


def needs_of_model(paths: Paths, recipe: schema.Recipe, stack: schema.Stack) -> ModelNeeds:
    """Fetches nothing. Where its headers are not here: a download and a checkpoint, each as large as what is known of
    the weights."""
    pin, chain = manifests.model_of(paths.project, recipe), manifests.load_chain(paths.project, recipe.stage)
    if manifests.unlocked(paths.project, pin):
        plan = planning.plan_recipe(paths, recipe, stack, chain, planning.machine_for(stack, "", ""))
        count = sum(kind.stored for kind in plan.weights)
    else:
        lock = manifests.load_model_lock(paths.project, pin)
        if is_here(paths, lock):
            return needs_of(paths, pin, lock, [checkpoint_steps(chain[:end], pin) for end in range(1, len(chain) + 1)])
        count = sum(file.size for file in lock.repositories[pin.base].files)
    return ModelNeeds((), count, count)


def known(machine: Host, driver: str, issues: tuple[schema.KnownIssue, ...]) -> Iterator[Requirement]:
    """What is known to break on a Spark such as this one."""
    kernel, memory = host.text("proc/sys/kernel/osrelease").strip(), f"{machine.memory_total / 1e9:.0f}"
    seen = {"kernel": kernel, "driver": driver, "memory": memory}
    for issue in issues:
        if issue.when.keys() <= seen.keys() and rules.holds(issue, seen.get):
            yield Requirement(issue.name, "advice", rules.told(issue, seen.get), issue.do)


def is_here(paths: Paths, lock: schema.ModelLock) -> bool:
    """Whether a plan can be made of this model without the network: every header and each small text."""
    store = Store(paths.store)
    for entry in lock.repositories.values():
        folder = repository_folder(paths, entry)
        there = [(folder / file.file).is_file() for file in entry.files if file.file in TEXTS]
        there += [store.has(header) or (folder / header.file).is_file() for header in entry.headers]
        if not all(there):
            return False
    return True


@task("measure")
def plan(
    paths: Paths,
    *,
    recipe: Recipe = None,
    stage: Stage = None,
    stack: Stack = None,
    memory: Annotated[str, "the machine's memory, such as 128GB (default: this one's, or a DGX Spark's)"] = "",
    free: Annotated[str, "how much of it is free, such as 110GB (default: what is free here now)"] = "",
    bandwidth: Annotated[str, "memory bandwidth in GB/s, for the highest speed (default: 273, a DGX Spark's)"] = "",
    nodes: Annotated[int | None, "plan for this many machines, tensor-parallel", "COUNT"] = None,
    json: Json = False,
    exit_code: Annotated[bool, "exit with 1 if the recipe does not fit"] = False,
) -> int:
    """Estimate a recipe's memory, concurrency and highest speed.

    invoke plan --recipe qwen3.5-122b --stage v2-tq
    """
    recipe = recipe or host.default_recipe(paths.project, stack)
    asked = planning.PlanOptions(memory=memory, free=free, bandwidth=bandwidth, nodes=nodes, as_json=json)
    fits = planning.plan(recipe=recipe, stage=stage, stack=stack, asked=asked)
    for finding in own_findings(paths.project, manifests.load_recipe(paths.project, recipe), pinned=False):
        if finding.severity != "note":  # what has broken for others with such memory, for one
            say(str(finding))
    return int(exit_code and not fits)
