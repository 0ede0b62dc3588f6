"""The statement: every input with its hash, in the form that in-toto and SLSA give it, the same bytes each time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, make_sample
from evidence_samples import sboms_made_once as sboms_made_once

from sparkpin.build.record import write_record
from sparkpin.commands import evidence as commands_evidence
from sparkpin.core.errors import HostError, IntegrityError
from sparkpin.evidence.attest import attest, ensure_attested, is_attested
from sparkpin.evidence.provenance import read_statement
from sparkpin.evidence.signing import SIGNING_KEY, Keys
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Releases


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """To look at."""
    sample = make_sample(tmp_path_factory.mktemp("sample"))
    attest(sample.paths, sample.release, Keys())
    return sample


@pytest.fixture
def sample(template: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """To change, also by tasks. No key is configured."""
    sample = template.copied(tmp_path)
    for name, folder in (("SPARKPIN_HOME", "home"), ("SPARKPIN_CACHE", "cache"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    return sample


def statement(sample: Sample) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((sample.folder / STATEMENT).read_bytes())
    return value


def test_form(template: Sample) -> None:
    sample = template
    value = statement(sample)
    assert (value["_type"], value["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    release, definition = sample.release, value["predicate"]["buildDefinition"]
    assert value["subject"][0] == {
        "name": release.tag,
        "digest": {"sha256": release.image.removeprefix("sha256:")},
        "mediaType": "application/vnd.oci.image.config.v1+json",
    }
    assert [row["digest"]["sha256"] for row in value["subject"][1:]] == [d.partition(":")[2] for d in release.diff_ids]
    assert [row["name"].split()[2] for row in value["subject"][1:4]] == ["rootfs", "venv", "torch"]
    assert definition["externalParameters"]["argv"] == list(release.argv)
    assert definition["internalParameters"]["checkpointKey"] == release.checkpoint_key
    assert value["predicate"]["runDetails"]["metadata"] == {"finishedOn": "2026-01-02T03:04:05.500Z"}


def test_every_input_has_its_hash(template: Sample) -> None:
    sample = template
    """Held against the places where the hashes come from, not against the code that lists them."""
    rows = statement(sample)["predicate"]["buildDefinition"]["resolvedDependencies"]
    found = {row["digest"]["sha256"] for row in rows}
    assert len({row["name"] for row in rows}) == len(rows)
    wanted = set(sample.release.inputs.values())
    for record in sample.records:
        wanted |= {row.sha256 for row in record.context} | {hashlib.sha256(record.dockerfile.encode()).hexdigest()}
    spec = sample.records[0].rootfs
    assert spec is not None
    wanted |= {deb.sha256 for deb in spec.debs} | {hashlib.sha256(spec.customize.encode()).hexdigest()}
    lock = manifests.load_model_lock(
        sample.paths.project, manifests.load_model(sample.paths.project, sample.release.model)
    )
    base, donor = lock.repositories["int4"], lock.repositories["fp8"]
    texts = [file for file in donor.files if file.file in ("config.json", "model.safetensors.index.json")]
    assert len(texts) == 2 and len(donor.headers) == 2 and len(donor.tensors) == 24
    wanted |= {file.sha256 for file in (*base.files, *texts, *donor.headers, *donor.tensors)}
    assert found == wanted
    tensor = donor.tensors[0]
    (named,) = [row for row in rows if row["name"].endswith(f"/{tensor.file}/{tensor.name}")]
    assert named["digest"]["sha256"] == tensor.sha256 and f"{donor.repo}@{donor.revision}" in named["name"]


def test_byproducts(template: Sample) -> None:
    sample = template
    rows = statement(sample)["predicate"]["runDetails"]["byproducts"]
    assert [row["name"] for row in rows] == [SBOM, "build record base", "build record hybrid"]
    assert rows[0]["digest"]["sha256"] == hashlib.sha256((sample.folder / SBOM).read_bytes()).hexdigest()


def test_only_what_decides_the_release_is_in_it(sample: Sample) -> None:
    """Not how long a build took, not what smoke tests found, not the state."""
    before = (sample.folder / STATEMENT).read_bytes()
    record = sample.records[0]
    write_record(sample.paths, record.model_copy(update={"seconds": 99.0, "size": 7}))
    Releases(sample.paths).smoked(sample.release.tag, {"passed": True, "checks": []})
    smoked = Releases(sample.paths).get(sample.release.tag)
    assert smoked.state == "passed" and is_attested(sample.paths, smoked)
    attest(sample.paths, smoked, Keys())
    assert (sample.folder / STATEMENT).read_bytes() == before


def test_made_once(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("sparkpin.evidence.attest.attest", lambda *args: said.append("made"))
    ensure_attested(sample.paths, sample.release, said.append)
    assert said == []


@pytest.mark.parametrize("name", [STATEMENT, SBOM])
@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_what_is_missing_or_damaged_is_made_again(sample: Sample, name: str, content: bytes | None) -> None:
    before = {file: (sample.folder / file).read_bytes() for file in (STATEMENT, SBOM)}
    (sample.folder / name).unlink() if content is None else (sample.folder / name).write_bytes(content)
    assert not is_attested(sample.paths, sample.release)
    ensure_attested(sample.paths, sample.release, lambda line: None)
    assert {file: (sample.folder / file).read_bytes() for file in (STATEMENT, SBOM)} == before


def test_another_build_makes_another_statement(sample: Sample) -> None:
    change_record(sample)
    assert not is_attested(sample.paths, sample.release)
    inputs = {**sample.release.inputs, "stages/base.yaml": "0" * 64}
    assert not is_attested(sample.paths, dataclasses.replace(sample.release, inputs=inputs))


def test_signed_once_there_is_a_key(sample: Sample, signing_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(signing_key))
    ensure_attested(sample.paths, sample.release, lambda line: None)
    assert (sample.folder / SIGNATURE).read_bytes().startswith(b"-----BEGIN SSH SIGNATURE-----")


def test_a_statement_that_stays_keeps_its_signature(sample: Sample, signing_key: Path) -> None:
    signed = attest(sample.paths, sample.release, Keys(signing_key))
    before = {path: path.read_bytes() for path in signed.files}
    again = attest(sample.paths, sample.release, Keys())
    assert again == signed and not signed.removed
    assert {path: path.read_bytes() for path in again.files} == before
    assert [path.name for path in again.files] == [SBOM, STATEMENT, SIGNATURE]


def change_record(sample: Sample) -> None:
    """So that the statement is another one."""
    record = sample.records[0]
    write_record(sample.paths, record.model_copy(update={"dockerfile": record.dockerfile + "# changed\n"}))


def test_no_signature_outlives_its_statement(
    sample: Sample, signing_key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attest(sample.paths, sample.release, Keys(signing_key))
    assert (sample.folder / SIGNATURE).is_file()
    broken = sample.paths.home / "broken"
    broken.write_text("no key")
    change_record(sample)
    with pytest.raises(HostError):
        attest(sample.paths, sample.release, Keys(broken))
    assert not (sample.folder / SIGNATURE).exists() and (sample.folder / STATEMENT).is_file()

    attest(sample.paths, sample.release, Keys(signing_key))
    change_record(sample)
    for said in (True, False):
        commands_evidence.attest(sample.release.tag)
        assert ("the signature from before is removed" in capsys.readouterr().out) == said
        assert not (sample.folder / SIGNATURE).exists()


def test_attest_says_who_signed(
    sample: Sample, signing_key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(signing_key))
    commands_evidence.attest(sample.release.tag)
    assert f"signed with {signing_key}: ED25519 key SHA256:" in capsys.readouterr().out
    monkeypatch.delenv(SIGNING_KEY)
    commands_evidence.attest(sample.release.tag)
    said = capsys.readouterr().out
    assert "the signature from before stays, it is over this very statement: ED25519 key SHA256:" in said
    assert "not signed now" in said and SIGNING_KEY in said


def test_a_damaged_signature_goes(sample: Sample, signing_key: Path) -> None:
    """Else `verify` says that it is wrong, and `attest`, which it proposes, would leave it so."""
    attest(sample.paths, sample.release, Keys(signing_key))
    (sample.folder / SIGNATURE).write_text("damaged")
    assert attest(sample.paths, sample.release, Keys()).removed
    assert not (sample.folder / SIGNATURE).exists()


def test_a_build_says_that_a_signature_went(sample: Sample, signing_key: Path) -> None:
    attest(sample.paths, sample.release, Keys(signing_key))
    change_record(sample)
    said: list[str] = []
    ensure_attested(sample.paths, sample.release, said.append)
    assert len(said) == 1 and "the signature from before is removed" in said[0]


def test_a_bad_key_does_not_stop_a_build(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv(SIGNING_KEY, str(sample.paths.home / "none"))
    ensure_attested(sample.paths, sample.release, said.append)
    assert len(said) == 1 and said[0].startswith("warning: ") and SIGNING_KEY in said[0]


def test_lost_input_is_told(sample: Sample) -> None:
    Store(sample.paths.inputs).path(sample.release.inputs["stages/base.yaml"]).unlink()
    with pytest.raises(IntegrityError, match=r"stages/base\.yaml"):
        attest(sample.paths, sample.release, Keys())


def definition(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["predicate"]["buildDefinition"]
    return found


NO_STATEMENTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "other type": lambda v: v.update(_type="https://in-toto.io/Statement/v0.1"),
    "other predicate": lambda v: v.update(predicateType="https://example.org/other"),
    "no subject": lambda v: v.update(subject=[]),
    "two of a name": lambda v: v["subject"].append(v["subject"][0]),
    "unknown field": lambda v: v["predicate"].update(more=1),
    "another spelling": lambda v: definition(v).update(build_type=definition(v).pop("buildType")),
    "empty field": lambda v: v["subject"][0].update(uri=""),
    "hash of another kind": lambda v: v["subject"][0].update(digest={"md5": "0"}),
    "wrong shape": lambda v: v["predicate"].update(buildDefinition="x"),
}


@pytest.mark.parametrize("change", NO_STATEMENTS)
def test_what_is_no_such_statement(template: Sample, change: str) -> None:
    value = statement(template)
    NO_STATEMENTS[change](value)
    with pytest.raises(IntegrityError, match="cannot be read"):
        read_statement(json.dumps(value).encode())


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"predicate": 1}']
)
def test_what_is_no_statement_at_all(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        read_statement(data)
