"""Fetching from a real index: damage, wrong locks, kills, full disks, no network."""

from __future__ import annotations

from pathlib import Path

import pytest
import uv
import wheelhouse
from stack_samples import locked, stack
from wheelhouse import Index, make_wheel

from sparkpin.core.errors import NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import LOST, Store


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


def left_over(paths: Paths) -> list[str]:
    return [path.name for path in paths.store.rglob("*") if path.name.startswith(".partial-") or path.suffix == ".part"]


def test_everything_is_fetched_once_and_then_needs_no_network(
    paths: Paths, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = [make_wheel(index.folder, f"p{n}", size=n * 100_000) for n in range(15)]
    lock = locked(paths, *wheels)
    index.busy = {wheels[3].file}
    assert fetch_stack(paths, stack(), lock) == sum(wheel.size for wheel in wheels)
    assert all(Store(paths.store).verified(wheel) for wheel in wheels)
    assert sorted(index.asked) == sorted([*(wheel.file for wheel in wheels), wheels[3].file])
    assert left_over(paths) == []
    wheelhouse.use_index(monkeypatch, "http://127.0.0.1:9/simple/")
    assert fetch_stack(paths, stack(), lock) == 0


@pytest.mark.parametrize("lost", ["from its page", "from where the page says"])
def test_a_file_that_is_gone_is_named(paths: Paths, index: Index, lost: str) -> None:
    other, missing = make_wheel(index.folder, "b"), make_wheel(index.folder, "a")
    if lost == "from its page":
        (index.folder / missing.file).unlink()
    else:
        index.gone = {missing.file}
    with pytest.raises(NetworkError, match=missing.sha256) as caught:
        fetch_stack(paths, stack(), locked(paths, other, missing))
    assert caught.value.next_step == LOST
    assert Store(paths.store).verified(other), "what else there is was fetched"


def test_another_file_of_the_same_version_is_not_taken(paths: Paths, index: Index) -> None:
    """An index may get a better-fitting wheel of a version after it was locked; the hash decides."""
    file = make_wheel(index.folder, "a")
    make_wheel(index.folder, "a", tag="cp311-cp311-manylinux_2_17_x86_64")
    fetch_stack(paths, stack(), locked(paths, file))
    assert Store(paths.store).verified(file)
    assert index.asked == [file.file]


def test_the_indexes_of_pip_are_asked(
    paths: Paths, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own index with a password, one more of its configuration file, and a folder of wheels."""
    index.login = "me:secret"
    (tmp_path / "more").mkdir()
    (tmp_path / "links").mkdir()
    own = make_wheel(index.folder, "own")
    more, local = make_wheel(tmp_path / "more", "more"), make_wheel(tmp_path / "links", "local", "1.0+cpu")
    lock = locked(paths, own, more, local)
    with wheelhouse.serve(tmp_path / "more") as other:
        config = tmp_path / "pip.conf"
        config.write_text(
            f"[global]\nindex-url = http://127.0.0.1:9/simple/\nextra-index-url =\n  {other.url}\n"
            f"[download]\nfind-links = {tmp_path}/links\n"
        )
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "UV_DEFAULT_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
        monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", f"//{index.login}@"))
        fetch_stack(paths, stack(), lock)
        assert (index.asked, other.asked) == ([own.file], [more.file])
    assert all(Store(paths.store).verified(wheel) for wheel in lock.wheels)
    index.gone = {own.file}
    Store(paths.store).path(own.sha256).unlink()
    with pytest.raises(NetworkError) as caught:
        fetch_stack(paths, stack(), locked(paths, own))
    assert "secret" not in str(caught.value)


def test_pytorchs_own_index_is_asked_for_what_the_others_lack(
    paths: Paths, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A uv that knows another index under that word: the real one is out of reach here."""
    (tmp_path / "pytorch").mkdir()
    plain, torch = make_wheel(index.folder, "plain"), make_wheel(tmp_path / "pytorch", "torch", "1.0+cpu")
    with wheelhouse.serve(tmp_path / "pytorch") as other:
        script = tmp_path / "uv"
        script.write_text(
            "#!/bin/sh\nfor word; do case $word in\n"
            f'--torch-backend=cpu) shift; UV_INDEX={other.url};;\n*) set -- "$@" "$word"; shift;;\nesac; done\n'
            f'export UV_INDEX; exec {uv.find_uv_bin()} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(uv, "find_uv_bin", lambda: str(script))
        lock = locked(paths, plain, torch)
        fetch_stack(paths, stack(torch_backend="cpu"), lock)
        assert (set(index.asked), other.asked) == ({plain.file}, [torch.file])
        Store(paths.store).path(torch.sha256).unlink()
        with pytest.raises(NetworkError, match=r"torch-1\.0\+cpu"):
            fetch_stack(paths, stack(), lock)
