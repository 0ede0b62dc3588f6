"""Locking and fetching model repositories against a real local Hub, of donors only what is taken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hub
import pytest
from checkpoint_samples import (
    MODULES,
    PIN,
    base_config,
    base_shards,
    fp8_config,
    fp8_shards,
    listing_of,
    lock_of,
    read_tensors,
    tree,
    write_repository,
)
from heard import heard
from hub import Fault, Request
from remote_files import NOWHERE, LocalHub
from remote_files import pauses as pauses

from sparkpin.checkpoint.repository import Places, header_of
from sparkpin.core.errors import DiskError, IntegrityError, ManifestError, NetworkError
from sparkpin.core.files import PARTIAL, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_model, model
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests
from sparkpin.pins.schema import UNRESOLVED, ModelLock, ModelPin, RepositoryLock

SHARD = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
TAKEN = {f"{module}.{part}" for module in MODULES for part in ("weight", "weight_scale_inv")}
TINY = "scripted-tiny"


class Remote(LocalHub):
    """A project that pins the repositories of the local Hub."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        self.paths = Paths(root / "project", root / "cache", root / "home")
        write_repository(self.root / "acme/sample-int4", base_shards(), base_config(), repository="int4")
        write_repository(self.root / "acme/sample-fp8", fp8_shards(), fp8_config(), repository="fp8")
        value = PIN.model_dump(mode="json", exclude={"packed", "smoke"})
        for repository in value["repositories"].values():
            repository["revision"] = self.commit(repository["repo"])
        self.pin_file = self.paths.project / "pins/models/sample.yaml"
        self.pin_file.parent.mkdir(parents=True)
        self.pin_file.write_text(json.dumps(value))  # YAML can be written as JSON

    def commit(self, repo: str) -> str:
        return hub.scan(self.root / repo, repo).commit

    @property
    def pin(self) -> ModelPin:
        return manifests.load_model(self.paths.project, "sample")

    @property
    def lock_file(self) -> Path:
        return self.pin_file.with_suffix(".lock")

    def lock(self) -> ModelLock:
        return lock_model.lock_model(self.paths, "sample")

    def fetch(self, lock: ModelLock) -> Places:
        return model.fetch_model(self.paths, self.pin, lock)

    def source(self, name: str) -> Path:
        return self.root / self.pin.repositories[name].repo

    def is_fetched(self, places: Places) -> bool:
        """The base whole, and of the donor exactly the tensors of the shared experts."""
        donor = read_tensors(self.source("fp8"))
        return (
            {name: tree(folder) for name, folder in places.folders.items()} == {"int4": tree(self.source("int4"))}
            and list(places.tensors) == ["fp8"]
            and {name: path.read_bytes() for name, path in places.tensors["fp8"].items()}
            == {name: donor[name][3] for name in TAKEN}
        )

    def got(self, repo: str) -> list[tuple[str, str]]:
        """What was asked of a repository: file and range, in order. Redirects to large files aside."""
        names = {sha256_file(path)[0]: path.name for path in (self.root / repo).iterdir()}
        found = []
        for request in self.requests:
            last = request.path.partition("?")[0].rpartition("/")[2]
            if f"/{repo}/" in request.path and "/api/" not in request.path and not last.endswith(".safetensors"):
                found.append((names.get(last, last), request.range))
        return found

    def needed(self, donor: RepositoryLock) -> list[tuple[str, str]]:
        """Texts, headers, and the tensors that are taken."""
        listing, found = listing_of("fp8", self.source("fp8")), [(CONFIG, ""), (INDEX, "")]
        found += [(row.file, f"bytes=0-{row.size - 1}") for row in donor.headers]
        for row in donor.tensors:
            info = header_of(listing, row.file).tensors[row.name]
            found.append((row.file, f"bytes={info.begin}-{info.end - 1}"))
        return found

    def edit_pin(self, name: str, **change: Any) -> None:
        value = json.loads(self.pin_file.read_text())
        value["repositories"][name] |= change
        self.pin_file.write_text(json.dumps(value))


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    remote = Remote(tmp_path, monkeypatch)
    with remote.serve():
        yield remote


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the lock: the same in every test, since a commit follows from the files."""
    with pytest.MonkeyPatch.context() as patch:
        remote = Remote(tmp_path_factory.mktemp("made"), patch)
        with remote.serve():
            remote.lock()
    return remote.lock_file.read_text()


@pytest.fixture
def locked(remote: Remote, made: str) -> ModelLock:
    """The lock, with nothing fetched yet."""
    remote.lock_file.write_text(made)
    return manifests.load_model_lock(remote.paths.project, remote.pin)


@pytest.fixture
def folders(remote: Remote) -> Remote:
    """Folders of this machine stand for both repositories, and no Hub is there."""
    for name in ("int4", "fp8"):
        remote.edit_pin(name, revision=UNRESOLVED, folder=str(remote.source(name)))
    remote.point_at(NOWHERE)
    return remote


def test_a_lock_names_the_needed_bytes_and_fetches_no_others(remote: Remote) -> None:
    lock = remote.lock()
    base, donor = lock.repositories["int4"], lock.repositories["fp8"]
    assert lock == lock_of({name: remote.source(name) for name in ("int4", "fp8")}, remote.pin)
    assert not base.tensors and {tensor.name for tensor in donor.tensors} == TAKEN
    assert manifests.load_model_lock(remote.paths.project, remote.pin) == lock
    lengths = [(file, "bytes=0-7") for file in (SHARD, SECOND)]
    assert sorted(remote.got("acme/sample-fp8")) == sorted([*remote.needed(donor), *lengths])
    got = [asked for file, asked in remote.got("acme/sample-int4") if file.endswith(".safetensors")]
    assert sorted(got) == sorted(
        ["bytes=0-7"] * len(base.headers) + [f"bytes=0-{header.size - 1}" for header in base.headers]
    )
    first = remote.lock_file.read_bytes()
    remote.requests.clear()
    remote.lock()
    assert not [request for request in remote.requests if "/api/" not in request.path]
    assert remote.lock_file.read_bytes() == first


def test_a_lock_made_again_believes_no_file_that_is_there(remote: Remote, locked: ModelLock) -> None:
    right = remote.lock_file.read_bytes()
    remote.fetch(locked)
    remote.lock_file.unlink()
    for name in ("int4", "fp8"):
        repository = remote.pin.repositories[name]
        damage(remote.paths.models / repository.repo / repository.revision / CONFIG, "flip")
    remote.lock()
    assert remote.lock_file.read_bytes() == right


@pytest.mark.parametrize("part", ["files", "headers", "tensors"])
def test_lock_again_holds_the_hub_to_the_former_lock(remote: Remote, locked: ModelLock, part: str) -> None:
    """On first use a tensor's hash is believed, and never after."""
    right, path = getattr(locked.repositories["fp8"], part)[0].sha256, remote.lock_file
    path.write_text(path.read_text().replace(right, "0" * 64))
    with pytest.raises(
        IntegrityError, match=f"got size=[0-9]+, sha256={right}, expected size=[0-9]+, sha256={'0' * 64}"
    ):
        remote.lock()
    assert right not in path.read_text()


