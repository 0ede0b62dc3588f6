"""The task `recipe`: take one of the community over, write one for its tools, find mistakes."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from sparkpin.build.pair import pair
from sparkpin.checkpoint.write import checkpoint_folder
from sparkpin.cli.tasks import task
from sparkpin.core import files
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, show_json, table, tame
from sparkpin.fetch import lock_model
from sparkpin.pins import drafters, manifests, schema, vllm_command, vllm_flags
from sparkpin.pins.mods import in_workspace, templates_of, to_fetch
from sparkpin.pins.nodes import spread
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.pins.vllm_command import origins
from sparkpin.recipes import adopt, check, export, mapping, yamlfile
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.finding import RecipeFinding, ordered
from sparkpin.recipes.render import machines_of
from sparkpin.releases import container
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.record import Releases

COMMIT = re.compile(r"[0-9a-f]{40}")
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
LAUNCHER = "launcher"
UNREAD: tuple[str, int | str, str] = ("?", "?", "?")
MISTAKES = 4  # exit code
OPTIONS = {
    "list": (),
    "check": ("--stack", "--json"),
    "show": ("--stack", "--stage", "--json"),
    "import": ("--name", "--model", "--stack", "--stage", "--no-lock", "--dry-run"),
    "export": ("--stage", "--format", "--output"),
}
MIRRORED = (".", "pins", "pins/models", "recipes")


@dataclass(frozen=True)
class CheckedRecipe:
    """machines, model: "?" where the file does not tell."""

    name: str
    stack: str
    machines: int | str
    model: str
    found: list[RecipeFinding]
    read_as: str = ""  # of a file that is none of recipes/

    @property
    def errors(self) -> list[RecipeFinding]:
        return [finding for finding in self.found if finding.severity == "error"]

    @property
    def verdict(self) -> str:
        return "refused" if self.errors else "passes"


@dataclass(frozen=True)
class ImportedRecipe:
    target: Path
    lines: list[str]  # for people
    found: list[RecipeFinding]  # by `check` of what was written

    @property
    def good(self) -> bool:
        return not any(finding.severity == "error" for finding in self.found)


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
    most = {"list": 0, "export": 2}.get(action, 1)
    if len(what) > most:
        raise InputError(f"invoke recipe {action} does not take {what[most]!r}", next_step="invoke recipe --help")
    first, *more = what or [""]
    if action == "list":
        recipe_list(paths)
    elif not first:
        raise InputError(f"invoke recipe {action}: of which?", next_step=f"invoke recipe {action} FILE|NAME")
    elif action == "show":
        recipe_show(paths, first, stack=stack, stage=stage, as_json=json)
    elif action == "import":
        lock = not no_lock
        made = recipe_import(paths, first, name=name, stack=stack, stage=stage, lock=lock, dry_run=dry_run, model=model)
        return MISTAKES * (not made.good)
    else:
        recipe_export(paths, first, form=format, release=more[0] if more else None, stage=stage, output=output)
    return 0


def require_taken(action: str, given: Sequence[str]) -> None:
    if others := [option for option in given if option not in OPTIONS[action]]:
        step = f"leave {'it' if len(others) == 1 else 'them'} out, or see invoke recipe --help"
        raise InputError(f"invoke recipe {action} does not take {' and '.join(others)}", next_step=step)


def require_file(name: str, stack: str | None) -> None:
    """InputError for --stack with a recipe of recipes/, which names its own."""
    if stack is not None:
        step = "leave --stack out, or change the key `stack` of the recipe"
        raise InputError(f"--stack {stack} is for a file: {name} of recipes/ names its stack", next_step=step)


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


def recipe_import(
    paths: Paths, file: str, *, name: str = "", stack: str | None = None, stage: str | None = None, lock: bool = True,
    dry_run: bool = False, model: str = "",
) -> ImportedRecipe:  # fmt: skip
    """Write recipes/NAME.yaml, and pins/models/MODEL.yaml with its lock where that model is not pinned yet.

    lock: False asks no Hub: the model's revision stays what is locked, or `unresolved`. Nothing is written on an error,
    and nothing with dry_run.
    """
    with mirrored(paths) if dry_run else contextlib.nullcontext(paths) as to:
        made = imported(to, file, name=name, stack=stack, stage=stage, lock=lock and not dry_run, model=model)
        if dry_run:
            show(tame(made.target.read_text(encoding="utf-8")))
    for line in made.lines:
        show(line.replace("wrote", "would write", 1) if dry_run else line)
    report(made.found)
    return made


@contextlib.contextmanager
def mirrored(paths: Paths) -> Iterator[Paths]:
    """The project's files under another folder, where recipes and pins of models can be added without a trace."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for place in MIRRORED:
            (project / place).mkdir(exist_ok=True)
            for file in (paths.project / place).iterdir():
                if (below := Path(place, file.name)).as_posix() not in MIRRORED:
                    (project / below).symlink_to(file.resolve())
        try:
            yield replace(paths, project=project)
        except SparkpinError as error:  # it is to name the files that people have
            error.message = error.message.replace(folder, str(paths.project))
            error.next_step = error.next_step.replace(folder, str(paths.project))
            raise


