"""Locking and fetching model repositories with the real huggingface_hub against a real local Hub."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pytest
from checkpoint_samples import PIN, base_config, base_shards, fp8_config, fp8_shards, tree, write_repository

from sparkpin import hub, hubclient, manifests
from sparkpin.errors import DiskError, IntegrityError, ManifestError, NetworkError
from sparkpin.files import PARTIAL, sha256_file
from sparkpin.paths import Paths
from sparkpin.schema import ModelLock, ModelPin
from sparkpin.tinymodel import hub as local_hub

SHARD = "model-00001-of-00002.safetensors"
TINY = "scripted-tiny"


class Remote:
    """A local Hub that stands for the public one, and a project that pins its repositories."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "remote"
        self.paths = Paths(root / "project", root / "cache", root / "home")
        self.monkeypatch = monkeypatch
        self.requests: list[local_hub.Request] = []
        self.said: list[str] = []
        write_repository(self.root / "acme/sample-int4", base_shards(), base_config(), repository="int4")
        write_repository(self.root / "acme/sample-fp8", fp8_shards(), fp8_config(), repository="fp8")
        value = PIN.model_dump(mode="json", exclude={"generator"})
        for repository in value["repositories"].values():
            repository["revision"] = local_hub.scan(self.root / repository["repo"], repository["repo"]).commit
        self.pin_file = self.paths.project / "pins/models/sample.yaml"
        self.pin_file.parent.mkdir(parents=True)
        self.pin_file.write_text(json.dumps(value))  # YAML can be written as JSON

    @property
    def pin(self) -> ModelPin:
        return manifests.load_model(self.paths.project, "sample")

    @contextlib.contextmanager
    def online(self, **options: Any) -> Iterator[str]:
        with local_hub.serve(self.root, log=self.requests, **options) as url:
            self.point_at(url)
            yield url

    def point_at(self, url: str) -> None:
        @contextlib.contextmanager
        def endpoint(*args: object) -> Iterator[str]:
            yield url

        self.monkeypatch.setattr(hub, "endpoint", endpoint)

    def lock(self) -> ModelLock:
        return hub.lock_model(self.paths, "sample", self.said.append)

    def fetch(self, lock: ModelLock) -> dict[str, Path]:
        return hub.fetch_model(self.paths, self.pin, lock, self.said.append)

    def is_fetched(self, folders: dict[str, Path]) -> bool:
        repositories = self.pin.repositories
        return {name: tree(folder) for name, folder in folders.items()} == {
            name: tree(self.root / repositories[name].repo) for name in repositories
        }


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    return Remote(tmp_path, monkeypatch)


@pytest.fixture
def locked(remote: Remote) -> ModelLock:
    """The lock, with nothing fetched yet."""
    with remote.online():
        lock = remote.lock()
    shutil.rmtree(remote.paths.cache)
    remote.requests.clear()
    return lock


def test_lock_names_every_file_with_its_real_size_and_hash(remote: Remote) -> None:
    with remote.online():
        lock = remote.lock()
    for repository in lock.repositories.values():
        folder = remote.root / repository.repo
        assert [file.file for file in repository.files] == sorted(path.name for path in folder.iterdir())
        assert all((file.sha256, file.size) == sha256_file(folder / file.file) for file in repository.files)
    assert manifests.load_model_lock(remote.paths.project, remote.pin) == lock


def test_lock_downloads_no_large_file(remote: Remote) -> None:
    with remote.online():
        remote.lock()
    got = [request.path for request in remote.requests if request.method == "GET"]
    assert any("README.md" in path for path in got)
    assert not any(("safetensors" in path and "index" not in path) or "/blobs/" in path for path in got)


def test_lock_twice_gives_the_same_bytes(remote: Remote) -> None:
    path = remote.pin_file.with_suffix(".lock")
    with remote.online():
        remote.lock()
        first = path.read_bytes()
        remote.lock()
    assert path.read_bytes() == first


def test_fetch_gives_the_repositories_and_then_needs_no_network(remote: Remote, locked: ModelLock) -> None:
    with remote.online():
        folders = remote.fetch(locked)
    assert remote.is_fetched(folders)
    assert folders["fp8"] == remote.paths.models / "acme/sample-fp8" / remote.pin.repositories["fp8"].revision
    remote.point_at("http://127.0.0.1:9")
    assert remote.fetch(locked) == folders


def test_fetch_of_one_repository(remote: Remote, locked: ModelLock) -> None:
    with remote.online():
        folders = hub.fetch_model(remote.paths, remote.pin, locked, print, only=["int4"])
    assert list(folders) == ["int4"]
    assert [path.name for path in (remote.paths.models / "acme").iterdir()] == ["sample-int4"]