def test_lock_again_misses_a_file_of_the_former_lock(remote: Remote, locked: ModelLock) -> None:
    """A commit never loses one; and a lock that nobody can read is no lock that is not there."""
    lock = json.loads(remote.lock_file.read_text())
    rows = lock["repositories"]["int4"]["files"]
    rows.append(rows[0] | {"name": "lost.json", "file": "lost.json"})
    remote.lock_file.write_text(json.dumps(lock))
    with pytest.raises(IntegrityError, match=r"lost\.json"):
        remote.lock()
    remote.lock_file.write_text("<<<<<<< HEAD\n")
    with pytest.raises(ManifestError) as caught:
        remote.lock()
    assert "rm pins/models/sample.lock" in caught.value.next_step


@pytest.mark.parametrize("change", [{"repo": "../project"}, {"revision": ".."}, None])
def test_a_lock_of_another_repository_names_no_folder(
    remote: Remote, locked: ModelLock, change: dict[str, str] | None
) -> None:
    """It would be written to. None: it lacks the repository."""
    value = json.loads(remote.lock_file.read_text())
    entry = value["repositories"].pop("int4")
    value["repositories"] |= {"int4": entry | change} if change else {}
    remote.lock_file.write_text(json.dumps(value))
    with pytest.raises(ManifestError, match="repositories"):
        remote.fetch(manifests.load_model_lock(remote.paths.project, remote.pin))
    assert remote.requests == []


