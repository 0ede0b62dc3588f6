"""Building an image for another architecture: where the steps run natively meanwhile.

Nearly every step only unpacks wheels, links and compiles Python to bytecode; it runs nothing of what it installs. So it
may run in a root file system of the building machine's own architecture, if Debian and Python are the same to the
version: what it leaves is the same bytes. Made under emulation are the image's own root file system and the mods' GPU
kernels, by the image's Triton (dockerfiles/layers.j2 says why).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from sparkpin.build.context import UV, uv_file
from sparkpin.build.record import BuildRecord, RenderedImage
from sparkpin.build.render import BUILDER
from sparkpin.build.rootfs import RootfsSpec, rootfs_spec
from sparkpin.core.errors import HostError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.host.machine import this_platform
from sparkpin.pins.manifests import load_stack, load_stack_lock
from sparkpin.pins.schema import Stack, StackLock

PYTHON = re.compile(r"(?:lib)?python3(?:\.\d+)?-(?:minimal|stdlib)$")  # the interpreter and its compiler to bytecode


def stand_in(paths: Paths, stack: str, machine: str) -> RootfsSpec:
    """The root file system that the steps of a stack's images run in on a machine. Raises as `native_stack`."""
    return rootfs_spec(*native_stack(paths, load_stack(paths.project, stack), machine))


def native_stack(paths: Paths, stack: Stack, machine: str) -> tuple[Stack, StackLock]:
    """The stack in whose root file system another's steps run on a machine (its platform), and a lock of its packages.

    Raises HostError (the stack names none for such a machine) or ManifestError (it is for another, or with another
    Python).
    """
    if (name := stack.build_on.get(machine)) is None:  # type: ignore[call-overload]
        places = ", ".join([stack.platform, *stack.build_on])
        raise HostError(
            f"the stack {stack.name} is built on {places}; this machine's engine is {machine}",
            next_step=f"build it on {stack.platform}, or name a stack for {machine} in `build_on` of its file",
        )
    native = load_stack(paths.project, name)
    lock, file, key = load_stack_lock(paths.project, native), f"pins/stacks/{stack.name}.yaml", f"build_on.{machine}"
    got, expected = pythons(native, lock), pythons(stack, load_stack_lock(paths.project, stack))
    if (native.platform, got) != (machine, expected):
        step = f"invoke lock --stack {name}, then invoke lock --stack {stack.name}"
        found = f"{name}: {native.platform}, {got}"
        raise ManifestError(file, key, found, f"a stack for {machine} with {expected}", next_step=step)
    return native, lock.model_copy(update={"wheels": []})


def pythons(stack: Stack, lock: StackLock) -> str:
    found = [f"{deb.name} {deb.version}" for deb in lock.debs if PYTHON.match(deb.name)]
    return ", ".join([f"Debian {stack.debian.suite}", *found])


def again(record: BuildRecord, machine: str) -> RenderedImage:
    """A recorded build as it can run on a machine (its platform): where its steps ran then, if that is such a machine.

    Elsewhere this machine's uv runs them; whether another version of it gives the same bytes, a comparison shows.
    """
    image, ran_on = record.rendered, (record.builder or record).platform
    if machine == ran_on or f"ARG {BUILDER}=" not in image.dockerfile:
        return image
    return replace(image, context=tuple(uv_file() if file.path == UV else file for file in image.context))


def require_own_uv(image: RenderedImage, machine: str) -> None:
    """HostError where the engine's machine (its platform) is none for this machine's uv, which the steps run."""
    own = this_platform()
    if machine != own and any(file.path == UV and isinstance(file.source, Path) for file in image.context):
        raise HostError(
            f"{image.ref}: its steps run uv, which is here for {own}, and the engine's machine is {machine}",
            next_step=f"the same command on that machine, or with an engine on {own} (DOCKER_HOST, docker context)",
        )
