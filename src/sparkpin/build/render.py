"""From pins, locks, stages and mods to Dockerfiles and build keys. Pure apart from reading the project's files.

A build key is the SHA-256 over all that decides an image's bytes: the rendered Dockerfile, every file of its context,
the key of its parent (or of the root file system), the platform, the epoch and the form of sealing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from sparkpin.build.context import link_files, mod_file, script_file, template_file, uv_file, wheel_files
from sparkpin.build.record import ContextFile, RenderedImage
from sparkpin.build.rootfs import rootfs_spec
from sparkpin.core.errors import BuildError, ManifestError
from sparkpin.core.files import EPOCH
from sparkpin.core.names import MACHINES
from sparkpin.core.tags import image_ref, rootfs_ref
from sparkpin.image import seal
from sparkpin.pins.manifests import wheel_groups
from sparkpin.pins.mods import CarriedTemplate, Mod, read_mod
from sparkpin.pins.schema import LINKS, RESERVED, STACK_MODS, VENV, Stack, StackLock, Stage

Templates = Sequence[CarriedTemplate]
BUILDER = "BUILDER"  # the argument that names where the steps run: what the image stands on, or a native stand-in
DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=", re.I)
FROM = re.compile(r"(?:--platform=\S+\s+)?(?P<image>\S+)(?:\s+as\s+(?P<name>\S+))?\s*$", re.I)
ARGUMENT = re.compile(r"\w+(?:=\S*)?")
FLAGS = re.compile(r"(?:--\S*\s*)*")  # between COPY or RUN and what it copies or runs
SPECIAL = re.compile(r"""["'\\]|--network|--security""", re.I)
SOURCE = re.compile(r"from=(?P<image>[^\s,]+)", re.I)


def render_chain(
    project: Path, stack: Stack, lock: StackLock, chain: Sequence[Stage], templates: Templates = ()
) -> tuple[RenderedImage, ...]:
    """The images of a chain, first stage first. templates: of the recipe, in all of them, on top of the first.

    ManifestError when a layer names what the lock does not have, and for a template that cannot be filled in.
    """
    done: list[RenderedImage] = []
    for stage in chain:
        try:
            parent = done[-1] if done else None
            done.append(render(project, stack, lock, stage, parent, () if parent else templates))
        except jinja2.TemplateError as error:
            file, got = project / "dockerfiles" / stage.template, f"{type(error).__name__}: {error}"
            raise ManifestError(file, "template", got, "a template as jinja2's sandbox fills it in") from None
    return tuple(done)


@dataclass(frozen=True)
class Tree:
    """A tree of files that a stage of the Dockerfile makes: a layer of the image, or what one is compiled with.

    files: what that stage sees of the context. kernels: whether its mod's are compiled for the GPU. is_template: it is
    a chat template, which is copied where everything else is installed.
    """

    name: str
    files: tuple[ContextFile, ...]
    kernels: bool = False
    is_template: bool = False


def render(
    project: Path, stack: Stack, lock: StackLock, stage: Stage, parent: RenderedImage | None, templates: Templates = ()
) -> RenderedImage:
    spec = None
    if parent:
        below, parent_ref = parent.key, parent.ref
    else:
        spec = rootfs_spec(stack, lock)
        below, parent_ref = spec.key, rootfs_ref(spec.suite, spec.key)
    trees = [] if parent else [*base_trees(project, stack, lock)]
    trees += [mods_tree(stack, name, [read_mod(project, name)]) for name in stage.mods]
    trees += [Tree(one.mod, (template_file(project, one),), is_template=True) for one in templates]
    require_possible(stack, stage, trees)
    tools = [script_file(project, "install.py"), uv_file()] if trees else []
    files = sorted([*tools, *(file for tree in trees for file in tree.files)], key=lambda file: file.path)

    template = environment(project / "dockerfiles").get_template(stage.template)

    def dockerfile(key: str, shown: Sequence[Tree]) -> str:
        """As if the image ended with the last of these trees."""
        return template.render(
            stage=stage,
            stack=stack,
            parent_ref=parent_ref,
            layers=[tree.name for tree in shown],
            installed=[tree.name for tree in shown if tree.name != VENV and not tree.is_template],
            templates=[tree.name for tree in shown if tree.is_template],
            kernels=[tree.name for tree in trees if tree.kernels],
            key=key,
            wheels_for=f"{MACHINES[stack.platform]}-manylinux_2_40",  # the hashes say which wheels, not this
        )

    # Trees above the last have no say in a layer's key.
    ends = [(tree, dockerfile("", trees[:end])) for end, tree in enumerate(trees, start=1)]
    layers = [(tree.name, build_key(stack, below, text, [*tools, *tree.files])) for tree, text in ends]
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
        layers=tuple(layers),
    )


