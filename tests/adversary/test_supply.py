"""An index and a mirror that lie: to `lock`, which believes nobody twice, and to `fetch`, which has the lock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import stack_samples
from heard import heard
from stack_samples import locked, stack, write
from wheelhouse import Index, make_wheel

from sparkpin.core.errors import IntegrityError, ManifestError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch import debs
from sparkpin.fetch import stack as lock_module
from sparkpin.fetch.stack import fetch_stack, lock_stack
from sparkpin.fetch.store import Store
from sparkpin.pins.schema import LockedFile

SIZE = 300_000


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    return stack_samples.project(tmp_path, monkeypatch)


def shorter(index: Index, file: LockedFile) -> None:
    index.stale[file.file] = bytes(file.size - 1)


def longer(index: Index, file: LockedFile) -> None:
    index.stale[file.file] = (index.folder / file.file).read_bytes() + b"x"


def other_bytes(index: Index, file: LockedFile) -> None:
    index.stale[file.file] = bytes(file.size)


def endless(index: Index, file: LockedFile) -> None:
    index.endless.add(file.file)


def in_a_circle(index: Index, file: LockedFile) -> None:
    index.moved[file.file] = f"{index.url.removesuffix('simple/')}files/{file.file}"


@pytest.mark.parametrize("lie", [shorter, longer, other_bytes, endless, in_a_circle])
def test_fetch_takes_nothing_else_and_no_more(
    paths: Paths, index: Index, lie: Callable[[Index, LockedFile], None]
) -> None:
    file = make_wheel(index.folder, "app", size=SIZE)
    lie(index, file)
    begin = time.monotonic()
    with pytest.raises((IntegrityError, NetworkError), match=r"app-1\.0"):
        fetch_stack(paths, stack(), locked(paths, file))
    assert time.monotonic() - begin < 60
    assert index.sent < 1 << 25, "reading ends after the size that is locked; the rest is in the sockets' buffers"
    assert not Store(paths.store).path(file.sha256).exists()
    assert sum(path.stat().st_size for path in paths.store.rglob("*") if path.is_file()) < 2 * SIZE


def test_lock_takes_no_step_back_by_itself(paths: Paths, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pins, and an index or a mirror that has older versions, or other bytes of what is locked; a lock that is
    damaged is no lock that is not there."""
    app, dep = make_wheel(index.folder, "app", requires=["dep"]), make_wheel(index.folder, "dep", "1.10")
    make_wheel(index.folder, "dep", "1.9")
    file = paths.project / "pins/stacks/s.lock"
    write(paths, ["app==1.0"])
    lock_stack(paths, "s")
    before = file.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(IntegrityError, match=match) as caught:
            lock_stack(paths, "s")
        assert f"rm pins/stacks/{file.name}" in caught.value.next_step
        assert file.read_bytes() == before

    hidden = (index.folder / dep.file).rename(index.folder / "hidden")
    refused(r"older.*dep-1\.10.* -> dep-1\.9")
    hidden.rename(index.folder / dep.file)
    make_wheel(index.folder, "app", requires=["dep"], size=9)
    refused(app.file)
    again = (index.folder / app.file).rename(index.folder / app.file.replace("1.0-", "1.0-1-"))
    refused(rf"other bytes.*{re.escape(again.name)}")
    again.unlink()
    make_wheel(index.folder, "app", requires=["dep"])
    file.write_bytes(before[:-9])
    with pytest.raises(ManifestError) as caught:
        lock_stack(paths, "s")
    assert f"rm pins/stacks/{file.name}" in caught.value.next_step
    file.write_bytes(before)
    libc, python = stack_samples.closure()
    for packages, match in (
        (
            [libc.model_copy(update={"version": "2.36-9+deb12u9", "sha256": "2" * 64}), python],
            r"older.*libc6_2\.36-9\+deb12u10",
        ),
        ([libc.model_copy(update={"sha256": "1" * 64}), python], rf"other bytes.*{re.escape(libc.file)}"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(lock_module, "debian_closure", lambda *_, packages=packages: packages)
            refused(match)
    write(paths, ["app==1.0"], constraints={"dep<1.10": "1.10 is broken"})
    told = heard()
    assert {wheel.version for wheel in lock_stack(paths, "s").wheels} == {"1.0", "1.9"}
    assert any("dep-1.9" in line for line in told), "new pins may want less, and it is said"


def test_lists_that_debian_did_not_sign_are_not_read(
    paths: Paths, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apt with a real mirror that has a list and no signature."""
    (index.folder / "dists/bookworm/main/binary-amd64").mkdir(parents=True)
    (index.folder / "dists/bookworm/main/binary-amd64/Packages").write_text("")
    (index.folder / "dists/bookworm/Release").write_text("Suite: bookworm\nComponents: main\nArchitectures: amd64\n")
    monkeypatch.setattr(debs, "mirrors_of", lambda suite: [(f"file:{index.folder}", suite)])
    (tmp_path / "apt").mkdir()
    with pytest.raises(NetworkError, match="not signed"):
        debs.debian_closure(tmp_path / "apt", stack())
    conf = debs.apt_conf
    monkeypatch.setattr(debs, "apt_conf", lambda *args: conf(*args) + '\nAcquire::AllowInsecureRepositories "true";\n')
    (tmp_path / "trusting").mkdir()
    with pytest.raises(ManifestError):  # the same mirror's empty list: the signature was all that lacked
        debs.debian_closure(tmp_path / "trusting", stack())
