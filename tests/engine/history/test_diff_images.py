"""`diff` and `why` of real images, before and after an edit."""

from __future__ import annotations

import made_releases
import pytest
import tiny_images
from build_site import Site
from build_site import site as site
from recorded import sections, sha

from sparkpin.build import reproduce
from sparkpin.build.image import cached_contents
from sparkpin.build.record import layer_file
from sparkpin.history import sides
from sparkpin.history.why import find_origin
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases

HELLO = "mods/hello/sparkpin_hello/__init__.py"


def real_release(site: Site, *flags: str) -> Release:
    """The release of a real chain, with the project's files kept."""
    images = site.build_all()
    last, built = site.chain()[-1], images[-1]
    names = [
        path.relative_to(site.paths.project).as_posix() for path in site.paths.project.rglob("*") if path.is_file()
    ]
    inputs = {name: sha((site.paths.project / name).read_bytes()) for name in names if "tests" not in name}
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


def test_real_images_before_and_after_an_edit(site: Site) -> None:
    before = real_release(site, "--quiet")
    tiny_images.write(site.paths.project / HELLO, '"""Made up."""\nVALUE = 2\n')
    after = real_release(site, "--loud")
    found = sides.difference(site.paths, before.tag, after.tag)
    told = sections(found)
    assert told["mods"][0] == "changed hello 0.1.0" and told["mods"][-2:] == ["-VALUE = 1", "+VALUE = 2"]
    assert told["vllm serve"] == ["- --quiet", "+ --loud"]
    assert found.contents and [change.path for change in found.contents.changed] == [
        "opt/hello/requirements.txt",
        "opt/hello/sparkpin_hello-0.1.0-py3-none-any.whl",
    ]
    assert not found.parts["debs"] and not found.parts["wheels"]
    wheel = find_origin(site.paths, after.tag, "/opt/hello/sparkpin_hello-0.1.0-py3-none-any.whl")
    assert wheel.layer and (wheel.layer.name, wheel.layer.stage) == ("hello", "one")
    assert wheel.entry != find_origin(site.paths, before.tag, wheel.path).entry
    shell = find_origin(site.paths, after.tag, "/bin/sh")
    assert shell.layer and shell.layer.name == "root file system"


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
