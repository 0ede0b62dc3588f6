"""Exporting: no file unless each import would take it, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from bundle_samples import Parts, sample_of, state_of, with_checkpoint, write_sample
from evidence_samples import Sample
from evidence_samples import sboms_made_once as sboms_made_once

from sparkpin.cli import bundle as commands_bundle
from sparkpin.cli import evidence as commands_evidence
from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError
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


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample_of(tmp_path_factory.mktemp("sample"))


@pytest.fixture
def sample(template: Sample, tmp_path: Path) -> Sample:
    return template.copied(tmp_path / "own")


@pytest.fixture
def home(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKPIN_HOME", str(sample.paths.home))
    monkeypatch.setenv("SPARKPIN_CACHE", str(sample.paths.cache))


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


def test_a_file_that_is_there_is_not_overwritten(sample: Sample, tmp_path: Path, home: None) -> None:
    before, there = state_of(sample), tmp_path / "there.tar"
    there.write_text("x")
    for target in (there, tmp_path, tmp_path / "missing/x.tar"):
        with pytest.raises(InputError):
            commands_bundle.export(sample.release.tag, str(target), no_image=True)
    assert state_of(sample) == before and {path.name for path in tmp_path.iterdir()} == {"there.tar", "own"}


@pytest.mark.parametrize(
    ("what", "damage", "told"),
    [
        ("statement", lambda data: data.replace(b"amd64", b"arm64"), "statement"),
        ("statement", lambda data: None, "--sign"),
        ("SBOM", lambda data: None, "SBOM"),
        ("input", lambda data: b"x" * len(data), "got other bytes"),
        ("input", lambda data: None, "was made from"),
    ],
)
def test_what_every_import_would_refuse_is_not_exported(
    sample: Sample, tmp_path: Path, what: str, damage: Callable[[bytes], bytes | None], told: str
) -> None:
    """And once it is mended, it is. damage: None: the file is gone."""
    name, digest = next(iter(sample.release.inputs.items()))
    path = {
        "statement": sample.folder / STATEMENT,
        "SBOM": sample.folder / SBOM,
        "input": KeptInputs.of(sample.paths).kept.path(digest),
    }[what]
    whole = path.read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    path.write_bytes(damaged) if damaged is not None else path.unlink()
    with pytest.raises(IntegrityError) as caught:
        exported(sample, tmp_path / "out.tar")
    said = f"{caught.value.message}\n{caught.value.next_step}"
    assert told in said and (sample.release.tag in said or name in said)
    assert [child.name for child in tmp_path.iterdir()] == ["own"]
    path.write_bytes(whole)
    with open_bundle(exported(sample, tmp_path / "out.tar")) as opened:
        assert opened.image is None


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("oci://host/name", {"with_checkpoint": True}),
        ("ssh://host", {"ca": "x.pem"}),
        ("ssh://host", {"deep": True}),  # of a checkpoint that is not sent
        ("out.tar", {"redistribute": True}),
    ],
)
def test_an_option_that_does_not_fit_the_place(sample: Sample, place: str, options: dict[str, Any], home: None) -> None:
    with pytest.raises(InputError) as caught:
        commands_bundle.export(sample.release.tag, place, **options)
    assert "--" in caught.value.message


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("in.tar", {"unsigned": True}),
        ("in.tar", {"ca": "x.pem"}),
        ("oci://host/name:tag", {"require_signature": True}),
        ("ssh://host", {}),
    ],
)
def test_what_an_import_does_not_take(place: str, given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        commands_bundle.import_(place, **given)


def test_whom_this_machine_trusts_stops_no_export(
    sample: Sample, tmp_path: Path, signing_key: Path, allowed: Path
) -> None:
    attest(sample.paths, sample.release, Keys(signing_key))
    bundle = exported(sample, tmp_path / "out.tar")
    with pytest.raises(IntegrityError, match="does not allow"), open_bundle(bundle):
        pass


def test_no_signature_is_over_a_finished_checkpoint(
    sample: Sample, tmp_path: Path, signing_key: Path, allowed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed.write_text(f"lead@example {signing_key.with_suffix('.pub').read_text()}")
    attest(sample.paths, sample.release, Keys(signing_key, allowed))
    plain, finished = write_sample(sample, tmp_path / "plain.tar"), tmp_path / "finished.tar"
    finished.write_bytes(with_checkpoint(Parts.of(plain), sample, ["config.json"]).pack())
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