def test_a_fetch_takes_the_needed_bytes_and_then_needs_no_network(remote: Remote, locked: ModelLock) -> None:
    places = remote.fetch(locked)
    assert remote.is_fetched(places)
    assert (places.folders["int4"] / SHARD).stat().st_mode & 0o777 == 0o444
    assert places.folders["int4"] == remote.paths.models / "acme/sample-int4" / remote.pin.repositories["int4"].revision
    assert set(tree(remote.paths.models / "acme/sample-fp8")) == {
        f"{remote.pin.repositories['fp8'].revision}/{file}" for file in (CONFIG, INDEX)
    }
    assert sorted(remote.got("acme/sample-fp8")) == sorted(remote.needed(locked.repositories["fp8"]))
    assert sorted(remote.got("acme/sample-int4")) == [(file, "") for file in sorted(tree(remote.source("int4")))]
    remote.point_at(NOWHERE)
    remote.said.clear()
    assert remote.fetch(locked) == places
    for row in locked.repositories["int4"].headers:
        assert not Store(remote.paths.store).has(row), "it is read from the whole file"
    found = model.listings(remote.paths, remote.pin, locked)
    assert dict(found["int4"].headers) == dict(listing_of("int4", remote.source("int4")).headers)
    assert remote.said == []


def test_two_models_whose_tensors_have_the_same_bytes_may_be_fetched_at_once(remote: Remote, locked: ModelLock) -> None:
    """The store has one place for them, and neither run writes into the other's part."""
    shutil.copytree(remote.root / "acme", remote.root / "other")
    text = remote.pin_file.read_text().replace("acme/", "other/").replace('"sample"', '"other"')
    remote.pin_file.with_name("other.yaml").write_text(text)
    other = ModelLock.model_validate_json(locked.model_dump_json().replace("acme/", "other/"))
    donor, begun, go_on = locked.repositories["fp8"], threading.Event(), threading.Event()
    shared = remote.needed(donor)[-1][1]

    def stall(request: Request) -> Fault | None:
        if request.range != shared or "/blobs/" not in request.path or begun.is_set():
            return None
        begun.set()
        return Fault(cut=1, wait=go_on)

    with ThreadPoolExecutor(1) as pool, remote.serve(stall):
        first = pool.submit(remote.fetch, locked)
        assert begun.wait(60)
        assert remote.is_fetched(
            model.fetch_model(remote.paths, manifests.load_model(remote.paths.project, "other"), other)
        )
        go_on.set()
        assert remote.is_fetched(first.result())
    assert not list(remote.paths.cache.rglob("*.part"))


def damage(path: Path, harm: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if harm != "remove":
        path.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if harm == "flip" else b""))


@pytest.mark.parametrize("harm", ["flip", "remove"])
@pytest.mark.parametrize("what", ["file", "tensor"])
def test_what_is_damaged_is_fetched_again_alone(remote: Remote, locked: ModelLock, what: str, harm: str) -> None:
    places = remote.fetch(locked)
    tensor = locked.repositories["fp8"].tensors[0]
    path, asked = {
        "file": (places.folders["int4"] / SHARD, {"int4": [SHARD], "fp8": []}),
        "tensor": (places.tensors["fp8"][tensor.name], {"int4": [], "fp8": [tensor.file]}),
    }[what]
    damage(path, harm)
    remote.requests.clear()
    remote.point_at(NOWHERE)
    with pytest.raises(NetworkError):
        remote.fetch(locked)
    assert not path.exists(), "whoever only looks at sizes finds no file, not a wrong one"
    with remote.serve():
        assert remote.is_fetched(remote.fetch(locked))
    assert {key: [file for file, _ in remote.got(f"acme/sample-{key}")] for key in asked} == asked


