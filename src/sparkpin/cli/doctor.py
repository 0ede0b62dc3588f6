"""The task `doctor`: what a build, and a recipe's server, need of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

from sparkpin.build.checkpoint import ModelNeeds, needs_of
from sparkpin.checkpoint.steps import checkpoint_steps
from sparkpin.cli.options import Json, Stack, Stage
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import HostError, InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib, size
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
    """Whether the recipe can be served here, and with which memory. is_asked: what it takes of a Hub and of the disk,
    too. elsewhere: the engine's machine, where that is another. Fetches nothing: what the headers would tell is left
    out, or estimated, where they are not here."""
    stack = manifests.load_stack(paths.project, recipe.stack)
    why = obstacle_of(stack, host.this_platform(), gpus, elsewhere)
    # A Spark whose driver or GPU is to be fixed first is to serve it, too.
    is_served = not why or (machine.is_spark and not elsewhere)
    if is_served and stack.gpu:
        yield from known(machine, loaded_driver(gpus), manifests.load_known_issues(paths.project))
    if is_asked:
        detail = f"images of recipe {recipe.name} can be built here, and not served: {why}" if why else "can run here"
        yield checked("server", not why, detail, lack="advice")
    pin, chain, stored = manifests.model_of(paths.project, recipe), manifests.load_chain(paths.project, recipe.stage), 0
    lock = None if manifests.unlocked(paths.project, pin) else manifests.load_model_lock(paths.project, pin)
    has_headers = lock is not None and is_here(paths, lock)
    if (is_asked or is_served) and (has_headers or not lock):
        plan = planning.plan_recipe(paths, recipe, stack, chain, planning.machine_for(stack, "", ""))
        stored, free = sum(kind.stored for kind in plan.weights), machine.memory_available
        if is_served:
            detail = f"recipe {recipe.name}, stage {recipe.stage}, needs {gib(plan.needed)}, {gib(free)} are available"
            step = f"invoke plan --recipe {recipe.name} prints what would fit"
            yield checked("memory plan", plan.needed <= free, detail, step, "advice")
    if not is_asked or all(pin.owner(name).is_made for name in pin.repositories):
        return
    if lock and has_headers:
        steps = [checkpoint_steps(chain[:end], pin) for end in range(1, len(chain) + 1)]
        needs, note = needs_of(paths, pin, lock, steps), ""
    else:  # a download and a checkpoint, each as large as what is known of the weights
        count = sum(file.size for file in lock.repositories[pin.base].files) if lock else stored
        needs = ModelNeeds((pin.repositories[pin.base].repo,), count, count)
        note = f" ({'headers not here' if lock else 'not locked'}, so these are estimates)"
    if needs.fetch:
        detail = f"{pin.name}{note}: {size(needs.fetch)} of {' and '.join(needs.repositories)} to be fetched"
        yield Requirement("model", "advice", detail, f"invoke up --recipe {recipe.name} asks, then fetches")
    lack: State = "MISSING" if is_served else "advice"
    for disk in needs.disk(paths, preflight.needs_for(stack)):
        detail = f"model, checkpoints, images: {disk.text}"
        yield checked("disk in all", not disk.short, detail, preflight.MORE_DISK, lack)


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
