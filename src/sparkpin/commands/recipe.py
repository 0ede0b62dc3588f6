"""The task `recipe`: take one of the community over, write one for its tools, find mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from sparkpin.build.pair import pair
from sparkpin.checkpoint.write import checkpoint_folder
from sparkpin.community import adopt, check, export, mapping, yamlfile
from sparkpin.community import recipe as foreign
from sparkpin.community.finding import RecipeFinding
from sparkpin.core import files
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, say, show, table, tame
from sparkpin.fetch import lock_model
from sparkpin.pins import drafters, manifests, schema
from sparkpin.pins.families import vllm_version
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.record import Releases

COMMIT = re.compile(r"[0-9a-f]{40}")


def recipe(
    action: Literal["list", "check", "import", "export"], what: str, *, name: str, stack: str | None,
    stage: str | None, lock: bool, form: str, release: str | None, output: str,
) -> bool:  # fmt: skip
    """One of the four; False when mistakes were found."""
    if release and action != "export":
        raise InputError(f"invoke recipe {action} does not take {release!r}", next_step="invoke recipe --help")
    paths = Paths.from_env()
    if action == "check":
        return recipe_check(paths, what or None, stack=stack)
    if action == "list":
        recipe_list(paths)
    elif action == "import":
        recipe_import(paths, what, name=name, stack=stack, stage=stage, lock=lock)
    else:
        recipe_export(paths, what, form=form, release=release, stage=stage, output=output)
    return True


def recipe_list(paths: Paths) -> None:
    """The recipes of recipes/. One that cannot be read is told as such: `recipe check NAME` says what is wrong."""
    rows = []
    for name in names_of(paths):
        try:
            read = manifests.load_recipe(paths.project, name)
            rows.append((name, read.model, read.stack, read.stage, read.description))
        except SparkpinError:
            rows.append((name, "(cannot be read)", "", "", f"invoke recipe check {name}"))
    table(("recipe", "model", "stack", "stage", "what it is"), rows, spare="model")


def names_of(paths: Paths) -> list[str]:
    return sorted(path.stem for path in (paths.project / "recipes").glob("*.yaml"))


def recipe_import(
    paths: Paths, file: str, *, name: str = "", stack: str | None = None, stage: str | None = None, lock: bool = True
) -> Path:
    """Write recipes/NAME.yaml, and pins/models/MODEL.yaml with its lock where that model is not pinned yet.

    lock: False asks no Hub: the model's revision stays what is locked, or `unresolved`. Nothing is written on an error.
    """
    project, path = paths.project, Path(file)
    recipe, rendered = adopt.as_served(foreign.load(path))
    found = mapping.mapped(recipe, project, container=rendered.container, stack=stack, stage=stage)
    chosen = manifests.load_stack(project, found.stack)
    manifests.load_chain(project, found.stage)
    target = project / f"recipes/{adopt.plain_name(name or path.stem)}.yaml"
    if target.exists():
        raise InputError(f"{target} is there already", next_step="give the new one another name: --name NAME")
    version = vllm_version(chosen)
    made = adopt.adopt(project, recipe, rendered, target.stem, found, version)  # before anything is fetched
    revision, pinned = pin(paths, recipe, lock=lock)
    made.value["model_revision"] = revision
    lines = [f"Taken over from {path.name}, a recipe of version {recipe.version}, by `invoke recipe import`."]
    lines += [f"not mapped: {line}" for line in made.unmapped]
    with files.atomic_file(target) as out:
        out.write(yamlfile.text_of(made.value, lines).encode())
    for line in (*pinned, *made.told, *(f"not mapped: {line}" for line in made.unmapped)):
        show(f"  {tame(line)}")
    of = f"stack {chosen.name} (vLLM {version}), stage {found.stage}, model {recipe.model}"
    show(f"wrote {target.relative_to(project)}: {of}")
    report(check.own_findings(project, made.name))
    todo = [f"lock --mod {mod}" for mod in made.value.get("mods", ()) if mapping.is_unlocked(project, mod)]
    todo += [f"lock --model {model_name(paths, recipe.model)}"] if revision == UNRESOLVED else []
    show("next: " + "; ".join(f"invoke {task}" for task in todo or [f"build --recipe {made.name}"]))
    return target


def model_name(paths: Paths, repo: str) -> str:
    """Of the pin that is there, else a new one; with the owner's name where that of the repository is taken."""
    if found := pins_of(paths, repo):
        return found[0].name
    short, long = adopt.plain_name(repo.rpartition("/")[2]), adopt.plain_name(repo)
    return long if (paths.project / f"pins/models/{short}.yaml").exists() else short


def pins_of(paths: Paths, repo: str) -> list[schema.ModelPin]:
    return [pin for pin in manifests.readable_models(paths.project)[0] if pin.repositories[pin.base].repo == repo]


def pin(paths: Paths, recipe: foreign.CommunityRecipe, *, lock: bool) -> tuple[str, list[str]]:
    """The commit of the model, and what is told of it. A new pin goes again when it cannot be locked."""
    existing = pins_of(paths, recipe.model)
    name = model_name(paths, recipe.model)
    path = paths.project / f"pins/models/{name}.yaml"
    told = []
    if not existing:
        commit = recipe.revision if COMMIT.fullmatch(recipe.revision) else UNRESOLVED
        value = {
            "description": f"{recipe.model} as published",
            "base": "base",
            "repositories": {"base": {"repo": recipe.model, "revision": commit}},
        }
        if path.exists():
            raise InputError(
                f"{path} is there and pins another repository", next_step=f"rename it, or pin {recipe.model}"
            )
        with files.atomic_file(path) as out:
            out.write(yamlfile.text_of(value, [f"Made for {recipe.path.name} by `invoke recipe import`."]).encode())
        told.append(f"wrote pins/models/{name}.yaml")
    try:
        revision = locked(paths, name, lock=lock)
    except BaseException:
        if not existing:
            path.unlink(missing_ok=True)
        raise
    told.append(
        f"model {recipe.model} at {revision}" + ("" if revision != UNRESOLVED else ": nobody has asked the Hub yet")
    )
    if recipe.revision not in ("", UNRESOLVED, revision):
        told.append(f"model_revision {recipe.revision} -> {revision}, as pins/models/{name} says")
    return revision, told


