"""The loader of a release on this machine, from its checkpoint's headers and the memory that is free now."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sparkpin.checkpoint.safetensors import read_header
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host import machine
from sparkpin.pins import manifests
from sparkpin.pins.weight_loaders import WeightBytes, choose
from sparkpin.pins.wheel_layers import normal
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release


def with_loader(paths: Paths, release: Release, checkpoint: Path, say: Say, *, gpus: bool) -> Release:
    """The release as it is to be started here: with the flag of the loader that was chosen, and the reason said.

    Its record stays as it is: what is free is another thing on each day. Without a GPU there is nothing to choose.
    """
    if not gpus:
        return release
    free = machine.read_host().memory_available
    loader = choose(release.argv, versions_of(paths, release), weights_of(checkpoint), free)
    say(loader.line)
    return dataclasses.replace(release, argv=tuple(loader.applied(release.argv)))


def versions_of(paths: Paths, release: Release) -> dict[str, str]:
    """Of the wheels in the release's image; nothing where its lock is nowhere any more."""
    try:
        with project_of(paths, release) as project:
            lock = manifests.former_stack_lock(project, release.stack)
    except SparkpinError:
        return {}
    return {normal(wheel.name): wheel.version for wheel in lock.wheels}


def weights_of(checkpoint: Path) -> WeightBytes:
    files = sorted(checkpoint.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    tensors = [info.nbytes for file in files for info in read_header(file).tensors.values()]
    return WeightBytes(sum(sizes), max(sizes, default=0), max(tensors, default=0))
