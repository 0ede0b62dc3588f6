"""Building an image for another architecture: where the steps run natively meanwhile.

Nearly every step only unpacks wheels, links and compiles Python to bytecode; it runs nothing of what it installs. So it
may run in a root file system of the building machine's own architecture, if Debian and Python are the same to the
version: what it leaves is the same bytes. Made under emulation are the image's own root file system and the mods' GPU
kernels, by the image's Triton (dockerfiles/layers.j2 says why).
"""

from __future__ import annotations

import re

from sparkpin.errors import HostError, ManifestError
from sparkpin.manifests import load_stack, load_stack_lock
from sparkpin.paths import Paths
from sparkpin.rootfs import RootfsSpec, rootfs_spec
from sparkpin.schema import LockedFile, Stack, StackLock

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
    return native, lock.model_copy(update={"wheels": [], "underlay": [], "updates": []})


def pythons(lock: StackLock) -> list[str]:
    def known(deb: LockedFile) -> bool:
        return PYTHON.match(deb.name) is not None

    return [f"{deb.name} {deb.version}" for deb in lock.debs if known(deb)]
