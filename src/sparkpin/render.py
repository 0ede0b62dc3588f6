"""From pins, locks, stages and mods to Dockerfiles and build keys. Pure apart from reading the project's files.

A build key is the SHA-256 over all that decides an image's bytes: the rendered Dockerfile, every file of its context,
the key of its parent (or of the root file system), the platform, the epoch and the form of sealing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.sandbox
import uv

from sparkpin import seal
from sparkpin.epoch import EPOCH
from sparkpin.errors import ManifestError
from sparkpin.files import sha256_file
from sparkpin.layering import LINKS, RESERVED, STACK_MODS, UPDATES, USER, VENV, normal, updated, wheel_groups
from sparkpin.modwheels import Mod, read_mod
from sparkpin.releases import INTERNAL, ROOTFS
from sparkpin.rootfs import RootfsSpec, rootfs_spec
from sparkpin.schema import MACHINES, LockedFile, Stack, StackLock, Stage

UV = "tools/uv"
PASSWD, GROUP = "sparkpin:*:10001:10001:sparkpin:/home/sparkpin:/bin/sh", "sparkpin:*:10001:"
HIDDEN = "(hidden)"  # at the end of what a wheel is called that a layer above hides


@dataclass(frozen=True)
class ContextFile:
    """One file that a build sees. A mod stands for its wheel: `sha256` is its sources' key, `size` their bytes.

    identity: stands for the file in keys, where machines have different files that do the same.
    source: "store" (a locked wheel), "host" (a file of this machine, `origin`), "text" (`text`), "mod", or "kept" (of
    an earlier build, by its SHA-256 alone). what: what a person calls it, with its version.
    """

    path: str
    sha256: str
    size: int
    source: Literal["store", "host", "text", "mod", "kept"]
    what: str = ""
    executable: bool = False
    text: str = field(default="", repr=False)
    origin: Path | None = None
    locked: LockedFile | None = None
    identity: str = ""
    mod: Mod | None = None


@dataclass(frozen=True)
class Rendered:
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


def render_chain(project: Path, stack: Stack, stack_lock: StackLock, chain: Sequence[Stage]) -> tuple[Rendered, ...]:
    """The images of a chain, first stage first.

    ManifestError when a layer names what the lock does not have, and for a template that cannot be filled in.
    """
    done: list[Rendered] = []
    for stage in chain:
        try:
            done.append(render(project, stack, stack_lock, stage, done[-1] if done else None))
        except jinja2.TemplateError as error:
            file = project / "dockerfiles" / stage.template
            raise ManifestError(
                file, "template", f"{type(error).__name__}: {error}", "a template as jinja2's sandbox fills it in"
            ) from None
    return tuple(done)


def render(project: Path, stack: Stack, stack_lock: StackLock, stage: Stage, parent: Rendered | None) -> Rendered:
    layers: dict[str, list[ContextFile]] = {}
    spec = None
    if parent is None:
        if stack.base:
            below = parent_ref = stack.base.image
        else:
            spec = rootfs_spec(stack, stack_lock)
            below = spec.key
            parent_ref = rootfs_ref(stack.system.suite, below)
        layers[VENV] = []
        if stack.base:
            layers[USER] = user_files()
        groups = wheel_groups(project, stack, stack_lock)
        for name, wheels in groups.items():
            layers[name] = wheel_files(name, wheels, stack_lock.underlay)
        if stack_lock.updates or stack_lock.underlay:
            layers[UPDATES] = update_files(stack_lock, groups)
        if stack.image.links:
            layers[LINKS] = link_files(stack)
        if stack.mods:
            layers[STACK_MODS] = [mod_file(STACK_MODS, read_mod(project, name)) for name in stack.mods]
    else:
        below, parent_ref = parent.key, parent.ref
    for name in stage.mods:
        if name in RESERVED:
            file = project / f"stages/{stage.name}.yaml"
            raise ManifestError(file, "mods", name, "a mod whose name no other layer of the images has")
        layers[name] = [mod_file(name, read_mod(project, name))]
    kernels = kernel_layers(stack, stage, layers)
    tools = tool_files(project) if layers else []
    files = sorted((file for part in (tools, *layers.values()) for file in part), key=lambda file: file.path)

    template = environment(project / "dockerfiles").get_template(stage.template)
    names = list(layers)

    def dockerfile(key: str, count: int = len(names)) -> str:
        return template.render(
            stage=stage,
            stack=stack,
            parent_ref=parent_ref,
            layers=names[:count],
            kernels=kernels,
            key=key,
            wheels_for=f"{MACHINES[stack.platform]}-manylinux_2_40",  # the hashes say which wheels, not this
        )

    def layer_key(count: int) -> str:
        """As if the image ended with this layer: those above have no say in it."""
        return build_key(stack, below, dockerfile("", count), [*tools, *layers[names[count - 1]]])

    key = build_key(stack, below, dockerfile(""), files)
    return Rendered(
        stage=stage.name,
        stack=stack.name,
        key=key,
        parent_key=parent.key if parent else None,
        ref=image_ref(stack.name, stage.name, key),
        parent_ref=parent_ref,
        platform=stack.platform,
        rootfs=spec,
        dockerfile=dockerfile(key),
        context=tuple(files),
        layers=tuple((name, layer_key(count)) for count, name in enumerate(names, start=1)),
    )


def kernel_layers(stack: Stack, stage: Stage, layers: Mapping[str, Sequence[ContextFile]]) -> list[str]:
    """The layers, each of one mod, that get the mod's kernels for the stack's GPU."""
    found = [name for name, files in layers.items() if any(file.mod and file.mod.kernels for file in files)]
    if not stack.gpu:
        return []
    if STACK_MODS in found:
        wanted = "mods without kernels: those are compiled by what a stage's parent image holds. Name it in a stage"
        raise ManifestError(f"pins/stacks/{stack.name}.yaml", "mods", stack.mods, wanted)
    if found and stage.parent is None:
        wanted = "none with kernels: those are compiled by what the parent image holds, and it has no parent"
        raise ManifestError(f"stages/{stage.name}.yaml", "mods", stage.mods, wanted)
    return found


def rootfs_ref(suite: str, key: str) -> str:
    return f"sparkpin/{ROOTFS}:{suite}-{key[:12]}"


def image_ref(stack: str, stage: str, key: str) -> str:
    return f"sparkpin/{INTERNAL}{stack}:{stage}-{key[:12]}"


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


def environment(folder: Path) -> jinja2.Environment:
    """A sandbox: the templates of an imported release come from somebody else."""
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def wheel_files(layer: str, wheels: Sequence[LockedFile], hidden: Sequence[LockedFile] = ()) -> list[ContextFile]:
    """hidden: wheels that a layer above hides."""
    files = [
        ContextFile(
            f"wheels/{layer}/{Path(w.file).name}",
            w.sha256,
            w.size,
            "store",
            f"wheel {normal(w.name)} {w.version}{f' {HIDDEN}' if w in hidden else ''}",
            locked=w,
        )
        for w in wheels
    ]
    return [*files, requirements_file(f"wheels/{layer}/requirements.txt", wheels)]


def requirements_file(path: str, wheels: Sequence[LockedFile]) -> ContextFile:
    return text_file(path, "".join(f"{normal(w.name)}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels))


def update_files(stack_lock: StackLock, groups: Mapping[str, Sequence[LockedFile]]) -> list[ContextFile]:
    """Beside its wheels, the layer gets to know what lies in those below it: which wheels it hides, and which stay."""
    stay = [
        f"{wheel.sha256}  {name}/{Path(wheel.file).name}\n"
        for name, wheels in groups.items()
        for wheel in wheels
        if wheel not in stack_lock.underlay
    ]
    return [
        *wheel_files(UPDATES, updated(stack_lock)),
        requirements_file(f"wheels/{UPDATES}/hidden.txt", stack_lock.underlay),
        text_file(f"wheels/{UPDATES}/kept.txt", "".join(stay)),
    ]


def user_files() -> list[ContextFile]:
    """The images' user where no root file system of ours brings it (rootfs.sh has the same lines)."""
    return [
        text_file(f"wheels/{USER}/requirements.txt", ""),
        text_file(f"wheels/{USER}/passwd", f"{PASSWD}\n", "the images' user"),
        text_file(f"wheels/{USER}/group", f"{GROUP}\n", "the images' group"),
    ]


