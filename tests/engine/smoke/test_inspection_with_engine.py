"""An inspection of what a real engine has."""

from __future__ import annotations

import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import PROJECT
from elf_samples import GPU, SAMPLE_ROOT, put
from made_releases import built

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.smoke.inspect.run import open_image, ref_of
from sparkpin.smoke.inspect.scan import scan

pytest_plugins = ["empty_engine"]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[Engine, str]]:
    """A real image of two layers for arm64, which this machine need not be able to run."""
    engine, name = Engine.connect(), f"sparkpin-test/inspect:{uuid.uuid4().hex[:12]}"
    folder = put(tmp_path / "root", SAMPLE_ROOT)
    with tarfile.open(tmp_path / "rootfs.tar", "w") as tar:
        tar.add(folder, ".")
    engine.import_rootfs(tmp_path / "rootfs.tar", f"{name}-base", architecture="arm64", labels={})
    lines = [f"FROM {name}-base", "COPY above.so /opt/above.so", "LABEL a=b"]
    context = put(tmp_path / "context", {"above.so": GPU, "Dockerfile": "\n".join(lines)})
    engine.client.images.build(path=str(context), tag=name, platform="linux/arm64", rm=True, forcerm=True)
    yield engine, name
    engine.untag(name)
    engine.untag(f"{name}-base")


def test_an_image_is_read_from_an_export(image: tuple[Engine, str], tmp_path: Path) -> None:
    engine, name = image
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    with open_image(paths, engine, name) as opened:
        assert opened.platform == "linux/arm64"
        found = scan(opened.files)
    assert set(found.libraries) == {"opt/above.so", "opt/app/module.so", "usr/lib/libreal.so.1"}
    assert set(found.broken) == {"opt/app/broken.so"}
    assert not engine.client.containers.list(all=True, filters={"ancestor": name})
    assert not list((tmp_path / "cache/work").glob("saved-*"))


def test_a_name_of_several_recipes_and_a_release_whose_image_is_gone(empty_engine: Engine, tmp_path: Path) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    one, gone = (built(paths, empty_engine, number, recipe=f"r{number}") for number in (1, 2))
    with pytest.raises(InputError) as caught:
        ref_of(paths, empty_engine, "v2")
    assert one.tag in caught.value.next_step and gone.tag in caught.value.next_step
    assert ref_of(paths, empty_engine, one.name) == one.tag
    empty_engine.client.api.remove_image(gone.image, force=True)
    with pytest.raises(InputError) as caught:
        ref_of(paths, empty_engine, gone.name)
    assert caught.value.next_step == f"invoke reproduce {gone.tag} --keep"


@pytest.mark.parametrize("subject", ["/nowhere", "Upper Case", "sparkpin-test/none:such"])
def test_what_is_no_release_no_image_and_no_folder(tmp_path: Path, subject: str) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    with pytest.raises(InputError):
        ref_of(paths, Engine.connect(), subject)
