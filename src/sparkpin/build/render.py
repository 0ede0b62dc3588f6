"""From pins, locks, stages and mods to Dockerfiles and build keys. Pure apart from reading the project's files.

A build key is the SHA-256 over all that decides an image's bytes: the rendered Dockerfile, every file of its context,
the key of its parent (or of the root file system), the platform, the epoch and the form of sealing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.sandbox

from sparkpin.build.context_files import (
    ContextFile,
    link_files,
    mod_file,
    run_mod_files,
    script_file,
    source_files,
    source_wheel_files,
    update_files,
    user_files,
    uv_file,
    wheel_files,
)
from sparkpin.build.rootfs import RootfsSpec, rootfs_spec
from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import ManifestError
from sparkpin.core.tags import image_ref, rootfs_ref
from sparkpin.image import seal
from sparkpin.pins import source_builds
from sparkpin.pins.community_mods import RunMod, read_run_mods
from sparkpin.pins.mods import Mod, read_mod
from sparkpin.pins.schema import MACHINES, Stack, StackLock, Stage
from sparkpin.pins.wheel_layers import LINKS, RESERVED, SOURCE_WHEELS, STACK_MODS, UPDATES, USER, VENV, wheel_groups


@dataclass(frozen=True)
class RenderedImage:
    """One stage's image, before it is built.

    key: build key (hex); parent_key: None for the first stage; ref: the internal tag; parent_ref: what it is built on;
    rootfs: what the first stage stands on, None for the others and on a base by digest;
    layers: (name, key) of each layer that it adds, where the key is over all that decides the layer;
    builder: of an image for another architecture, where its steps ran before; None where the project's pins say it.
    """

    stage: str
    stack: str
    key: str
    parent_key: str | None
    ref: str
    parent_ref: str
    platform: str
    rootfs: RootfsSpec | None
    dockerfile: str
    context: tuple[ContextFile, ...]
    layers: tuple[tuple[str, str], ...] = ()
    builder: RootfsSpec | None = None


def render_chain(
    project: Path,
    stack: Stack,
    stack_lock: StackLock,
    chain: Sequence[Stage],
    community: Sequence[RunMod] = (),
) -> tuple[RenderedImage, ...]:
    """The images of a chain, first stage first. community: what a recipe wants in all of them, on top of the first.

    ManifestError when a layer names what the lock does not have, and for a template that cannot be filled in.
    """
    done: list[RenderedImage] = []
    for stage in chain:
        try:
            file = f"stages/{stage.name}.yaml"
            own = read_run_mods(project, stage.community, file, "community", stack_lock)
            mods = (*(() if done else community), *own)
            done.append(render(project, stack, stack_lock, stage, done[-1] if done else None, mods))
        except jinja2.TemplateError as error:
            template = project / "dockerfiles" / stage.template
            raise ManifestError(
                template, "template", f"{type(error).__name__}: {error}", "a template as jinja2's sandbox fills it in"
            ) from None
    return tuple(done)


@dataclass(frozen=True)
class Tree:
    """A tree of files that a stage of the Dockerfile makes: a layer of the image, or what one is compiled with.

    files: what that stage sees of the context. kind: "layer"; "compiled" or "applied" (a community mod), layers that
    follow from all trees before them and not from their files alone; "tool", which is no layer. kernels: whether its
    mod's are compiled for the GPU.
    """

    name: str
    files: tuple[ContextFile, ...]
    kind: Literal["layer", "compiled", "applied", "tool"] = "layer"
    kernels: bool = False

    @property
    def follows(self) -> bool:
        return self.kind in ("compiled", "applied")

    @property
    def is_layer(self) -> bool:
        return self.kind != "tool"


def render(
    project: Path,
    stack: Stack,
    stack_lock: StackLock,
    stage: Stage,
    parent: RenderedImage | None,
    community: Sequence[RunMod] = (),
) -> RenderedImage:
    spec = None
    if parent is not None:
        below, parent_ref = parent.key, parent.ref
    elif stack.base:
        below = parent_ref = stack.base.image
    else:
        spec = rootfs_spec(stack, stack_lock)
        below, parent_ref = spec.key, rootfs_ref(stack.system.suite, spec.key)
    trees = [*(base_trees(project, stack, stack_lock) if parent is None else ())]
    trees += [mods_tree(stack, name, [read_mod(project, name)]) for name in stage.mods]
    trees += [Tree(mod.name, tuple(run_mod_files(project, mod)), "applied") for mod in community]
    require_apart(project, stage, trees)
    require_kernels(stack, stage, trees)
    tools = [script_file(project, "install.py"), uv_file()] if trees else []
    if parent is None and stack.base:
        tools.append(script_file(project, "base.py"))
    more = [script_file(project, name) for name in ("patching.py", "runmod.py")] if community else []
    files = sorted([*tools, *more, *files_of(trees)], key=lambda file: file.path)

    template = environment(project / "dockerfiles").get_template(stage.template)

    def dockerfile(key: str, shown: Sequence[Tree]) -> str:
        """As if the image ended with the last of these trees."""
        layers = [tree.name for tree in shown if tree.is_layer]
        built = next((number for number, tree in enumerate(shown) if tree.kind == "compiled"), None)
        return template.render(
            stage=stage,
            stack=stack,
            parent_ref=parent_ref,
            layers=layers,
            plain=[tree.name for tree in shown if tree.is_layer and tree.kind != "applied"],
            applied=applied(shown),
            kernels=[tree.name for tree in trees if tree.kernels],
            trees=[tree.name for tree in layers_first(shown)[1:] if not tree.follows],
            source=built and {"layer": shown[built].name, "below": [tree.name for tree in shown[:built]]},
            key=key,
            wheels_for=f"{MACHINES[stack.platform]}-manylinux_2_40",  # the hashes say which wheels, not this
        )

    def layer_key(shown: Sequence[Tree]) -> str:
        """Those above the last have no say in it."""
        seen = shown if shown[-1].follows else shown[-1:]
        used = [*tools, *more] if applied(seen) else tools  # what lies below is shared with stages without such mods
        return build_key(stack, below, dockerfile("", shown), [*used, *files_of(seen)])

    key = build_key(stack, below, dockerfile("", trees), files)
    return RenderedImage(
        stage=stage.name,
        stack=stack.name,
        key=key,
        parent_key=parent.key if parent else None,
        ref=image_ref(stack.name, stage.name, key),
        parent_ref=parent_ref,
        platform=stack.platform,
        rootfs=spec,
        dockerfile=dockerfile(key, trees),
        context=tuple(files),
        layers=tuple((tree.name, layer_key(trees[:end])) for end, tree in enumerate(trees, start=1) if tree.is_layer),
    )


def base_trees(project: Path, stack: Stack, stack_lock: StackLock) -> Iterator[Tree]:
    """What the first stage has below its mods, from the lowest."""
    yield Tree(VENV, ())
    if stack.base:
        yield Tree(USER, tuple(user_files()))
    groups = wheel_groups(project, stack, stack_lock)
    for name, wheels in groups.items():
        yield Tree(name, tuple(wheel_files(name, wheels, stack_lock.underlay)))
    if stack_lock.updates or stack_lock.underlay:
        yield Tree(UPDATES, tuple(update_files(stack_lock, groups)))
    if stack.image.links:
        yield Tree(LINKS, tuple(link_files(stack)))
    if source := source_builds.source_of(project, stack, stack_lock):
        yield Tree(SOURCE_WHEELS, tuple(source_wheel_files(stack_lock)), "tool")
        yield Tree(source_builds.layer_of(stack, source), tuple(source_files(project, stack, stack_lock)), "compiled")
    if stack.mods:
        yield mods_tree(stack, STACK_MODS, [read_mod(project, name) for name in stack.mods])


def mods_tree(stack: Stack, name: str, mods: Sequence[Mod]) -> Tree:
    kernels = stack.gpu is not None and any(mod.kernels for mod in mods)
    return Tree(name, tuple(mod_file(name, mod) for mod in mods), kernels=kernels)


def applied(trees: Sequence[Tree]) -> list[dict[str, Any]]:
    """The community mods, each with the layers of its stage that lie below it."""
    return [
        {"name": tree.name, "below": [below.name for below in trees[:number] if below.is_layer]}
        for number, tree in enumerate(trees)
        if tree.kind == "applied"
    ]


def layers_first(trees: Sequence[Tree]) -> list[Tree]:
    """In the order that keys have always been made of: each kind as it stands."""
    return sorted(trees, key=lambda tree: not tree.is_layer)


def files_of(trees: Sequence[Tree]) -> list[ContextFile]:
    return [file for tree in layers_first(trees) for file in tree.files]


def require_apart(project: Path, stage: Stage, trees: Sequence[Tree]) -> None:
    names = [tree.name for tree in trees]
    for tree in trees:
        if tree.name in stage.mods or tree.kind == "applied":
            if tree.name not in RESERVED and names.count(tree.name) == 1:
                continue
            file = project / f"stages/{stage.name}.yaml"
            raise ManifestError(file, "mods", tree.name, "a mod whose name no other layer of the images has")


def require_kernels(stack: Stack, stage: Stage, trees: Sequence[Tree]) -> None:
    """Only a stage with a parent, in which one mod is a layer, gets kernels for the stack's GPU."""
    found = [tree.name for tree in trees if tree.kernels]
    if STACK_MODS in found:
        wanted = "mods without kernels: those are compiled by what a stage's parent image holds. Name it in a stage"
        raise ManifestError(f"pins/stacks/{stack.name}.yaml", "mods", stack.mods, wanted)
    if found and stage.parent is None:
        wanted = "none with kernels: those are compiled by what the parent image holds, and it has no parent"
        raise ManifestError(f"stages/{stage.name}.yaml", "mods", stage.mods, wanted)


def build_key(stack: Stack, below: str, dockerfile: str, files: Sequence[ContextFile]) -> str:
    value: dict[str, Any] = {
        "below": below,
        "dockerfile": dockerfile,
        "epoch": EPOCH,
        "files": [(file.path, file.identity or file.sha256, file.executable) for file in files],
        "platform": stack.platform,
        "seal": seal.VERSION,
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Compiled(jinja2.BytecodeCache):
    """Each text is compiled once: the stages of a chain share templates, and so do the projects that a task reads."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Any] = {}

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return name  # in any folder

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        bucket.code = self.known.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        self.known[bucket.key, bucket.checksum] = bucket.code


COMPILED = Compiled()


def environment(folder: Path) -> jinja2.Environment:
    """A sandbox: the templates of an imported release come from somebody else. Compiling them is most of what a render
    costs, so that is kept, by their text: one that has changed on disk is another, however soon after."""
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folder),
        bytecode_cache=COMPILED,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
