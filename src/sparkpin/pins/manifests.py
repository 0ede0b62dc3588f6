"""Read every file that people edit or that `invoke lock` writes; the only module that reads YAML.

Each loader returns a frozen model or raises ManifestError (file, key, value got, value expected).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from sparkpin.core.errors import WHOLE, InputError, ManifestError
from sparkpin.core.names import choose
from sparkpin.pins.schema import (
    DRAFTER,
    UNRESOLVED,
    CommunityMod,
    CommunityMods,
    Families,
    Family,
    KnownIssue,
    KnownIssues,
    ModelLock,
    ModelPin,
    PublishedSpeeds,
    Recipe,
    Stack,
    StackLock,
    Stage,
    StrictModel,
)
from sparkpin.pins.values import require_values

M = TypeVar("M", bound=StrictModel)
YAML_LIMIT, LOCK_LIMIT = 256 << 10, 24 << 20  # bytes; each locked tensor takes 150
SCALAR = {"str", "int", "float", "bool"}  # schema.Scalar, as pydantic names what a value could have been
DEPTH, NODES = 50, 50_000  # of a YAML file, aliases counted as what they stand for


def parse(kind: type[M], value: Any, file: object, *, next_step: str = "") -> M:
    """Validate plain data against a model; the first fault is the one that is told."""
    made, faults = parsed(kind, value, file, next_step=next_step)
    if made is None:
        raise faults[0]
    return made


def parsed(kind: type[M], value: Any, file: object, *, next_step: str = "") -> tuple[M | None, list[ManifestError]]:
    """As `parse`, with every fault, one a key. A misspelt key comes before the one that is missing for it."""
    if not isinstance(value, dict):
        return None, [ManifestError(file, WHOLE, type(value).__name__, "a mapping of keys", next_step=next_step)]
    try:
        return kind.model_validate(value), []
    except ValidationError as error:
        faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    kinds: dict[tuple[int | str, ...], set[int | str]] = {}
    for fault in faults:
        kinds.setdefault(fault["loc"][:-1], set()).update(fault["loc"][-1:])
    found: dict[str, ManifestError] = {}
    for fault in faults:
        key = ".".join(str(part) for part in fault["loc"]) or WHOLE
        seen, wanted, known = fault["input"], plain(fault["msg"]), list[str]()
        if fault["type"] == "extra_forbidden":
            known = sorted(known_keys(kind, fault["loc"][:-1]))
            wanted = f"no such key (known here: {', '.join(known)})"
        elif fault["type"] == "missing":
            seen, wanted = "(missing)", "a value: the key must be there"
        elif kinds[fault["loc"][:-1]] == SCALAR:
            key, wanted = key.rpartition(".")[0], "text, a number, true or false"  # of each kind it is none
        found.setdefault(key, ManifestError(file, key, seen, wanted, next_step=next_step, known=known))
    return None, list(found.values())


def plain(message: str) -> str:
    """What pydantic wants, as the end of `wanted ...`."""
    text = re.sub(r"^(Value error, |Input should be |\w+ should have )", "", message)
    text = re.sub(r"^String should match pattern ", "text of the pattern ", text)
    return re.sub(r" after validation, not \d+$", "", text)


def known_keys(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that the mapping at `location` may have, as far as the types tell."""
    current: Any = kind
    for part in location:
        if isinstance(part, str) and isinstance(current, type) and issubclass(current, BaseModel):
            current = current.model_fields[part].annotation if part in current.model_fields else current
        inner = list(model_types(current))
        current = inner[0] if inner else current
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def model_types(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in model_types(part)]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice, which plain YAML readers let the last one win."""


def _mapping(loader: Any, node: Any) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> Any:
    """A file of this project, or of a bundle from anybody."""
    require_size(path, YAML_LIMIT)
    try:
        text = path.read_text(encoding="utf-8")
        require_plain_yaml(path, text)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "(whole file)"
        raise ManifestError(path, where, getattr(error, "problem", str(error)), "valid YAML") from None


def require_size(path: Path, limit: int) -> None:
    if (size := path.stat().st_size) > limit:
        raise ManifestError(path, "(whole file)", f"{size:,} bytes", f"{limit:,} or less")


def require_plain_yaml(path: Path, text: str) -> None:
    """Counts before anything is made of it: the loader of C recurses until it crashes, and aliases multiply."""
    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor; nodes in all that is open so far, when it began
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, 1)
        count += 1
        if len(open_nodes) > DEPTH or count > NODES:
            seen = f"{len(open_nodes)} levels, {count:,} nodes"
            where = f"line {event.start_mark.line + 1}" if event.start_mark else "(whole file)"
            raise ManifestError(path, where, seen, f"at most {DEPTH} and {NODES:,}")


def load_named(kind: type[M], folder: Path, name: str, what: str) -> M:
    path = choose(folder, name, what)
    value = read_yaml(path)
    if isinstance(value, dict) and "name" not in value:
        value = {"name": name, **value}
    loaded = parse(kind, value, path)
    if loaded.name != name:  # type: ignore[attr-defined]
        raise ManifestError(path, "name", loaded.name, f"{name!r}, as the file is called")  # type: ignore[attr-defined]
    return loaded


def load_stack(project: Path, name: str) -> Stack:
    stack = load_named(Stack, project / "pins/stacks", name, "stack")
    path = project / f"pins/stacks/{name}.yaml"
    if sum(layer.packages == ["*"] for layer in stack.python.layers) != 1:
        raise ManifestError(
            path,
            "python.layers",
            [layer.name for layer in stack.python.layers],
            'exactly one layer with packages: ["*"]',
        )
    for mod in stack.mods:
        require_mod(project, mod, path, "mods")
    require_values([], stack.image.env, path)
    return stack


def require_mod(project: Path, mod: str, file: Path, key: str) -> None:
    if not (project / "mods" / mod / "pyproject.toml").is_file():
        known = ", ".join(sorted(p.parent.name for p in (project / "mods").glob("*/pyproject.toml")))
        raise ManifestError(file, key, mod, f"a mod of mods/ ({known})")


def load_stage(project: Path, name: str) -> Stage:
    stage = load_named(Stage, project / "stages", name, "stage")
    path = project / f"stages/{name}.yaml"
    if not (project / "dockerfiles" / stage.template).is_file():
        known = ", ".join(sorted(p.name for p in (project / "dockerfiles").glob("*.j2")))
        raise ManifestError(path, "template", stage.template, f"a file of dockerfiles/ ({known})")
    for mod in stage.mods:
        require_mod(project, mod, path, "mods")
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
            raise ManifestError(path, "smoke.add_checks, smoke.drop_checks", changed, "none beside `checks`")
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
    for step in ("hybrid", "mtp"):
        rules = step_rules.rules if (step_rules := getattr(pin, step)) else []
        sources |= {f"{step}.rules.{i}.source": rule.source for i, rule in enumerate(rules)}
    for key, source in sources.items():
        if source is not None and source not in pin.repositories:
            raise ManifestError(path, key, source, f"one of the repositories ({', '.join(pin.repositories)})")
        if source == pin.base and key != "base":
            raise ManifestError(path, key, source, "another repository than the base")
    for name, repository in pin.repositories.items():
        if repository.folder and repository.revision != UNRESOLVED:
            key, wanted = f"repositories.{name}.revision", f"{UNRESOLVED!r}: that of a folder is derived from its files"
            raise ManifestError(path, key, repository.revision, wanted)
    return pin


def load_models(project: Path, name: str, drafter: str | None) -> ModelPin:
    """A model with its drafter, as a release names both."""
    pin = load_model(project, name)
    return pin.with_drafter(load_model(project, drafter)) if drafter else pin


def load_recipe(project: Path, name: str) -> Recipe:
    return load_named(Recipe, project / "recipes", name, "recipe")


FAMILIES, COMMUNITY_MODS = "pins/families.yaml", "pins/community_mods.yaml"


def load_families(project: Path) -> tuple[Family, ...]:
    """None where the file is not there, as in a project of somebody's own."""
    path = project / FAMILIES
    return tuple(parse(Families, read_yaml(path), path).families) if path.is_file() else ()