@pytest.mark.parametrize("harm", ["flip", "shorten", "remove"])
def test_damaged_file_is_told_and_fetched_again_alone(remote: Remote, locked: ModelLock, harm: str) -> None:
    with remote.online():
        folders = remote.fetch(locked)
    path = folders["int4"] / SHARD
    data = path.read_bytes()
    path.unlink()
    if harm != "remove":
        path.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if harm == "flip" else b""))
    remote.requests.clear()
    remote.said.clear()
    with remote.online():
        remote.fetch(locked)
    assert remote.is_fetched(folders)
    assert any("is damaged" in line and SHARD in line for line in remote.said) == (harm != "remove")
    resolved = {request.path.rpartition("/")[2] for request in remote.requests if "/resolve/" in request.path}
    assert resolved == {SHARD}


def test_stray_file_is_removed_and_told(remote: Remote, locked: ModelLock) -> None:
    with remote.online():
        folders = remote.fetch(locked)
    stray = folders["int4"] / "pytorch_model.bin"
    stray.write_bytes(b"x")
    remote.fetch(locked)
    assert not stray.exists()
    assert any("pytorch_model.bin" in line for line in remote.said)


def test_other_bytes_than_locked_are_refused_with_both_sides(remote: Remote, locked: ModelLock) -> None:
    fp8 = locked.repositories["fp8"]
    rows = [f.model_copy(update={"sha256": "0" * 64}) if f.file == SHARD else f for f in fp8.files]
    lock = locked.model_copy(
        update={"repositories": {**locked.repositories, "fp8": fp8.model_copy(update={"files": rows})}}
    )
    sha256, size = sha256_file(remote.root / "acme/sample-fp8" / SHARD)
    with remote.online(), pytest.raises(IntegrityError) as caught:
        remote.fetch(lock)
    assert SHARD in caught.value.message
    assert f"wanted size={size}, sha256={'0' * 64}; got size={size}, sha256={sha256}" in caught.value.message
    assert not (remote.paths.models / "acme/sample-fp8" / fp8.revision / SHARD).exists()
    with remote.online():
        assert remote.is_fetched(remote.fetch(locked)), "the right lock must still succeed"