def imported(
    paths: Paths, file: str, *, name: str, stack: str | None, stage: str | None, lock: bool, model: str = ""
) -> ImportedRecipe:
    project, path = paths.project, Path(file)
    read = foreign.load(path)
    recipe, rendered = adopt.as_served(replace(read, model=model) if model else read)
    found = mapping.mapped(recipe, stack=stack, stage=stage)
    chosen = manifests.load_stack(project, found.stack)
    manifests.load_chain(project, found.stage)
    target = project / f"recipes/{adopt.plain_name(name or path.stem)}.yaml"
    if target.exists():
        raise InputError(f"{target} is there already", next_step="give the new one another name: --name NAME")
    version = chosen.vllm
    made = adopt.adopt(project, recipe, rendered, target.stem, found, version)  # before anything is fetched
    revision, pinned = pin(paths, recipe, lock=lock)
    made.value["model_revision"] = revision
    lines = [f"Taken over from {path.name}, a recipe of version {recipe.said_version}, by `invoke recipe import`."]
    lines += [f"not mapped: {line}" for line in made.unmapped]
    with files.atomic_file(target) as out:
        out.write(yamlfile.text_of(made.value, lines).encode())
    told = [
        f"  {printable(line)}" for line in (*pinned, *made.told, *(f"not mapped: {line}" for line in made.unmapped))
    ]
    of = f"stack {chosen.name} (vLLM {version}), stage {found.stage}, model {recipe.model}"
    todo = to_fetch(project, made.value.get("mods", ()))
    todo += [f"invoke lock --model {model_name(paths, recipe.model)}"] if revision == UNRESOLVED else []
    after = "next: " + "; ".join(todo or [f"invoke build --recipe {made.name}"])
    told += [f"wrote {target.relative_to(project)}: {of}", after]
    return ImportedRecipe(target, told, check.own_findings(project, made.name))


