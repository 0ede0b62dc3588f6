"""`invoke reproduce`: the images of a release again, from its record."""

from __future__ import annotations

from dataclasses import asdict

from sparkpin.build import reproduce as reproducing
from sparkpin.cli.choose import choose_known, newest_of_stage, require_trust
from sparkpin.core import files, terminal
from sparkpin.core.errors import DifferenceError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.pins import manifests
from sparkpin.releases.record import Releases


def reproduce(*, tag: str | None, stage: str | None, recipe: str | None, trusted: bool, keep: bool = False) -> None:
    """Build a release again from its record; DifferenceError unless every image came out identical.

    keep: what is missing of its images and its checkpoint, in this machine's engine and data directory, to stay.
    """
    paths = Paths.from_env()
    records = Releases(paths)
    if tag:
        release = records.get(tag)
    else:
        name = choose_known(paths, recipe)
        release = newest_of_stage(paths, name, stage or manifests.load_recipe(paths.project, name).stage)
    require_trust(paths, release, trusted=trusted)
    if keep:
        reproducing.restore(paths, release)
        show(f"{release.tag} is there: image {release.image}, checkpoint {release.checkpoint_key[:16]}")
        return
    say(f"building {release.tag} again from its record, in an engine of its own")
    result = reproducing.reproduce(paths, release, say)
    files.write_json(records.evidence(release) / "reproduced.json", asdict(result))
    print_result(result)


def print_result(result: reproducing.Reproduction) -> None:
    """DifferenceError for one that is not identical."""
    terminal.table(
        ("stage", "verdict", "image", "layers", "build"),
        [(s.stage, s.verdict, terminal.digest(s.got), s.layers, terminal.seconds(s.seconds)) for s in result.stages],
    )
    for stage in result.stages:
        for line in stage.lines:
            show(f"{stage.stage}: {line}")
    if result.verdict != "identical":
        raise DifferenceError(
            f"{result.release} came out different: not the recorded bytes",
            next_step="look for a build step that reads the time, a random number or the machine: the lines above say "
            "what it changed",
        )
    images = terminal.count(len(result.stages), "image")
    show(f"identical: {images} of {result.release}, built with Docker {result.engine}")
