"""A recipe and a stage, joined: image, checkpoint and flags as one thing that has a key and a tag.

`pair` is pure apart from reading the project's files: nothing is fetched, built or asked of an engine.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build import render
from sparkpin.build.record import RenderedImage
from sparkpin.build.render import Templates
from sparkpin.checkpoint.steps import checkpoint_key, checkpoint_steps, lock_for, require, rules_of
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.fetch.model_files import config_here
from sparkpin.memory.division import division_faults
from sparkpin.pins import drafters, manifests, schema, vllm_command
from sparkpin.pins.mods import Mod, in_workspace, read_templates
from sparkpin.pins.nodes import nodes_of, spread
from sparkpin.pins.values import text_faults
from sparkpin.releases.record import Demands, release_key
from sparkpin.smoke.demands import demands_of


@dataclass(frozen=True)
class Pairing:
    """One stage of a recipe's chain, with everything that decides its release.

    chosen: the flags of `argv` that neither recipe nor stack nor stage says.
    """

    recipe: schema.Recipe
    stack: schema.Stack
    stack_lock: schema.StackLock
    model: schema.ModelPin
    model_lock: schema.ModelLock
    chain: tuple[schema.Stage, ...]
    rendered: RenderedImage
    steps: tuple[str, ...]
    checkpoint_key: str
    argv: tuple[str, ...]
    env: dict[str, str]
    demands: Demands
    inputs: dict[str, str]
    executable: tuple[str, ...]
    chosen: tuple[vllm_command.Chosen, ...] = ()

    @property
    def stage(self) -> schema.Stage:
        return self.chain[-1]

    @property
    def key(self) -> str:
        return release_key(self.rendered.key, self.checkpoint_key, self.argv, self.env)

    @property
    def tag(self) -> str:
        return tag_of(self.recipe.name, self.stage.name, self.key)


def pair(
    project: Path, recipe_name: str, *, stage: str | None = None, stack_name: str | None = None
) -> tuple[Pairing, ...]:
    """The pairings of the chain from the first stage to `stage` (the recipe's own when None)."""
    recipe = manifests.load_recipe(project, recipe_name)
    if stack_name not in (None, recipe.stack):
        step = f"leave --stack out, or choose a recipe of {stack_name!r}"
        expected = f"{recipe.stack!r}, as recipe {recipe.name!r} says"
        raise InputError(f"--stack: got {stack_name!r}, expected {expected}", next_step=step)
    stack = manifests.load_stack(project, recipe.stack)
    stack_lock = manifests.load_stack_lock(project, stack)
    model = manifests.model_of(project, recipe)
    model_lock = manifests.load_model_lock(project, model)
    chain = manifests.load_chain(project, stage or recipe.stage)
    templates = read_templates(project, recipe.mods, recipe.file, stack.vllm)
    rendered = render.render_chain(project, stack, stack_lock, chain, templates)
    family = vllm_command.family_of(manifests.load_families(project), recipe.model, recipe.family)
    read = functools.cache(lambda name: read_input(project, name))
    pairings = []
    for end, image in enumerate(rendered, start=1):
        below = chain[:end]
        steps = checkpoint_steps(below, model)
        require(model, steps)
        given, env = vllm_command.serve_argv(recipe, stack, below)
        drafters.require_used(recipe, given)
        chosen = vllm_command.choices(family, stack.vllm, given)
        argv, env = spread(vllm_command.completed(given, chosen), env, recipe.nodes, gpu=stack.gpu is not None)
        mods = [file.source for one in rendered[:end] for file in one.context if isinstance(file.source, Mod)]
        files = {f"mods/{mod.name}/{file.path}": file for mod in mods for file in mod.files}
        names = input_names(project, recipe, model, below, templates)
        pairings.append(
            Pairing(
                recipe=recipe,
                stack=stack,
                stack_lock=stack_lock,
                model=model,
                model_lock=lock_for(model, model_lock, steps),
                chain=below,
                rendered=image,
                steps=steps,
                checkpoint_key=checkpoint_key(model, model_lock, steps),
                argv=tuple(in_workspace(argv) if templates else argv),
                env=env,
                demands=demands_of(project, stack, below, model),
                inputs={name: read(name) for name in names} | {name: file.sha256 for name, file in files.items()},
                executable=tuple(name for name, file in files.items() if file.is_executable),
                chosen=chosen,
            )
        )
    return tuple(pairings)


def require_model_fits(paths: Paths, pairing: Pairing) -> tuple[str, ...]:
    """ManifestError where the machines' shares of the model are not whole, or where the drafter cannot draft for it.

    Both follow from config.json, which is read where it was fetched. What could not be checked, and why.
    """
    file, model, lock, drafter = pairing.recipe.file, pairing.model, pairing.model_lock, pairing.model.drafter
    is_divided = nodes_of(pairing.argv) > 1
    if not (is_divided or drafter):
        return ()
    target = config_here(paths, model, lock)
    unchecked, faults = [] if target else [f"{model.name} has no config.json here yet"], list[ManifestError]()
    if drafter and drafter.drafts:
        plan, config = drafters.speculation(pairing.argv), config_here(paths, model, lock, schema.DRAFTER)
        faults += drafters.method_faults(plan, drafter.drafts, file)
        if target and config:
            faults += drafters.pair_faults(plan, target, config, f"pins/models/{drafter.name}.yaml")
        unchecked += [] if config else [f"{drafter.name} has no config.json here yet"]
    if target and is_divided:
        try:
            faults += division_faults(target, pairing.argv, rules_of(model, pairing.steps), file)
        except ManifestError as error:  # a model of a shape that nobody taught us
            unchecked.append(error.message)
    for fault in faults:
        raise fault
    return tuple(f"{file}: whether the model fits is not checked: {why}" for why in unchecked)


def require_no_secrets(files: Mapping[str, bytes]) -> None:
    """Of what people write: it is kept with the release, and goes into its bundles. ManifestError. files: by name."""
    for name, content in files.items():
        if name.endswith(".yaml"):
            for fault in text_faults(content.decode(errors="replace"), name):
                raise fault


def input_names(
    project: Path, recipe: schema.Recipe, model: schema.ModelPin, chain: Sequence[schema.Stage], templates: Templates
) -> list[str]:
    """The files that people edit, and the locks, by their paths below the project.

    All templates of dockerfiles/: those of the stages may import the others.
    """
    pins = [f"stacks/{recipe.stack}", f"models/{model.name}"]
    pins += [f"models/{model.drafter.name}"] if model.drafter else []
    names = [f"recipes/{recipe.name}.yaml", *(f"pins/{pin}.{end}" for pin in pins for end in ("yaml", "lock"))]
    names += [f"stages/{stage.name}.yaml" for stage in chain]
    names += [manifests.FAMILIES] if (project / manifests.FAMILIES).is_file() else []
    names += [manifests.COMMUNITY_MODS, *(one.file for one in templates)] if templates else []
    files = sorted(path for path in (project / "dockerfiles").iterdir() if path.is_file())
    return [*names, *(f"dockerfiles/{path.name}" for path in files)]


def read_input(project: Path, name: str) -> str:
    """SHA-256 of a file of the project. ManifestError for a secret in it."""
    data = (project / name).read_bytes()
    require_no_secrets({name: data})
    return hashlib.sha256(data).hexdigest()
