"""Building from source: what is locked for it from a real index and real repositories, and what is fetched."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import source_samples
from places import PROJECT
from source_samples import write_stack
from wheelhouse import Index

from sparkpin.build import render
from sparkpin.commands import lint
from sparkpin.core.errors import IntegrityError, ManifestError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_stack as lock_module
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests
from sparkpin.pins.schema import LockedFile, Stack, StackLock


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An index's folder, and the stack file's `python.source` with repositories: made once, only read."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "index").mkdir()
    return folder / "index", source_samples.published(folder, folder / "index")


@pytest.fixture
def published(world: tuple[Path, dict[str, Any]], index: Index, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for key, value in (("COUNT", "1"), ("KEY_0", "protocol.file.allow"), ("VALUE_0", "always")):
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    index.sizes = True
    shutil.copytree(world[0], index.folder, dirs_exist_ok=True)
    return copy.deepcopy(world[1])


@pytest.fixture
def paths(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(lock_module, "open_apt", lambda root, stack: source_samples.FakeApt())
    return Paths(project, tmp_path / "cache", tmp_path / "home")


def quiet(line: str) -> None:
    pass


def locked(paths: Paths, name: str = "made-up") -> StackLock:
    return lock_stack(paths, name, quiet)


def test_a_lock_has_all_that_the_build_needs(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published)
    lock = locked(paths)
    assert lock.source
    assert [(wheel.name, wheel.version) for wheel in lock.wheels] == [("torch", "2.10.0+cu130")], "not the index's own"
    assert [wheel.name for wheel in lock.source.wheels] == ["buildtool"]
    assert [deb.name for deb in lock.source.debs] == ["ccache", "git"]
    assert [(file.name, file.version) for file in lock.source.archives] == [
        ("standin", published["git"]["commit"]),
        ("fastlib", published["inputs"]["fastlib"]["commit"]),
    ]
    text = (paths.project / "pins/stacks/made-up.lock").read_text()
    assert "://" not in text and str(paths.cache) not in text
    assert locked(paths) == lock, "archives are the same bytes each time"
    manifests.load_stack_lock(paths.project, manifests.load_stack(paths.project, "made-up"))


def test_what_is_fetched_is_checked_against_the_lock(paths: Paths, published: dict[str, Any]) -> None:
    stack = write_stack(paths.project, published)
    lock = locked(paths)
    assert lock.source
    store, archives = Store(paths.store), lock.source.archives
    for file in archives:
        store.path(file.sha256).unlink()
    no_debs = lock.model_copy(update={"debs": [], "source": lock.source.model_copy(update={"debs": []})})
    fetch_for(paths, stack, no_debs, lock.debs)
    assert all(store.verified(file) for file in archives)
    wrong = lock.source.model_copy(
        update={"debs": [], "archives": [archives[0].model_copy(update={"sha256": "f" * 64}), archives[1]]}
    )
    with pytest.raises(IntegrityError, match="integrity mismatch") as caught:
        fetch_for(paths, stack, no_debs.model_copy(update={"source": wrong}), lock.debs)
    assert "nothing of it was stored" in caught.value.next_step
    assert not store.path("f" * 64).exists()


def fetch_for(paths: Paths, stack: Stack, lock: StackLock, debs: list[LockedFile]) -> None:
    """Fetch without Debian's packages, whose mirror is made up."""
    from sparkpin.fetch import stack as fetch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "target_of", lambda stack, _: lock_module.target_of(stack, debs))
        fetch_stack(paths, stack, lock, quiet, str)


def test_the_source_may_be_the_indexs_own_archive(paths: Paths, published: dict[str, Any], index: Index) -> None:
    del published["git"]
    write_stack(paths.project, published)
    lock = locked(paths)
    assert lock.source
    first = lock.source.archives[0]
    assert (first.file, first.version) == ("standin-0.19.1.tar.gz", "0.19.1")
    assert first.size == (index.folder / first.file).stat().st_size
    (index.folder / first.file).unlink()
    with pytest.raises(NetworkError, match="no source distribution of standin==0.19.1".replace(".", r"\.")):
        locked(paths)


def test_two_torches_are_refused(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published | {"requirements": ["buildtool==2.0"]})
    with pytest.raises(ManifestError, match="that fit the versions that the images have") as caught:
        locked(paths)
    assert caught.value.key == "python.source.requirements" and "torch==2.11.0" in caught.value.wanted
    assert not (paths.project / "pins/stacks/made-up.lock").exists()


def test_a_source_distribution_of_another_form_is_refused(
    paths: Paths, published: dict[str, Any], index: Index
) -> None:
    (index.folder / "standin-0.19.1.tar.gz").rename(index.folder / "standin-0.19.1.zip")
    del published["git"]
    write_stack(paths.project, published)
    with pytest.raises(ManifestError, match=r"saw 'standin-0\.19\.1\.zip', wanted .* is a \.tar\.gz") as caught:
        locked(paths)
    assert caught.value.key == "python.source.version" and "standin-0.19.1.zip" not in index.asked


def test_a_lock_tells_to_drop_a_patch(paths: Paths, published: dict[str, Any]) -> None:
    patch = source_samples.write_patch(paths.project, drop_when="standin >= 0.19.1")
    write_stack(paths.project, published, patches=[patch])
    with pytest.raises(ManifestError, match="is to be dropped"):
        locked(paths)
    assert not (paths.project / "pins/stacks/made-up.lock").exists()


def test_hadolint_has_nothing_to_say(paths: Paths, published: dict[str, Any]) -> None:
    """The Dockerfile that compiles, with a patch and links; and those of the seed's own version."""
    patch = source_samples.write_patch(paths.project)
    write_stack(paths.project, published, patches=[patch], image={"links": {"/opt/cuda/lib64": "lib"}})
    locked(paths)
    stack = manifests.load_stack(PROJECT, "spark-seed-source")
    chain = manifests.load_chain(PROJECT, "v2-tq")
    images = render.render_chain(PROJECT, stack, source_samples.made_up_lock(stack), chain)
    files = {f"{image.stage}.Dockerfile": image.dockerfile for image in images}
    assert lint.hadolint(PROJECT, files | {"stand-in.Dockerfile": source_samples.rendered(paths).dockerfile}) == []
