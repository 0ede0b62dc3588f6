"""`invoke reproduce`: the images of a release again, from its record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from sparkpin.build import reproduce as reproducing
from sparkpin.cli.choose import choose_known, newest_of_stage, require_trust
from sparkpin.cli.tasks import task
from sparkpin.core import files, terminal
from sparkpin.core.errors import DifferenceError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.pins import manifests
from sparkpin.releases.record import Releases, now


@task("prove and carry")
def reproduce(
    tag: Annotated[str | None, "release, or a stage for its newest one (default: the newest of the recipe)"] = None,
    *,
    keep: Annotated[bool, "in this machine's engine: its images, and its checkpoint, stay"] = False,
    trust: Annotated[bool, "also build an imported release: its steps run as root"] = False,
) -> None:
    """Build a release again from its record, and compare."""
    paths = Paths.from_env()
    records = Releases(paths)
    if tag:
        release = records.get(tag)
    else:
        name = choose_known(paths, None)
        release = newest_of_stage(paths, name, manifests.load_recipe(paths.project, name).stage)
    require_trust(paths, release, trusted=trust)
    if keep:
        reproducing.restore(paths, release)
        show(f"{release.tag} is there: image {release.image}, checkpoint {release.checkpoint_key[:16]}")
        return
    say(f"building {release.tag} again from its record, in an engine of its own")
    results = reproducing.reproduce(paths, release)
    verdict = "identical" if all(result.verdict == "identical" for result in results) else "different"
    value = {"release": release.tag, "verdict": verdict, "at": now(), "stages": [asdict(result) for result in results]}
    files.write_json(records.evidence(release) / "reproduced.json", value)
    rows = [(r.stage, r.verdict, terminal.digest(r.got), r.layers, terminal.seconds(r.seconds)) for r in results]
    terminal.table(("stage", "verdict", "image", "layers", "build"), rows)
    for result in results:
        for line in result.lines:
            show(f"{result.stage}: {line}")
    if verdict == "different":
        step = "find the build step that read the time, a random number or the machine; see above what changed"
        raise DifferenceError(f"{release.tag} came out different: not the recorded bytes", next_step=step)
    show(f"identical: {terminal.count(len(results), 'image')} of {release.tag}")