def load_community_mods(project: Path) -> dict[str, CommunityMod]:
    """By name; none where the file is not there, as in what is kept of a release without any."""
    path = project / COMMUNITY_MODS
    return {mod.name: mod for mod in parse(CommunityMods, read_yaml(path), path).mods} if path.is_file() else {}


def load_known_issues(project: Path) -> tuple[KnownIssue, ...]:
    """None where the file is not there, as in what was kept of releases from before it."""
    path = project / "pins/known_issues.yaml"
    return tuple(parse(KnownIssues, read_yaml(path), path).issues) if path.is_file() else ()


def load_published(project: Path) -> PublishedSpeeds:
    path = project / "pins/published.yaml"
    return parse(PublishedSpeeds, read_yaml(path) if path.is_file() else {}, path)


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


def _pin_of(project: Path, recipe: Recipe, key: str, repo: str, wanted_revision: str) -> ModelPin:
    path = project / f"recipes/{recipe.name}.yaml"
    pins, faults = readable_models(project)
    found = [pin for pin in pins if pin.repositories[pin.base].repo == repo]
    if not found and faults:
        raise faults[0]  # it may be of the one that was meant
    if len(found) != 1:
        several = f"of one model of pins/models/, not of {' and '.join(pin.name for pin in found)}"
        known = ", ".join(sorted({pin.repositories[pin.base].repo for pin in pins}))
        wanted = several if found else f"of a model of pins/models/ ({known})"
        step = "move one of these pins out of pins/models/" if found else f"correct it in {path}, or pin that model"
        raise ManifestError(path, key, repo, f"the base repository {wanted}", next_step=step)
    pin = found[0]
    revision, where = pin.repositories[pin.base].revision, project / f"pins/models/{pin.name}.yaml"
    if wanted_revision == UNRESOLVED:  # whatever the lock says, if there is one
        return pin
    if revision == UNRESOLVED:
        revision = load_model_lock(project, pin).repositories[pin.base].revision
        where = where.with_suffix(".lock")
    if wanted_revision != revision:
        raise ManifestError(path, f"{key}_revision", wanted_revision, f"{revision}, as in {where}")
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


