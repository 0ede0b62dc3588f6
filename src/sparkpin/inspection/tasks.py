"""The task `inspect`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparkpin import manifests, ui
from sparkpin.engine import Engine
from sparkpin.errors import InputError, InspectionError, SparkpinError
from sparkpin.inputs import project_of
from sparkpin.inspection import report
from sparkpin.inspection.elf import MACHINES
from sparkpin.inspection.image import Opened, open_folder, open_image
from sparkpin.inspection.report import Result
from sparkpin.inspection.rules import PLATFORMS, findings
from sparkpin.inspection.scan import Facts, scan
from sparkpin.modwheels import read_mod
from sparkpin.paths import Paths
from sparkpin.progress import Say
from sparkpin.releases import Releases


def inspect(paths: Paths, engine: Engine | None, subject: str, *, sm: str, platform: str, say: Say) -> Result:
    """Examine a release, another image of the engine, or a folder. sm, platform: "" for what the stack says.

    engine: None for a folder.
    """
    with contextlib.ExitStack() as stack:
        if engine is None:
            opened = stack.enter_context(open_folder(Path(subject)))
        else:
            opened = stack.enter_context(open_image(paths, engine, ref_of(paths, engine, subject), say))
        facts = scan(opened.files, say, opened.env)
        chosen = platform_of(platform, opened, facts)
        then = paths if engine is None else stack.enter_context(pins_of(paths, subject, say))
        gpu, mods = sm_of(then, sm, opened, say), mods_of(then, opened, say)
    return Result(subject, chosen, gpu, facts, findings(facts, sm=gpu, platform=chosen, mods=mods))


def ref_of(paths: Paths, engine: Engine, subject: str) -> str:
    """The tag of a release, however it is shortened, else what the engine knows by that name."""
    try:
        tag = Releases(paths).get(subject).tag
    except InputError:
        if engine.image(subject):
            return subject
        raise
    if engine.image(tag) is None:
        raise InputError(f"the engine has no image {tag}", next_step=f"invoke rebuild {tag}")
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


def platform_of(asked: str, opened: Opened, facts: Facts) -> str:
    """As asked for, as the image says, else that of most libraries."""
    if not asked and not opened.platform:
        machines = [library.machine for library in facts.libraries.values() if library.machine in MACHINES]
        asked = max(PLATFORMS, key=lambda name: machines.count(PLATFORMS[name]))
    chosen = asked or opened.platform
    if chosen not in PLATFORMS:
        known = ", ".join(PLATFORMS)
        raise InputError(f"--platform: saw {chosen!r}, wanted one of: {known}", next_step=f"choose one of: {known}")
    return chosen


def sm_of(paths: Paths, asked: str, opened: Opened, say: Say) -> int | None:
    """As asked for ("121" or "12.1"), else what the image's stack is for."""
    if asked:
        if not re.fullmatch(r"\d{2,3}|\d{1,2}\.\d", asked):
            raise InputError(f"--sm: saw {asked!r}, wanted a compute capability", next_step="for example --sm 121")
        return int(asked.replace(".", ""))
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


def show(result: Result, *, as_json: bool) -> None:
    """Print it; InspectionError where it fails."""
    if as_json:
        ui.show(json.dumps(result.as_json(), indent=1))
    else:
        report.show(result)
    if errors := result.errors:
        first = errors[0]
        raise InspectionError(f"{result.subject} {result.verdict}", next_step=first.next_step)
