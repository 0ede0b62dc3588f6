"""Locking against a real index: the closure for another machine, exclusions, and what a person can get wrong."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import stack_samples
import wheelhouse
from stack_samples import locked, versions, write
from wheelhouse import Index, make_wheel

from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch.stack import fetch_stack, lock_stack
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import load_stack, load_stack_lock, lock_text
from sparkpin.pins.schema import LockedFile


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    return stack_samples.project(tmp_path, monkeypatch)


def test_lock_is_written_and_fetch_accepts_it(paths: Paths, index: Index) -> None:
    app = make_wheel(index.folder, "app", requires=["Some_Dep>=1"])
    make_wheel(index.folder, "some-dep", "1.0")
    dep = make_wheel(index.folder, "some-dep", "1.5")
    write(paths, ["app==1.0"])
    lock = lock_stack(paths, "s")
    assert lock.wheels == [app, dep]
    assert load_stack_lock(paths.project, load_stack(paths.project, "s")) == lock
    text = (paths.project / "pins/stacks/s.lock").read_text()
    assert "http" not in text and "127.0.0.1" not in text and str(index.folder) not in text
    assert not any(paths.store.rglob("*.*")), "locking brings nothing into the store"
    assert fetch_stack(paths, load_stack(paths.project, "s"), locked(paths, *lock.wheels))
    assert all(Store(paths.store).verified(wheel) for wheel in lock.wheels)
    assert lock_text(lock_stack(paths, "s")) == text


def test_excluded_goes_with_what_only_it_needs(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app", requires=["gpu", "shared", "tool[fast,unknown]"])
    make_wheel(index.folder, "gpu", requires=["gpu-helper", "shared"])
    make_wheel(index.folder, "gpu-helper", requires=["gpu-helper-helper"])
    make_wheel(index.folder, "gpu-helper-helper", requires=["gpu-helper"])
    make_wheel(index.folder, "shared")
    make_wheel(index.folder, "tool", requires=["speed; extra == 'fast'", "never; extra == 'slow'"], extras="fast slow")
    make_wheel(index.folder, "speed")
    write(paths, ["app==1.0"], exclude={"gpu": "no GPU here"})
    assert sorted(versions(lock_stack(paths, "s"))) == ["app", "shared", "speed", "tool"]
    write(paths, ["app==1.0"])
    everything = {"app", "gpu", "gpu-helper", "gpu-helper-helper", "shared", "speed", "tool"}
    assert set(versions(lock_stack(paths, "s"))) == everything


def test_markers_and_wheels_are_the_targets(paths: Paths, index: Index) -> None:
    """Whatever runs the tests: the lock is for Debian's Python 3.11 with glibc 2.36 on the stack's platform."""
    markers = {
        "old": "python_version < '3.12'",
        "new": "python_version >= '3.12'",
        "patch": "python_full_version < '3.11.3'",
        "arm": "platform_machine == 'aarch64'",
        "intel": "platform_machine == 'x86_64'",
        "windows": "sys_platform == 'win32'",
    }
    make_wheel(index.folder, "app", requires=["native", *(f"{name}; {marker}" for name, marker in markers.items())])
    for name in markers:
        make_wheel(index.folder, name)
    for tag in ("cp311-cp311-manylinux_2_17_{}", "cp311-cp311-manylinux_2_35_{}", "cp311-cp311-manylinux_2_39_{}"):
        for machine in ("x86_64", "aarch64"):
            make_wheel(index.folder, "native", tag=tag.format(machine))
    make_wheel(index.folder, "native", tag="cp312-cp312-manylinux_2_17_x86_64")
    for platform, machine, other in (("linux/amd64", "x86_64", "intel"), ("linux/arm64", "aarch64", "arm")):
        write(paths, ["app==1.0"], platform)
        lock = lock_stack(paths, "s")
        assert set(versions(lock)) == {"app", "native", "old", "patch", other}
        (native,) = [wheel.file for wheel in lock.wheels if wheel.name == "native"]
        assert native == f"native-1.0-cp311-cp311-manylinux_2_35_{machine}.whl"


def test_an_override_takes_the_place_of_what_distributions_say(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app", requires=["dep>=3", "bound", 'x86-only; platform_machine == "x86_64"'])
    make_wheel(index.folder, "dep", "2.0")
    make_wheel(index.folder, "bound", "13.0.1", tag="py3-none-manylinux_2_17_aarch64", size=9)
    best = make_wheel(index.folder, "bound", "13.0.1", tag="py3-none-manylinux_2_28_aarch64")
    make_wheel(index.folder, "bound", "13.0.1", tag="py3-none-manylinux_2_40_aarch64")  # for a newer glibc
    make_wheel(index.folder, "bound", "13.5.0", tag="py3-none-manylinux_2_17_aarch64")
    bounds = {"constraints": {"bound==13.0.*": "one release"}, "overrides": {"dep==2.0": "3 is not served"}}
    write(paths, ["app==1.0"], "linux/arm64", **bounds)
    lock = lock_stack(paths, "s")
    assert versions(lock) == {"app": "1.0", "bound": "13.0.1", "dep": "2.0"}
    assert best in lock.wheels
    fetch_stack(paths, load_stack(paths.project, "s"), locked(paths, *lock.wheels))
    assert all(Store(paths.store).verified(wheel) for wheel in lock.wheels)

    write(paths, ["app==1.0"], "linux/arm64", overrides=bounds["overrides"])
    assert versions(lock_stack(paths, "s"))["bound"] == "13.5.0"
    write(paths, ["app==1.0"], "linux/arm64", overrides=bounds["overrides"], exclude={"bound": "not here"})
    assert versions(lock_stack(paths, "s")) == {"app": "1.0", "dep": "2.0"}
    write(paths, ["app==1.0"], "linux/arm64", constraints={"dep<3": "none"}, overrides={"bound==12.0": "none"})
    with pytest.raises(ManifestError, match=r"python\.requirements: .*uv says"):
        lock_stack(paths, "s")


@pytest.mark.parametrize(
    ("requirements", "exclude", "key"),
    [
        (["app==1.0", "app==2.0"], {}, "python.requirements"),
        (["app==1.0"], {"app": "why"}, "python.exclude"),
        (["app==1.0"], {"Some_Dep": "why"}, "python.exclude"),
    ],
    ids=["two-versions", "required-and-excluded", "not-canonical"],
)
def test_what_cannot_be_meant_is_refused(
    paths: Paths, index: Index, requirements: list[str], exclude: dict[str, str], key: str
) -> None:
    make_wheel(index.folder, "app")
    write(paths, requirements, exclude=exclude)
    with pytest.raises(ManifestError) as caught:
        lock_stack(paths, "s")
    assert caught.value.key == key
    assert not (paths.project / "pins/stacks/s.lock").exists()


def test_what_has_no_wheel_keeps_the_old_lock(paths: Paths, index: Index) -> None:
    """An unknown version, and a distribution that is there only in source."""
    make_wheel(index.folder, "app")
    (index.folder / "source-only-1.0.tar.gz").touch()
    write(paths, ["app==1.0"])
    lock_stack(paths, "s")
    before = (paths.project / "pins/stacks/s.lock").read_text()
    for wanted in ("app==9.0", "source-only==1.0"):
        write(paths, [wanted])
        with pytest.raises(ManifestError, match=wanted.partition("=")[0]) as caught:
            lock_stack(paths, "s")
        assert (caught.value.key, caught.value.got) == ("python.requirements", [wanted])
    assert (paths.project / "pins/stacks/s.lock").read_text() == before


def test_an_index_with_a_password_that_gives_no_sizes(
    paths: Paths, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyTorch's own: the server is asked for the size of the file, which does not come for that."""
    index.login, index.sizes = "me:secret", False
    url = index.url.replace("//", f"//{index.login}@")
    wheelhouse.use_pip_config(monkeypatch, tmp_path / "pip.conf", index_url=url)
    app = make_wheel(index.folder, "app")
    write(paths, ["app==1.0"])
    for requests in (1, 2):  # uv reads the metadata in the file each time
        assert lock_stack(paths, "s").wheels == [app]
        assert index.asked.count(app.file) == requests


def lock_and_fetch(paths: Paths) -> list[LockedFile]:
    write(paths, ["app==1.0"])
    wheels = lock_stack(paths, "s").wheels
    fetch_stack(paths, load_stack(paths.project, "s"), locked(paths, *wheels))
    assert all(Store(paths.store).verified(wheel) for wheel in wheels)
    return wheels


def test_the_proxy_of_pip_is_asked(paths: Paths, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By uv, and for the files and their sizes: nothing else knows that host."""
    app, parts = make_wheel(index.folder, "app"), urlsplit(index.url)
    url = f"http://index.invalid{parts.path}"
    wheelhouse.use_pip_config(monkeypatch, tmp_path / "pip.conf", index_url=url, proxy=parts.netloc)
    assert lock_and_fetch(paths) == [app] and set(index.asked) == {app.file}
