"""The scripted models of pins/models: their archives hold what the pins name, and their template chooses the script."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import PROJECT

from benchmarks.scripted_tiny.network import FORMS
from benchmarks.scripted_tiny.repositories import SEED, generate
from sparkpin.core.errors import IntegrityError
from sparkpin.fetch.packed import commit_of, config_ahead, unpack
from sparkpin.pins import manifests


@pytest.mark.parametrize("name", FORMS)
def test_an_archive_holds_the_pinned_commits(name: str, tmp_path: Path) -> None:
    pin = manifests.load_model(PROJECT, name)
    assert pin.packed
    unpack(PROJECT, pin.packed, tmp_path)
    assert {one.repo: commit_of(tmp_path / one.repo) for one in pin.repositories.values()} == {
        one.repo: one.revision for one in pin.repositories.values()
    }
    base = pin.repositories[pin.base].repo
    assert config_ahead(PROJECT, pin.packed, base)["num_hidden_layers"] == FORMS[name].layers  # type: ignore[index]


def test_an_archive_is_unpacked_by_the_python_of_debian_12(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11.2, whose `tarfile` has no filters."""
    extract = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: extract(self, path))
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    test_an_archive_holds_the_pinned_commits("scripted-tiny", tmp_path)


def test_the_generator_still_makes_them(tmp_path: Path) -> None:
    generate(tmp_path, seed=SEED)
    pin = manifests.load_model(PROJECT, "scripted-tiny")
    assert all(commit_of(tmp_path / one.repo) == one.revision for one in pin.repositories.values())


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + b"?", lambda data: b"version https://git-lfs/spec/v1"])
def test_another_archive_is_one_clear_error_before_it_is_read(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    pin = manifests.load_model(PROJECT, "scripted-drafter")
    assert pin.packed
    archive = tmp_path / "project" / pin.packed.path
    archive.parent.mkdir(parents=True)
    archive.write_bytes(damage((PROJECT / pin.packed.path).read_bytes()))
    with pytest.raises(IntegrityError) as error:
        unpack(tmp_path / "project", pin.packed, tmp_path / "out")
    assert str(archive) in error.value.message and not (tmp_path / "out").exists()
