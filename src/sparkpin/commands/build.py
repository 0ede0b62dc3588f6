"""`invoke render`, `rebuild`, `reproduce`: images from pins, and again from records."""

from __future__ import annotations

import shlex

from sparkpin.build import at_commit
from sparkpin.build import reproduce as reproducing
from sparkpin.build.make import rebuild as remake
from sparkpin.commands.choose import choose_known, newest_of_stage, pairings_of, require_trust
from sparkpin.core import files, terminal
from sparkpin.core.errors import DifferenceError, EngineError, HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests
from sparkpin.releases.record import Releases


def show_rendered(*, recipe: str | None, stage: str | None, stack: str | None) -> None:
    _, pairings = pairings_of(recipe, stage, stack)
    last = pairings[-1]
    image = last.rendered
    show(f"# {image.ref}\n{image.dockerfile.rstrip()}\n")
    show("# The build sees these files and no network:")
    for file in image.context:
        show(f"#   {file.sha256[:12]} {terminal.small_size(file.size):>10}  {file.path}")
    show(f"# A release of it runs: {shlex.join(last.argv)}")
    show(f"# Its checkpoint ({' + '.join(last.steps)}): {last.checkpoint_key}")


def rebuild(tag: str, *, trusted: bool) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    require_trust(paths, release, trusted=trusted)
    remake(paths, release)
    show(f"{release.tag} is there: image {release.image}, checkpoint {release.checkpoint_key[:16]}")


def reproduce(
    *, tag: str | None, stage: str | None, recipe: str | None, trusted: bool, commit: str | None = None
) -> None:
    """Build a release again from its record, or the pins of an earlier commit by its own code; DifferenceError unless
    every image came out identical."""
    paths = Paths.from_env()
    records = Releases(paths)
    if commit:
        if tag:
            raise InputError(
                f"{tag} is built from its record, --commit {commit} from the project as it was then",
                next_step=f"invoke reproduce --commit {commit}",
            )
        tell(at_commit.reproduce_commit(paths, commit, recipe, stage, say))
        return
    if tag:
        release = records.get(tag)
    else:
        name = choose_known(paths, recipe)
        release = newest_of_stage(paths, name, stage or manifests.load_recipe(paths.project, name).stage)
    require_trust(paths, release, trusted=trusted)
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
