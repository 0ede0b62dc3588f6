"""The task `recipe`: take one of the community over, write one for its tools, find mistakes."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

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
from sparkpin.recipes import check, export, mapping, yamlfile
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.adopt import adopt, plain_name
from sparkpin.recipes.finding import ORDER, RecipeFinding
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
        "check: files, folders, globs or names of recipes/, all of these when left out; show: a file or a name; "
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
    require_taken(action, [option for option, value in given.items() if value])
    paths = Paths.from_env()
    if action == "check":
        return MISTAKES * (not recipe_check(paths, what, stack=stack, as_json=json))
    if len(what) > MOST[action]:
        raise InputError(
            f"invoke recipe {action} does not take {what[MOST[action]]!r}", next_step="invoke recipe --help"
        )
    if action == "list":
        recipe_list(paths)
        return 0
    if not what:
        raise InputError(f"invoke recipe {action}: of which?", next_step=f"invoke recipe {action} FILE|NAME")
    if action == "import":
        found = recipe_import(
            paths, what[0], name=name, stack=stack, stage=stage, lock=not no_lock, dry_run=dry_run, model=model
        )
        return MISTAKES * any(one.severity == "error" for one in found)
    if action == "show":
        recipe_show(paths, what[0], stack=stack, stage=stage, as_json=json)
    else:
        recipe_export(paths, *what, form=format, stage=stage, output=output)
    return 0


def require_taken(action: str, given: Sequence[str]) -> None:
    if others := [option for option in given if option not in OPTIONS[action]]:
        step = "leave out what it does not take, or see invoke recipe --help"
        raise InputError(f"invoke recipe {action} does not take {' and '.join(others)}", next_step=step)


def recipe_list(paths: Paths) -> None:
    """The recipes of recipes/. One that cannot be read is told as such: `recipe check NAME` says what is wrong."""
    rows = []
    for name in names_of(paths):
        try:
            read = manifests.load_recipe(paths.project, name)
            rows.append(tuple(map(printable, (name, read.model, read.stack, read.stage, read.description))))
        except SparkpinError:
            rows.append((name, "(cannot be read)", "", "", f"invoke recipe check {name}"))
    table(("recipe", "model", "stack", "stage", "what it is"), rows, spare="model")


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
    path = Path(file)
    target = paths.project / f"recipes/{plain_name(name or path.stem)}.yaml"
    if target.exists():
        raise InputError(f"{target} is there already", next_step="give the new one another name: --name NAME")
    read = foreign.load(path)
    made = adopt(
        paths.project,
        read.model_copy(update={"model": model}) if model else read,
        target.stem,
        stack=stack,
        stage=stage,
    )
    taken = parse(schema.Recipe, made.value, target)  # before anything is fetched or written
    pinned = pin(paths, taken.model, made.model_revision, path.name, lock=lock and not dry_run, dry_run=dry_run)
    lines = [f"Taken over from {path.name}, a recipe of version {read.said_version}, by `invoke recipe import`."]
    unmapped = [f"not mapped: {line}" for line in made.unmapped]
    text = yamlfile.text_of(made.value | {"model_revision": pinned.revision}, [*lines, *unmapped])
    wrote = "would write" if dry_run else "wrote"
    if dry_run:
        show(tame(text))
    else:
        with files.atomic_file(target) as out:
            out.write(text.encode())
    if pinned.is_new:
        show(f"  {wrote} pins/models/{pinned.name}.yaml")
    unasked = ": nobody has asked the Hub yet" if pinned.revision == UNRESOLVED else ""
    for line in (f"model {taken.model} at {pinned.revision}{unasked}", *made.told, *unmapped):
        show(f"  {printable(line)}")
    if made.model_revision not in ("", UNRESOLVED, pinned.revision):
        show(f"  model_revision {made.model_revision} -> {pinned.revision}, as pins/models/{pinned.name} says")
    vllm = manifests.load_stack(paths.project, taken.stack).vllm
    show(f"{wrote} {taken.file}: stack {taken.stack} (vLLM {vllm}), stage {taken.stage}, model {taken.model}")
    report(found := check.own_findings(paths.project, taken, pinned=False))
    todo = to_fetch(paths.project, taken.mods)
    todo += [f"invoke lock --model {pinned.name}"] if pinned.revision == UNRESOLVED else []
    show("next: " + "; ".join(todo or [f"invoke build --recipe {taken.name}"]))
    return found


@dataclass(frozen=True)
class PinnedModel:
    name: str  # of the pin
    revision: str
    is_new: bool


def pin(paths: Paths, repo: str, revision: str, of: str, *, lock: bool, dry_run: bool) -> PinnedModel:
    """The model's pin and commit. A new pin goes again when it cannot be locked.

    revision: what the recipe says of it; of: the file that it is for.
    """
    known = [one for one in manifests.readable_models(paths.project)[0] if one.repositories[one.base].repo == repo]
    if known:
        return locked(paths, known[0], lock=lock, is_new=False)
    folder = paths.project / "pins/models"
    short, long = plain_name(repo.rpartition("/")[2]), plain_name(repo)
    name = long if (folder / f"{short}.yaml").exists() else short
    path = folder / f"{name}.yaml"
    if path.exists():
        raise InputError(f"{path} is there and pins another repository", next_step=f"rename it, or pin {repo}")
    commit = revision if COMMIT.fullmatch(revision) else UNRESOLVED
    base = {"repo": repo, "revision": commit}
    value = {"description": f"{repo} as published", "base": "base", "repositories": {"base": base}}
    if dry_run:
        return PinnedModel(name, commit, is_new=True)
    with files.atomic_file(path) as out:
        out.write(yamlfile.text_of(value, [f"Made for {of} by `invoke recipe import`."]).encode())
    try:
        return locked(paths, manifests.load_model(paths.project, name), lock=lock, is_new=True)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def locked(paths: Paths, model: schema.ModelPin, *, lock: bool, is_new: bool) -> PinnedModel:
    revision = model.repositories[model.base].revision
    try:
        if manifests.model_lock_file(paths.project, model.name).is_file():
            revision = manifests.load_model_lock(paths.project, model).repositories[model.base].revision
        elif lock:
            revision = lock_model.lock_model(paths, model.name).repositories[model.base].revision
    except SparkpinError as error:
        hint = "or the same command with --no-lock, and `invoke lock` later"
        error.next_step = f"{error.next_step}; {hint}" if error.next_step else hint
        raise
    return PinnedModel(model.name, revision, is_new)


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
    notes += [mapping.about(*one) for one in templates_of(project, read.mods).items()]
    tables = {
        title: [(printable(text), place) for text, place in rows]
        for title, rows in (("command", words), ("environment", variables))
    }
    if as_json:
        value = {key: [{"text": text, "from": place} for text, place in rows] for key, rows in tables.items()}
        show_json({"recipe": what, **value, "notes": notes})
        return
    of = f"stack {chosen.name} (vLLM {chosen.vllm}), stage {chain[-1].name}, model {read.model}"
    show(printable(f"{what}: {of}"))
    for title, rows in tables.items():
        table((title, "from"), rows)
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
    return export.ExportedRecipe(
        name=last.recipe.name,
        description=last.recipe.description,
        image=last.tag,
        argv=last.argv,
        env=dict(last.env),
        published=set(last.steps) <= {"copy"} and not last.model.is_made,
        checkpoint=checkpoint_folder(paths, last.model, last.model_lock, last.steps),
        origin=origin_of(last.recipe, last.model, last.model_lock, last.stage.name),
    )


def origin_of(
    recipe: schema.Recipe, model: schema.ModelPin, lock: schema.ModelLock, stage: str
) -> foreign.RecipeOrigin:
    base = lock.repositories[model.base]
    return foreign.RecipeOrigin(
        model=base.repo, model_revision=base.revision, stack=recipe.stack, stage=stage, mods=tuple(recipe.mods)
    )


def of_release(paths: Paths, name: str, tag: str) -> export.ExportedRecipe:
    """Its checkpoint is taken from the folder: what was published at that time is in no record."""
    records = Releases(paths)
    release = records.get(tag, name)
    origin = None
    try:
        with project_of(paths, release) as project:
            was = manifests.load_recipe(project, release.recipe)
            model = manifests.model_of(project, was)
            origin = origin_of(was, model, manifests.load_model_lock(project, model), release.stage)
    except SparkpinError as error:
        say(f"note: `invoke recipe import` cannot take this export back: {reason(error)}")
    return export.ExportedRecipe(
        name=release.recipe,
        description=f"{release.recipe}, stage {release.stage}, {release.state_text}",
        image=release.tag,
        argv=release.argv,
        env=dict(release.env),
        published=False,
        checkpoint=records.checkpoint(release),
        origin=origin,
    )