@pytest.mark.parametrize(("name", "part"), [("int4", "files"), ("fp8", "headers"), ("fp8", "tensors")])
def test_other_bytes_than_locked_are_refused_with_both_sides(
    remote: Remote, locked: ModelLock, name: str, part: str
) -> None:
    row = next(row for row in getattr(locked.repositories[name], part) if row.file == SHARD)
    wrong = ModelLock.model_validate_json(locked.model_dump_json().replace(row.sha256, "0" * 64))
    with pytest.raises(IntegrityError) as caught:
        remote.fetch(wrong)
    assert all(text in caught.value.message for text in (SHARD, "0" * 64, row.sha256))
    assert not list(remote.paths.cache.rglob("0" * 64))
    assert remote.is_fetched(remote.fetch(locked)), "the right lock must still succeed"


ALONE = """
from pathlib import Path
from sparkpin.fetch import lock_model as hublock, model as hub
from sparkpin.pins import manifests
from sparkpin.core.paths import Paths
root = Path({root!r})
paths = Paths(root / "project", root / "cache", root / "home")
pin = manifests.load_model(paths.project, "sample")
{call}
"""
CALL_FETCH = "hub.fetch_model(paths, pin, manifests.load_model_lock(paths.project, pin))"
CALL_LOCK = "hublock.lock_model(paths, 'sample')"


def kill_when(there: Callable[[], bool], url: str, root: Path, call: str) -> None:
    code = ALONE.format(root=str(root), call=call)
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HF_ENDPOINT": url})
    while not there():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("call", [CALL_LOCK, CALL_FETCH])
@pytest.mark.parametrize("at", [1, 9, 14, 26])
def test_killed_at_any_request_the_next_run_ends_as_if_nothing_had_been(
    remote: Remote, made: str, tmp_path: Path, call: str, at: int
) -> None:
    """Lists, texts, lengths of headers, headers, tensors, shards: the requests of one run, in that order."""
    if call == CALL_FETCH:
        remote.lock_file.write_text(made)
    with remote.serve() as url:
        kill_when(lambda: len(remote.requests) >= at, url, tmp_path, call)
        assert remote.lock_file.exists() == (call == CALL_FETCH)
        remote.lock()
        assert remote.lock_file.read_text() == made
        assert remote.is_fetched(remote.fetch(remote.lock()))
    assert not list(remote.paths.models.rglob("*.download"))


