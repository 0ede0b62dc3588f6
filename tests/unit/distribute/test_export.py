"""Exporting: no file unless each import would take it; places, and the options that fit them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from bundle_samples import layers_of, members_of
from evidence_samples import Sample

from sparkpin.cli import bundle as commands_bundle
from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.distribute import engines
from sparkpin.distribute.bundle import open_bundle
from sparkpin.distribute.layout import slice_of
from sparkpin.distribute.signing import ALLOWED_SIGNERS, Keys, attest
from sparkpin.distribute.transfer import export
from sparkpin.host.engine import Engine
from sparkpin.image.archive import Slice
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import SBOM, STATEMENT, Release

NO_ENGINE = cast(Engine, None)


@pytest.fixture(autouse=True)
def layers(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine would save of the image, which was never built."""

    @contextlib.contextmanager
    def saved(paths: Paths, engine: Engine, release: Release) -> Iterator[dict[str, Slice]]:
        yield {diff_id: slice_of(tar) for diff_id, tar in layers_of(sample).items()}

    monkeypatch.setattr(engines, "saved_layers", saved)
    monkeypatch.setattr(commands_bundle, "engine_of", lambda paths: NO_ENGINE)


def exported(sample: Sample, target: Path) -> Path:
    export(sample.paths, NO_ENGINE, sample.release, target)
    return target


def test_a_folder_is_the_same_layout(own: Sample, tmp_path: Path) -> None:
    commands_bundle.export(own.release.tag, f"{tmp_path}/folder/")
    folder, file = tmp_path / "folder", exported(own, tmp_path / "file.tar")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == members_of(file.read_bytes())
    with open_bundle(folder) as opened:
        assert opened.release == own.release
    (folder / "index.json").unlink()
    with pytest.raises(IntegrityError), open_bundle(folder):
        pass


@pytest.mark.parametrize(
    ("what", "data", "told"),
    [
        (STATEMENT, b"{}", "statement"),
        (STATEMENT, None, "--sign"),
        (SBOM, None, "SBOM"),
        ("input", b"x", "got other bytes"),
        ("input", None, "was made from"),
    ],
)
def test_what_every_import_would_refuse_is_not_exported(
    own: Sample, tmp_path: Path, what: str, data: bytes | None, told: str
) -> None:
    """And once it is mended, it is. data: None: the file is gone."""
    digest, name = next(iter(own.release.inputs.values())), "out/" if what == STATEMENT else "out.tar"
    path = KeptInputs.of(own.paths).store.path(digest) if what == "input" else own.folder / what
    whole = path.read_bytes()
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        commands_bundle.export(own.release.tag, f"{tmp_path}/{name}")
    assert told in f"{caught.value.message}\n{caught.value.next_step}"
    assert not list(tmp_path.iterdir())
    path.write_bytes(whole)
    commands_bundle.export(own.release.tag, f"{tmp_path}/{name}")
    with open_bundle(tmp_path / name):
        pass


REFUSED = [
    (commands_bundle.export, "oci://host/name", {"with_checkpoint": True}),
    (commands_bundle.export, "out.tar", {"with_checkpoint": True}),
    (commands_bundle.export, "ssh://host", {"ca": "x.pem"}),
    (commands_bundle.export, "ssh://host", {"deep": True}),  # of a checkpoint that is not sent
    (commands_bundle.export, "out.tar", {"redistribute": True}),
    (commands_bundle.import_, "in.tar", {"unsigned": True}),
    (commands_bundle.import_, "in.tar", {"ca": "x.pem"}),
    (commands_bundle.import_, "oci://host/name:tag", {"require_signature": True}),
    (commands_bundle.import_, "ssh://host", {}),
    (commands_bundle.import_, "in.tar", {"tag": "v2"}),
]


@pytest.mark.parametrize(("task", "place", "options"), REFUSED)
def test_an_option_that_does_not_fit_the_place(
    own: Sample, task: Callable[..., None], place: str, options: dict[str, Any]
) -> None:
    tag = [own.release.tag] if task is commands_bundle.export else []
    with pytest.raises(InputError):
        task(*tag, place, **options)


def test_whom_this_machine_trusts_stops_no_export(
    own: Sample, tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "allowed_signers").touch()
    monkeypatch.setenv(ALLOWED_SIGNERS, str(tmp_path / "allowed_signers"))
    attest(own.paths, own.release, Keys(signing_key))
    bundle = exported(own, tmp_path / "out.tar")
    with pytest.raises(IntegrityError, match="does not allow"), open_bundle(bundle):
        pass


def test_what_a_killed_run_saved_goes_and_what_another_holds_stays(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    left, held = paths.work / "saved-left", paths.work / "saved-held"
    left.mkdir(parents=True)
    with files.lock(held / "lock"), saving_folder(paths) as own:
        assert set(paths.work.glob("saved-*")) == {own, held}
    with saving_folder(paths) as own:
        assert set(paths.work.glob("saved-*")) == {own}
