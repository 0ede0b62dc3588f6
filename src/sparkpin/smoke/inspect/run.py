"""An inspection: what is examined, for which GPU and platform, and held against which pins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.pins.mods import read_mod
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect.elf import MACHINES
from sparkpin.smoke.inspect.image import Opened, open_image
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.rules import PLATFORMS, findings
from sparkpin.smoke.inspect.scan import ImageFacts, scan
from sparkpin.smoke.inspect.tree import in_folders

MAY_BE = "TAG may be a release, another image of the engine, or a folder with a root file system"


def inspect(paths: Paths, engine: Engine | None, subject: str, *, sm: int | None, platform: str, say: Say) -> Result:
    """Examine a release, another image of the engine, or a folder, for which engine is None.

    sm: 121; None for what the stack says. platform: "" for what the image says.
    """
    with contextlib.ExitStack() as stack:
        if engine is None:
            opened = Opened(in_folders([Path(subject)]))
        else:
            subject = ref_of(paths, engine, subject)
            opened = stack.enter_context(open_image(paths, engine, subject, say))
        facts = scan(opened.files, say, opened.env)
        chosen = platform_of(platform, opened, facts)
        then = paths if engine is None else stack.enter_context(pins_of(paths, subject, say))
        gpu, mods = sm or sm_of(then, opened, say), mods_of(then, opened, say)
    return Result(subject, chosen, gpu, facts, findings(facts, sm=gpu, platform=chosen, mods=mods))


def ref_of(paths: Paths, engine: Engine, subject: str) -> str:
    """The tag of a release, however it is shortened, else what the engine knows by that name. Of a name that several
    releases have, those count whose images are here."""
    try:
        tag = Releases(paths).get(subject, has_image=lambda release: engine.image(release.tag) is not None).tag
    except InputError as error:
        if engine.image(subject):
            return subject
        raise InputError(f"{error.message}; {MAY_BE}", next_step=error.next_step) from None
    if engine.image(tag) is None:
        raise InputError(f"the engine has no image {tag}", next_step=f"invoke reproduce {tag} --keep")
    return tag


@contextlib.contextmanager
def pins_of(paths: Paths, subject: str, say: Say) -> Iterator[Paths]:
    """With the project as it was when a release was made, for its stage may have other mods today."""
    project = paths.project
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(InputError):  # no release: today's
            release = Releases(paths).get(subject)
            try:
                project = stack.enter_context(project_of(paths, release))
            except SparkpinError as error:
                say(f"note: held against today's pins, not its own: {error.message}")
        yield replace(paths, project=project)


def platform_of(asked: str, opened: Opened, facts: ImageFacts) -> str:
    """As asked for, as the image says, else that of most libraries."""
    if not asked and not opened.platform:
        machines = [library.machine for library in facts.libraries.values() if library.machine in MACHINES]
        asked = max(PLATFORMS, key=lambda name: machines.count(PLATFORMS[name]))
    return known_platform(asked or opened.platform)


def known_platform(name: str) -> str:
    """The same; "" for "". InputError for any other that is not in PLATFORMS."""
    if name and name not in PLATFORMS:
        known = ", ".join(PLATFORMS)
        raise InputError(f"--platform: saw {name!r}, wanted one of: {known}", next_step=f"choose one of: {known}")
    return name


def sm_of(paths: Paths, opened: Opened, say: Say) -> int | None:
    """What the image's stack is for."""
    try:
        gpu = manifests.load_stack(paths.project, opened.stack).gpu if opened.stack else None
        return int(gpu.sm.replace(".", "")) if gpu else None
    except SparkpinError as error:  # a stack of another project
        say(f"note: which GPU the image is for is not known here, so its GPU code is not judged: {error.message}")
        return None


def mods_of(paths: Paths, opened: Opened, say: Say) -> list[str]:
    """Distributions of the mods that the image's stack and stage name."""
    if not opened.stage:
        return []
    try:
        stack, chain = (
            manifests.load_stack(paths.project, opened.stack),
            manifests.load_chain(paths.project, opened.stage),
        )
        names = [*stack.mods, *(mod for stage in chain for mod in stage.mods)]
        return [read_mod(paths.project, name).distribution for name in names]
    except SparkpinError as error:
        say(f"note: which mods belong into the image is not known here: {error.message}")
        return []