def test_full_disk_is_told_before_fetching(remote: Remote, locked: ModelLock, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(DiskError):
        remote.fetch(locked)
    assert remote.requests == []


@pytest.mark.parametrize("data", [b"", b"1234567", (100).to_bytes(8, "little") + b"{}" + bytes(97)])
def test_a_header_that_is_longer_than_its_file(folders: Remote, data: bytes) -> None:
    (folders.source("fp8") / SHARD).write_bytes(data)
    with pytest.raises(IntegrityError, match=SHARD):
        folders.lock()


@pytest.mark.parametrize("name", ["a/../../evil", "/etc/evil"])
def test_a_name_that_leaves_the_folder_is_refused_before_it_is_a_path(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The listing is changed: no real repository holds such a name."""
    info = hub.model_info

    def hostile(repository: hub.Repository) -> dict[str, Any]:
        listed = info(repository)
        return listed | {"siblings": [*listed["siblings"], {"rfilename": name, "size": 1}]}

    monkeypatch.setattr(hub, "model_info", hostile)
    with pytest.raises(ManifestError, match=r"files.*evil"):
        remote.lock()
    assert not list(tmp_path.rglob("evil*"))
    assert not [path for _, path in remote.got("acme/sample-int4")]


def test_an_unresolved_revision_is_the_newest_commit_and_stays_so(remote: Remote) -> None:
    newest = remote.commit("acme/sample-fp8")
    remote.edit_pin("fp8", revision=UNRESOLVED)
    lock = remote.lock()
    assert lock.repositories["fp8"].revision == newest
    assert remote.is_fetched(remote.fetch(lock))
    (remote.source("fp8") / "README.md").write_text("changed\n")
    assert remote.commit("acme/sample-fp8") != newest
    with remote.serve(), pytest.raises(NetworkError, match="no such revision"):  # this Hub forgets the old one
        remote.lock()
    remote.lock_file.unlink()
    with remote.serve():
        assert remote.lock().repositories["fp8"].revision == remote.commit("acme/sample-fp8")


@pytest.mark.parametrize("relative", [True, False])
def test_a_folder_stands_for_the_hub(remote: Remote, relative: bool) -> None:
    for name in ("int4", "fp8"):
        folder = remote.source(name)
        shown = os.path.relpath(folder, remote.paths.project) if relative else str(folder)
        remote.edit_pin(name, revision=UNRESOLVED, folder=shown)
        (folder / ".git").mkdir()
        (folder / ".git/HEAD").write_text("not a file of the model\n")
    remote.point_at(NOWHERE)
    before = {name: tree(remote.source(name)) for name in ("int4", "fp8")}
    lock = remote.lock()
    assert all(len(entry.revision) == 40 for entry in lock.repositories.values())
    assert remote.lock() == lock, "the revision follows from the files"
    places = remote.fetch(lock)
    for path in remote.source("int4").glob(".git/*"):
        path.unlink()
    (remote.source("int4") / ".git").rmdir()
    assert remote.is_fetched(places)
    assert (places.folders["int4"] / SHARD).samefile(remote.source("int4") / SHARD), "a link, not a copy"
    assert not (places.folders["int4"] / CONFIG).samefile(remote.source("int4") / CONFIG)
    assert before["fp8"] == tree(remote.source("fp8"))
    mode = (remote.source("int4") / SHARD).stat().st_mode
    assert mode & 0o200, "files of the folder stay as they are"


def test_the_hub_of_the_environment_gets_the_token_and_its_storage_does_not(
    remote: Remote, locked: ModelLock, tmp_path: Path
) -> None:
    with hub.serve(remote.root, log=remote.requests, storage="localhost") as url:
        env = {**os.environ, "HF_ENDPOINT": url, "HF_TOKEN": "hf_secret"}
        code = ALONE.format(root=str(tmp_path), call=f"{CALL_LOCK}; {CALL_FETCH}")
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    asked = [request for request in remote.requests if "/acme/" in request.path]  # the library asks for more
    sent = {(request.host.partition(":")[0], request.token) for request in asked}
    assert sent == {("127.0.0.1", "Bearer hf_secret"), ("localhost", "")}
    remote.point_at(NOWHERE)
    assert remote.is_fetched(remote.fetch(locked))


def test_a_model_is_generated_only_once(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Paths(project, tmp_path / "cache", tmp_path / "home")
    path = tiny.project / f"pins/models/{TINY}.lock"
    committed = path.read_bytes() if path.exists() else None
    hub.use(monkeypatch, NOWHERE)
    lock = lock_model.lock_model(tiny, TINY)
    assert committed == path.read_bytes(), "pins/models/scripted-tiny.lock is not what its archive holds"
    pin = manifests.load_model(tiny.project, TINY)
    places = model.fetch_model(tiny, pin, lock)
    assert sorted(tree(places.folders["int4"])) == [file.file for file in lock.repositories["int4"].files]
    assert len(places.tensors["fp8"]) == len(lock.repositories["fp8"].tensors)
    assert not list(tiny.work.rglob(f"{PARTIAL}*"))

    monkeypatch.delattr(model, "unpack")
    said = heard()
    assert model.fetch_model(tiny, pin, lock) == places
    assert said == []
