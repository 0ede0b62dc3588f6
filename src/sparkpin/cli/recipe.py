"""The tasks `recipe ...`: take one of the community over, write one for its tools, find mistakes."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from sparkpin.build.pair import pair
from sparkpin.checkpoint.write import checkpoint_folder
from sparkpin.cli.tasks import DryRun, Json, task
from sparkpin.core import files
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, show_file, show_json, table, tame, typed
from sparkpin.fetch import lock_model
from sparkpin.pins import manifests, schema, vllm_command, vllm_flags
from sparkpin.pins.mods import in_workspace, templates_of, to_fetch
from sparkpin.pins.nodes import spread
from sparkpin.pins.reading import parse
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.recipes import check, export
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.adopt import about, adopt, plain_name
from sparkpin.recipes.render import REPO
from sparkpin.recipes.rules import ORDER, RecipeFinding
from sparkpin.releases import container
from sparkpin.releases.record import Releases

COMMIT = re.compile(r"[0-9a-f]{40}")
LAUNCHER = "launcher"
MISTAKES = 4  # exit code

FileOrName = Annotated[str, "file, or a name of recipes/", "FILE|NAME"]
FileStack = Annotated[str | None, "of a file: stack of pins/stacks/ (default: its container's)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's, or base)"]


@task("inputs")
def recipe_list(paths: Paths) -> None:
    """List the recipes of recipes/."""
    rows = []
    for name in names_of(paths):
        try:
            read = manifests.load_recipe(paths.project, name)
            rows.append(tuple(map(printable, (name, read.stack, read.stage, read.description))))
        except SparkpinError:
            rows.append((name, "", "", f"cannot be read: invoke recipe check {name}"))
    table(("recipe", "stack", "stage", "what it is"), rows)


def names_of(paths: Paths) -> list[str]:
    return sorted(path.stem for path in (paths.project / "recipes").glob("*.yaml"))


@task("inputs")
def recipe_check(
    paths: Paths,
    what: Annotated[tuple[str, ...], "files, folders, names of recipes/ (default: all of these)", "FILE|NAME ..."] = (),
    *,
    stack: FileStack = None,
    json: Json = False,
) -> int:
    """Find mistakes in recipes, ours or others'.

    invoke recipe check their-recipe.yaml
    """
    every = [check.check(paths.project, word, stack) for word in subjects(what) or names_of(paths)]
    refused = sum(bool(one.errors) for one in every)
    if json:
        values = [asdict(one) | {"verdict": one.verdict} for one in every]
        show_json({"recipes": values, "passed": len(every) - refused, "refused": refused})
    elif len(every) == 1 and what:
        report_check(every[0])
    else:
        rows = []
        for one in every:
            error = f"{one.errors[0].key}: {one.errors[0].text}" if one.errors else ""
            rows.append([printable(str(cell)) for cell in (one.name, one.verdict, one.machines, one.model, error)])
        table(("recipe", "verdict", "machines", "model", "first error"), rows)
        step = "; next: invoke recipe check FILE, for all of one" if refused else ""
        show(typed(f"{count(len(every), 'recipe')}: {len(every) - refused} pass, {refused} refused{step}"))
    return MISTAKES * bool(refused)


def subjects(what: Sequence[str]) -> list[str]:
    """Files and names; a folder means all recipes below it."""
    found: list[str] = []
    for word in what:
        below = [str(file) for file in Path(word).rglob("*") if file.suffix in (".yaml", ".yml") and file.is_file()]
        if Path(word).is_dir() and not below:
            raise InputError(f"{word}: no recipe there", next_step="give files, or folders of *.yaml")
        found += sorted(below) or [word]
    return list(dict.fromkeys(found))


def report_check(checked: check.CheckedRecipe) -> None:
    """Verdict and next step come last, where a terminal has them in sight."""
    if checked.read_as:
        show(printable(f"{checked.name}: {checked.read_as}"))
    report(checked.found)
    found, file = Counter(one.severity for one in checked.found), shlex.quote(checked.name)
    counts = [count(found[severity], severity) for severity in ORDER if found[severity]]
    step = f"invoke recipe import {file}" if checked.read_as else f"invoke build --recipe {Path(checked.name).stem}"
    if checked.errors:
        step = f"correct {file}, then invoke recipe check {file}"
    else:
        counts = ["no errors", *counts]
    show(typed(printable(f"{', '.join(counts)}; next: {step}")))


def report(found: Sequence[RecipeFinding]) -> None:
    for finding in found:
        show(f"  {printable(str(finding))}")


@task("inputs")
def recipe_import(
    paths: Paths,
    file: Annotated[str, "recipe of spark-vllm-docker or sparkrun, `vllm serve` or `docker run` line, Compose file"],
    *,
    name: Annotated[str, "of the new recipe (default: the file's)"] = "",
    model: Annotated[str, "of the Hub, where the file serves a folder", "OWNER/NAME"] = "",
    stack: FileStack = None,
    stage: Stage = None,
    no_lock: Annotated[bool, "do not ask the Hub for the model's commit: it stays as it is locked, or open"] = False,
    dry_run: DryRun = False,
) -> int:
    """Convert a recipe of others into one of recipes/.

    invoke recipe import their-recipe.yaml --name mine
    """
    path, target = Path(file), paths.project / f"recipes/{plain_name(name or Path(file).stem)}.yaml"
    if target.exists():
        raise InputError(f"{target} is there already", next_step="give the new one another name: --name NAME")
    read = foreign.load(path)
    named = read.model_copy(update={"model": model}) if model and not REPO.fullmatch(read.model) else read
    made = adopt(paths.project, named, target.stem, stack=stack, stage=stage)
    if model and made.value["model"] != model:
        raise InputError(f"--model {model}: {path} serves {made.value['model']}", next_step="leave --model out")
    taken = parse(schema.Recipe, made.value, target)  # before anything is fetched or written
    pin, new = pin_of(paths, taken.model, made.model_revision)
    try:
        if new and not dry_run:
            value = pin.model_dump(exclude={"name"}, exclude_unset=True)
            write(new, foreign.text_of(value, [f"Made for {path.name}."]))
        revision = commit_of(paths, pin, lock=not (no_lock or dry_run))
    except BaseException:  # a pin that cannot be locked goes again
        if new:
            new.unlink(missing_ok=True)
        raise
    unmapped, wrote = [f"not mapped: {line}" for line in made.unmapped], "would write" if dry_run else "wrote"
    head = f"Taken over from {path.name}, a recipe of version {read.said_version}, by `invoke recipe import`."
    text = foreign.text_of(made.value | {"model_revision": revision}, [head, *unmapped])
    if dry_run:
        show_file(tame(text))
    else:
        write(target, text)
    told = [f"{wrote} pins/models/{pin.name}.yaml"] if new else []
    told.append(f"model {taken.model} at {revision}, as pins/models/{pin.name} says")
    show("\n".join(f"  {printable(line)}" for line in (*told, *made.told, *unmapped)))
    vllm = manifests.load_stack(paths.project, taken.stack).vllm
    show(f"{wrote} {taken.file}: stack {taken.stack} (vLLM {vllm}), stage {taken.stage}, model {taken.model}")
    report(found := check.own_findings(paths.project, taken, pinned=False))
    todo = to_fetch(paths.project, taken.mods) + [f"invoke lock --model {pin.name}"] * (revision == UNRESOLVED)
    show("next: " + "; ".join(todo or [f"invoke build --recipe {taken.name}"]))
    return MISTAKES * any(one.severity == "error" for one in found)


def write(path: Path, text: str) -> None:
    with files.atomic_file(path) as out:
        out.write(text.encode())


def pin_of(paths: Paths, repo: str, revision: str) -> tuple[schema.ModelPin, Path | None]:
    """The model's pin, and its file where it is a new one, not written yet. revision: what the recipe says of it."""
    for pin in manifests.readable_models(paths.project)[0]:
        if pin.repositories[pin.base].repo == repo:
            return pin, None
    names = (plain_name(repo.rpartition("/")[2]), plain_name(repo))
    free = [path for name in names if not (path := paths.project / f"pins/models/{name}.yaml").exists()]
    if not free:
        raise InputError(f"pins/models/{names[1]}.yaml pins another repository", next_step=f"rename it, or pin {repo}")
    base = {"repo": repo, "revision": revision if COMMIT.fullmatch(revision) else UNRESOLVED}
    value = {
        "name": free[0].stem,
        "description": f"{repo} as published",
        "base": "base",
        "repositories": {"base": base},
    }
    return parse(schema.ModelPin, value, free[0]), free[0]


