"""The tasks `doctor` and `plan`: what a build and a recipe's server need of a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated

from pydantic import ByteSize, TypeAdapter, ValidationError

from sparkpin.cli.tasks import Json, Recipe, Stack, Stage, task
from sparkpin.core.errors import HostError, InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib, say, show, show_json, table
from sparkpin.host import machine, preflight
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.host.gpu import loaded_driver
from sparkpin.host.machine import Host, Requirement, checked
from sparkpin.memory import inputs, text
from sparkpin.memory.plan import SPARK_BANDWIDTH, Machine
from sparkpin.pins import manifests, schema, vllm_command
from sparkpin.pins.values import STAGE, lacks_mod
from sparkpin.recipes import rules
from sparkpin.recipes.check import own_findings
from sparkpin.releases.runs_here import obstacle_of


@task("machine")
def doctor(
    paths: Paths,
    *,
    fix: Annotated[bool, "install what is missing and start an engine"] = False,
    stack: Stack = None,
    recipe: Annotated[str | None, "check what this recipe's stack needs, and whether a server of it can run"] = None,
    json: Json = False,
) -> None:
    """Check this machine, and print how to fix what is missing.

    invoke doctor --recipe qwen3.5-122b
    """
    here, gpus, engine = machine.read_host(), machine.read_gpus(), None
    if recipe and stack:
        raise InputError(f"--recipe {recipe} names its stack itself", next_step="leave --stack out")
    if recipe:
        stack = manifests.load_recipe(paths.project, recipe).stack
    chosen = manifests.load_stack(paths.project, stack or machine.default_stack(paths.project, here))
    if fix:
        preflight.install(preflight.missing(paths, here, chosen), here)
        say(f"engine: {engine_of(paths).version}")
    found = preflight.requirements(paths, here, chosen, gpus=gpus)
    with contextlib.suppress(SparkpinError):  # it has a row of its own
        engine = Engine.connect()
    elsewhere = engine.elsewhere if engine else ""
    why = obstacle_of(chosen, machine.this_platform(), gpus, elsewhere)
    if recipe:
        detail = f"images of recipe {recipe} can be built here, and not served: {why}" if why else "can run here"
        found.append(checked("server", not why, detail, lack="advice"))
    # A Spark whose driver or GPU is to be fixed first is to serve it, too.
    if chosen.gpu and (not why or (here.is_spark and not elsewhere)):
        found += known(here, loaded_driver(gpus), manifests.load_known_issues(paths.project))
    whom = read_fingerprint(engine.version if engine else "", gpus)
    if json:
        value = {"host": whom.model_dump(mode="json"), "is_spark": here.is_spark, "stack": chosen.name}
        show_json(value | {"findings": list(map(asdict, found))})
    else:
        show(f"{whom.line}; stack {chosen.name}: {chosen.description}")
        table(("", "what", "found", "fix"), [(one.state, one.name, one.detail, one.fix) for one in found])
    if lacking := [one.name for one in found if one.state == "MISSING"]:
        step = "the same command with --fix (as root), or the commands in the table"
        raise HostError(f"this machine lacks: {', '.join(lacking)}", next_step=step)


def known(here: Host, driver: str, issues: tuple[schema.KnownIssue, ...]) -> Iterator[Requirement]:
    """What is known to break on a Spark such as this one."""
    kernel, memory = machine.text("proc/sys/kernel/osrelease").strip(), f"{here.memory_total / 1e9:.0f}"
    facts = {"kernel": kernel, "driver": driver, "memory": memory}
    for issue in issues:
        if issue.when.keys() <= facts.keys() and rules.holds(issue, facts.get):
            yield Requirement(issue.name, "advice", rules.sentence(issue, facts.get), issue.do)


@task("measure")
def plan(
    paths: Paths,
    *,
    recipe: Recipe = None,
    stage: Stage = None,
    stack: Stack = None,
    memory: Annotated[str, "the machine's memory, such as 128GB (default: this one's, or a DGX Spark's)"] = "",
    free: Annotated[str, "how much of it is free, such as 110GB (default: what is free here now)"] = "",
    bandwidth: Annotated[int | None, "of the memory in GB/s, for the highest speed (default of a Spark: 273)"] = None,
    nodes: Annotated[int | None, "plan for this many machines, tensor-parallel", "COUNT"] = None,
    json: Json = False,
    exit_code: Annotated[bool, "exit with 1 if the recipe does not fit"] = False,
) -> int:
    """Estimate a recipe's memory, concurrency and highest speed.

    invoke plan --recipe qwen3.5-122b --stage v2-tq
    """
    chosen = manifests.load_recipe(paths.project, recipe or machine.default_recipe(paths.project, stack))
    chain = manifests.load_chain(paths.project, stage or chosen.stage)
    pinned = manifests.load_stack(paths.project, chosen.stack)
    rate = bandwidth * 1e9 if bandwidth else SPARK_BANDWIDTH if pinned.platform == inputs.SPARK else None
    here = planned_machine(pinned, memory, free)
    for option, given, example in (("--bandwidth", bandwidth, 273), ("--nodes", nodes, 2)):
        if given == 0:
            raise InputError(f"{option}: got 0, expected 1 or more", next_step=f"{option} {example}")
    known = inputs.read_inputs(paths, chosen, pinned, chain, nodes=nodes)
    plan = known.plan(here)
    speed = inputs.speed_of(paths, chosen, chain[-1].name, known, tuple(plan.requests), rate)
    for line in vllm_command.overruled(chosen, pinned, chain):
        say(f"note: {line}")
    if lack := lacks_mod(plan.settings.cache_dtype, chain):
        say(f"warning: {lack}; stage {STAGE} has it")
    if json:
        is_locked = not manifests.unlocked(paths.project, manifests.model_of(paths.project, chosen))
        value = {"recipe": chosen.name, "stage": chain[-1].name, "locked": is_locked}
        show_json(value | text.to_json(plan) | {"decode": speed.to_json()})
    else:
        show("\n".join(text.title(plan, chosen.name, chain[-1].name)))
        for columns, rows in text.tables(plan):
            table(columns, rows)
        lines = (*text.cache_lines(plan), "", *text.speed_lines(speed, plan.settings.ranks), "", *text.verdict(plan))
        show("\n".join(lines))
    # What has broken for others with such memory, for one.
    broken = [str(finding) for finding in own_findings(paths.project, chosen) if finding.severity != "note"]
    for line in broken and ["which does not count:", *broken]:
        say(line)
    return int(exit_code and not plan.fits)


def planned_machine(stack: schema.Stack, memory: str = "", free: str = "") -> Machine:
    """The machine that was asked for, else this one if the stack is for it, else a Spark."""
    here = inputs.machine_for(stack)
    if memory:
        total = read_size("memory", memory)
        here = Machine(total, total, f"a machine with {memory}", "flag")
    if free:
        here = replace(here, free=read_size("free", free))
        if here.free > here.total:
            expected = f"expected at most {gib(here.total)}"
            raise InputError(f"--free: got {free}, {expected}", next_step="also give --memory")
    return here


def read_size(option: str, text: str) -> int:
    """Bytes; less than a MiB was meant to have another unit."""
    with contextlib.suppress(ValidationError):
        if (size := TypeAdapter(ByteSize).validate_python(text.strip())) >= 1 << 20:
            return size
    raise InputError(f"--{option}: got {text!r}, expected a size", next_step=f"--{option} 128GB, or 119.2GiB")
