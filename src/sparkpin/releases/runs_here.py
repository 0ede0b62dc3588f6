"""Whether a server of a release can run on this machine, and what stands against it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.engine import Engine
from sparkpin.host.machine import Gpu, read_gpus
from sparkpin.pins.nodes import example, nodes_of
from sparkpin.releases.record import Release

if TYPE_CHECKING:
    from sparkpin.pins.schema import Stack


def stack_of(paths: Paths, release: Release) -> Stack | None:
    """The stack as the release was made from it, else as it is now; None where neither is there."""
    from sparkpin.pins import manifests, schema  # slow to import, and `images` reads no pins
    from sparkpin.releases.kept_inputs import project_of

    with contextlib.suppress(SparkpinError), project_of(paths, release, "pins/stacks/") as project:
        return manifests.load_named(schema.Stack, project / "pins/stacks", release.stack, "stack")
    with contextlib.suppress(SparkpinError):
        return manifests.load_stack(paths.project, release.stack)
    return None


def uses_gpu(paths: Paths, release: Release) -> bool:
    stack = stack_of(paths, release)
    return stack is not None and stack.gpu is not None


def obstacle(paths: Paths, engine: Engine | None, release: Release, *, nodes: int | None = None) -> str:
    """Why no server of the release can run on this machine; "" when one can, or when its stack is nowhere any more.

    engine: None for any engine of this machine; nodes: how many of the release's are to be here; None: all.
    """
    stack = stack_of(paths, release)
    if stack is None:
        return ""
    platform, elsewhere = (engine.platform, engine.elsewhere) if engine else (machine.this_platform(), "")
    gpus = read_gpus() if stack.gpu and not elsewhere else ()
    return obstacle_of(stack, platform, gpus, elsewhere, nodes=nodes or nodes_of(release.argv))


def obstacle_of(stack: Stack, platform: str, gpus: Sequence[Gpu], elsewhere: str = "", *, nodes: int = 1) -> str:
    """platform: the engine's. gpus: of this machine. elsewhere: the engine's machine where that is another. nodes: of
    the release; all of them on this machine, each with a GPU of its own."""
    if stack.platform != platform:
        return f"stack {stack.name} is for {stack.platform}, and this engine's machine is {platform}"
    if elsewhere:
        return f"the engine runs on {elsewhere}, and a server is given folders of this machine"
    fitting = sum(gpu.compute_capability == stack.gpu.sm for gpu in gpus) if stack.gpu else nodes
    if not fitting and stack.gpu:
        there = ", ".join(f"{gpu.name}, {gpu.compute_capability}" for gpu in gpus) or "none"
        return f"stack {stack.name} is for a GPU of compute capability {stack.gpu.sm}; here: {there}"
    if fitting < nodes:
        return (
            f"it is for {nodes} machines with a GPU each, and this one has {fitting}: "
            f"invoke smoke TAG --nodes {example(nodes)} names them"
        )
    return ""


def with_others(paths: Paths, release: Release) -> str:
    """The commands that smoke a release on this machine and others; "" where it needs no other, or not this one."""
    nodes = nodes_of(release.argv)
    if nodes == 1 or not obstacle(paths, None, release) or obstacle(paths, None, release, nodes=1):
        return ""
    tag, others = release.tag, example(nodes).split(",")[1:]
    copies = "; ".join(f"invoke export {tag} {url} --with-checkpoint" for url in others)
    return f"{copies}; invoke smoke {tag} --nodes {example(nodes)}"
