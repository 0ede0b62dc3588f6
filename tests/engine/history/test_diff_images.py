"""`diff` and `why` of real images, before and after an edit."""

from __future__ import annotations

import made_releases
import pytest
from build_site import Site
from build_site import site as site
from bundle_samples import sha256

from sparkpin.build import reproduce
from sparkpin.build.image import cached_contents
from sparkpin.build.record import layer_file
from sparkpin.history import sides
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases


def real_release(site: Site, *flags: str) -> Release:
    """The release of a real chain, with the project's files kept."""
    images = site.build_all()
    last, built = site.chain()[-1], images[-1]
    names = [
        path.relative_to(site.paths.project).as_posix() for path in site.paths.project.rglob("*") if path.is_file()
    ]
    inputs = {name: sha256((site.paths.project / name).read_bytes()) for name in names if "tests" not in name}
    KeptInputs.of(site.paths).keep_project(site.paths.project, inputs)
    release = made_releases.release(
        1,
        recipe="real",
        stage=last.stage,
        stack=last.stack,
        build_key=last.key,
        image=built.config_digest,
        diff_ids=built.diff_ids,
        size=built.size,
        argv=("vllm", "serve", "/model", *flags),
        inputs=inputs,
    )
    Releases(site.paths).save(release)
    return release


def test_a_rebuild_brings_a_lost_listing_back(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `diff` advises. The checkpoint, which takes a model, and the packages of a made-up root are left out here."""
    for part in ("checkpoint_of", "absent_inputs"):
        monkeypatch.setattr(reproduce, part, lambda *args: None)
    release = real_release(site)
    found = sides.difference(site.paths, release.tag, release.tag)
    listings = {layer_file(site.paths, diff_id): diff_id for diff_id in release.diff_ids}
    before = {path: path.read_bytes() for path in listings}
    for path, diff_id in listings.items():
        path.unlink()
        cached_contents(site.paths, diff_id).unlink()
    assert sides.difference(site.paths, release.tag, release.tag).contents is None and found.contents
    try:
        reproduce.restore(site.paths, release)
    finally:
        site.engine.untag(release.tag)
    assert {path: path.read_bytes() for path in listings} == before