def recipe_show(
    paths: Paths, what: str, *, stack: str | None = None, stage: str | None = None, as_json: bool = False
) -> None:
    """Print the command and environment of a server to be, with where each word is from. Nothing need be locked."""
    path, own = check.file_or_name(paths.project, what)
    if own:
        require_file(path.stem, stack)
    with contextlib.nullcontext(paths) if own else mirrored(paths) as to:
        made = None if own else imported(to, str(path), name=f"{path.stem}-shown", stack=stack, stage=stage, lock=False)
        read = manifests.load_recipe(to.project, made.target.stem if made else path.stem)
        chosen = manifests.load_stack(to.project, read.stack)
        chain = manifests.load_chain(to.project, stage or read.stage)
        family = vllm_command.family_of(manifests.load_families(to.project), read.model)
    said, env = vllm_command.serve_argv(read, chosen, chain)
    added = vllm_command.choices(family, chosen.vllm, said)
    argv, env = spread(vllm_command.completed(said, added), env, read.nodes, gpu=chosen.gpu is not None)
    if read.mods:
        argv = in_workspace(argv)
    places = {read.file: "recipe", f"pins/stacks/{chosen.name}.yaml": f"stack {chosen.name}"}
    places |= {f"stages/{one.name}.yaml": f"stage {one.name}" for one in chain}
    where = {key: places[file] for key, file in origins(read, chosen, chain).items()}
    where |= {vllm_flags.Flag((one.flag,)).key: f"family {family.name}" for one in added if family}
    head, flags = vllm_flags.parse_flags(argv)
    words = [(printable(shlex.join(head)), LAUNCHER)]
    words += [(printable(shlex.join(flag.words)), where.get(flag.key, LAUNCHER)) for flag in flags]
    variables = [
        (printable(f"{name}={value}"), where.get(name, LAUNCHER)) for name, value in (container.ENV | env).items()
    ]
    notes = differences(chosen, env, added)
    notes += [mapping.about(*one) for one in templates_of(paths.project, read.mods).items()]
    notes += [line.strip() for line in made.lines if line.startswith("  not mapped")] if made else []
    if as_json:
        rows = {"command": words, "environment": variables}
        value = {key: [{"text": text, "from": place} for text, place in found] for key, found in rows.items()}
        show_json({"recipe": what, **value, "notes": notes})
        return
    of = f"stack {chosen.name} (vLLM {chosen.vllm}), stage {chain[-1].name}, model {read.model}"
    show(printable(f"{what}: {of}"))
    table(("command", "from"), words)
    table(("environment", "from"), variables)
    for note in notes:
        show(f"note: {printable(note)}")


def differences(stack: schema.Stack, env: Mapping[str, str], added: Sequence[vllm_command.Chosen]) -> list[str]:
    """What a server here has otherwise than one that the community's runners start from the same file."""
    found = [f"{one.line.removeprefix('chosen: ')}; their runners leave it out" for one in added]
    if stack.gpu and ALLOCATOR not in env:
        text = f"{ALLOCATOR}=expandable_segments:True is set by their runners on a Spark (sparkrun 0.4.2), and not here"
        found.append(f"{text}; write it in the recipe's `env` where it is wanted")
    return found


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
        return lock_model.lock_model(paths, name).repositories[pinned.base].revision
    except SparkpinError as error:
        hint = "or the same command with --no-lock, and `invoke lock` later"
        error.next_step = f"{error.next_step}; {hint}" if error.next_step else hint
        raise


def recipe_export(
    paths: Paths, what: str, *, form: str, release: str | None = None, stage: str | None = None, output: str = ""
) -> None:
    """Print or write a recipe for spark-vllm-docker (v1) or sparkrun (v2), of the working tree or of a release."""
    target = files.output_file("--output", output) if output else None
    subject = of_release(paths, what, release) if release else of_tree(paths, what, stage)
    if drafters.speculation(subject.argv).get("model") == drafters.PATH:
        raise InputError(
            f"{subject.image} is served with a second model that lies in its checkpoint: no file of {form} can say so",
            next_step=f"invoke export {subject.image}, which takes both",
        )
    kind: export.Format = "v1" if form == "v1" else "v2"
    text = export.text_of(subject, kind)
    if line := export.listening(export.host_of(subject, kind)):
        say(f"note: {line}")
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


def recipe_check(paths: Paths, what: Sequence[str] = (), *, stack: str | None = None, as_json: bool = False) -> bool:
    """Print what is found: all of it for one recipe, a table for several or for all of recipes/. Whether there is no
    error."""
    words = subjects(what) if what else names_of(paths)
    alone = len(words) == 1 and words[0] in what
    every = [checked(paths, word, stack=stack, alone=alone) for word in words]
    good = [one for one in every if not one.errors]
    if as_json:
        rows = [asdict(one) | {"verdict": one.verdict} for one in every]
        show_json({"recipes": rows, "passed": len(good), "refused": len(every) - len(good)})
    elif alone:
        one_check(every[0])
    else:
        folders = [Path(one.name).parent for one in every]  # ours are told as of the project
        root = os.path.commonpath(folders) if len({folder.is_absolute() for folder in folders}) == 1 else ""
        table(
            ("recipe", "verdict", "machines", "model", "what is missing"),
            [
                (
                    printable(os.path.relpath(one.name, root or ".")),
                    one.verdict,
                    one.machines,
                    printable(one.model),
                    missing(one),
                )
                for one in every
            ],
        )
        refused = len(every) - len(good)
        step = f"; next: invoke recipe check {shlex.quote(root or '.')}/FILE tells all of one" if refused else ""
        show(printable(f"{count(len(every), 'recipe')} of {root or '.'}: {len(good)} pass, {refused} refused{step}"))
    return len(good) == len(every)


