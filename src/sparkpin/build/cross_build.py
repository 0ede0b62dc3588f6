"""Building an image for another architecture: where the steps run natively meanwhile.

Nearly every step only unpacks wheels, links and compiles Python to bytecode; it runs nothing of what it installs. So it
may run in a root file system of the building machine's own architecture, if Debian and Python are the same to the
version: what it leaves is the same bytes. Made under emulation are the image's own root file system and the mods' GPU
kernels, by the image's Triton (dockerfiles/layers.j2 says why).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparkpin.build.context import UV, uv_file
from sparkpin.build.record import BuildRecord, ContextFile, RenderedImage
from sparkpin.build.render import BUILDER
from sparkpin.build.rootfs import RootfsSpec, rootfs_spec
from sparkpin.core.errors import HostError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host.machine import this_platform
from sparkpin.pins.manifests import load_stack, load_stack_lock
from sparkpin.pins.schema import LockedDeb, Stack, StackLock

PYTHON = re.compile(r"(?:lib)?python3(?:\.\d+)?-(?:minimal|stdlib)$")  # the interpreter and its compiler to bytecode


def stand_in(paths: Paths, stack: str, machine: str) -> RootfsSpec:
    """The root file system that the steps of a stack's images run in on a machine (its platform).

    Raises HostError (the stack names none for such a machine) or ManifestError (its Python is another).
    """
    wanted = load_stack(paths.project, stack)
    native, lock = stand_in_stack(paths, wanted, machine)
    seen, own = pythons(lock), pythons(load_stack_lock(paths.project, wanted))
    if (native.system.suite, seen) != (wanted.system.suite, own):
        raise ManifestError(
            f"pins/stacks/{stack}.yaml",
            f"build_on.{machine}",
            f"{native.name}: Debian {native.system.suite}, {', '.join(seen)}",
            f"a stack with Debian {wanted.system.suite} and {', '.join(own)}",
            next_step=f"invoke lock --stack {native.name}, then invoke lock --stack {stack}",
        )
    return rootfs_spec(native, lock)


def stand_in_stack(paths: Paths, stack: Stack, machine: str) -> tuple[Stack, StackLock]:
    if (name := stack.build_on.get(machine)) is None:  # type: ignore[call-overload]
        places = ", ".join([stack.platform, *stack.build_on])
        raise HostError(
            f"the stack {stack.name} is built on {places}; this machine's engine is {machine}",
            next_step=f"build it on {stack.platform}, or name a stack for {machine} in `build_on` of its file",
        )
    native = load_stack(paths.project, name)
    if native.platform != machine:
        file, key = f"pins/stacks/{stack.name}.yaml", f"build_on.{machine}"
        raise ManifestError(file, key, f"{name}, which is for {native.platform}", f"a stack for {machine}")
    return native, load_stack_lock(paths.project, native)


def stand_in_debs(paths: Paths, stack: Stack, machine: str) -> tuple[Stack, StackLock] | None:
    """What has to be fetched beside the stack's own lock to build it on that machine; None where nothing has to."""
    if machine == stack.platform:
        return None
    native, lock = stand_in_stack(paths, stack, machine)
    return native, of_debs(lock, lock.debs, lock.time)


def again(paths: Paths, record: BuildRecord, machine: str) -> RenderedImage:
    """A recorded build as it can run on a machine (its platform): where its steps ran then, if that is such a machine.

    Raises HostError: the steps ran on another architecture with another version of uv than is here, or nothing says
    where they could run on this machine.
    """
    image = record.rendered
    if f"ARG {BUILDER}=" not in image.dockerfile:
        return image
    if machine != (record.builder.platform if record.builder else record.platform):
        image = replace(image, context=tuple(own_uv(file) if file.path == UV else file for file in image.context))
    if machine == record.platform:
        return replace(image, builder=None)
    if record.builder and record.builder.platform == machine:
        return image
    try:
        return replace(image, builder=stand_in(paths, record.stack, machine))
    except SparkpinError as error:
        raise HostError(
            f"the record of {record.ref} does not say where its steps could run on {machine}, nor do today's pins: "
            f"{error.message}",
            next_step=f"the same command on a machine of {record.platform}",
        ) from None


def own_uv(recorded: ContextFile) -> ContextFile:
    """This machine's binary in place of that of another architecture."""
    if (own := uv_file()).what != recorded.what:
        raise HostError(
            f"the images were made with {recorded.what} on another architecture; this machine has {own.what}",
            next_step=f"install {recorded.what.replace(' ', '==')} into .venv, then run the same command again",
        )
    return own


def require_own_uv(image: RenderedImage, machine: str) -> None:
    """HostError where the engine's machine (its platform) is none for this machine's uv, which the steps run."""
    own = this_platform()
    if machine != own and any(file.path == UV and isinstance(file.source, Path) for file in image.context):
        raise HostError(
            f"{image.ref}: its steps run uv, which is here for {own}, and the engine's machine is {machine}",
            next_step=f"the same command on that machine, or with an engine on {own} (DOCKER_HOST, docker context)",
        )


def moved(record: BuildRecord, image: RenderedImage) -> str:
    """In words, where the steps run now if the record says another place or none; else ""."""
    if image.builder and record.builder != image.builder:
        where, key = image.builder.platform, image.builder.key[:12]
        return f"{record.stage}: its record names no root file system for {where}; its steps run in today's, {key}"
    if record.builder and not image.builder:
        return f"{record.stage}: its steps ran on {record.builder.platform} then, and run on {record.platform} now"
    return ""


def fetched_with(spec: RootfsSpec, stack: Stack, lock: StackLock) -> tuple[Stack, StackLock]:
    """What to fetch for a recorded root file system. stack, lock: those of the image, which has the same Python."""
    system = stack.system.model_copy(update={"suite": spec.suite})
    return stack.model_copy(update={"platform": spec.platform, "debian": system}), of_debs(lock, spec.debs, spec.time)


def of_debs(lock: StackLock, debs: Sequence[LockedDeb], time: str) -> StackLock:
    """A lock of nothing but these. time: of their own."""
    return StackLock(stack=lock.stack, inputs=lock.inputs, time=time, debs=list(debs), wheels=[])


def pythons(lock: StackLock) -> list[str]:
    def known(deb: LockedDeb) -> bool:
        return PYTHON.match(deb.name) is not None

    return [f"{deb.name} {deb.version}" for deb in lock.debs if known(deb)]
