"""Load every file that people edit or that `invoke lock` writes.

Each loader returns a frozen model or raises ManifestError (file, key, value got, value expected).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from sparkpin.core.errors import WHOLE, InputError, ManifestError
from sparkpin.core.models import StrictModel
from sparkpin.core.names import choose
from sparkpin.pins import schema
from sparkpin.pins.reading import LOCK_LIMIT, parse, read_yaml, require_size
from sparkpin.pins.schema import DRAFTER, UNRESOLVED, ModelLock, ModelPin, Recipe, Stack, StackLock, Stage
from sparkpin.pins.values import require_values

N = TypeVar("N", Stack, Stage, ModelPin, Recipe)
K = TypeVar("K", StackLock, ModelLock)
F = TypeVar("F", bound=StrictModel)
FAMILIES, COMMUNITY_MODS = "pins/families.yaml", "pins/community_mods.yaml"


def load_named(kind: type[N], folder: Path, name: str, what: str) -> N:
    path = choose(folder, name, what)
    value = read_yaml(path)
    loaded = parse(kind, {"name": name} | value if isinstance(value, dict) else value, path)
    if loaded.name != name:
        raise ManifestError(path, "name", loaded.name, f"{name!r}, as the file is called")
    return loaded


def load_stack(project: Path, name: str) -> Stack:
    stack = load_named(Stack, project / "pins/stacks", name, "stack")
    path = project / f"pins/stacks/{name}.yaml"
    require_mods(project, stack.mods, path)
    require_values([], stack.image.env, path)
    return stack


def require_mods(project: Path, mods: Sequence[str], file: Path) -> None:
    known = sorted(path.parent.name for path in (project / "mods").glob("*/pyproject.toml"))
    for mod in mods:
        if mod not in known:
            raise ManifestError(file, "mods", mod, f"a mod of mods/ ({', '.join(known)})")


def load_stage(project: Path, name: str) -> Stage:
    stage = load_named(Stage, project / "stages", name, "stage")
    path = project / f"stages/{name}.yaml"
    if not (project / "dockerfiles" / stage.template).is_file():
        known = ", ".join(sorted(p.name for p in (project / "dockerfiles").glob("*.j2")))
        raise ManifestError(path, "template", stage.template, f"a file of dockerfiles/ ({known})")
    require_mods(project, stage.mods, path)
    return stage


def load_chain(project: Path, name: str) -> tuple[Stage, ...]:
    """The stages from the first one (no parent) to `name`, each with all of its checks. A cycle or an unknown parent is
    an error, and so is a check that cannot be added or dropped.
    """
    chain = [load_stage(project, name)]
    while (parent := chain[-1].parent) is not None:
        path = project / f"stages/{chain[-1].name}.yaml"
        if parent in [stage.name for stage in chain]:
            walk = " -> ".join([*(stage.name for stage in chain), parent])
            raise ManifestError(path, "parent", parent, f"a chain that ends in a stage without parent, not {walk}")
        try:
            chain.append(load_stage(project, parent))
        except InputError as error:
            raise ManifestError(path, "parent", parent, "a stage of stages/", next_step=error.next_step) from None
    checks: list[str] = []
    for place, stage in reversed(list(enumerate(chain))):
        checks = checks_after(project, stage, checks)
        chain[place] = stage.model_copy(update={"smoke": stage.smoke.model_copy(update={"checks": checks})})
    return tuple(reversed(chain))


def checks_after(project: Path, stage: Stage, below: Sequence[str]) -> list[str]:
    """Names of a stage's checks, of which it names what its parent has not. below: the parent's."""
    smoke, path = stage.smoke, project / f"stages/{stage.name}.yaml"
    if smoke.checks is not None:
        if changed := [*smoke.add_checks, *smoke.drop_checks]:
            raise ManifestError(path, "smoke.add_checks, smoke.drop_checks", changed, "none together with `checks`")
        return smoke.checks
    if twice := [name for name in smoke.add_checks if name in below]:
        raise ManifestError(path, "smoke.add_checks", twice, f"checks that {stage.parent} has not")
    if absent := [name for name in smoke.drop_checks if name not in below]:
        raise ManifestError(path, "smoke.drop_checks", absent, f"checks of {stage.parent}: {', '.join(below)}")
    return [name for name in (*below, *smoke.add_checks) if name not in smoke.drop_checks]


def load_model(project: Path, name: str) -> ModelPin:
    pin = load_named(ModelPin, project / "pins/models", name, "model")
    path = project / f"pins/models/{name}.yaml"
    sources: dict[str, str | None] = {"base": pin.base, "mtp.source": pin.mtp.source if pin.mtp else None}
    for name, step in (("hybrid", pin.hybrid), ("mtp", pin.mtp)):
        sources |= {f"{name}.rules.{i}.source": rule.source for i, rule in enumerate(step.rules if step else [])}
    for key, source in sources.items():
        if source is not None and source not in pin.repositories:
            raise ManifestError(path, key, source, f"one of the repositories ({', '.join(pin.repositories)})")
        if source == pin.base and key != "base":
            raise ManifestError(path, key, source, "another repository than the base")
    for name, repository in pin.repositories.items():
        if repository.folder and repository.revision != UNRESOLVED:
            expected = f"{UNRESOLVED!r}, since that of a folder is derived from its files"
            raise ManifestError(path, f"repositories.{name}.revision", repository.revision, expected)
    return pin


def load_models(project: Path, name: str, drafter: str | None) -> ModelPin:
    """A model with its drafter, as a release names both."""
    pin = load_model(project, name)
    return pin.with_drafter(load_model(project, drafter)) if drafter else pin


def load_recipe(project: Path, name: str) -> Recipe:
    recipe = load_named(Recipe, project / "recipes", name, "recipe")
    if recipe.family and recipe.family not in (known := [family.name for family in load_families(project)]):
        expected = f"a family of {FAMILIES} ({', '.join(known)})"
        raise ManifestError(project / recipe.file, "family", recipe.family, expected, known=known)
    return recipe


def load_families(project: Path) -> tuple[schema.Family, ...]:
    """None where the file is not there, as in a project of somebody's own."""
    return tuple(_read_optional(schema.Families, project / FAMILIES).families)


