"""All that is wrong with a recipe, ours or the community's, on a stack of this project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparkpin import manifests, schema
from sparkpin.community import broken, keys, words
from sparkpin.community import recipe as foreign
from sparkpin.community.finding import Finding, ordered
from sparkpin.community.mapping import templates_of, useless
from sparkpin.community.release import Release, release
from sparkpin.community.render import render, vllm_serve
from sparkpin.community.words import Served, packages_of
from sparkpin.errors import InputError, ManifestError, SparkpinError
from sparkpin.families import vllm_version
from sparkpin.pairing import Pairing
from sparkpin.recipes import flag_value, own_argv, serve_argv

LACKS = "a lock: "  # as `manifests` begins what it wants of a pin that nobody has locked


def foreign_findings(project: Path, recipe: foreign.Recipe, stack: schema.Stack) -> list[Finding]:
    """Of the community's recipe, as its own runner would start it with the stack's vLLM."""
    found = [*keys.of_recipe(recipe)]
    try:
        rendered = render(recipe, nodes=1 if recipe.nodes == 1 else None)
    except (InputError, ManifestError) as error:
        if not any(finding.severity == "error" for finding in found):  # else it is one of those
            found.append(of_error(error))
        return ordered(found)
    rendered = replace(rendered, argv=vllm_serve(rendered.argv))
    found += keys.of_rendered(recipe, rendered)
    if recipe.nodes > 1:
        found.append(Finding("error", "nodes", f"it is for {recipe.nodes} machines or more; here is one"))
    if rendered.argv[:2] != ("vllm", "serve"):
        found.append(Finding("error", "command", f"{' '.join(rendered.argv[:2])}: the images here serve with vLLM"))
        return ordered(found)
    packages = locked_packages(project, stack)
    served = served_by(project, recipe.model, rendered.argv, rendered.env, stack, recipe.applied, packages)
    return ordered([*found, *of_served(served)])


def own_findings(project: Path, name: str) -> list[Finding]:
    """Of a recipe of recipes/, with what its stack and stages add."""
    recipe = manifests.load_recipe(project, name)
    stack = manifests.load_stack(project, recipe.stack)
    found = [*keys.of_template(recipe.command, recipe.defaults, version="1")]
    found += [Finding("warning", f"env.{name}", why, "remove it") for name in recipe.env if (why := useless(name))]
    try:
        own_argv(recipe)
        argv, env = serve_argv(recipe, stack, manifests.load_chain(project, recipe.stage))
    except (InputError, ManifestError) as error:
        if not any(finding.severity == "error" for finding in found):
            found.append(of_error(error))
        return ordered(found)
    try:
        manifests.model_of(project, recipe)
    except SparkpinError as error:
        seen = error.message.removeprefix(f"{project}/")
        if isinstance(error, ManifestError) and error.wanted.startswith(LACKS):
            seen = error.wanted.removeprefix(LACKS)
        found.append(Finding("note", "model", seen, f"next: {error.next_step.partition(': ')[0]}"))
    packages = locked_packages(project, stack)
    served = served_by(project, recipe.model, tuple(argv), env, stack, recipe.mods, packages)
    return ordered([*found, *of_served(served)])


def mistakes(project: Path, pairing: Pairing) -> list[Finding]:
    """What keeps a pairing's server from starting, or from doing what is meant: the errors alone."""
    recipe, stack = pairing.recipe, pairing.stack
    packages = packages_of([wheel.name for wheel in pairing.stack_lock.wheels])
    served = served_by(project, recipe.model, pairing.argv, pairing.env, stack, recipe.mods, packages)
    return [finding for finding in ordered(of_served(served)) if finding.severity == "error"]


def of_error(error: InputError | ManifestError) -> Finding:
    if isinstance(error, ManifestError):
        return Finding("error", error.key, f"saw {error.seen}, wanted {error.wanted}")
    return Finding("error", "(whole file)", error.message, error.next_step)


def of_served(served: Served) -> list[Finding]:
    return [*words.findings(served), *broken.findings(served), *of_version(served.release)]


def of_version(data: Release) -> list[Finding]:
    if data.version == data.wanted:
        return []
    text = f"nothing is recorded of vLLM {data.wanted}: held against {data.version}"
    return [Finding("note", "stack", text, "python -m sparkpin.community.wheelflags WHEEL records a release")]


def locked_packages(project: Path, stack: schema.Stack) -> frozenset[str] | None:
    if not (project / f"pins/stacks/{stack.name}.lock").is_file():
        return None
    return packages_of([wheel.name for wheel in manifests.former_stack_lock(project, stack.name).wheels])


def served_by(
    project: Path,
    model: str,
    argv: tuple[str, ...],
    env: dict[str, str],
    stack: schema.Stack,
    mods: Sequence[str],
    packages: frozenset[str] | None,
) -> Served:
    return Served(
        model=model,
        argv=argv,
        env=env,
        release=release(vllm_version(stack)),
        gpu=stack.gpu is not None,
        packages=packages,
        templates=templates_of(project, mods, flag_value(argv, "--chat-template")),
    )


def file_or_name(project: Path, what: str) -> tuple[Path, bool]:
    """The file that is meant, and whether it is one of recipes/, which a name means."""
    own = project / file_of_name(what)
    path = Path(what)
    if own.is_file() and (path.name == what or path.resolve() == own.resolve()):
        return own, True
    if path.is_file():
        return path, path.resolve().parent == (project / "recipes").resolve()
    known = ", ".join(sorted(file.stem for file in (project / "recipes").glob("*.yaml")))
    raise InputError(f"no recipe {what!r}", next_step=f"give a file, or one of: {known}")


def file_of_name(name: str) -> str:
    return f"recipes/{Path(name).stem if name.endswith('.yaml') else name}.yaml"
