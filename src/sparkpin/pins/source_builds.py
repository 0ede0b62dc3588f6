"""What a build from source sees, and where in the Dockerfile it stands. Pure apart from reading the project's files.

The source is compiled in a stage that has the images' own layers below it, so that it meets the very torch that it will
run with. How many jobs compile at once is found out there, from the memory that is free: it is in no key and no file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sparkpin.core.errors import ManifestError
from sparkpin.pins.patches import name_of, require_patches
from sparkpin.pins.schema import MACHINES, LockedFile, SourceBuild, Stack, StackLock

FOLDER = "source"


def source_of(project: Path, stack: Stack, lock: StackLock) -> SourceBuild | None:
    """The stack's source, when the lock has it, too. ManifestError for a patch that is not what the stack says."""
    source = stack.python.source
    if source is None:
        return None
    require_patches(project, stack)
    names = [source.name, *sorted(source.inputs)]
    seen = [file.name for file in lock.source.archives] if lock.source else []
    if seen != names:
        step = f"invoke lock --stack {stack.name}"
        raise ManifestError(f"pins/stacks/{stack.name}.lock", "source.archives", seen, str(names), next_step=step)
    return source


def layer_of(stack: Stack, source: SourceBuild) -> str:
    return next(layer.name for layer in stack.python.layers if layer.packages == [source.name])


def build_plan(stack: Stack, lock: StackLock) -> str:
    """build.json: all that dockerfiles/source.py needs to know beside the files that lie there."""
    source = stack.python.source
    assert source and lock.source
    archives = {file.name: file.file for file in lock.source.archives}
    arch_list = {"TORCH_CUDA_ARCH_LIST": source.arch_list} if source.arch_list else {}
    plan = {
        "name": source.name,
        "version": source.version,
        "archive": archives[source.name],
        "inputs": {
            name: {"archive": archives[name], "variable": tree.variable, "folder": tree.folder}
            for name, tree in source.inputs.items()
        },
        "patches": [name_of(number, patch) for number, patch in enumerate(stack.patches)],
        "env": {**stack.image.env, **arch_list, **source.env},
        "path": stack.image.path,
        "driver": f"/usr/lib/{MACHINES[stack.platform]}-linux-gnu/libcuda.so.1" if stack.gpu else "",
    }
    return json.dumps(plan, indent=1, sort_keys=True) + "\n"


def called(file: LockedFile) -> str:
    """As a build record names what a lock has and an image has not."""
    return f"source {file.name} {file.version}"


def places(lock: StackLock) -> Sequence[tuple[str, LockedFile]]:
    """(path in the context, file) of archives and Debian packages; the wheels are a tree like others."""
    assert lock.source
    return [
        *((f"{FOLDER}/archives/{file.file}", file) for file in lock.source.archives),
        *((f"{FOLDER}/debs/{file.file}", file) for file in lock.source.debs),
    ]