def load_community_mods(project: Path) -> dict[str, schema.CommunityMod]:
    """By name; none where the file is not there, as in what is kept of a release without any."""
    return {mod.name: mod for mod in _read_optional(schema.CommunityMods, project / COMMUNITY_MODS).mods}


def load_known_issues(project: Path) -> tuple[schema.KnownIssue, ...]:
    """None where the file is not there, as in what was kept of releases from before it."""
    return tuple(_read_optional(schema.KnownIssues, project / "pins/known_issues.yaml").issues)


def load_published(project: Path) -> schema.PublishedSpeeds:
    return _read_optional(schema.PublishedSpeeds, project / "pins/published.yaml")


def _read_optional(kind: type[F], path: Path) -> F:
    return parse(kind, read_yaml(path) if path.is_file() else {}, path)


def model_of(project: Path, recipe: Recipe) -> ModelPin:
    """The model pin whose base repository the recipe names, with that of its drafter if it names one."""
    pin = _pin_of(project, recipe, "model", recipe.model, recipe.model_revision)
    if recipe.drafter is None:
        return pin
    drafter = _pin_of(project, recipe, "drafter", recipe.drafter, recipe.drafter_revision)
    if drafter.drafts is None:
        path = project / f"pins/models/{drafter.name}.yaml"
        raise ManifestError(path, "drafts", "(missing)", "its method, tokens and acceptance_floor (docs/drafters.md)")
    return pin.with_drafter(drafter)


def _pin_of(project: Path, recipe: Recipe, key: str, repo: str, asked: str) -> ModelPin:
    """asked: the revision that the recipe names."""
    path = project / recipe.file
    pins, faults = readable_models(project)
    found = [pin for pin in pins if pin.repositories[pin.base].repo == repo]
    if not found and faults:
        raise faults[0]  # it may be of the one that was meant
    if len(found) != 1:
        known = ", ".join(f"{pin.repositories[pin.base].repo} of {pin.name}" for pin in found or pins)
        expected = f"the base repository of one pin of pins/models/ ({known})"
        raise ManifestError(path, key, repo, expected, next_step=f"correct it in {path}, or pin that model once")
    pin = found[0]
    revision, where = pin.repositories[pin.base].revision, f"pins/models/{pin.name}.yaml"
    if asked == UNRESOLVED:  # whatever the lock says, if there is one
        return pin
    if revision == UNRESOLVED:
        revision, where = load_model_lock(project, pin).repositories[pin.base].revision, f"pins/models/{pin.name}.lock"
    if asked != revision:
        raise ManifestError(path, f"{key}_revision", asked, f"{revision}, as in {where}")
    return pin


def readable_models(project: Path) -> tuple[list[ModelPin], list[ManifestError]]:
    """Every pin of a model, and what is wrong with those that cannot be read: they concern nobody but their users."""
    pins: list[ModelPin] = []
    faults: list[ManifestError] = []
    for file in sorted((project / "pins/models").glob("*.yaml")):
        try:
            pins.append(load_model(project, file.stem))
        except ManifestError as error:
            faults.append(error)
    return pins, faults


