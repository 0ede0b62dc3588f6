"""Fetching from a real index over HTTP with the real pip: damage, wrong locks, kills, full disks, no network."""

from __future__ import annotations

import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import wheelhouse
from wheelhouse import Index, make_wheel

from sparkpin.core import files
from sparkpin.core.errors import DiskError, IntegrityError, ManifestError, NetworkError
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch import stack as fetch
from sparkpin.fetch import wheels
from sparkpin.fetch.debs import Apt, apt_conf
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import lock_text, parse
from sparkpin.pins.schema import LockedFile, Stack, StackLock

DEBS = {"libc6": "2.36-9", "python3.11-minimal": "3.11.2-6"}
BIG = fetch.BIG + 1


def stack(**python: object) -> Stack:
    value = {"version": "3.11", "requirements": ["a==1.0"], "layers": [{"name": "all", "packages": ["*"]}], **python}
    return parse(
        Stack,
        {
            "name": "s",
            "description": "",
            "platform": "linux/amd64",
            "default_recipe": "r",
            "debian": {"suite": "bookworm", "packages": []},
            "python": value,
        },
        "s.yaml",
    )


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def locked(tmp_path: Path, paths: Paths) -> Callable[..., StackLock]:
    """A lock of wheels, and of two packages that are in the store already: apt's mirror is no part of these tests."""

    def make(*files: LockedFile) -> StackLock:
        debs = []
        for name, version in DEBS.items():
            path = tmp_path / f"{name}.deb"
            path.write_text(name)
            debs.append(wheels_entry(path, name, version))
            Store(paths.store).add(path, debs[-1])
        return StackLock(stack="s", inputs="0" * 64, debs=debs, wheels=list(files))

    return make


def wheels_entry(path: Path, name: str, version: str) -> LockedFile:
    sha256, size = sha256_file(path)
    return LockedFile(name=name, version=version, file=path.name, size=size, sha256=sha256)


def left_over(paths: Paths) -> list[Path]:
    return list(paths.store.rglob(".partial-*"))


def test_everything_is_fetched_once(paths: Paths, index: Index, locked: Callable[..., StackLock]) -> None:
    files = [make_wheel(index.folder, f"p{n}") for n in range(15)] + [make_wheel(index.folder, "big", size=BIG)]
    lock, said = locked(*files), list[str]()
    report = fetch_stack(paths, stack(), lock, said.append, str)
    assert (report.files, report.bytes_fetched) == (18, sum(f.size for f in files))
    assert all(Store(paths.store).verified(file) for file in files)
    assert any("16/16 files" in line for line in said)
    assert sorted(index.asked) == sorted(f.file for f in files)
    assert fetch_stack(paths, stack(), lock, said.append, str).bytes_fetched == 0
    assert len(index.asked) == 16
    assert left_over(paths) == []