@pytest.mark.parametrize("name", ["README.md", SHARD])
def test_wrong_file_in_the_librarys_own_cache_does_not_last(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """huggingface_hub prefers its cache to the Hub and does not check it."""
    cache = tmp_path / "huggingface"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    revision = remote.pin.repositories["int4"].revision
    poisoned = cache / "models--acme--sample-int4/snapshots" / revision / name
    poisoned.parent.mkdir(parents=True)
    poisoned.write_bytes(b"wrong")
    with remote.online():
        lock = remote.lock()
        assert remote.is_fetched(remote.fetch(lock))
    assert [file.sha256 for file in lock.repositories["int4"].files if file.file == name] == [
        sha256_file(remote.root / "acme/sample-int4" / name)[0]
    ]
    assert f"{name} of acme/sample-int4 arrived with wrong bytes: asking the Hub for it once more" in remote.said


def test_cut_connection_is_taken_up_where_it_broke(
    remote: Remote, locked: ModelLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1)  # it keeps whole chunks only
    size = (remote.root / "acme/sample-int4" / SHARD).stat().st_size
    with remote.online(cut_once={SHARD: size // 2}):
        folders = remote.fetch(locked)
    assert remote.is_fetched(folders)
    assert [request.range for request in remote.requests if request.range] == [f"bytes={size // 2}-"]


FETCH = """
import contextlib, sys
from pathlib import Path
from sparkpin import hub, manifests
from sparkpin.paths import Paths
@contextlib.contextmanager
def endpoint(*args):
    yield {url!r}
hub.endpoint = endpoint
root = Path({root!r})
paths = Paths(root / "project", root / "cache", root / "home")
pin = manifests.load_model(paths.project, "sample")
hub.fetch_model(paths, pin, manifests.load_model_lock(paths.project, pin), lambda line: None)
"""


def test_killed_fetch_is_completed_by_the_next(
    remote: Remote, locked: ModelLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, go_on = threading.Event(), threading.Event()
    copy = local_hub._Handler._copy

    def stall(self: local_hub._Handler, file: BinaryIO, size: int) -> None:
        if Path(file.name).name != SHARD:
            return copy(self, file, size)
        self.wfile.write(file.read(size // 2))
        self.wfile.flush()
        stalled.set()
        go_on.wait(60)

    monkeypatch.setattr(local_hub._Handler, "_copy", stall)
    with remote.online() as url:
        process = subprocess.Popen([sys.executable, "-c", FETCH.format(url=url, root=str(tmp_path))])
        assert stalled.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        go_on.set()
    monkeypatch.undo()
    revision = locked.repositories["int4"].revision
    folder = remote.paths.models / "acme/sample-int4" / revision
    there = tree(folder)
    assert SHARD not in there
    assert all(data == (remote.root / "acme/sample-int4" / name).read_bytes() for name, data in there.items())
    assert list(folder.with_name(f"{revision}.download").rglob("*.incomplete"))

    remote.monkeypatch = monkeypatch
    with remote.online():
        assert remote.is_fetched(remote.fetch(locked))
    assert not list(remote.paths.models.rglob("*.incomplete"))
    assert not list(remote.paths.models.rglob("*.download"))


def test_full_disk_is_told_before_fetching(remote: Remote, locked: ModelLock, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with remote.online(), pytest.raises(DiskError, match=r"files need [0-9,]+ bytes in .*models, 10 are free"):
        remote.fetch(locked)
    assert remote.requests == []


def test_no_hub_is_a_network_error(remote: Remote, locked: ModelLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its many tries
    remote.point_at("http://127.0.0.1:9")
    with pytest.raises(
        NetworkError, match=r"cannot fetch README\.md of acme/sample-int4 at .*: the Hub does not answer"
    ):
        remote.fetch(locked)
    with pytest.raises(NetworkError, match="cannot fetch its list of files of acme/sample-int4"):
        remote.lock()


def edit_pin(remote: Remote, **change: str) -> None:
    value = json.loads(remote.pin_file.read_text())
    value["repositories"]["fp8"] |= change
    remote.pin_file.write_text(json.dumps(value))


def test_unknown_repository_and_revision(remote: Remote) -> None:
    with remote.online():
        edit_pin(remote, revision="c" * 40)
        with pytest.raises(NetworkError, match=r"acme/sample-fp8 at cccccccccccc: the repository has no such revision"):
            remote.lock()
        edit_pin(remote, repo="acme/other")
        with pytest.raises(NetworkError, match=r"acme/other at .*: no such repository"):
            remote.lock()


class Gate(BaseHTTPRequestHandler):
    """A Hub whose every repository is gated."""

    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


LOCK = """
import sys
from pathlib import Path
from sparkpin import hub
from sparkpin.errors import NetworkError
from sparkpin.paths import Paths
root = Path({root!r})
try:
    hub.lock_model(Paths(root / "project", root / "cache", root / "home"), "sample", lambda line: None)
except NetworkError as error:
    print(error)
"""


def test_gated_repository_is_told_and_the_token_of_the_environment_is_sent(remote: Remote, tmp_path: Path) -> None:
    Gate.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_secret"}
        code = LOCK.format(root=str(tmp_path))
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
        server.server_close()
    assert "acme/sample-int4" in done.stdout and "is gated" in done.stdout and "HF_TOKEN" in done.stdout, done.stderr
    asked = [token for path, token in Gate.seen if "acme/sample-int4" in path]
    assert asked and set(asked) == {"Bearer hf_secret"}, Gate.seen
    assert "hf_secret" not in done.stdout + done.stderr


@pytest.fixture
def tiny(project: Path, tmp_path: Path) -> Paths:
    return Paths(project, tmp_path / "cache", tmp_path / "home")


def test_generated_model_goes_through_the_hub_and_only_once(tiny: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    path = tiny.project / f"pins/models/{TINY}.lock"
    committed = path.read_bytes() if path.exists() else None
    lock = hub.lock_model(tiny, TINY, print)
    assert committed == path.read_bytes(), "pins/models/scripted-tiny.lock is not what the generator makes"
    pin = manifests.load_model(tiny.project, TINY)
    folders = hub.fetch_model(tiny, pin, lock, print)
    for name, repository in lock.repositories.items():
        assert sorted(tree(folders[name])) == [file.file for file in repository.files]
    assert os.environ["HTTP_PROXY"] and "127.0.0.1" not in os.environ.get("NO_PROXY", "")
    assert not list(tiny.work.rglob(f"{PARTIAL}*"))

    def never(*args: object, **options: object) -> None:
        raise AssertionError("generated again")

    monkeypatch.setattr("sparkpin.tinymodel.generate", never)
    said: list[str] = []
    assert hub.fetch_model(tiny, pin, lock, said.append) == folders
    assert said == []


def test_pinned_revision_that_the_generator_does_not_make(tiny: Paths) -> None:
    path = tiny.project / f"pins/models/{TINY}.yaml"
    right = manifests.load_model(tiny.project, TINY).repositories["fp8"].revision
    path.write_text(path.read_text().replace(right, "d" * 40))
    with pytest.raises(ManifestError) as caught:
        hub.lock_model(tiny, TINY, print)
    assert (caught.value.key, caught.value.seen) == ("repositories.fp8.revision", "d" * 40)
    assert right in caught.value.wanted
    assert f"repositories.fp8.revision to {right} in {path}" in caught.value.next_step


def test_model_revision_of_the_recipe_is_the_pinned_one(project: Path) -> None:
    recipe = manifests.load_recipe(project, TINY)
    assert manifests.model_of(project, recipe).name == TINY


def test_progress_is_told_while_a_file_arrives(
    remote: Remote, locked: ModelLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = local_hub._Handler._copy
    told = threading.Event()

    def slow(self: local_hub._Handler, file: BinaryIO, size: int) -> None:
        if Path(file.name).name == SHARD:
            told.wait(60)
        copy(self, file, size)

    def say(line: str) -> None:
        if f"fetching {SHARD}: " in line and "so far" in line:
            told.set()

    monkeypatch.setattr(local_hub._Handler, "_copy", slow)
    monkeypatch.setattr(hubclient, "PROGRESS_SECONDS", 0.01)
    with remote.online():
        hub.fetch_model(remote.paths, remote.pin, locked, say)
    assert told.is_set()