def commit_of(paths: Paths, pin: schema.ModelPin, *, lock: bool) -> str:
    """Of the lock that is there, or is made."""
    if manifests.model_lock_file(paths.project, pin.name).is_file():
        return manifests.load_model_lock(paths.project, pin).repositories[pin.base].revision
    if lock:
        return lock_model.lock_model(paths, pin.name).repositories[pin.base].revision
    return pin.repositories[pin.base].revision


@task("inputs")
def recipe_show(
    paths: Paths, what: FileOrName, *, stack: FileStack = None, stage: Stage = None, json: Json = False
) -> None:
    """Print the command and environment that a recipe would run.

    invoke recipe show their-recipe.yaml
    """
    project, notes = paths.project, list[str]()
    path, own = check.file_or_name(project, what, stack)
    if own:
        read = manifests.load_recipe(project, path.stem)
    else:
        made = adopt(project, foreign.load(path), plain_name(path.stem), stack=stack, stage=stage)
        read = parse(schema.Recipe, made.value, path)
        notes += [f"not mapped: {line}" for line in made.unmapped]
    chosen, chain = manifests.load_stack(project, read.stack), manifests.load_chain(project, stage or read.stage)
    family = vllm_command.family_of(manifests.load_families(project), read.model)
    said, env = vllm_command.serve_argv(read, chosen, chain)
    added = vllm_command.choices(family, chosen.vllm, said)
    argv, env = spread(vllm_command.completed(said, added), env, read.nodes, gpu=chosen.gpu is not None)
    argv = in_workspace(argv) if read.mods else argv
    places = {read.file: "recipe", f"pins/stacks/{chosen.name}.yaml": f"stack {chosen.name}"}
    places |= {f"stages/{one.name}.yaml": f"stage {one.name}" for one in chain}
    where = {key: places[file] for key, file in vllm_command.origins(read, chosen, chain).items()}
    where |= {vllm_flags.Flag((one.flag,)).key: f"family {family.name}" for one in added if family}
    head, flags = vllm_flags.parse_flags(argv)
    words = [(shlex.join(head), LAUNCHER), *((shlex.join(one.words), where.get(one.key, LAUNCHER)) for one in flags)]
    variables = [(f"{name}={value}", where.get(name, LAUNCHER)) for name, value in (container.ENV | env).items()]
    notes += [f"{one.line.removeprefix('chosen: ')}; their runners leave it out" for one in added]
    notes += [about(*one) for one in templates_of(project, read.mods).items()]
    tables = {"command": words, "environment": variables}
    if json:
        value = {key: [{"text": printable(text), "from": of} for text, of in rows] for key, rows in tables.items()}
        show_json({"recipe": what, **value, "notes": notes})
        return
    on = f"stack {chosen.name} (vLLM {chosen.vllm}), stage {chain[-1].name}, model {read.model}"
    show(printable(f"{what}: {on}"))
    for title, rows in tables.items():
        table((title, "from"), [(printable(text), of) for text, of in rows])
    for note in notes:
        show(f"note: {printable(note)}")


