"""`invoke reproduce`: the images of a release again, from its record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from sparkpin.build import reproduce as reproducing
from sparkpin.build.consistent import is_from_elsewhere
from sparkpin.cli.tasks import task
from sparkpin.core import files, terminal
from sparkpin.core.errors import DifferenceError, InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.releases.record import Releases, now


@task("prove and carry")
def reproduce(
    paths: Paths,
    tag: Annotated[str, "release, or a stage for its newest one"],
    *,
    keep: Annotated[bool, "in this machine's engine: its images, and its checkpoint, stay"] = False,
    trust: Annotated[bool, "also build an imported release: its steps run as root"] = False,
) -> None:
    """Build a release again from its record, and compare."""
    release = Releases(paths).get(tag)
    if not trust and is_from_elsewhere(paths, release):
        cause = f"{release.tag} came from another machine: building it runs, as root, what its bundle says"
        step = f"`invoke verify {release.tag}` says who signed it; then the same command with --trust"
        raise InputError(cause, next_step=step)
    if keep:
        reproducing.restore(paths, release)
        show(f"{release.tag} is there: image {release.image}, checkpoint {release.checkpoint_key[:16]}")
        return
    say(f"building {release.tag} again from its record, in an engine of its own")
    results = reproducing.reproduce(paths, release)
    verdict = "identical" if all(result.verdict == "identical" for result in results) else "different"
    value = {"release": release.tag, "verdict": verdict, "at": now(), "stages": [asdict(result) for result in results]}
    files.write_json(Releases(paths).evidence(release) / "reproduced.json", value)
    rows = [(r.stage, r.verdict, terminal.digest(r.got), r.layers, terminal.seconds(r.seconds)) for r in results]
    terminal.table(("stage", "verdict", "image", "layers", "build"), rows)
    for result in results:
        for line in result.lines:
            show(f"{result.stage}: {line}")
    if verdict == "different":
        step = "find the build step that read the time, a random number or the machine; see above what changed"
        raise DifferenceError(f"{release.tag} came out different: not the recorded bytes", next_step=step)
    show(f"identical: {terminal.count(len(results), 'image')} of {release.tag}")
