"""Exporting: no file unless each import would take it, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from bundle_samples import Parts, state_of, with_checkpoint, write_sample
from evidence_samples import Sample
from heard import heard

from sparkpin.cli import bundle as commands_bundle
from sparkpin.cli import evidence as commands_evidence
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, InputError, IntegrityError
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.distribute import take_in
from sparkpin.distribute.bundle import open_bundle
from sparkpin.distribute.export import BundleParts, export
from sparkpin.distribute.signing import ALLOWED_SIGNERS, Keys, attest
from sparkpin.host.engine import Engine
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import SBOM, STATEMENT

NO_ENGINE = cast(Engine, None)  # whoever asks it anything fails


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of allowed signers: there, and empty."""
    path = tmp_path / "allowed_signers"
    path.touch()
    monkeypatch.setenv(ALLOWED_SIGNERS, str(path))
    return path


def exported(sample: Sample, target: Path) -> Path:
    export(sample.paths, lambda: NO_ENGINE, sample.release, target, BundleParts(image=False))
    return target


def test_a_file_that_is_there_is_not_overwritten(own: Sample, tmp_path: Path) -> None:
    before, there = state_of(own), tmp_path / "there.tar"
    there.write_text("x")
    for target in (there, tmp_path, tmp_path / "missing/x.tar"):
        with pytest.raises(InputError):
            commands_bundle.export(own.release.tag, str(target), no_image=True)
    assert state_of(own) == before and {path.name for path in tmp_path.iterdir()} == {"there.tar"}


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
    digest = next(iter(own.release.inputs.values()))
    path = KeptInputs.of(own.paths).kept.path(digest) if what == "input" else own.folder / what
    whole = path.read_bytes()
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        exported(own, tmp_path / "out.tar")
    assert told in f"{caught.value.message}\n{caught.value.next_step}"
    assert not list(tmp_path.iterdir())
    path.write_bytes(whole)
    with open_bundle(exported(own, tmp_path / "out.tar")) as opened:
        assert opened.image is None


REFUSED = [
    (commands_bundle.export, "oci://host/name", {"with_checkpoint": True}),
    (commands_bundle.export, "ssh://host", {"ca": "x.pem"}),
    (commands_bundle.export, "ssh://host", {"deep": True}),  # of a checkpoint that is not sent
    (commands_bundle.export, "out.tar", {"redistribute": True}),
    (commands_bundle.import_, "in.tar", {"unsigned": True}),
    (commands_bundle.import_, "in.tar", {"ca": "x.pem"}),
    (commands_bundle.import_, "oci://host/name:tag", {"require_signature": True}),
    (commands_bundle.import_, "ssh://host", {}),
]


@pytest.mark.parametrize(("task", "place", "options"), REFUSED)
def test_an_option_that_does_not_fit_the_place(
    own: Sample, task: Callable[..., None], place: str, options: dict[str, Any]
) -> None:
    tag = [own.release.tag] if task is commands_bundle.export else []
    with pytest.raises(InputError):
        task(*tag, place, **options)


def test_whom_this_machine_trusts_stops_no_export(
    own: Sample, tmp_path: Path, signing_key: Path, allowed: Path
) -> None:
    attest(own.paths, own.release, Keys(signing_key))
    bundle = exported(own, tmp_path / "out.tar")
    with pytest.raises(IntegrityError, match="does not allow"), open_bundle(bundle):
        pass


def test_a_checkpoint_beside_a_signature_is_told_beforehand(own: Sample, tmp_path: Path, signing_key: Path) -> None:
    def said() -> list[str]:
        lines = heard()
        with pytest.raises(CheckpointError):
            export(own.paths, lambda: NO_ENGINE, own.release, tmp_path / "x", BundleParts(image=False, checkpoint=True))
        return [line for line in lines if "signature" in line]

    assert not said()
    attest(own.paths, own.release, Keys(signing_key))
    assert said()


def test_no_signature_is_over_a_finished_checkpoint(
    own: Sample, tmp_path: Path, signing_key: Path, allowed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed.write_text(f"lead@example {signing_key.with_suffix('.pub').read_text()}")
    attest(own.paths, own.release, Keys(signing_key, allowed))
    plain, finished = write_sample(own, tmp_path / "plain.tar"), tmp_path / "finished.tar"
    finished.write_bytes(with_checkpoint(Parts.of(plain), own, ["config.json"]).pack())
    commands_evidence.verify(str(plain), deep=False, require_signature=True)
    commands_evidence.verify(str(finished), deep=False, require_signature=False)
    assert "ok     checkpoint" not in capsys.readouterr().out, "only its own record says so"
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    for take in (
        lambda: commands_evidence.verify(str(finished), deep=True, require_signature=True),
        lambda: take_in.import_bundle(paths, NO_ENGINE, finished, signed=True),
    ):
        with pytest.raises(IntegrityError, match=r"lacks a trusted signature: finished checkpoint"):
            take()
    assert not paths.home.exists() and not paths.cache.exists()


def test_what_a_killed_run_saved_goes_and_what_another_holds_stays(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    left, held = paths.work / "saved-left", paths.work / "saved-held"
    left.mkdir(parents=True)
    with files.lock(held / "lock"), saving_folder(paths) as own:
        assert set(paths.work.glob("saved-*")) == {own, held}
    with saving_folder(paths) as own:
        assert set(paths.work.glob("saved-*")) == {own}