def _read_lock(kind: type[M], path: Path, command: str) -> M:
    if not path.is_file():
        raise ManifestError(path, "(whole file)", "no such file", "a lock", next_step=command)
    require_size(path, LOCK_LIMIT)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ManifestError(
            path, "(whole file)", str(error), "JSON as `invoke lock` writes it", next_step=command
        ) from None
    return parse(kind, value, path, next_step=command)


def _load_lock(kind: type[M], path: Path, wanted_inputs: str, command: str) -> M:
    lock = _read_lock(kind, path, command)
    seen = lock.inputs  # type: ignore[attr-defined]
    if seen != wanted_inputs:
        raise ManifestError(path, "inputs", seen, f"{wanted_inputs}: the pins have changed since", next_step=command)
    return lock


def stack_inputs(stack: Stack) -> str:
    """Over what decides the closure; how wheels are grouped into layers and why some are left out does not."""
    python = stack.python
    return digest_of(
        [
            stack.platform,
            (stack.base or stack.system).model_dump(mode="json"),
            [python.version, python.requirements, sorted(python.exclude), python.torch_backend],
            [sorted(python.constraints), sorted(python.overrides)],
        ]
    )


def model_inputs(pin: ModelPin) -> str:
    """Over what decides which commits, files and tensors are locked. A key at its default counts as none."""
    aside: Any = {"name": True, "description": True, "smoke": True, "drafts": True, "hybrid": {"unused"}}
    return digest_of(pin.owner(pin.base).model_dump(mode="json", exclude=aside, exclude_defaults=True))


def load_stack_lock(project: Path, stack: Stack) -> StackLock:
    path = project / f"pins/stacks/{stack.name}.lock"
    return _load_lock(StackLock, path, stack_inputs(stack), f"invoke lock --stack {stack.name}")


def former_stack_lock(project: Path, name: str) -> StackLock:
    """The lock that is there, whether or not it still fits the pins."""
    return _read_lock(StackLock, project / f"pins/stacks/{name}.lock", f"invoke lock --stack {name}")


def model_lock_file(project: Path, name: str) -> Path:
    return project / f"pins/models/{name}.lock"


def unlocked(project: Path, pin: ModelPin) -> list[str]:
    """Names of the pin, and of its drafter's, where there is no lock."""
    names = [pin.name, pin.drafter.name] if pin.drafter else [pin.name]
    return [name for name in names if not model_lock_file(project, name).is_file()]


def load_model_lock(project: Path, pin: ModelPin) -> ModelLock:
    path, command = model_lock_file(project, pin.name), f"invoke lock --model {pin.name}"
    if not path.is_file():
        step = (
            f"{command}: it fetches headers, small files and the tensors that the steps take, and writes their hashes; "
            "of large files the Hub tells them"
        )
        raise ManifestError(
            path, "(whole file)", "no such file", "a lock: this model has not been locked yet", next_step=step
        )
    lock = _load_lock(ModelLock, path, model_inputs(pin), command)
    if pin.drafter is None:
        return lock
    drafter = load_model_lock(project, pin.drafter).repositories[pin.drafter.base]
    return lock.model_copy(update={"repositories": lock.repositories | {DRAFTER: drafter}})


def former_model_lock(project: Path, name: str) -> ModelLock:
    """The lock that is there, whether or not it still fits the pin."""
    return _read_lock(ModelLock, project / f"pins/models/{name}.lock", f"invoke lock --model {name}")


def lock_text(lock: StackLock | ModelLock) -> str:
    """JSON with one locked file a line, so that a change of one version is a change of one line."""

    def files(rows: list[dict[str, Any]], indent: str) -> str:
        lines = ",\n".join(f"{indent}  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        return f"[\n{lines}\n{indent}]" if rows else "[]"

    def item(value: Any, indent: str) -> str:
        if isinstance(value, list):
            return files(value, indent)
        if isinstance(value, dict) and "sha256" in value:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            inner = ",\n".join(f"{indent}  {json.dumps(k)}: {item(v, indent + '  ')}" for k, v in value.items())
            return "{\n" + inner + "\n" + indent + "}"
        return json.dumps(value, ensure_ascii=False)

    unused = {key for key in ("base", "gguf") if not getattr(lock, key, None)}
    return item(lock.model_dump(mode="json", exclude=unused), "") + "\n"