def subjects(what: Sequence[str]) -> list[str]:
    """Files and names: a folder means all recipes below it, and a glob is one that the shell has left as it is."""
    found: list[str] = []
    for word in what:
        place, many = Path(word), None
        if place.is_dir():
            many = [str(file) for file in place.rglob("*") if file.suffix in (".yaml", ".yml")]
        elif glob.has_magic(word) and not place.exists():
            many = [file for file in glob.glob(word, recursive=True) if Path(file).is_file()]
        if many == []:
            raise InputError(f"{word}: no recipe there", next_step="give files, folders or globs of *.yaml")
        found += [word] if many is None else sorted(many)
    return list(dict.fromkeys(found))


def missing(checked: CheckedRecipe) -> str:
    """The first error, and how many more."""
    if not checked.errors:
        return ""
    first, more = checked.errors[0], len(checked.errors) - 1
    return printable(f"{first.key}: {first.text}" + (f" (+{more})" if more else ""))


def checked(paths: Paths, word: str, *, stack: str | None, alone: bool) -> CheckedRecipe:
    """alone: an error of the file itself is raised, since there is nothing else to tell."""
    path, own = check.file_or_name(paths.project, word)
    if own:
        require_file(path.stem, stack)
        read, found = None, check.own_findings(paths.project, path.stem)
        with contextlib.suppress(SparkpinError):
            read = manifests.load_recipe(paths.project, path.stem)
        told = (read.stack, read.nodes, read.model) if read else UNREAD
        return CheckedRecipe(f"recipes/{path.name}", *told, found)
    try:
        recipe = foreign.load(path)
        said = recipe.origin.stack if recipe.origin else mapping.stack_of(recipe.container)[0]
        chosen = manifests.load_stack(paths.project, stack or said or mapping.STACK)
    except SparkpinError as error:
        if alone:
            raise
        return CheckedRecipe(word, *UNREAD, [check.of_error(error)])
    found = check.foreign_findings(paths.project, recipe, chosen)
    found += as_imported(paths.project, recipe, stack, chosen.vllm, found)
    machines: int | str = "?"
    with contextlib.suppress(SparkpinError):
        machines = machines_of(recipe)
    read_as = f"version {recipe.said_version}, compared with stack {chosen.name} (vLLM {chosen.vllm})"
    name = path.name if alone else word
    return CheckedRecipe(name, chosen.name, machines, recipe.model, ordered(found), read_as)


def as_imported(
    project: Path, recipe: foreign.CommunityRecipe, stack: str | None, version: str, found: Sequence[RecipeFinding]
) -> list[RecipeFinding]:
    """What `import` would say. A refusal is told once: not where an error is found already."""
    try:
        served, rendered = adopt.as_served(recipe)
        to = mapping.mapped(served, stack=stack, stage=None)
        made = adopt.adopt(project, served, rendered, adopt.plain_name(recipe.path.stem), to, version)
    except SparkpinError as error:
        return [] if any(one.severity == "error" for one in found) else [check.of_error(error)]
    lines = [RecipeFinding("warning", "import", f"not mapped: {line}") for line in made.unmapped]
    return [*lines, *(RecipeFinding("note", "import", line) for line in made.told)]


def one_check(checked: CheckedRecipe) -> None:
    errors, name = len(checked.errors), printable(checked.name)
    others = len(checked.found) - errors
    if checked.read_as:
        show(f"{name}: {printable(checked.read_as)}")
    show(f"{name}: {count(errors, 'error')}, {others} other" if checked.found else f"{name}: nothing found")
    report(checked.found)


def report(found: list[RecipeFinding]) -> None:
    for finding in found:
        show(f"  {printable(str(finding))}")