@task("inputs")
def recipe_export(
    paths: Paths,
    name: Annotated[str, "of recipes/"],
    *,
    stage: Stage = None,
    format: Annotated[export.Format, "v1 for spark-vllm-docker (default), v2 for sparkrun"] = "v1",
    output: Annotated[str, "file to write (default: print it)", "FILE"] = "",
) -> None:
    """Write a recipe for spark-vllm-docker or sparkrun."""
    target = files.output_file("--output", output) if output else None
    last = pair(paths.project, name, stage=stage)[-1]
    base = last.model_lock.repositories[last.model.base]
    subject = export.ExportedRecipe(
        name=name,
        description=last.recipe.description,
        image=last.tag,
        argv=last.argv,
        env=dict(last.env),
        published={*last.steps} <= {"copy"} and not last.model.is_made,
        checkpoint=checkpoint_folder(paths, last.model, last.model_lock, last.steps),
        origin=foreign.RecipeOrigin(
            model=base.repo,
            model_revision=base.revision,
            stack=last.recipe.stack,
            stage=last.stage.name,
            mods=tuple(last.recipe.mods),
        ),
    )
    text = export.export(subject, format)
    for line in re.findall(r"^# (It listens on .*)", text, re.M):
        say(f"note: {line}")
    if Releases(paths).find(last.tag) is None:
        say(f"note: {last.tag} is not built yet; next: invoke build --recipe {name} --stage {last.stage.name}")
    if target is None:
        show_file(text.rstrip())
    else:
        write(target, text)
        show(f"wrote {output}: {last.tag} for {export.TOOLS[format]}")
