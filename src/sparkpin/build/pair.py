"""A recipe and a stage, joined: image, checkpoint and flags as one thing that has a key and a tag.

Pure apart from reading the project's files: nothing is fetched, built or asked of an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build import render
from sparkpin.build.demands import demands_of
from sparkpin.checkpoint.steps import checkpoint_key, checkpoint_steps, lock_for, require, rules_of
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.fetch.model_files import config_here
from sparkpin.pins import drafters, manifests, schema, vllm_command
from sparkpin.pins.mods import CarriedTemplate, Mod, in_workspace, read_templates
from sparkpin.pins.nodes import nodes_of, spread
from sparkpin.pins.values import text_faults
from sparkpin.releases.record import Demands, release_key
from sparkpin.serve.memory.node_shares import share_faults
from sparkpin.smoke.drafting import require_drafter


@dataclass(frozen=True)
class Pairing:
    """One stage of a recipe's chain, with everything that decides its release.

    chosen: the flags of `argv` that neither recipe nor stack nor stage says. unchecked: what could
    not be compared with the model.
    """

    recipe: schema.Recipe
    stack: schema.Stack
    stack_lock: schema.StackLock
    model: schema.ModelPin
    model_lock: schema.ModelLock
    stage: schema.Stage
    chain: tuple[schema.Stage, ...]
    rendered: render.RenderedImage
    steps: tuple[str, ...]
    checkpoint_key: str
    argv: tuple[str, ...]
    env: dict[str, str]
    key: str
    demands: Demands
    inputs: dict[str, str]
    executable: tuple[str, ...]
    chosen: tuple[vllm_command.Chosen, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        return tag_of(self.recipe.name, self.stage.name, self.key)


def pair(
    project: Path, recipe_name: str, *, stage: str | None = None, stack_name: str | None = None
) -> tuple[Pairing, ...]:
    """The pairings of the chain from the first stage to `stage` (the recipe's own when None)."""
    recipe = manifests.load_recipe(project, recipe_name)
    if stack_name not in (None, recipe.stack):
        raise InputError(
            f"recipe {recipe.name!r} is pinned to the stack {recipe.stack!r}, not {stack_name!r}",
            next_step=f"leave --stack out, or choose a recipe of {stack_name!r}",
        )
    stack = manifests.load_stack(project, recipe.stack)
    stack_lock = manifests.load_stack_lock(project, stack)
    model = manifests.model_of(project, recipe)
    model_lock = manifests.load_model_lock(project, model)
    chain = manifests.load_chain(project, stage or recipe.stage)
    templates = read_templates(project, recipe.mods, recipe.file, stack.vllm)
    rendered = render.render_chain(project, stack, stack_lock, chain, templates)
    family = vllm_command.family_of(manifests.load_families(project), recipe.model)
    pairings = []
    for end, image in enumerate(rendered, start=1):
        steps = checkpoint_steps(chain[:end], model)
        require(model, steps)
        checkpoint = checkpoint_key(model, model_lock, steps)
        said, env = vllm_command.serve_argv(recipe, stack, chain[:end])
        unchecked = require_whole_shares(recipe, said, model, model_lock, steps)
        unchecked += require_drafter_fits(recipe, said, model, model_lock)
        demands = demands_of(project, stack, chain[:end], model)
        chosen = vllm_command.choices(family, stack.vllm, said)
        argv, env = spread(vllm_command.completed(said, chosen), env, recipe.nodes, gpu=stack.gpu is not None)
        require_drafter(chain[end - 1], recipe.name, argv)
        if templates:
            argv = in_workspace(argv)
        mods = [file.mod for below in rendered[:end] for file in below.context if file.mod]
        pairings.append(
            Pairing(
                recipe=recipe,
                stack=stack,
                stack_lock=stack_lock,
                model=model,
                model_lock=lock_for(model, model_lock, steps),
                stage=chain[end - 1],
                chain=chain[:end],
                rendered=image,
                steps=steps,
                checkpoint_key=checkpoint,
                argv=tuple(argv),
                env=env,
                key=release_key(image.key, checkpoint, tuple(argv), env),
                demands=demands,
                inputs=input_hashes(project, recipe, stack, model, chain[:end], mods, templates),
                executable=tuple(
                    f"mods/{mod.name}/{file.path}" for mod in mods for file in mod.files if file.is_executable
                ),
                chosen=chosen,
                unchecked=unchecked,
            )
        )
    return tuple(pairings)


def require_whole_shares(
    recipe: schema.Recipe, argv: Sequence[str], model: schema.ModelPin, lock: schema.ModelLock, steps: Sequence[str]
) -> tuple[str, ...]:
    """ManifestError where a node's share of the model is not whole; else what could not be checked, and why."""
    if nodes_of(argv) == 1:
        return ()
    name, config = recipe.file, config_here(Paths.from_env(), model, lock)
    if config is None:
        return (f"{name}: whether {model.name} divides by its nodes is not checked: its config.json is not here yet",)
    try:
        faults = share_faults(config, argv, rules_of(model, steps), name)
        for fault in faults:
            raise fault
    except ManifestError as fault:
        if fault.file == name:
            raise
        return (f"{name}: whether {model.name} divides by its nodes is not checked: {fault.message}",)
    return ()


def require_drafter_fits(
    recipe: schema.Recipe, argv: Sequence[str], model: schema.ModelPin, lock: schema.ModelLock
) -> tuple[str, ...]:
    """ManifestError where the recipe's drafter cannot draft for its model; else what could not be checked, and why."""
    if (pin := model.drafter) is None or pin.drafts is None:
        return ()
    drafters.require_used(recipe, argv)
    file, plan = recipe.file, drafters.speculation(argv)
    for fault in drafters.method_faults(plan, pin.drafts, file):
        raise fault
    target, own = (config_here(Paths.from_env(), model, lock, name) for name in (model.base, schema.DRAFTER))
    if target is None or own is None:
        absent = model.name if target is None else pin.name
        return (f"{file}: whether {pin.name} fits {model.name} is not checked: {absent} has no config.json here yet",)
    for fault in drafters.pair_faults(plan, target, own, f"pins/models/{pin.name}.yaml"):
        raise fault
    return ()


def require_no_secrets(files: Mapping[str, bytes]) -> None:
    """Of what people write: it is kept with the release, and goes into its bundles. ManifestError. files: by name."""
    for name, content in files.items():
        if name.endswith(".yaml"):
            for fault in text_faults(content.decode(errors="replace"), name):
                raise fault


def input_hashes(
    project: Path,
    recipe: schema.Recipe,
    stack: schema.Stack,
    model: schema.ModelPin,
    chain: tuple[schema.Stage, ...],
    mods: Sequence[Mod],
    templates: Sequence[CarriedTemplate] = (),
) -> dict[str, str]:
    """SHA-256 of each file that people edit and of each lock, by path below the project.

    All templates: those of the stages may import the others.
    """
    names = [f"recipes/{recipe.name}.yaml"]
    names += [
        f"pins/{kind}.{end}" for kind in (f"stacks/{stack.name}", f"models/{model.name}") for end in ("yaml", "lock")
    ]
    names += [f"pins/models/{model.drafter.name}.{end}" for end in ("yaml", "lock")] if model.drafter else []
    names += [f"stages/{stage.name}.yaml" for stage in chain]
    names += [manifests.FAMILIES] if (project / manifests.FAMILIES).is_file() else []
    names += [manifests.COMMUNITY_MODS, *(one.file for one in templates)] if templates else []
    names += [f"dockerfiles/{path.name}" for path in sorted((project / "dockerfiles").iterdir()) if path.is_file()]
    data = {name: (project / name).read_bytes() for name in names}
    require_no_secrets(data)
    found = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    return found | {f"mods/{mod.name}/{file.path}": file.sha256 for mod in mods for file in mod.files}
