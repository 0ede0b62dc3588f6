"""A step's build context."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_images

from sparkpin.build import render
from sparkpin.build.context import fill
from sparkpin.core.errors import IntegrityError
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import KeptInputs


def test_a_damaged_wheel_of_the_store_stops_the_build(tmp_path: Path) -> None:
    project = tiny_images.make_project(tmp_path / "project")
    stack = manifests.load_stack(project, "tiny")
    wheels = tiny_images.locked("alpha", "beta")
    image = render.render_chain(
        project, stack, tiny_images.stack_lock(stack, wheels), manifests.load_chain(project, "base")
    )[0]
    store = Store(tmp_path / "store")
    store.path(wheels[0].sha256).parent.mkdir(parents=True)
    store.path(wheels[0].sha256).write_bytes(b"123456789")
    with pytest.raises(IntegrityError, match=r"alpha-1\.0-py3-none-any\.whl"):
        fill(tmp_path / "context", KeptInputs(Store(tmp_path / "kept"), store), image)
