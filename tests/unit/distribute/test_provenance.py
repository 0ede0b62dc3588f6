"""The statement: every input with its hash, in the form that in-toto and SLSA give it, the same bytes each time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from evidence_samples import Sample
from google.protobuf.json_format import Parse, ParseDict
from heard import heard
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance  # type: ignore[import-untyped]
from in_toto_attestation.v1.statement import Statement  # type: ignore[import-untyped]
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage  # type: ignore[import-untyped]

from sparkpin.build.record import write_record
from sparkpin.cli import evidence as commands_evidence
from sparkpin.core.errors import HostError, InputError, IntegrityError
from sparkpin.distribute.signing import SIGNING_KEY, Keys, attest, ensure_attested, is_attested
from sparkpin.pins import manifests
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Releases


def statement(sample: Sample) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((sample.folder / STATEMENT).read_bytes())
    return value


def test_form(sample: Sample) -> None:
    value = statement(sample)
    Statement.copy_from_pb(Parse(json.dumps(value), StatementMessage())).validate()
    ParseDict(value["predicate"], Provenance())
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
    byproducts = value["predicate"]["runDetails"]["byproducts"]
    assert [row["name"] for row in byproducts] == [SBOM, "build record base", "build record hybrid"]
    assert byproducts[0]["digest"]["sha256"] == hashlib.sha256((sample.folder / SBOM).read_bytes()).hexdigest()


def test_every_input_has_its_hash(sample: Sample) -> None:
    """Held against the places where the hashes come from, not against the code that lists them."""
    rows = statement(sample)["predicate"]["buildDefinition"]["resolvedDependencies"]
    found = {row["digest"]["sha256"] for row in rows}
    assert len({row["name"] for row in rows}) == len(rows)
    wanted = set(sample.release.inputs.values())
    for record in sample.records:
        wanted |= {row.sha256 for row in record.context} | {hashlib.sha256(record.dockerfile.encode()).hexdigest()}
    spec = sample.records[0].rootfs
    assert spec is not None
    wanted |= {deb.sha256 for deb in spec.debs} | {hashlib.sha256(spec.script.encode()).hexdigest()}
    project = sample.paths.project
    lock = manifests.load_model_lock(project, manifests.load_model(project, sample.release.model))
    base, donor = lock.repositories["int4"], lock.repositories["fp8"]
    texts = [file for file in donor.files if file.file in ("config.json", "model.safetensors.index.json")]
    tensors = [one for one in donor.tensors if not one.name.startswith("mtp.")]  # what stage v3 alone takes
    assert len(texts) == 2 and len(donor.headers) == 2 and len(tensors) == 24 < len(donor.tensors)
    wanted |= {file.sha256 for file in (*base.files, *texts, *donor.headers, *tensors)}
    assert found == wanted
    tensor = tensors[0]
    (named,) = [row for row in rows if row["name"].endswith(f"/{tensor.file}/{tensor.name}")]
    assert named["digest"]["sha256"] == tensor.sha256 and f"{donor.repo}@{donor.revision}" in named["name"]


def test_only_what_decides_the_release_is_in_it(own: Sample) -> None:
    """Not how long a build took, not what smoke tests found, not the state."""
    before = (own.folder / STATEMENT).read_bytes()
    record = own.records[0]
    write_record(own.paths, record.model_copy(update={"seconds": 99.0, "size": 7}))
    Releases(own.paths).smoked(own.release.tag, {"passed": True, "checks": []})
    smoked = Releases(own.paths).get(own.release.tag)
    assert smoked.state == "passed" and is_attested(own.paths, smoked)
    attest(own.paths, smoked, Keys())
    assert (own.folder / STATEMENT).read_bytes() == before


@pytest.mark.parametrize("name", [STATEMENT, SBOM])
@pytest.mark.parametrize("content", [None, b"{}"])
def test_what_is_missing_or_damaged_is_made_again(own: Sample, name: str, content: bytes | None) -> None:
    """And what is there stays: it is made once."""
    before = {file: (own.folder / file).read_bytes() for file in (STATEMENT, SBOM)}
    (own.folder / name).unlink() if content is None else (own.folder / name).write_bytes(content)
    assert not is_attested(own.paths, own.release)
    ensure_attested(own.paths, own.release)
    assert {file: (own.folder / file).read_bytes() for file in (STATEMENT, SBOM)} == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkpin.distribute.signing.attest", fail)
        ensure_attested(own.paths, own.release)


def fail(*what: object) -> NoReturn:
    raise AssertionError(what)


def change_record(own: Sample) -> None:
    """So that the statement is another one."""
    record = own.records[0]
    write_record(own.paths, record.model_copy(update={"dockerfile": record.dockerfile + "# changed\n"}))


def test_signatures_of_statements_that_stay_and_of_others(
    own: Sample, signing_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stays as long as it is over the very statement. Any other goes, by a build, too: else `verify` says that it
    is wrong, and --sign, which it proposes, would leave it so. A key that fails changes nothing."""
    signature, said = own.folder / SIGNATURE, heard()
    with monkeypatch.context() as patch:
        patch.setenv(SIGNING_KEY, str(signing_key))
        ensure_attested(own.paths, own.release)  # there is a statement, and now a key
        made = signature.read_bytes()
    signer = attest(own.paths, own.release, Keys())
    assert signature.read_bytes() == made and signer and signer.key.startswith("ED25519 key SHA256:") and not said
    signature.write_text("damaged")
    assert attest(own.paths, own.release, Keys()) is None and not signature.exists()
    attest(own.paths, own.release, Keys(signing_key))
    change_record(own)
    (own.paths.home / "broken").write_text("no key")
    before = {path.name: path.read_bytes() for path in own.folder.iterdir()}
    with pytest.raises(HostError):
        attest(own.paths, own.release, Keys(own.paths.home / "broken"))
    assert {path.name: path.read_bytes() for path in own.folder.iterdir()} == before
    attest(own.paths, own.release, Keys())
    assert not signature.exists() and len(said) == 2


def test_a_bad_key_does_not_stop_a_build(own: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    said = heard()
    monkeypatch.setenv(SIGNING_KEY, str(own.paths.home / "none"))
    ensure_attested(own.paths, own.release)
    assert len(said) == 1 and said[0].startswith("warning: ") and SIGNING_KEY in said[0]


def test_what_is_neither_a_release_nor_a_bundle(own: Sample, tmp_path: Path) -> None:
    """A folder, for one: another checkout's packages are no part of what `verify` checks."""
    (tmp_path / "other/.venv").mkdir(parents=True)
    with pytest.raises(InputError):
        commands_evidence.verify(str(tmp_path / "other/.venv"), require_signature=False)


def test_signing_with_verify(own: Sample, tmp_path: Path) -> None:
    """--sign makes what is missing before it is checked; it means nothing for a bundle."""
    (own.folder / STATEMENT).unlink()
    bundle = tmp_path / "x.tar"
    bundle.touch()
    with pytest.raises(InputError):
        commands_evidence.verify(str(bundle), require_signature=False, sign=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands_evidence, "engine_of", lambda paths: SimpleNamespace(image=lambda ref: None))
        with pytest.raises(IntegrityError):  # no engine has its image
            commands_evidence.verify(own.release.tag, require_signature=False, sign=True)
    assert (own.folder / STATEMENT).is_file()
