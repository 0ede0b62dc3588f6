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
    paths: Paths,
    *,
    stack: Annotated[str | None, "lock this stack only"] = None,
    model: Annotated[str | None, "lock this model only"] = None,
    digests: Annotated[bool, "resolve nothing: build what the locks give, write its digests to pins/digests"] = False,
) -> None:
    """Resolve the pins and write their locks (network)."""
    if model and (stack or digests):
        raise InputError("--model locks that model only", next_step=f"invoke lock --model {model}, then the rest")
    if digests:
        publish_digests(paths, stack)
        return
    for name in [stack] if stack else [] if model else names(paths.project / "pins/stacks"):
        made = lock_stack(paths, name)
        show(f"pins/stacks/{name}.lock: {len(made.debs)} Debian packages, {len(made.wheels)} wheels")
    for name in [model] if model else [] if stack else names(paths.project / "pins/models"):
        if not model and not manifests.model_lock_file(paths.project, name).is_file():
            show(f"pins/models/{name}.yaml has no lock; to make it: invoke lock --model {name}")
            continue
        for repository in lock_model.lock_model(paths, name).repositories.values():
            size = terminal.size(sum(tensor.size for tensor in repository.tensors))
            parts = f"{len(repository.files)} files, {len(repository.headers)} headers"
            parts += f", {len(repository.tensors)} tensors of {size}" if repository.tensors else ""
            show(f"pins/models/{name}.lock: {repository.repo} at {repository.revision}: {parts}")


def publish_digests(paths: Paths, stack: str | None) -> None:
    """Of one stack, or of each that has published some before. Those for another architecture are not built then, for
    that can take an hour: entries of other pins are removed from their files."""
    from sparkpin.build.make import at_work  # slow to import: only this asks an engine
    from sparkpin.distribute import digests as published

    if not (wanted := [stack] if stack else names(paths.project / published.FOLDER)):
        cause = f"{published.FOLDER} has no file yet, and no stack is named"
        raise InputError(cause, next_step="invoke lock --digests --stack cpu")
    with at_work(paths) as engine:
        for name in wanted:
            file = published.file_of(name)
            if stack or manifests.load_stack(paths.project, name).platform == this_platform():
                show(f"{file}: {published.publish(paths, engine, name)} images")
            elif gone := published.remove_stale(paths.project, name):
                show(f"{file}: removed {', '.join(gone)}, of other pins; next: invoke lock --digests --stack {name}")


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))
