"""The tasks `recipe ...`: find mistakes, show what would run, write one for the community's tools."""

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
from sparkpin.cli.tasks import Json, task
from sparkpin.core import files
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.names import names_in
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, show_file, show_json, table, typed
from sparkpin.pins import manifests, schema, vllm_command, vllm_flags
from sparkpin.pins.mods import in_workspace, templates_of
from sparkpin.pins.nodes import spread
from sparkpin.pins.reading import parse
from sparkpin.recipes import check, export
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.adopt import Wanted, about, adopt, plain_name
from sparkpin.recipes.rules import ORDER, of_error
from sparkpin.releases import container
from sparkpin.releases.record import Releases

LAUNCHER = "launcher"
MISTAKES = 4  # exit code

FileOrName = Annotated[str, "file, or a name of recipes/", "FILE|NAME"]
FileStack = Annotated[str | None, "of a file: stack of pins/stacks/ (default: its container's)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's, or base)"]


@task("inputs")
def recipe_list(paths: Paths) -> None:
    """List the recipes of recipes/.

    invoke recipe list
    """
    rows = []
    for name in names_in(paths.project / "recipes"):
        try:
            read = manifests.load_recipe(paths.project, name)
            rows.append(tuple(map(printable, (name, read.stack, read.stage, read.description))))
        except SparkpinError:
            rows.append((name, "", "", f"cannot be read: invoke recipe check {name}"))
    table(("recipe", "stack", "stage", "what it is"), rows)


@task("inputs")
def recipe_check(
    paths: Paths,
    what: Annotated[
        tuple[str, ...],
        "files: recipes, a `vllm serve` or `docker run` line, Compose; folders; names of recipes/ (default: all)",
        "FILE|NAME ...",
    ] = (),
    *,
    stack: FileStack = None,
    json: Json = False,
) -> int:
    """Find mistakes in recipes, ours or others'.

    invoke recipe check their-recipe.yaml
    """
    words, every, code = subjects(what) or names_in(paths.project / "recipes"), list[check.CheckedRecipe](), 0
    for word in words:
        try:
            one = check.check(paths.project, word, stack)
            code = max(code, MISTAKES * bool(one.errors))
        except InputError as fault:
            if len(words) == 1:
                raise
            one, code = check.CheckedRecipe(word, [of_error(fault, "file")]), max(code, fault.exit_code)
        every.append(one)
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
    return code


def subjects(what: Sequence[str]) -> list[str]:
    """Files and names; a folder means all recipes below it."""
    found: list[str] = []
    for word in what:
        below = [str(file) for file in Path(word).rglob("*") if file.is_file() and foreign.is_recipe(file)]
        found += sorted(below) or [word]
    return list(dict.fromkeys(found))


def report_check(checked: check.CheckedRecipe) -> None:
    """Verdict and next step come last, where a terminal has them in sight."""
    if checked.read_as:
        show(printable(f"{checked.name}: {checked.read_as}"))
    for finding in checked.found:
        show(f"  {printable(str(finding))}")
    found, file = Counter(one.severity for one in checked.found), shlex.quote(checked.name)
    counts = [count(found[severity], severity) for severity in ORDER if found[severity]]
    step = f"invoke add {file}" if checked.read_as else f"invoke build --recipe {Path(checked.name).stem}"
    if checked.errors:
        step = f"correct {file}, then invoke recipe check {file}"
    else:
        counts = ["no errors", *counts]
    step = next((one.step for one in checked.found if one.step), step)
    show(typed(printable(f"{', '.join(counts)}; next: {step}")))


@task("inputs")
def recipe_show(
    paths: Paths, what: FileOrName, *, stack: FileStack = None, stage: Stage = None, json: Json = False
) -> None:
    """Print the command and environment that a recipe would run.

    invoke recipe show their-recipe.yaml
    """
    project, notes = paths.project, list[str]()
    path, is_ours = check.file_or_name(project, what, stack)
    if is_ours:
        read = manifests.load_recipe(project, path.stem)
    else:
        adopted = adopt(project, foreign.load(path), plain_name(path.stem), Wanted(stack=stack, stage=stage))
        read = parse(schema.Recipe, adopted.value, path)
        notes += [f"not mapped: {line}" for line in adopted.unmapped]
    chosen, chain = manifests.load_stack(project, read.stack), manifests.load_chain(project, stage or read.stage)
    family = vllm_command.family_of(manifests.load_families(project), read.model, read.family)
    base_argv, env = vllm_command.serve_argv(read, chosen, chain)
    added = vllm_command.choices(family, chosen.vllm, base_argv)
    argv, env = spread(vllm_command.completed(base_argv, added), env, read.nodes, gpu=chosen.gpu is not None)
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
    """Write a recipe for spark-vllm-docker or sparkrun.

    invoke recipe export qwen3.5-122b --format v2 --output mine.yaml
    """
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
        with files.atomic_file(target) as out:
            out.write(text.encode())
        show(f"wrote {output}: {last.tag} for {export.TOOLS[format]}")
