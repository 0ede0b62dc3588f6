"""A real image for another architecture than the building machine's."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest
import tiny_images
from cross_images import chain_of, cross_paths, stand_in, write_stack
from private_engine import remove_tags

from sparkpin.build import rootfs
from sparkpin.build.image import build_image
from sparkpin.build.record import read_record, record_file
from sparkpin.build.reproduce import again
from sparkpin.core import tags
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return cross_paths(tmp_path)


def test_an_image_for_another_architecture_without_emulation(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The far root file system has no program at all: a step that ran in it would fail."""
    engine, name = Engine.connect(), f"test{uuid.uuid4().hex[:8]}"
    machine = engine.platform
    other = "linux/arm64" if machine == "linux/amd64" else "linux/amd64"
    write_stack(paths.project, "native", f"3.11.2-{name}", platform=machine)
    write_stack(paths.project, name, f"3.11.2-{name}", platform=other, build_on={machine: "native"})
    shell, empty = tiny_images.make_rootfs(tmp_path / "shell.tar"), tmp_path / "empty.tar"
    shutil.copy(shell, empty)
    tiny_images.without_programs(empty)
    monkeypatch.setattr(
        rootfs, "build_rootfs", lambda paths, engine, spec: shell if spec.platform == machine else empty
    )
    chain, then = chain_of(paths, name), stand_in(paths, name, machine)
    try:
        built = [build_image(paths, engine, image) for image in chain]
        assert [image.architecture for image in built] == [other.partition("/")[2]] * 3
        assert len(built[0].diff_ids) == 2  # the far root file system and what the native step left
        records = [read_record(record_file(paths, image)) for image in chain]
        assert [record.builder for record in records] == [then, None, None]  # the others' steps are none of its own
        write_stack(paths.project, "native", "3.11.2-7", platform=machine)
        image = again(records[0], machine)
        engine.untag(image.ref)
        assert build_image(paths, engine, image).config_digest == built[0].config_digest
    finally:
        remove_tags(engine, f"stack-{name}")
        for ref in (chain[0].parent_ref, tags.rootfs_ref(then.suite, then.key)):
            engine.untag(ref)
