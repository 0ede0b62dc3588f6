"""Real images on a base by digest."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import tiny_images
from based_images import chain_of, on_base
from private_engine import remove_tags
from tiny_registry import registry

from sparkpin.build.image import build_image, find_built
from sparkpin.build.record import check_form, layer_file, read_record, record_file
from sparkpin.core.errors import BuildError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.image import listing


def test_images_stand_on_what_the_engine_has_under_the_digest(tmp_path: Path) -> None:
    engine, name, said = Engine.connect(), f"test{uuid.uuid4().hex[:8]}", [""]
    with registry(tiny_images.make_rootfs(tmp_path / "base.tar", ["install"])) as image:
        project = on_base(tmp_path / "project", image, name)
        paths = Paths(project, tmp_path / "cache", tmp_path / "home")
        chain = chain_of(project, name)
        with pytest.raises(BuildError, match="the engine has no") as caught:
            build_image(paths, engine, chain[0], said.append)
        assert caught.value.next_step == f"docker pull --platform linux/amd64 {image}"
        engine.client.api.pull(image)
    try:  # the registry is gone: nothing is asked of it
        built = [build_image(paths, engine, stage, said.append) for stage in chain]
        below = engine.image(image)
        assert below is not None
        assert built[0].diff_ids[: len(below.diff_ids)] == below.diff_ids
        made = engine.image(built[-1].ref)
        assert made is not None and {"FROM_BASE=yes", "GREETING=hello"} <= set(made.config["Env"])
        assert all(find_built(paths, engine, stage) for stage in chain)
        check_form([read_record(record_file(paths, stage)) for stage in chain])
        listed = listing.read_contents(layer_file(paths, below.diff_ids[0]))
        assert "bin/sh" in {entry.path for entry in listed}
        added = listing.read_contents(layer_file(paths, built[0].diff_ids[-1]))
        (home,) = [entry for entry in added if entry.path == "home/sparkpin"]
        assert (home.kind, home.uid, home.gid, home.mode) == ("dir", 10001, 10001, 0o755)
    finally:
        remove_tags(engine, f"stack-{name}")
        engine.client.api.remove_image(image)


def test_a_base_for_another_platform_is_refused(tmp_path: Path) -> None:
    engine = Engine.connect()
    with registry(tiny_images.make_rootfs(tmp_path / "base.tar"), architecture="arm64") as image:
        project = on_base(tmp_path / "project", image)
        engine.client.api.pull(image, platform="linux/arm64")
        try:
            with pytest.raises(BuildError, match="is for linux/arm64, the stack for linux/amd64"):
                build_image(
                    Paths(project, tmp_path / "cache", tmp_path / "home"), engine, chain_of(project)[0], lambda _: None
                )
        finally:
            engine.client.api.remove_image(image)
