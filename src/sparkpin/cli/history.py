"""`invoke diff`, `why`, `reproduce` and `report`: what is known of releases, and whether they come out so again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from sparkpin.build import reproduce as reproducing
from sparkpin.build.consistent import is_from_elsewhere
from sparkpin.cli.tasks import Json, task
from sparkpin.core import files, terminal
from sparkpin.core.errors import DifferenceError, InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, show_json, size
from sparkpin.history.diff_text import difference_json, difference_lines
from sparkpin.history.sides import difference
from sparkpin.history.why import find_origin, origin_lines
from sparkpin.releases.record import Releases, now


@task("releases")
def diff(
    paths: Paths,
    before: Annotated[str, "tag of a release, or . for the working tree", "TAG"],
    after: Annotated[str, "another tag, or .", "TAG"],
    *,
    files: Annotated[bool, "every path of the images that differs"] = False,
    json: Json = False,
    exit_code: Annotated[bool, "end with 1 when they differ"] = False,
) -> int:
    """Print what changed between two releases.

    invoke diff v2 v2-tq
    """
    found = difference(paths, before, after)
    show_json(difference_json(found)) if json else show("\n".join(difference_lines(found, all_files=files)))
    return int(exit_code and not found.identical)


@task("verify and distribute")
def why(
    paths: Paths, tag: Annotated[str, "release"], path: Annotated[str, "path in its image"], *, json: Json = False
) -> None:
    """Print which lock entry, stage and layer a file comes from.

    invoke why v2 /opt/vllm/bin/vllm
    """
    origin = find_origin(paths, tag, path)
    show_json(asdict(origin)) if json else show("\n".join(origin_lines(origin)))


@task("verify and distribute")
def reproduce(
    paths: Paths,
    tag: Annotated[str, "release, or a stage for its newest one"],
    *,
    keep: Annotated[bool, "build in this machine's engine; keep images and checkpoint"] = False,
    trust: Annotated[bool, "also build an imported release: its steps run as root"] = False,
) -> None:
    """Build a release again from its record, and compare.

    invoke reproduce v2 --keep
    """
    release = Releases(paths).get(tag)
    if not trust and is_from_elsewhere(paths, release):
        cause = f"{release.tag} came from another machine: building it runs, as root, what its bundle says"
        step = f"`invoke verify {release.tag}` prints who signed it; then the same command with --trust"
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
    show(f"identical: {count(len(results), 'image')} of {release.tag}")


@task("releases")
def report(
    paths: Paths,
    *,
    recipe: Annotated[str | None, "releases of this recipe only (default: every recipe's)"] = None,
    markdown: Annotated[bool, "print a table for a forum post instead"] = False,
) -> None:
    """Write the releases with their evidence as one HTML page.

    invoke report --markdown
    """
    from sparkpin.report import page  # slow to import, both
    from sparkpin.report.gather import gather

    facts = gather(paths, recipe)
    for fault in facts.all_faults:
        say(printable(fault))
    if markdown:
        show(page.markdown(facts))
        return
    # One recipe's page does not take the place of all recipes'.
    target, content = paths.home / (f"report-{recipe}.html" if recipe else "report.html"), page.html(facts).encode()
    with files.atomic_file(target) as file:
        file.write(content)
    show(f"{target}: {count(sum(len(part.items) for part in facts.recipes), 'release')}, {size(len(content))}")
