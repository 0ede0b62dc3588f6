"""The task `inspect`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.errors import InputError, InspectionError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.pins.mods import read_mod
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect import report
from sparkpin.smoke.inspect.elf import MACHINES
from sparkpin.smoke.inspect.gpu import KNOWN
from sparkpin.smoke.inspect.image import Opened, open_folder, open_image
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.rules import PLATFORMS, findings
from sparkpin.smoke.inspect.scan import ImageFacts, scan

# An image's name, as engines take it: [host:port/]name[:tag][@digest].
NAME = re.compile(r"[a-z0-9][a-z0-9._/-]*(:\d+/[a-z0-9._/-]+)?(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)
MAY_BE = "TAG may be a release, another image of the engine, or a folder with a root file system"


def inspect(paths: Paths, engine: Engine | None, subject: str, *, sm: str, platform: str, say: Say) -> Result:
    """Examine a release, another image of the engine, or a folder. sm, platform: "" for what the stack says.

    engine: None for a folder. InputError for options that cannot be, before anything is read.
    """
    asked = known_sm(sm)
    known_platform(platform)
    with contextlib.ExitStack() as stack:
        if engine is None:
            opened = stack.enter_context(open_folder(Path(subject)))
        else:
            subject = ref_of(paths, engine, subject)
            opened = stack.enter_context(open_image(paths, engine, subject, say))
        facts = scan(opened.files, say, opened.env)
        chosen = platform_of(platform, opened, facts)
        then = paths if engine is None else stack.enter_context(pins_of(paths, subject, say))
        gpu, mods = asked or sm_of(then, opened, say), mods_of(then, opened, say)
    return Result(subject, chosen, gpu, facts, findings(facts, sm=gpu, platform=chosen, mods=mods))


def check(paths: Paths, subject: str, *, sm: str, platform: str) -> None:
    """InputError for what cannot be right, before an engine is asked for anything."""
    known_sm(sm)
    known_platform(platform)
    path = Path(subject)
    if path.is_dir():
        return
    if (path.exists() or not NAME.fullmatch(subject)) and not is_release(paths, subject):
        if path.exists():
            raise InputError(f"{subject} is a file; {MAY_BE}", next_step="unpack it into a folder, or invoke images")
        raise InputError(f"there is no folder {subject!r}; {MAY_BE}", next_step="invoke images lists the releases")


def is_release(paths: Paths, subject: str) -> bool:
    try:
        return bool(Releases(paths).get(subject))
    except InputError:
        return False


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


def known_sm(asked: str) -> int | None:
    """121 for "121", "12.1" and "sm_121"; None for "". InputError for what is no GPU's compute capability."""
    if not asked:
        return None
    found = re.fullmatch(r"(?:sm_)?([0-9]{2,3})|([0-9]{1,2}\.[0-9])", asked)
    number = int((found[1] or found[2]).replace(".", "")) if found else 0
    if number not in KNOWN:
        raise InputError(
            f"--sm: saw {asked!r}, wanted a GPU's compute capability: 121, 12.1 or sm_121 (DGX Spark), 90 (H100), ...",
            next_step="for example --sm 121",
        )
    return number


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


def show(result: Result, *, everything: bool, as_json: bool) -> None:
    """Print it; InspectionError, which says the verdict, where it fails."""
    if as_json:
        terminal.show(json.dumps(result.as_json(), indent=1))
    else:
        report.show(result, everything=everything)
    if errors := result.errors:
        first = errors[0]
        raise InspectionError(f"{result.subject} {result.verdict}", next_step=first.next_step)
    if not as_json:
        terminal.show(result.verdict)
