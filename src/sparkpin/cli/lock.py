"""`invoke lock`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show
from sparkpin.fetch import lock_model
from sparkpin.fetch.stack import lock_stack
from sparkpin.host.machine import this_platform
from sparkpin.pins import manifests


@task("inputs")
def lock(
    *,
    stack: Annotated[str | None, "lock this stack only"] = None,
    model: Annotated[str | None, "lock this model only"] = None,
    digests: Annotated[bool, "resolve nothing: build what the locks give, write its digests to pins/digests"] = False,
) -> None:
    """Resolve the pins and write their locks (network)."""
    if digests:
        if model:
            raise InputError("--digests goes with --stack alone", next_step="invoke lock --digests")
        publish_digests(stack)
        return
    if stack and model:
        raise InputError(
            f"--stack {stack} locks that stack only, --model {model} that model only",
            next_step=f"one after the other: invoke lock --stack {stack}, then invoke lock --model {model}",
        )
    paths = Paths.from_env()
    everything = not stack and not model
    for name in [stack] if stack else names(paths.project / "pins/stacks") if everything else []:
        made = lock_stack(paths, name)
        show(f"pins/stacks/{name}.lock: {len(made.debs)} Debian packages, {len(made.wheels)} wheels")
    for name in [model] if model else names(paths.project / "pins/models") if everything else []:
        if not model and not (paths.project / f"pins/models/{name}.lock").is_file():
            show(f"pins/models/{name}.yaml has no lock; to make it: invoke lock --model {name}")
            continue
        locked = lock_model.lock_model(paths, name)
        for repository in locked.repositories.values():
            parts = f"{len(repository.files)} files, {len(repository.headers)} headers"
            if repository.tensors:
                size = terminal.size(sum(tensor.size for tensor in repository.tensors))
                parts += f", {len(repository.tensors)} tensors of {size}"
            show(f"pins/models/{name}.lock: {repository.repo} at {repository.revision}: {parts}")


def publish_digests(stack: str | None) -> None:
    """Of one stack, or of each that has published some before. Those for another architecture are not built then, for
    that can take an hour: entries of other pins are removed from their files."""
    from sparkpin.build.make import at_work  # slow to import: only this asks an engine
    from sparkpin.distribute import digests as published

    paths = Paths.from_env()
    if not (wanted := [stack] if stack else names(paths.project / published.FOLDER)):
        raise InputError(
            f"{published.FOLDER} has no file yet, and no stack is named", next_step="invoke lock --digests --stack cpu"
        )
    machine = this_platform()
    with at_work(paths) as engine:
        for name in wanted:
            file = published.file_of(name)
            if stack or manifests.load_stack(paths.project, name).platform == machine:
                show(f"{file}: {published.publish(paths, engine, name)} images")
            elif gone := published.remove_stale(paths.project, name):
                show(f"{file}: removed, of other pins: {', '.join(gone)}; invoke lock --digests --stack {name}")
            else:
                show(f"{file}: all of it holds")


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))
