"""Which release is current, and the list of all with what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sparkpin.core.errors import CheckpointError, EngineError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import image_ref
from sparkpin.host.engine import Engine
from sparkpin.host.images import ImageInfo
from sparkpin.releases import promotions
from sparkpin.releases.protection import protections_of
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import with_others


class GoneError(EngineError):
    """The engine answers, and lacks the image of a release."""


def promote(paths: Paths, engine: Engine, release: Release, *, accepted: Mapping[str, str] | None = None) -> Release:
    """Make a release that passed its smoke test the current one of its recipe. Running it again changes nothing more.

    The caller has looked whether the release is what its record says.
    """
    if not release.is_good:
        raise not_passed(paths, release)
    make_current(paths, engine, release, accepted=accepted)
    return Releases(paths).get(release.tag)


def not_passed(paths: Paths, release: Release) -> InputError:
    """The next step after a failed test is its evidence, or the last release that passed: until the cause is gone,
    another test fails as well."""
    why = f" (smoke test {release.smoke_text})" if release.smoke else ""
    passed = [one for one in Releases(paths).readable(release.recipe)[0] if one.is_good]
    passed = [one for one in passed if one.stage == release.stage] or passed
    instead = f"; or take the last that passed: invoke serve {passed[-1].tag}" if passed else ""
    if release.smoke_failed:
        step = how_it_failed(paths, release)
    else:
        there = f", where it can run: {release.smoke_why}" if release.smoke_inspected else ""
        step = with_others(paths, release) or f"invoke smoke {release.tag}{there}"
    return InputError(
        f"{release.tag} is {release.state}{why}; only a release that passed its smoke test is promoted or served",
        next_step=step + instead,
    )


def how_it_failed(paths: Paths, release: Release) -> str:
    """What to do about a smoke test that failed."""
    failed = {check["name"] for check in (release.smoke or {}).get("checks", ()) if not check["passed"]}
    file = "inspection.json" if not release.smoke_served else "server.log" if "start" in failed else "exchanges.jsonl"
    evidence = Releases(paths).evidence(release) / "smoke" / file
    return f"read {evidence}; once the cause is gone, invoke smoke {release.tag} tests it again"


def make_current(
    paths: Paths,
    engine: Engine,
    release: Release,
    *,
    instead_of: Release | None = None,
    accepted: Mapping[str, str] | None = None,
) -> None:
    """Note the promotion, or, `instead_of` the current release, the rollback. Nothing changes unless image and
    checkpoint are there, and the release is still good: a smoke test may have failed since its record was read."""
    records = Releases(paths)
    with records.locked(release.recipe):
        release = records.get(release.tag)
        if not release.is_good:
            raise not_passed(paths, release)
        ref = require_parts(paths, engine, release)
        now_current = records.current_tag(release.recipe)
        if instead_of and now_current not in (instead_of.tag, release.tag):
            raise InputError(
                f"{now_current} was promoted meanwhile, so {release.tag} does not become current",
                next_step=f"invoke images; invoke promote {release.tag} goes there all the same",
            )
        if ref != release.tag:
            engine.tag(ref, release.tag)
        records.point(release, rollback=instead_of is not None, accepted=accepted)


def require_parts(paths: Paths, engine: Engine, release: Release) -> str:
    """A name of the release's image. GoneError where the engine lacks it, CheckpointError where the
    data directory lacks the checkpoint."""
    ref, folder = require_ref(engine, release), Releases(paths).checkpoint(release)
    if not folder.is_dir():
        raise CheckpointError(
            f"the checkpoint of {release.tag} is gone: no folder {folder}", next_step=how_to_rebuild(release)
        )
    return ref


def require_ref(engine: Engine, release: Release) -> str:
    """A name under which the engine holds exactly the image that was recorded, or GoneError.

    The release's own tag may be gone or moved by hand; the digest itself is a name on most engines.
    """
    for ref in (release.tag, release.image, image_ref(release.stack, release.stage, release.build_key)):
        info = engine.image(ref)
        if info is not None and info.config_digest == release.image:
            return ref
    cause = f"the image of {release.tag} ({release.image}) is not in the engine"
    raise GoneError(cause, next_step=how_to_rebuild(release))


def require_current(records: Releases, recipe: str) -> Release:
    if current := records.current(recipe):
        return current
    known = records.of_recipe(recipe)
    if good := [release for release in known if release.is_good]:
        step = f"invoke promote {good[-1].tag}"
    elif known and known[-1].smoke_failed:
        step = how_it_failed(records.paths, known[-1])
    elif known:
        step = f"invoke smoke {known[-1].tag}, then invoke promote {known[-1].tag}"
    else:
        step = f"invoke up --recipe {recipe} (it builds and smokes; the first release that passes becomes current)"
    raise InputError(f"recipe {recipe!r} has no current release", next_step=step)


def how_to_rebuild(release: Release) -> str:
    return f"invoke reproduce {release.tag} --keep makes image and checkpoint again; then the same command"


AS_RECORDED = ("tag", "recipe", "stage", "key", "size", "created", "state")


@dataclass(frozen=True)
class ImageRows:
    """rows: one mapping for each release, from the newest to the oldest in each recipe; plain JSON values.

    shared: bytes of the layers of these images that are in no row's unique_size, each counted once; None where they
    are not known. faults: what is wrong with records that are damaged, and left out.
    """

    rows: list[dict[str, Any]]
    shared: int | None
    faults: list[ManifestError]


def list_images(paths: Paths, engine: Engine) -> ImageRows:
    """For `invoke images`. In a row, image is None where the engine does not hold the recorded image; sizes are in
    bytes; unique_size counts the layers that no other image of the engine shares, None where the engine does not tell;
    protected: since when and why, None for most; previous: whether a rollback would land on it; host: the machine that
    made it, None in old records.
    """
    from sparkpin.releases.quality_gate import is_refused  # slow to import

    records = Releases(paths)
    images = engine.images()
    refused = partial(is_refused, paths, present={image.config_digest for image in images})
    by_name = {(tag, image.config_digest): image for image in images for tag in image.tags}
    present: dict[str, ImageInfo] = {}
    rows: list[dict[str, Any]] = []
    faults: list[ManifestError] = []
    for recipe in records.recipes():
        releases, broken = records.readable(recipe)
        protections, faults = protections_of(records, recipe), [*faults, *broken]
        current = next((release for release in releases if release.state == "current"), None)
        back = promotions.landing(releases, current, records.before(recipe), refused) if current else None
        for release in reversed(releases):
            if image := by_name.get((release.tag, release.image)):
                present[image.id] = image
            protection = protections.get(release.tag)
            rows.append(
                {
                    **{name: getattr(release, name) for name in AS_RECORDED},
                    "image": release.image if image else None,
                    "unique_size": image.unique_size(images) if image else 0,
                    "smoke": release.smoke_text,
                    "protected": asdict(protection) if protection else None,
                    "previous": release == back,
                    "host": release.host.model_dump() if release.host else None,
                }
            )
    sizes = [image.unique_size(images) for image in present.values()]
    layers: dict[str, int] = {}
    for image in present.values():
        layers.update(image.layers or {})
    shared = sum(layers.values()) - sum(filter(None, sizes)) if present and None not in sizes else None
    return ImageRows(rows, shared, faults)


def current_of(paths: Paths, recipe: str | None) -> Release:
    """The current release of a recipe, by default the one that became current last. InputError where there is none."""
    records = Releases(paths)
    name = recipe or records.default_recipe()
    if not records.record_files(name):
        from sparkpin.pins import manifests  # slow to import

        manifests.load_recipe(paths.project, name)  # an unknown name is another mistake
    return require_current(records, name)