def test_complete_store_needs_no_network(
    paths: Paths, index: Index, locked: Callable[..., StackLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locked(make_wheel(index.folder, "a"))
    fetch_stack(paths, stack(), lock, print, str)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert fetch_stack(paths, stack(), lock, print, str).bytes_fetched == 0


PROGRAM = (
    "import sys, json; from pathlib import Path; from sparkpin.fetch.stack import fetch_stack; "
    "from sparkpin.pins.schema import Stack, StackLock; from sparkpin.core.paths import Paths; "
    "paths, stack, lock = sys.argv[1:]; "
    "fetch_stack(Paths(*map(Path, json.loads(paths))), Stack.model_validate_json(stack), "
    "StackLock.model_validate_json(Path(lock).read_text()), print, str)"
)


def program(paths: Paths, lock: StackLock, file: Path, more: str = "") -> list[str]:
    """A command that fetches in a process of its own."""
    file.write_text(lock_text(lock))
    folders = json.dumps([str(paths.project), str(paths.cache), str(paths.home)])
    return [sys.executable, "-c", PROGRAM + more, folders, stack().model_dump_json(), str(file)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network namespace")
def test_complete_store_opens_no_connection(
    paths: Paths, index: Index, locked: Callable[..., StackLock], tmp_path: Path
) -> None:
    """In a network namespace of its own, whose kernel counts what is tried there."""
    lock = locked(make_wheel(index.folder, "a"))
    fetch_stack(paths, stack(), lock, print, str)
    argv = program(paths, lock, tmp_path / "lock.json", "; print(Path('/proc/net/snmp').read_text())")
    done = subprocess.run(["unshare", "--net", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("Ip:", "Tcp:", "Udp:"))]
    sent = {names[0] + name: value for names, values in zip(rows[::2], rows[1::2], strict=True)
            for name, value in zip(names, values, strict=True)}  # fmt: skip
    assert (sent["Tcp:ActiveOpens"], sent["Udp:OutDatagrams"], sent["Ip:OutNoRoutes"]) == ("0", "0", "0")


def test_damaged_file_is_told_and_fetched_again(paths: Paths, index: Index, locked: Callable[..., StackLock]) -> None:
    file, other = make_wheel(index.folder, "a", size=5000), make_wheel(index.folder, "b")
    lock = locked(file, other)
    fetch_stack(paths, stack(), lock, print, str)
    stored, said = Store(paths.store).path(file.sha256), list[str]()
    data = bytearray(stored.read_bytes())
    data[1000] ^= 1
    stored.write_bytes(data)
    assert fetch_stack(paths, stack(), lock, said.append, str).bytes_fetched == file.size
    assert any(line.startswith("damaged") and file.file in line and file.sha256 in line for line in said)
    assert Store(paths.store).verified(file)
    assert index.asked.count(other.file) == 1


@pytest.mark.parametrize("hashes", [True, False], ids=["index-with-hashes", "index-without"])
def test_wrong_hash_in_the_lock_stores_nothing(
    paths: Paths, index: Index, locked: Callable[..., StackLock], hashes: bool
) -> None:
    index.hashes = hashes
    file = make_wheel(index.folder, "a")
    wrong = file.model_copy(update={"sha256": "f" * 64})
    with pytest.raises(IntegrityError) as caught:
        fetch_stack(paths, stack(), locked(wrong), print, str)
    assert "f" * 64 in str(caught.value) and file.sha256 in str(caught.value) and file.file in str(caught.value)
    assert not any(Store(paths.store).path(sha256).exists() for sha256 in ("f" * 64, file.sha256))
    assert left_over(paths) == []


def test_wrong_size_in_the_lock_stores_nothing(paths: Paths, index: Index, locked: Callable[..., StackLock]) -> None:
    file = make_wheel(index.folder, "a")
    with pytest.raises(IntegrityError, match=f"wanted size={file.size + 1}, .*got size={file.size},"):
        fetch_stack(paths, stack(), locked(file.model_copy(update={"size": file.size + 1})), print, str)
    assert not Store(paths.store).path(file.sha256).exists()


def test_one_failure_keeps_what_else_arrived(paths: Paths, index: Index, locked: Callable[..., StackLock]) -> None:
    big, missing = make_wheel(index.folder, "big", size=BIG), make_wheel(index.folder, "a")
    (index.folder / missing.file).unlink()
    with pytest.raises(NetworkError, match=r"a-1\.0-py3-none-any\.whl .* (does not answer|no longer offered)"):
        fetch_stack(paths, stack(), locked(big, missing), print, str)
    assert Store(paths.store).verified(big)


def test_killed_run_is_completed_by_the_next(
    paths: Paths, index: Index, locked: Callable[..., StackLock], tmp_path: Path
) -> None:
    slow, quick = make_wheel(index.folder, "slow", size=BIG), make_wheel(index.folder, "quick", size=1000)
    index.slow[slow.file] = 0.1
    lock = locked(slow, quick)
    argv = program(paths, lock, tmp_path / "lock.json")
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 400
        while not (Store(paths.store).has(quick) and slow.file in index.asked):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not Store(paths.store).has(slow)
        assert left_over(paths), "the killed run leaves its unfinished folder"
        index.slow.clear()
        report = fetch_stack(paths, stack(), lock, print, str)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the pip that the killed run had started
    assert report.bytes_fetched == slow.size
    assert index.asked.count(quick.file) == 1
    assert Store(paths.store).verified(slow)
    assert left_over(paths) == []


def test_full_disk_is_told(
    index: Index,
    paths: Paths,
    locked: Callable[..., StackLock],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = make_wheel(index.folder, "a", size=3_000_000)
    lock = locked(file)
    small = Paths(paths.project, small_disk / "cache", paths.home)
    for deb in lock.debs:
        Store(small.store).add(Store(paths.store).path(deb.sha256), deb)
    with pytest.raises(DiskError, match=r"the locked files need 3,[0-9,]+ bytes in "):
        fetch_stack(small, stack(), lock, print, str)
    # A fake: somebody else fills the disk right after it was measured.
    monkeypatch.setattr(files, "require_space", lambda *_: None)
    with pytest.raises(DiskError, match=r"cannot write to .*No space left on device"):
        fetch_stack(small, stack(), lock, print, str)
    assert not Store(small.store).has(file)
    assert left_over(small) == []


def test_no_network_names_the_file_and_what_to_do(
    paths: Paths, index: Index, locked: Callable[..., StackLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_wheel(index.folder, "a")
    wheelhouse.use_index(monkeypatch, "http://127.0.0.1:9/simple/")
    with pytest.raises(NetworkError) as caught:
        fetch_stack(paths, stack(), locked(file), print, str)
    assert file.file in str(caught.value) and "pip config list" in caught.value.next_step


def test_another_file_of_the_same_version_is_not_taken(
    paths: Paths, index: Index, locked: Callable[..., StackLock]
) -> None:
    """An index may get a better-fitting wheel of a version after it was locked; the hash decides."""
    file = make_wheel(index.folder, "a")
    make_wheel(index.folder, "a", tag="cp311-cp311-manylinux_2_17_x86_64")
    fetch_stack(paths, stack(), locked(file), print, str)
    assert Store(paths.store).verified(file)
    assert index.asked == [file.file]


def test_two_versions_of_one_package_are_refused(paths: Paths, index: Index, locked: Callable[..., StackLock]) -> None:
    lock = locked(make_wheel(index.folder, "a"), make_wheel(index.folder, "a", "2.0"))
    with pytest.raises(ManifestError, match=r"s\.lock: wheels: saw 'a 1\.0 and 2\.0', wanted one version"):
        fetch_stack(paths, stack(), lock, print, str)
    assert index.asked == []


@contextmanager
def mirror(folder: Path) -> Iterator[str]:
    """A folder over real HTTP on a free port of 127.0.0.1."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def make_deb(folder: Path, version: str, text: str = "x") -> LockedFile:
    """A package `hello` in folder/repo, with the list that a mirror has of it."""
    tree = folder / "hello"
    (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
    control = f"Package: hello\nVersion: {version}\nArchitecture: all\nMaintainer: n <n@example.org>\n"
    control += f"Description: {text}\n"
    (tree / "DEBIAN/control").write_text(control)
    (folder / "repo").mkdir(exist_ok=True)
    for old in (folder / "repo").glob("*.deb"):
        old.unlink()
    deb = folder / f"repo/hello_{version}_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tree, deb], check=True)
    entry = wheels_entry(deb, "hello", version)
    packages = f"{control}Filename: ./{deb.name}\nSize: {entry.size}\nSHA256: {entry.sha256}\n"
    (folder / "repo/Packages").write_text(packages)
    return entry


def open_mirror(root: Path, url: str) -> Apt:
    for folder in ("none", "lists/partial", "cache/archives/partial"):
        (root / folder).mkdir(parents=True)
    (root / "sources.list").write_text(f"deb [trusted=yes] {url} ./\n")
    (root / "status").touch()
    (root / "apt.conf").write_text(apt_conf(root, "amd64", ""))
    apt = Apt(root)
    assert apt.run("apt-get", "-qq", "update").returncode == 0
    return apt


def test_package_that_the_mirror_dropped_is_named(tmp_path: Path) -> None:
    """The real apt, on a mirror of one package over HTTP."""
    entry, asked = make_deb(tmp_path, "2.0"), list[Sequence[LockedFile]]()

    def how_to_get(lost: Sequence[LockedFile]) -> str:
        asked.append(lost)
        return "advice"

    (tmp_path / "out").mkdir()
    with mirror(tmp_path / "repo") as url:
        apt = open_mirror(tmp_path / "apt", url)
        apt.download([entry], tmp_path / "out", how_to_get)
        assert sha256_file(tmp_path / "out" / entry.file) == (entry.sha256, entry.size)
        for name, version in (("hello", "1.0"), ("nothello", "2.0")):
            gone = entry.model_copy(update={"name": name, "version": version})
            with pytest.raises(NetworkError, match=r"only the newest .*: hello_2\.0_all\.deb \(sha256=") as caught:
                apt.download([gone], tmp_path / "out", how_to_get)
            assert caught.value.next_step == "advice" and asked.pop() == [gone]
        (tmp_path / "repo" / entry.file).unlink()  # the list is older than what lies there
        (tmp_path / "out" / entry.file).unlink()
        with pytest.raises(NetworkError, match="no longer offered by the Debian mirror"):
            apt.download([entry], tmp_path / "out", how_to_get)
        assert asked.pop() == [entry]
    with pytest.raises(NetworkError, match="could not fetch hello") as caught:
        apt.download([entry], tmp_path / "out", how_to_get)
    assert "connect to the network" in caught.value.next_step and not asked


def test_package_with_other_bytes_is_not_stored(
    paths: Paths, tmp_path: Path, locked: Callable[..., StackLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that has another package under the locked version."""
    entry = make_deb(tmp_path, "2.0")
    other = make_deb(tmp_path, "2.0", "other bytes")
    lock = locked()
    lock = lock.model_copy(update={"debs": [*lock.debs, entry]})
    with mirror(tmp_path / "repo") as url:
        monkeypatch.setattr(fetch, "open_apt", lambda root, _: open_mirror(root, url))
        with pytest.raises(IntegrityError, match=entry.sha256) as caught:
            fetch_stack(paths, stack(), lock, print, str)
    assert str([entry]) in caught.value.next_step, "the caller's advice about that file"
    assert not any(Store(paths.store).path(file.sha256).exists() for file in (entry, other))


PYLOCK = """
lock-version = "1.0"
[[packages]]
name = "torch"
version = "2.13.0+cpu"
wheels = [
    { url = "http://127.0.0.1/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl", size = 1, \
hashes = { sha256 = "aa" } },
    { path = "local.whl", hashes = { sha256 = "bb" } },
]
[[packages]]
name = "from-source"
sdist = { url = "http://127.0.0.1/x.tar.gz", hashes = { sha256 = "cc" } }
"""


def test_pylock_gives_the_wheels_urls() -> None:
    url = "http://127.0.0.1/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert wheels.parse_pylock(PYLOCK) == [(url, "aa", "torch")]


def test_wheel_of_another_index_is_streamed_and_verified(
    paths: Paths, index: Index, locked: Callable[..., StackLock], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What pip does not find is taken from the place that uv names. Only uv's answer is made up here."""
    file = make_wheel(index.folder, "a")
    found = [(index.url.replace("simple/", f"files/{file.file}"), file.sha256, "a")]
    monkeypatch.setattr(wheels, "backend_urls", lambda *_: found)
    (tmp_path / "empty").mkdir()
    with wheelhouse.serve(tmp_path / "empty") as empty:
        wheelhouse.use_index(monkeypatch, empty.url)
        fetch_stack(paths, stack(torch_backend="cpu"), locked(file), print, str)
        assert Store(paths.store).verified(file)
        with pytest.raises(NetworkError, match=r"neither pip's index nor PyTorch's \(cpu\) has a-1\.0"):
            other = locked(file.model_copy(update={"sha256": "f" * 64}))
            fetch_stack(paths, stack(torch_backend="cpu"), other, print, str)
