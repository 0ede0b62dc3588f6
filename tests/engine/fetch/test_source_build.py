"""A real build from source, of a stand-in: vLLM itself is not built here."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import source_samples
from in_container import output_of
from private_engine import remove_tags
from source_samples import rendered, write_stack
from wheelhouse import Index

from sparkpin.build import render
from sparkpin.build.image import build_image
from sparkpin.build.record import read_record, record_file
from sparkpin.build.rootfs import rootfs_spec
from sparkpin.core.errors import BuildError
from sparkpin.core.paths import Paths
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.stack import fetch_stack
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests


def rootfs_of_cpu(project: Path) -> str:
    """What the images of the stack `cpu` stand on: the stand-in asks for the same packages, of today."""
    stack = manifests.load_stack(project, "cpu")
    return render.rootfs_ref(stack.system.suite, rootfs_spec(stack, manifests.load_stack_lock(project, stack)).key)


def test_a_stand_in_is_compiled_with_the_torch_that_it_runs_with(
    project: Path, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real Debian compilers, unpacked for the build alone; a real build without network, twice; the image runs."""
    name, engine, said = f"test{uuid.uuid4().hex[:8]}", Engine.connect(), list[str]()
    paths = Paths(project, Paths.from_env().cache, tmp_path / "home")  # compilers are fetched once a machine
    for key, value in (("COUNT", "1"), ("KEY_0", "protocol.file.allow"), ("VALUE_0", "always")):
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    index.sizes = True
    source = source_samples.published(tmp_path / "published", index.folder) | {
        "packages": ["ccache", "g++", "git", "libpython3.11-dev"]
    }
    cpu = manifests.load_stack(project, "cpu")
    keys = {"debian": cpu.system.model_dump(), "patches": [source_samples.write_patch(project)]}
    stack = write_stack(project, source, name, **keys)
    lock = lock_stack(paths, name, said.append)
    fetch_stack(paths, stack, lock, said.append, str)
    image = rendered(paths, name)
    try:
        built = build_image(paths, engine, image, said.append)
        script = (
            "import os, shutil, standin, torch; "
            "print(standin.answer(), standin.torch_version() == torch.__version__, "
            "[name for name in ('g++', 'git', 'ccache') if shutil.which(name)])"
        )
        assert output_of(engine, built.ref, ["python", "-c", script]).strip() == "42 True []"
        # Without any cache of the engine, ccache's too, from the record alone; another digest would be an error.
        record = read_record(record_file(paths, image))
        build_image(paths, engine, record.rendered, said.append, fresh=True, wanted=built.config_digest)

        keys["patches"] = [source_samples.write_patch(project, source_samples.PATCH.replace("BASE +", "OTHER +"))]
        write_stack(project, source, name, **keys)
        with pytest.raises(BuildError, match=r"000-answer\.patch does not fit the source") as caught:
            build_image(paths, engine, rendered(paths, name), said.append)
        assert "-  return FASTLIB_OTHER + FASTLIB_MORE;" in caught.value.message
    finally:
        remove_tags(engine, f"stack-{name}")
        if image.parent_ref != rootfs_of_cpu(project):  # which others use
            engine.untag(image.parent_ref)