def locked(paths: Paths, name: str, *, lock: bool) -> str:
    pinned = manifests.load_model(paths.project, name)
    if (paths.project / f"pins/models/{name}.lock").is_file():
        return manifests.load_model_lock(paths.project, pinned).repositories[pinned.base].revision
    if not lock:
        return pinned.repositories[pinned.base].revision
    try:
        return lock_model.lock_model(paths, name, say).repositories[pinned.base].revision
    except SparkpinError as error:
        hint = "or the same command with --no-lock, and `invoke lock` later"
        error.next_step = f"{error.next_step}; {hint}" if error.next_step else hint
        raise


def recipe_export(
    paths: Paths, what: str, *, form: str, release: str | None = None, stage: str | None = None, output: str = ""
) -> None:
    """Print or write a recipe for spark-vllm-docker (v1) or sparkrun (v2), of the working tree or of a release."""
    if form not in export.TOOLS:
        raise InputError(f"--format: saw {form!r}, wanted v1 or v2", next_step="invoke recipe export NAME --format v1")
    target = files.output_file("--output", output) if output else None
    subject = of_release(paths, what, release) if release else of_tree(paths, what, stage)
    if drafters.speculation(subject.argv).get("model") == drafters.PATH:
        raise InputError(
            f"{subject.image} is served with a second model that lies in its checkpoint: no file of {form} can say so",
            next_step=f"invoke export {subject.image}, which takes both",
        )
    kind: export.Format = "v1" if form == "v1" else "v2"
    text = export.text_of(subject, kind)
    if Releases(paths).find(subject.image) is None:
        at = f" --stage {stage}" if stage else ""
        say(f"note: {subject.image} is not built yet; next: invoke build --recipe {subject.name}{at}")
    if target is None:
        show(text.rstrip())
        return
    with files.atomic_file(target) as out:
        out.write(text.encode())
    show(f"wrote {output}: {subject.image} for {export.TOOLS[kind]}")


def of_tree(paths: Paths, name: str, stage: str | None) -> export.ExportedRecipe:
    last = pair(paths.project, name, stage=stage)[-1]
    base = last.model_lock.repositories[last.model.base]
    return export.ExportedRecipe(
        name=last.recipe.name,
        description=last.recipe.description,
        image=last.tag,
        argv=last.argv,
        env=dict(last.env),
        repo=base.repo,
        revision=base.revision,
        published=set(last.steps) <= {"copy"} and not last.model.is_made,
        checkpoint=checkpoint_folder(paths, last.model, last.model_lock, last.steps),
        stack=last.stack.name,
        stage=last.stage.name,
        mods=tuple(last.recipe.mods),
    )


def of_release(paths: Paths, name: str, tag: str) -> export.ExportedRecipe:
    """Its checkpoint is taken from the folder: what was published at that time is in no record."""
    records = Releases(paths)
    release = records.get(tag, name)
    repo, revision = "", ""
    mods: tuple[str, ...] = ()
    try:
        with project_of(paths, release) as project:
            was = manifests.load_recipe(project, release.recipe)
            model = manifests.model_of(project, was)
            base = manifests.load_model_lock(project, model).repositories[model.base]
            repo, revision, mods = base.repo, base.revision, tuple(was.mods)
    except SparkpinError as error:
        say(f"note: `invoke recipe import` cannot take this export back: {reason(error)}")
    return export.ExportedRecipe(
        name=release.recipe,
        description=f"{release.recipe}, stage {release.stage}, {release.state_text}",
        image=release.tag,
        argv=release.argv,
        env=dict(release.env),
        repo=repo,
        revision=revision,
        published=False,
        checkpoint=records.checkpoint(release),
        stack=release.stack,
        stage=release.stage,
        mods=mods,
    )


def recipe_check(paths: Paths, what: str | None, *, stack: str | None = None) -> bool:
    """Print what is found, of one recipe or of all of recipes/; whether there is no error."""
    if what is None:
        good = [own_check(paths, name) for name in names_of(paths)]  # all are told
        return all(good)
    path, own = check.file_or_name(paths.project, what)
    if own:
        return own_check(paths, path.stem)
    recipe = foreign.load(path)
    said = recipe.origin.stack if recipe.origin else mapping.stack_of(recipe.container)[0]
    chosen = manifests.load_stack(paths.project, stack or said or mapping.STACK)
    show(f"{path.name}: version {recipe.version}, held against stack {chosen.name} (vLLM {vllm_version(chosen)})")
    return one_check(path.name, check.foreign_findings(paths.project, recipe, chosen))


def own_check(paths: Paths, name: str) -> bool:
    return one_check(f"recipes/{name}.yaml", check.own_findings(paths.project, name))


def one_check(name: str, found: list[RecipeFinding]) -> bool:
    errors = sum(finding.severity == "error" for finding in found)
    show(f"{name}: {count(errors, 'error')}, {len(found) - errors} other" if found else f"{name}: nothing found")
    report(found)
    return not errors


def report(found: list[RecipeFinding]) -> None:
    for finding in found:
        show(f"  {tame(str(finding))}")
