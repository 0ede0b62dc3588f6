"""Building a made-up chain with a real engine: the same bytes each time, one build at a time, nothing half-made."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_images
from build_site import Site
from build_site import site as site
from heard import heard
from private_engine import tags_in

from sparkpin.build import image as build
from sparkpin.build import render, rootfs
from sparkpin.build.image import build_image, find_built
from sparkpin.build.record import record_file
from sparkpin.core.errors import BuildError
from sparkpin.host import buildkit
from sparkpin.host.engine import Engine
from sparkpin.image import listing

fork = multiprocessing.get_context("fork")


def leftovers(site: Site) -> list[str]:
    keys = [image.key[:12] for image in site.chain()]
    unsealed = [tag for tag in tags_in(site.engine) if tag.startswith("sparkpin/unsealed:") and tag[-12:] in keys]
    return unsealed + [path.name for path in site.paths.work.iterdir()]


def test_chain_is_built_once(site: Site) -> None:
    images = site.build_all()
    assert site.made() == ["base", "one", "two"]
    base, one, two = images
    assert one.diff_ids[: len(base.diff_ids)] == base.diff_ids and len(one.diff_ids) == len(base.diff_ids) + 1
    assert two.diff_ids == one.diff_ids and two.config_digest != one.config_digest
    again = site.build_all()
    assert again == images and site.made() == []
    assert leftovers(site) == []


def test_layers_that_the_engine_lost_are_made_again(site: Site) -> None:
    first = site.build_all()
    site.forget_images(first)
    assert not any(find_built(site.paths, site.engine, image) for image in site.chain())
    for note in (site.paths.cache / "layers").glob("*.json"):
        gone = "sha256:" + "0" * 64  # the build cache may still hold the real ones
        note.write_text(json.dumps({"diff_id": gone}))
        listing.write_contents(build.cached_contents(site.paths, gone), ())
    again = site.build_all()
    assert [image.config_digest for image in again] == [image.config_digest for image in first]


def test_a_step_that_leaves_nothing_that_lasts_adds_no_layer(site: Site) -> None:
    template = site.paths.project / "dockerfiles/base.j2"
    template.write_text(template.read_text().replace("/tmp/net /opt/net", "/tmp/net /tmp/net"))
    assert len(site.build(site.chain()[0]).diff_ids) == 1, "the root file system alone"


def test_an_image_other_than_the_recorded_one_is_not_trusted(site: Site) -> None:
    base = site.chain()[0]
    built = site.build(base)
    site.engine.tag(base.parent_ref, base.ref)
    assert find_built(site.paths, site.engine, base) is None
    assert site.build(base) == built
    record = record_file(site.paths, base)
    record.write_text(json.dumps({**json.loads(record.read_text()), "config_digest": "sha256:" + "0" * 64}))
    assert not find_built(site.paths, site.engine, base)
    record.write_text("{torn")
    assert not find_built(site.paths, site.engine, base)


def test_an_image_on_top_of_the_root_file_system_is_not_taken_for_it(site: Site, tmp_path: Path) -> None:
    """It inherits the label."""
    first = site.build(site.chain()[0])
    below = site.chain()[0].parent_ref
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/Dockerfile").write_text(f"FROM {below}\nCOPY Dockerfile /opt/foreign\n")
    buildkit.build(tmp_path / "foreign", "--tag", below, host=site.engine.host)
    site.forget_images([first])
    assert site.build(site.chain()[0]).config_digest == first.config_digest


def test_a_dockerfile_that_could_fetch_is_not_built(site: Site) -> None:
    template = site.paths.project / "dockerfiles/base.j2"
    template.write_text(template.read_text().replace("ENV GREETING", "ADD http://127.0.0.1:9/x /opt/x\nENV GREETING"))
    with pytest.raises(BuildError, match=r"got 'ADD http://127\.0\.0\.1:9/x /opt/x', expected COPY"):
        site.build(site.chain()[0])


def test_a_tree_is_the_same_from_the_stage_that_installs_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the engine's copy of it; what lies beside the tree stays there."""
    tar = tiny_images.make_rootfs(tmp_path / "more.tar", ["mkdir", "ln"])
    monkeypatch.setattr(rootfs, "build_rootfs", lambda *args: tar)
    tiny_images.make_mod(site.paths.project, "below")
    site = replace(site, stack=site.stack.model_copy(update={"mods": ["below"]}))
    template = site.paths.project / "dockerfiles/base.j2"
    inside = "mkdir -p opt tmp; echo a >opt/b; ln opt/b opt/a"
    script = f"mkdir -p /built/layer; cd /built/layer; {inside}; echo no >/opt/beside"
    more = (
        f'FROM venv AS stack-mods\nRUN ["/bin/sh", "-c", "{script}"]\n'
        "FROM scratch AS stack-mods-tree\nCOPY --from=stack-mods /built/layer/ /\nFROM {{ parent_ref }} AS config"
    )
    template.write_text(template.read_text().replace("FROM {{ parent_ref }} AS config", more))
    base, *_ = site.chain()
    targets, run = list[str](), buildkit.build

    def noted(context: Path, *words: str, **options: Any) -> None:
        targets.append(words[words.index("--target") + 1])
        run(context, *words, **options)

    monkeypatch.setattr(buildkit, "build", noted)
    first = site.build(base)
    assert "stack-mods" in targets and "stack-mods-tree" not in targets
    monkeypatch.setattr(build.ImageBuild, "tree_stage", lambda maker, name: (f"{name}-tree", b""))
    again = site.elsewhere(tmp_path / "again").build(base)
    assert "stack-mods-tree" in targets and again.config_digest == first.config_digest
    contents = listing.read_contents(build.layer_file(site.paths, first.diff_ids[-1]))
    assert [entry.path for entry in contents] == ["opt", "opt/a", "opt/b"]


def run_build(site: Site, image: render.RenderedImage, log: Path) -> None:
    def act(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {line}\n")

    heard(act)
    build_image(site.paths, Engine.connect(), image)


def wait_for(log: Path, text: str, seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < end, f"{text!r} did not come: {log.read_text() if log.exists() else 'no log'}"
        time.sleep(0.01)


def slow_base(site: Site) -> render.RenderedImage:
    template = site.paths.project / "dockerfiles/base.j2"
    template.write_text(
        template.read_text().replace("echo building;", "while [ $((i += 1)) -lt 2000000 ]; do :; done;")
    )
    return site.chain()[0]


def test_of_two_builds_at_once_the_second_waits(site: Site, tmp_path: Path) -> None:
    base, log = slow_base(site), tmp_path / "log"
    first = fork.Process(target=run_build, args=(site, base, log))
    first.start()
    wait_for(log, "RUN")
    second = fork.Process(target=run_build, args=(site, base, log))
    second.start()
    for process in (first, second):
        process.join(400)
        assert process.exitcode == 0
    of_second = [line for line in log.read_text().splitlines() if line.startswith(f"{second.pid} ")]
    assert [line.split(": ", 1)[1] for line in of_second] == [
        "another run is building it; waiting",
        f"{base.ref} is there",
    ]
