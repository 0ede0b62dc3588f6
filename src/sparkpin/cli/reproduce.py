"""`invoke reproduce`: the images of a release again, from its record."""

from __future__ import annotations

from typing import Annotated

from sparkpin.build import reproduce as reproducing
from sparkpin.cli.choose import choose_known, newest_of_stage, require_trust
from sparkpin.cli.options import Recipe
from sparkpin.cli.tasks import task
from sparkpin.core import files, terminal
from sparkpin.core.errors import DifferenceError, EngineError, HostError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests
from sparkpin.releases.record import Releases


@task("prove and carry")
def reproduce(
    tag: Annotated[str | None, "release to build again (default: the newest of --stage)"] = None,
    *,
    stage: Annotated[str | None, "the newest release of this stage (default: the recipe's)"] = None,
    recipe: Recipe = None,
    keep: Annotated[bool, "in this machine's engine: its images, and its checkpoint, stay"] = False,
    trust: Annotated[bool, "also build an imported release: its steps run as root"] = False,
) -> None:
    """Build a release again from its record, and compare."""
    paths = Paths.from_env()
    records = Releases(paths)
    if tag:
        release = records.get(tag)
    else:
        name = choose_known(paths, recipe)
        release = newest_of_stage(paths, name, stage or manifests.load_recipe(paths.project, name).stage)
    require_trust(paths, release, trusted=trust)
    if keep:
        reproducing.restore(paths, release)
        show(f"{release.tag} is there: image {release.image}, checkpoint {release.checkpoint_key[:16]}")
        return
    say(f"building {release.tag} again from its record, in an engine of its own")
    try:
        original = engine_of(paths)
    except (EngineError, HostError):  # it is asked for texts of files that differ, and for nothing else
        original = None
    result = reproducing.reproduce(paths, release, original, say)
    files.write_json(records.evidence(release) / "reproduced.json", reproducing.to_json(result))
    tell(result)


def tell(result: reproducing.Reproduction) -> None:
    terminal.table(
        ("stage", "verdict", "image", "layers", "build"),
        [(s.stage, s.verdict, terminal.digest(s.got), s.layers, terminal.seconds(s.seconds)) for s in result.stages],
    )
    for stage_result in result.stages:
        if stage_result.verdict != "identical":
            word = "equivalent except" if stage_result.verdict == "equivalent" else "different"
            show(f"{stage_result.stage}: {word}:")
            for line in stage_result.lines:
                show(f"  {line}")
    for note in result.notes:
        show(f"note: {note}")
    if result.verdict != "identical":
        raise DifferenceError(
            f"{result.release} came out {result.verdict}: not the recorded bytes",
            next_step="what differs stands above; a build step that reads time, chance or the machine makes it so",
        )
    images = terminal.count(len(result.stages), "image")
    show(f"identical: {images} of {result.release}, built with Docker {result.engine}")