def base_trees(project: Path, stack: Stack, lock: StackLock) -> Iterator[Tree]:
    """What the first stage has below its mods, from the lowest."""
    yield Tree(VENV, ())
    for name, wheels in wheel_groups(project, stack, lock).items():
        yield Tree(name, tuple(wheel_files(name, wheels)))
    if stack.image.links:
        yield Tree(LINKS, tuple(link_files(stack)))
    if stack.mods:
        yield mods_tree(stack, STACK_MODS, [read_mod(project, name) for name in stack.mods])


def mods_tree(stack: Stack, name: str, mods: Sequence[Mod]) -> Tree:
    kernels = stack.gpu is not None and any(mod.kernels for mod in mods)
    return Tree(name, tuple(mod_file(name, mod) for mod in mods), kernels=kernels)


def require_possible(stack: Stack, stage: Stage, trees: Sequence[Tree]) -> None:
    """ManifestError for a mod with the name of another layer, and for kernels that nothing could compile."""
    file, names = f"stages/{stage.name}.yaml", [tree.name for tree in trees]
    for tree in trees:
        is_own = tree.name in stage.mods or tree.is_template
        if is_own and (tree.name in RESERVED or names.count(tree.name) > 1):
            raise ManifestError(file, "mods", tree.name, "a mod whose name no other layer of the images has")
        if tree.kernels and (tree.name == STACK_MODS or stage.parent is None):
            where = f"pins/stacks/{stack.name}.yaml" if tree.name == STACK_MODS else file
            expected = "mods without kernels: what a parent image holds compiles them; name it in a stage with a parent"
            raise ManifestError(where, "mods", names, expected)


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


@functools.cache  # compiling templates is most of what a render costs, and the stages of a chain share them
def environment(folder: Path) -> jinja2.Environment:
    """A sandbox: the templates of an imported release come from somebody else. One that changed on disk is compiled
    again."""
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def require_closed(text: str, parent_ref: str) -> None:
    """BuildError, with the line, for a Dockerfile that could let the engine open a connection.

    It may reach its own stages, the image that it stands on and its context. `--network none` holds for RUN only: the
    engine itself would fetch a URL of ADD, a `# syntax=` frontend, or an image that a FROM or a --from names and it
    does not have.
    """
    for number, raw in enumerate(text.split("\n"), start=1):
        is_comment = raw.lstrip(" \t").startswith("#")  # such as a stage's description, whatever it holds
        if not is_comment and (not raw.replace("\t", " ").isprintable() or raw.rstrip().endswith("\\\\")):
            raise refused(number, raw, r"printable characters, and no \\ at the end, which engines read otherwise")
    known, argument = {"scratch", parent_ref}, f"ARG {BUILDER}={parent_ref}"
    lines = instructions(text)
    known |= {f"${BUILDER}"} if argument in (line for _, line in lines) else set()
    for number, line in lines:
        word, rest = (*line.split(maxsplit=1), "")[:2]
        word, flags, expected = word.upper(), FLAGS.match(rest)[0], ""  # type: ignore[index]
        if DIRECTIVE.match(line):
            expected = "no parser directive: a frontend would be fetched"
        elif word in ("ADD", "ONBUILD"):
            expected = "COPY: the engine fetches what ADD names"
        elif word == "ARG" and line != argument and (BUILDER in rest or not ARGUMENT.fullmatch(rest)):
            expected = argument
        elif word == "FROM":
            match = FROM.match(rest.strip())
            if match is None or match["image"] not in known:
                expected = f"FROM {parent_ref}, scratch or a stage above"
            known |= {match["name"]} if match and match["name"] else set()
        elif word in ("COPY", "RUN") and (SPECIAL.search(flags) or not known.issuperset(SOURCE.findall(flags))):
            expected = "--from a stage above, and options without quotes and \\, none of network or security"
        if expected:
            raise refused(number, line, expected)


def instructions(text: str) -> list[tuple[int, str]]:
    """(line number, instruction) with continued lines joined. Directives are the comments before the first of them."""
    found: list[tuple[int, str]] = []
    is_open = False
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or (line.startswith("#") and (found or not DIRECTIVE.match(line))):
            continue
        start, begin = found.pop() if is_open else (number, "")
        is_open = line.endswith("\\")
        found.append((start, begin + (raw.rstrip()[:-1] if is_open else raw)))  # as BuildKit: no blank comes between
    return [(number, line.strip()) for number, line in found]


def refused(number: int, line: str, expected: str) -> BuildError:
    return BuildError(
        f"line {number} of the rendered Dockerfile: got {line[:100]!r}, expected {expected}",
        next_step="correct the template in dockerfiles/; `invoke build --render` prints what it becomes",
    )