def digest_of(value: Any) -> str:
    """SHA-256 (hex) of plain data: of what a manifest says, not of how its text looks."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_lock(kind: type[K], project: Path, name: str, inputs: str | None = None) -> K:
    """The lock that is there. inputs: what it must have been made of; None for a former one, which fits no pins."""
    what = "stack" if kind is StackLock else "model"
    path, command = project / f"pins/{what}s/{name}.lock", f"invoke lock --{what} {name}"
    if not path.is_file():
        raise ManifestError(path, WHOLE, "no such file", "a lock: nobody has locked this yet", next_step=command)
    require_size(path, LOCK_LIMIT)
    name = f"pins/{path.parent.name}/{path.name}"
    again = f"git checkout {name}, or, for all hashes as offered now, rm {name}; then {command}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ManifestError(path, WHOLE, str(error), "JSON as `invoke lock` writes it", next_step=again) from None
    lock = parse(kind, value, path, next_step=again)
    if inputs not in (None, lock.inputs):
        expected = f"{inputs}, since the pins have changed"
        raise ManifestError(path, "inputs", lock.inputs, expected, next_step=command)
    return lock


def stack_inputs(stack: Stack) -> str:
    """Over what decides the closure; how wheels are grouped into layers and why some are left out does not."""
    python = stack.python
    debian, bounds = stack.debian.model_dump(mode="json"), [sorted(python.constraints), sorted(python.overrides)]
    wheels = [python.version, python.requirements, sorted(python.exclude), python.torch_backend]
    return digest_of([stack.platform, debian, wheels, bounds])


def model_inputs(pin: ModelPin) -> str:
    """Over what decides which commits, files and tensors are locked. A key at its default counts as none."""
    aside: Any = {"name": True, "description": True, "smoke": True, "drafts": True}
    return digest_of(pin.owner(pin.base).model_dump(mode="json", exclude=aside, exclude_defaults=True))


def load_stack_lock(project: Path, stack: Stack) -> StackLock:
    return read_lock(StackLock, project, stack.name, stack_inputs(stack))


def model_lock_file(project: Path, name: str) -> Path:
    return project / f"pins/models/{name}.lock"


def unlocked(project: Path, pin: ModelPin) -> list[str]:
    """Names of the pin, and of its drafter's, where there is no lock."""
    names = [pin.name, pin.drafter.name] if pin.drafter else [pin.name]
    return [name for name in names if not model_lock_file(project, name).is_file()]


def load_model_lock(project: Path, pin: ModelPin) -> ModelLock:
    lock = read_lock(ModelLock, project, pin.name, model_inputs(pin))
    if pin.drafter is None:
        return lock
    drafter = load_model_lock(project, pin.drafter).repositories[pin.drafter.base]
    return lock.model_copy(update={"repositories": lock.repositories | {DRAFTER: drafter}})


def lock_text(lock: StackLock | ModelLock) -> str:
    """JSON with one locked file a line, so that a change of one version is a change of one line."""

    def item(value: Any, indent: str) -> str:
        if isinstance(value, list):
            first, last, rows = "[", "]", [json.dumps(row, ensure_ascii=False) for row in value]
        elif isinstance(value, dict) and "sha256" not in value:
            first, last = "{", "}"
            rows = [f"{json.dumps(key)}: {item(inner, indent + '  ')}" for key, inner in value.items()]
        else:
            return json.dumps(value, ensure_ascii=False)
        lines = ",\n".join(f"{indent}  {row}" for row in rows)
        return f"{first}\n{lines}\n{indent}{last}" if rows else first + last

    unused = {key for key in ("time", "gguf") if not getattr(lock, key, None)}
    return item(lock.model_dump(mode="json", exclude=unused), "") + "\n"


def wheel_groups(project: Path, stack: Stack, lock: StackLock) -> dict[str, list[schema.LockedFile]]:
    """The wheels by layer of the images, in the stack's order, without empty layers."""
    from packaging.utils import canonicalize_name  # half of what `invoke images` would load

    left = {canonicalize_name(wheel.name): wheel for wheel in lock.wheels}
    names = {layer.name: sorted(map(canonicalize_name, layer.packages)) for layer in stack.python.layers}
    named = [name for some in names.values() for name in some if name != "*"]
    if wrong := [name for name in named if name not in left or named.count(name) > 1]:
        file, expected = project / f"pins/stacks/{stack.name}.yaml", "distributions of the lock, each in one layer"
        raise ManifestError(file, "python.layers", wrong, expected)
    rest = sorted(left.keys() - {*named})
    groups = {layer: [left[name] for name in (rest if some == ["*"] else some)] for layer, some in names.items()}
    return {layer: wheels for layer, wheels in groups.items() if wheels}
