"""An inspection: what is examined, for which GPU and platform, and compared with which pins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.core.errors import EngineError, InputError, SparkpinError
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.core.progress import progress
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.pins.mods import read_mod
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.rules import PLATFORMS, findings
from sparkpin.smoke.inspect.scan import ImageFacts, scan
from sparkpin.smoke.inspect.tree import FoundPath, in_archive, in_folder

STACK, STAGE = "sparkpin.stack", "sparkpin.stage"  # labels


@dataclass(frozen=True)
class Opened:
    files: Iterator[FoundPath]  # each may be read until the next one is asked for
    platform: str = ""  # "linux/arm64"; "" where nothing names it
    stack: str = ""
    stage: str = ""


def inspect(paths: Paths, engine: Engine | None, subject: str, *, sm: int | None) -> Result:
    """Examine a release, another image of the engine, or a folder, for which engine is None.

    sm: 121; None for what the stack says.
    """
    with contextlib.ExitStack() as stack:
        if engine is None:
            opened, then = Opened(in_folder(Path(subject))), paths
        else:
            subject = ref_of(paths, engine, subject)
            opened = stack.enter_context(open_image(paths, engine, subject))
            then = stack.enter_context(pins_of(paths, subject))
        facts = scan(opened.files)
        platform = opened.platform or platform_of(facts)
        if platform not in PLATFORMS:
            raise InputError(f"{subject} is for {platform}", next_step=f"an image for {' or '.join(PLATFORMS)}")
        gpu, mods = demands_of(then, opened)
        gpu = sm or gpu
    return Result(subject, platform, gpu, facts, findings(facts, sm=gpu, platform=platform, mods=mods))


@contextlib.contextmanager
def open_image(paths: Paths, engine: Engine, ref: str) -> Iterator[Opened]:
    """An image of the engine, which exports its files from a container that never runs."""
    info = engine.image(ref)
    if info is None:
        raise InputError(f"the engine has no image {ref}", next_step="invoke images")
    say("the engine exports the files")
    with saving_folder(paths) as work, progress(info.size) as came, engine.exported(ref, came) as archive:
        files = in_archive(archive, work)
        platform = f"{info.os}/{info.architecture}"
        yield Opened(files, platform, info.labels.get(STACK, ""), info.labels.get(STAGE, ""))


def ref_of(paths: Paths, engine: Engine, subject: str) -> str:
    """The tag of a release, however it is shortened, otherwise what the engine knows by that name."""
    try:
        tag = Releases(paths).get(subject).tag
    except InputError as error:
        with contextlib.suppress(EngineError):  # what can be no image's name
            if engine.image(subject):
                return subject
        raise InputError(
            f"{error.message}; nor is there such a folder, or such an image", next_step=error.next_step
        ) from None
    if engine.image(tag) is None:
        raise InputError(f"the engine has no image {tag}", next_step=f"invoke reproduce {tag} --keep")
    return tag


@contextlib.contextmanager
def pins_of(paths: Paths, subject: str) -> Iterator[Paths]:
    """With the project as it was when a release was made, for its stage may have other mods today."""
    project = paths.project
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(InputError):  # no release: today's
            release = Releases(paths).get(subject)
            try:
                project = stack.enter_context(project_of(paths, release))
            except SparkpinError as error:
                say(f"note: compared with today's pins, not its own: {error.message}")
        yield replace(paths, project=project)


def platform_of(facts: ImageFacts) -> str:
    """That of most libraries."""
    machines = [library.machine for library in facts.libraries.values()]
    return max(PLATFORMS, key=lambda name: machines.count(PLATFORMS[name]))


def demands_of(paths: Paths, opened: Opened) -> tuple[int | None, list[str]]:
    """The GPU that the image's stack is for, and the distributions of the mods that its stack and stage name."""
    if not opened.stack:
        return None, []
    try:
        stack = manifests.load_stack(paths.project, opened.stack)
        chain = manifests.load_chain(paths.project, opened.stage) if opened.stage else ()
        names = [*stack.mods, *(mod for stage in chain for mod in stage.mods)] if chain else []
        sm = int(stack.gpu.sm.replace(".", "")) if stack.gpu else None
        return sm, [read_mod(paths.project, name).distribution for name in names]
    except SparkpinError as error:  # a stack of another project
        say(f"note: its GPU and its mods are not known here, so neither is judged: {error.message}")
        return None, []
