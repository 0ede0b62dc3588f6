"""The task `doctor`: read, judge, report."""

from __future__ import annotations

import json
from dataclasses import asdict

from sparkpin.commands.doctor import rules
from sparkpin.commands.doctor.facts import read_facts
from sparkpin.commands.doctor.rules import MachineFinding, NeededMemory
from sparkpin.core import terminal
from sparkpin.core.errors import HostError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.fetch.model_files import TEXTS, repository_folder
from sparkpin.fetch.store import Store
from sparkpin.host import daemon
from sparkpin.host import machine as host
from sparkpin.host.fingerprint import fingerprint_of
from sparkpin.pins import manifests, schema
from sparkpin.serve.address import Address
from sparkpin.serve.memory import recipe as planning


def doctor(*, fix: bool, stack: str | None, online: bool, as_json: bool) -> None:
    """HostError, after all is told, where something is MISSING."""
    paths = Paths.from_env()
    machine = host.read_host()
    chosen = manifests.load_stack(paths.project, stack or host.default_stack(paths.project, machine))
    if not as_json:
        terminal.show(f"{machine.summary}; stack {chosen.name}: {chosen.description}")
    if fix:
        host.install(host.missing(paths, machine, stack=chosen), machine, terminal.say)
        terminal.say(f"engine: {daemon.start_engine(paths, terminal.say)}")
    recipe = manifests.load_recipe(paths.project, chosen.default_recipe)
    facts = read_facts(machine, port_of(recipe), online=online)
    needed = host.requirements(paths, machine, stack=chosen)
    found = [
        MachineFinding(one.name, "ok" if one.ok else "MISSING", one.detail, one.fix)
        for one in needed
        if one.name != host.GPU_RUNTIME  # the rules know more of it
    ]
    found += rules.lock_of(lock_fault(paths, chosen))
    if source := chosen.python.source:
        found += rules.source_build(f"{source.name} {source.version}", chosen.platform, host.this_platform())
    cuda = chosen.gpu.cuda if chosen.gpu else None
    found += rules.findings(facts, memory_of(paths, recipe, chosen), cuda)
    if as_json:
        whom = fingerprint_of(machine, facts.gpus, host.ROOT, facts.docker.version).model_dump(mode="json")
        value = {"host": whom, "is_spark": machine.is_spark, "stack": chosen.name, "findings": list(map(asdict, found))}
        terminal.show(json.dumps(value, indent=2, sort_keys=True))
    else:
        rows = [(f.state.replace("n/a", "-"), f.name, f.detail, f.fix) for f in found]
        terminal.table(("", "what", "found", "to mend it"), rows)
        if not machine.is_spark:
            own = (*rules.OF_A_SPARK, rules.PLAN)
            skipped = [finding.name for finding in found if finding.state == "n/a" and finding.name in own]
            terminal.show(f"Not a DGX Spark, so these do not apply: {', '.join(skipped)}.")
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
        lock = manifests.load_model_lock(paths.project, pin)
        if not is_here(paths, lock):
            return NeededMemory(name, None, "its headers are not fetched yet", f"{command} (it fetches them)", command)
        chain = manifests.load_chain(paths.project, recipe.stage)
        plan = planning.plan_recipe(paths, recipe, stack, chain, planning.machine_for(stack, "", ""))
    except SparkpinError as error:
        return NeededMemory(name, None, f"no plan: {error.message}", error.next_step, command)
    return NeededMemory(f"{name}, stage {recipe.stage},", plan.needed, command=command)


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
