"""The task `recipe`: take one of the community over, write one for its tools, find mistakes."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from sparkpin.build.pair import pair
from sparkpin.checkpoint.write import checkpoint_folder
from sparkpin.cli.tasks import task
from sparkpin.core import files
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, show_json, table, tame, typed
from sparkpin.fetch import lock_model
from sparkpin.pins import manifests, schema, vllm_command, vllm_flags
from sparkpin.pins.mods import in_workspace, templates_of, to_fetch
from sparkpin.pins.nodes import spread
from sparkpin.pins.reading import parse
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.recipes import check, export
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.adopt import about, adopt, plain_name
from sparkpin.recipes.rules import ORDER, RecipeFinding
from sparkpin.releases import container
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.record import Releases

COMMIT = re.compile(r"[0-9a-f]{40}")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
LAUNCHER = "launcher"
MISTAKES = 4  # exit code
OPTIONS = {
    "list": (),
    "check": ("--stack", "--json"),
    "show": ("--stack", "--stage", "--json"),
    "import": ("--name", "--model", "--stack", "--stage", "--no-lock", "--dry-run"),
    "export": ("--stage", "--format", "--output"),
}
MOST = {"list": 0, "show": 1, "import": 1, "export": 2}  # names and files that each takes


@task("inputs")
def recipe(
    action: Annotated[
        Literal["list", "check", "show", "import", "export"],
        "list: those of recipes/; check: find mistakes; show: the command and environment that would run, and where "
        "each word comes from; import: convert a recipe of spark-vllm-docker or sparkrun; export: write one for them, "
        "with our image",
        "ACTION",
    ],
    what: Annotated[
        tuple[str, ...],
        "check: files, folders or names of recipes/, all of these when left out; show: a file or a name; "
        "import: a file; export: a name, and a release (default: what the working tree would build); list: none",
        "FILE|NAME ...",
    ] = (),
    *,
    name: Annotated[str, "import: name of the new recipe (default: the file's)"] = "",
    model: Annotated[str, "import: OWNER/NAME of the Hub, where the file serves a folder", "OWNER/NAME"] = "",
    stack: Annotated[
        str | None, "import, check and show of a file: stack of pins/stacks/ (default: its container's)"
    ] = None,
    stage: Annotated[str | None, "show, import, export: stage of stages/ (default: base; the recipe's)"] = None,
    no_lock: Annotated[bool, "import: do not ask the Hub for the model's commit"] = False,
    dry_run: Annotated[bool, "import: print the new recipe, and write nothing"] = False,
    json: Annotated[bool, "check, show: machine-readable"] = False,
    format: Annotated[Literal["v1", "v2"], "export: for spark-vllm-docker or for sparkrun (default: v1)"] = "v1",
    output: Annotated[str, "export: file to write (default: print it)", "FILE"] = "",
) -> int:
    """List, check, show, import and export recipes.

    invoke recipe check their-recipe.yaml
    invoke recipe import their-recipe.yaml --name mine
    """
    given = {
        "--name": name, "--model": model, "--stack": stack, "--stage": stage, "--no-lock": no_lock,
        "--dry-run": dry_run, "--json": json, "--format": format != "v1", "--output": output,
    }  # fmt: skip
    others = [option for option, value in given.items() if value and option not in OPTIONS[action]]
    others += what[MOST.get(action, len(what)) :]
    if others:
        raise InputError(f"invoke recipe {action} does not take {' '.join(others)}", next_step="invoke recipe --help")
    if not what and action not in ("list", "check"):
        raise InputError(f"invoke recipe {action}: of which?", next_step=f"invoke recipe {action} FILE|NAME")
    paths = Paths.from_env()
    if action == "list":
        recipe_list(paths)
    elif action == "check":
        return MISTAKES * (not recipe_check(paths, what, stack=stack, as_json=json))
    elif action == "show":
        recipe_show(paths, what[0], stack=stack, stage=stage, as_json=json)
    elif action == "export":
        recipe_export(paths, *what, form=format, stage=stage, output=output)
    else:
        found = recipe_import(
            paths, what[0], name=name, stack=stack, stage=stage, lock=not no_lock, dry_run=dry_run, model=model
        )
        return MISTAKES * any(one.severity == "error" for one in found)
    return 0


def recipe_list(paths: Paths) -> None:
    """The recipes of recipes/. One that cannot be read is told as such: `recipe check NAME` says what is wrong."""
    rows = []
    for name in names_of(paths):
        try:
            read = manifests.load_recipe(paths.project, name)
            rows.append(tuple(map(printable, (name, read.model, read.stack, read.stage, read.description))))
        except SparkpinError:
            rows.append((name, "(cannot be read)", "", "", f"invoke recipe check {name}"))
    table(("recipe", "model", "stack", "stage", "what it is"), rows)


def names_of(paths: Paths) -> list[str]:
    return sorted(path.stem for path in (paths.project / "recipes").glob("*.yaml"))


def recipe_check(paths: Paths, what: Sequence[str] = (), *, stack: str | None = None, as_json: bool = False) -> bool:
    """Print what is found: all of it for one recipe, a table for several or for all of recipes/. Whether there is no
    error."""
    every = [check.check(paths.project, word, stack) for word in subjects(what) or names_of(paths)]
    good = [one for one in every if not one.errors]
    refused = len(every) - len(good)
    if as_json:
        rows = [asdict(one) | {"verdict": one.verdict} for one in every]
        show_json({"recipes": rows, "passed": len(good), "refused": refused})
    elif len(every) == 1 and what:
        report_check(every[0])
    else:
        heads = ("recipe", "verdict", "machines", "model", "first error")
        cells = [(one.name, one.verdict, one.machines, one.model, first_error(one)) for one in every]
        table(heads, [[printable(str(cell)) for cell in row] for row in cells])
        step = "; next: invoke recipe check FILE, for all of one" if refused else ""
        show(typed(f"{count(len(every), 'recipe')}: {len(good)} pass, {refused} refused{step}"))
    return not refused


def subjects(what: Sequence[str]) -> list[str]:
    """Files and names; a folder means all recipes below it."""
    found: list[str] = []
    for word in what:
        below = [str(file) for file in Path(word).rglob("*") if file.suffix in (".yaml", ".yml")]
        if Path(word).is_dir() and not below:
            raise InputError(f"{word}: no recipe there", next_step="give files, or folders of *.yaml")
        found += sorted(below) or [word]
    return list(dict.fromkeys(found))


def first_error(checked: check.CheckedRecipe) -> str:
    errors = [f"{one.key}: {one.text}" for one in checked.errors]
    return " ".join([*errors[:1], *([f"(+{len(errors) - 1})"] if errors[1:] else [])])


def report_check(checked: check.CheckedRecipe) -> None:
    """Verdict and next step come last, where a terminal has them in sight."""
    if checked.read_as:
        show(printable(f"{checked.name}: {checked.read_as}"))
    report(checked.found)
    counts = Counter(one.severity for one in checked.found)
    others = [count(counts[severity], severity) for severity in ORDER[1:] if counts[severity]]
    file = shlex.quote(checked.name)
    step = f"invoke recipe import {file}" if checked.read_as else f"invoke build --recipe {Path(checked.name).stem}"
    if checked.errors:
        step = f"correct {file}, then invoke recipe check {file}"
    verdict = count(len(checked.errors), "error") if checked.errors else "no errors"
    show(typed(printable(f"{', '.join([verdict, *others])}; next: {step}")))


def report(found: Sequence[RecipeFinding]) -> None:
    for finding in found:
        show(f"  {printable(str(finding))}")


def recipe_import(
    paths: Paths, file: str, *, name: str = "", stack: str | None = None, stage: str | None = None, lock: bool = True,
    dry_run: bool = False, model: str = "",
) -> list[RecipeFinding]:  # fmt: skip
    """Write recipes/NAME.yaml, and pins/models/MODEL.yaml with its lock where that model is not pinned yet.

    lock: False asks no Hub: the model's revision stays what is locked, or `unresolved`. Nothing is written on an error,
    and nothing with dry_run. What `check` finds of what was written.
    """
    project, path = paths.project, Path(file)
    target = project / f"recipes/{plain_name(name or path.stem)}.yaml"
    if target.exists():
        raise InputError(f"{target} is there already", next_step="give the new one another name: --name NAME")
    read = foreign.load(path)
    named = read.model_copy(update={"model": model}) if model else read
    made = adopt(project, named, target.stem, stack=stack, stage=stage)
    taken = parse(schema.Recipe, made.value, target)  # before anything is fetched or written
    pin, new = pin_of(paths, taken.model, made.model_revision)
    unmapped = [f"not mapped: {line}" for line in made.unmapped]
    head = f"Taken over from {path.name}, a recipe of version {read.version}, by `invoke recipe import`."
    try:
        if new and not dry_run:
            write(new, pin.model_dump(exclude={"name"}, exclude_unset=True), [f"Made for {path.name}."])
        revision = commit_of(paths, pin, lock=lock and not dry_run)
    except BaseException:  # a pin that cannot be locked goes again
        if new:
            new.unlink(missing_ok=True)
        raise
    value, wrote = made.value | {"model_revision": revision}, "would write" if dry_run else "wrote"
    if dry_run:
        show(tame(export.text_of(value, [head, *unmapped])))
    else:
        write(target, value, [head, *unmapped])
    lines = [f"{wrote} pins/models/{pin.name}.yaml"] if new else []
    lines.append(f"model {taken.model} at {revision}, as pins/models/{pin.name} says")
    for line in (*lines, *made.told, *unmapped):
        show(f"  {printable(line)}")
    vllm = manifests.load_stack(project, taken.stack).vllm
    show(f"{wrote} {taken.file}: stack {taken.stack} (vLLM {vllm}), stage {taken.stage}, model {taken.model}")
    report(found := check.own_findings(project, taken, pinned=False))
    todo = to_fetch(project, taken.mods) + ([f"invoke lock --model {pin.name}"] if revision == UNRESOLVED else [])
    show("next: " + "; ".join(todo or [f"invoke build --recipe {taken.name}"]))
    return found


def write(path: Path, value: dict[str, Any], comments: Sequence[str]) -> None:
    with files.atomic_file(path) as out:
        out.write(export.text_of(value, comments).encode())


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
    try:
        if manifests.model_lock_file(paths.project, pin.name).is_file():
            return manifests.load_model_lock(paths.project, pin).repositories[pin.base].revision
        if lock:
            return lock_model.lock_model(paths, pin.name).repositories[pin.base].revision
    except SparkpinError as error:
        error.next_step = f"{error.next_step}; or the same with --no-lock, and `invoke lock` later".removeprefix("; ")
        raise
    return pin.repositories[pin.base].revision


def recipe_show(
    paths: Paths, what: str, *, stack: str | None = None, stage: str | None = None, as_json: bool = False
) -> None:
    """Print the command and environment of a server to be, with where each word is from. Nothing need be locked."""
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
    if chosen.gpu and ALLOCATOR not in env:
        notes.append(f"{ALLOCATOR}=expandable_segments:True, which their runners set on a Spark, is not set here")
    notes += [about(*one) for one in templates_of(project, read.mods).items()]
    tables = {"command": words, "environment": variables}
    if as_json:
        value = {key: [{"text": printable(text), "from": of} for text, of in rows] for key, rows in tables.items()}
        show_json({"recipe": what, **value, "notes": notes})
        return
    on = f"stack {chosen.name} (vLLM {chosen.vllm}), stage {chain[-1].name}, model {read.model}"
    show(printable(f"{what}: {on}"))
    for title, rows in tables.items():
        table((title, "from"), [(printable(text), of) for text, of in rows])
    for note in notes:
        show(f"note: {printable(note)}")


def recipe_export(
    paths: Paths, what: str, release: str | None = None, *, form: export.Format, stage: str | None = None,
    output: str = "",
) -> None:  # fmt: skip
    """Print or write a recipe for spark-vllm-docker (v1) or sparkrun (v2), of the working tree or of a release."""
    target = files.output_file("--output", output) if output else None
    subject = of_release(paths, what, release) if release else of_tree(paths, what, stage)
    text = export.export(subject, form)
    for line in re.findall(r"^# (It listens on .*)", text, re.M):
        say(f"note: {line}")
    if Releases(paths).find(subject.image) is None:
        at = f" --stage {stage}" if stage else ""
        say(f"note: {subject.image} is not built yet; next: invoke build --recipe {subject.name}{at}")
    if target is None:
        show(text.rstrip())
        return
    with files.atomic_file(target) as out:
        out.write(text.encode())
    show(f"wrote {output}: {subject.image} for {export.TOOLS[form]}")


def of_tree(paths: Paths, name: str, stage: str | None) -> export.ExportedRecipe:
    last = pair(paths.project, name, stage=stage)[-1]
    published = set(last.steps) <= {"copy"} and not last.model.is_made
    folder = checkpoint_folder(paths, last.model, last.model_lock, last.steps)
    origin = origin_of(paths.project, last.recipe, last.stage.name)
    description = last.recipe.description
    return export.ExportedRecipe(
        last.recipe.name, description, last.tag, last.argv, dict(last.env), published, folder, origin
    )


def of_release(paths: Paths, name: str, tag: str) -> export.ExportedRecipe:
    """Its checkpoint is taken from the folder: what was published at that time is in no record."""
    records = Releases(paths)
    made = records.get(tag, name)
    origin, folder = None, records.checkpoint(made)
    try:
        with project_of(paths, made) as project:
            origin = origin_of(project, manifests.load_recipe(project, made.recipe), made.stage)
    except SparkpinError as error:
        say(f"note: `invoke recipe import` cannot take this export back: {reason(error)}")
    description = f"{made.recipe}, stage {made.stage}, {made.state_text}"
    return export.ExportedRecipe(made.recipe, description, made.tag, made.argv, dict(made.env), False, folder, origin)


def origin_of(project: Path, recipe: schema.Recipe, stage: str) -> foreign.RecipeOrigin:
    model = manifests.model_of(project, recipe)
    base = manifests.load_model_lock(project, model).repositories[model.base]
    mods = tuple(recipe.mods)
    return foreign.RecipeOrigin(
        model=base.repo, model_revision=base.revision, stack=recipe.stack, stage=stage, mods=mods
    )