def link_files(stack: Stack) -> list[ContextFile]:
    links = json.dumps(stack.image.links, indent=1, sort_keys=True)
    return [
        text_file(f"wheels/{LINKS}/requirements.txt", ""),
        text_file(f"wheels/{LINKS}/links.json", f"{links}\n", "list of links"),
    ]


def mod_file(layer: str, mod: Mod) -> ContextFile:
    return ContextFile(f"wheels/{layer}/{mod.name}", mod.key, mod.size, "mod", f"mod {mod.name} {mod.version}", mod=mod)


def text_file(path: str, text: str, what: str = "list of wheels") -> ContextFile:
    data = text.encode()
    return ContextFile(path, hashlib.sha256(data).hexdigest(), len(data), "text", what, text=text)


def tool_files(project: Path) -> list[ContextFile]:
    script = project / "dockerfiles/install.py"
    return [host_file("tools/install.py", script, f"sparkpin {script.name}"), uv_file()]


def uv_file() -> ContextFile:
    """This machine's. Each architecture has a binary of its own, and what it installs is the same."""
    version = f"uv {importlib.metadata.version('uv')}"
    return replace(host_file(UV, Path(uv.find_uv_bin()), version, executable=True), identity=version)


def host_file(path: str, origin: Path, what: str, *, executable: bool = False) -> ContextFile:
    status = origin.stat()
    sha256, size = hashed(origin, status.st_mtime_ns, status.st_size)
    return ContextFile(path, sha256, size, "host", what, executable=executable, origin=origin)


@cache
def hashed(path: Path, mtime_ns: int, size: int) -> tuple[str, int]:
    return sha256_file(path)
