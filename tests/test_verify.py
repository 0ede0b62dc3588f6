"""Verifying: evidence as it was made holds; each thing that was tampered with is found, by the check that is for it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, make_sample
from private_engine import file_layer, private_engine

from sparkpin import commands
from sparkpin.buildrecord import write_record
from sparkpin.canonical import read_layer
from sparkpin.engine import Engine
from sparkpin.errors import HostError, IntegrityError
from sparkpin.evidence import imagecheck
from sparkpin.evidence.attest import attest
from sparkpin.evidence.signing import Keys
from sparkpin.evidence.verify import Check, Evidence, check_evidence, conclusion, demanded, require
from sparkpin.releases import SBOM, STATEMENT, Releases, release_key, tag_of
from sparkpin.seal import Part, image_config
from sparkpin.store import Store

NAMES = ["image", "layers", "release key", "build records", "kept inputs", "locks", "statement", "inputs", "SBOM"]
NAMES += ["signature"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    sample = make_sample(tmp_path_factory.mktemp("sample"))
    attest(sample.paths, sample.release, Keys())
    return sample


@pytest.fixture
def keys(signing_key: Path, tmp_path: Path) -> Keys:
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f"lead@example {signing_key.with_suffix('.pub').read_text()}")
    return Keys(signing_key, allowed)


def found(checks: list[Check], result: str) -> list[str]:
    return [check.what for check in checks if check.result == result]


def test_signed_release_holds(tmp_path: Path, keys: Keys) -> None:
    sample = make_sample(tmp_path)
    attest(sample.paths, sample.release, keys)
    checks = check_evidence(sample.evidence(), keys)
    assert found(checks, "ok") == NAMES, [check.line for check in checks]
    require(checks, sample.release.tag)
    assert "lead@example" in checks[-1].line


def test_what_is_not_there_is_said(sample: Sample) -> None:
    checks = check_evidence(sample.evidence(read=None, config=None), Keys())
    assert found(checks, "open") == ["image", "kept inputs", "locks", "signature"]
    assert found(checks, "wrong") == []
    assert "17 of the model were not looked at" in next(check.detail for check in checks if check.what == "inputs")
    assert "not checked: image, kept inputs, locks, signature" in conclusion(checks)
    checks = check_evidence(sample.evidence(files={}), Keys())
    assert found(checks, "open") == ["statement", "signature"]


def test_valid_signature_of_whomever(tmp_path: Path, keys: Keys) -> None:
    sample = make_sample(tmp_path)
    attest(sample.paths, sample.release, keys)
    check = check_evidence(sample.evidence(), Keys())[-1]
    assert (check.result, demanded(check).result) == ("open", "wrong") and "nobody says" in check.detail


def test_demanded_signature(sample: Sample) -> None:
    checks = [demanded(check) for check in check_evidence(sample.evidence(), Keys())]
    with pytest.raises(IntegrityError, match="not signed; the signature of an allowed signer is required") as failed:
        require(checks, sample.release.tag)
    assert failed.value.exit_code == 5


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("other statement", "not over this statement"),
        ("unknown signer", "does not allow"),
        ("no statement", "no statement"),
    ],
)
def test_bad_signature_is_wrong(tmp_path: Path, keys: Keys, what: str, wrong: str) -> None:
    sample = make_sample(tmp_path)
    attest(sample.paths, sample.release, keys)
    evidence = sample.evidence()
    files = dict(evidence.files)
    if what == "other statement":
        files[STATEMENT] += b"\n"
    elif what == "no statement":
        del files[STATEMENT]
    else:
        assert keys.allowed
        keys.allowed.write_text("")
    check = check_evidence(dataclasses.replace(evidence, files=files), keys)[-1]
    assert (check.what, check.result) == ("signature", "wrong") and wrong in check.detail


def test_without_ssh_keygen_a_signature_is_not_looked_at(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = make_sample(tmp_path)
    attest(sample.paths, sample.release, keys)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = check_evidence(sample.evidence(), keys)[-1]
    assert check.result == "open" and "ssh-keygen" in check.detail
    with pytest.raises(HostError):
        attest(sample.paths, sample.release, keys)


def release(evidence: Evidence, **changes: Any) -> Evidence:
    return dataclasses.replace(evidence, release=dataclasses.replace(evidence.release, **changes))


def rekeyed(evidence: Evidence, **changes: Any) -> Evidence:
    """Consistent in itself: key and tag follow from what was changed."""
    made = dataclasses.replace(evidence.release, **changes)
    key = release_key(made.build_key, made.checkpoint_key, made.argv, made.env)
    return release(evidence, **changes, key=key, tag=tag_of(made.recipe, made.stage, key))


def record(evidence: Evidence, number: int, **changes: Any) -> Evidence:
    records = list(evidence.records)
    records[number] = records[number].model_copy(update=changes)
    return dataclasses.replace(evidence, records=tuple(records))


def context(evidence: Evidence, number: int, what: str, **changes: Any) -> Evidence:
    rows = [
        row.model_copy(update=changes) if row.what.startswith(what) else row for row in evidence.records[number].context
    ]
    return record(evidence, number, context=rows)


def statement(evidence: Evidence, change: Callable[[dict[str, Any]], object]) -> Evidence:
    value = json.loads(evidence.files[STATEMENT])
    change(value)
    return dataclasses.replace(evidence, files={**evidence.files, STATEMENT: json.dumps(value).encode()})


def definition(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["predicate"]["buildDefinition"]
    return found


def sbom(evidence: Evidence, old: bytes, new: bytes, *, named: bool) -> Evidence:
    """named: the statement names the changed one."""
    data = evidence.files[SBOM]
    assert old in data
    data = data.replace(old, new, 1)
    evidence = dataclasses.replace(evidence, files={**evidence.files, SBOM: data})
    digest = {"sha256": hashlib.sha256(data).hexdigest()}
    details: Callable[[dict[str, Any]], object] = lambda value: value["predicate"]["runDetails"]["byproducts"][  # noqa: E731
        0
    ].update(digest=digest)
    return statement(evidence, details) if named else evidence


def kept(evidence: Evidence, path: str, data: bytes | None) -> Evidence:
    """The release's record names other bytes for a project file, which are kept, too (or nothing is kept at all)."""
    read, wanted = evidence.read, evidence.release.inputs[path]
    assert read
    if data is None:
        return dataclasses.replace(evidence, read=lambda sha256: None if sha256 == wanted else read(sha256))
    sha256 = hashlib.sha256(data).hexdigest()
    changed = release(evidence, inputs={**evidence.release.inputs, path: sha256})
    return dataclasses.replace(changed, read=lambda name: data if name == sha256 else read(name))


ZERO = "0" * 64
LOCK, MODEL = "pins/stacks/cpu.lock", "pins/models/scripted-tiny.lock"
TAMPERED: dict[str, tuple[str, Callable[[Evidence], Evidence]]] = {
    "other image": ("image", lambda e: release(e, image=f"sha256:{ZERO}")),
    "other config": ("image", lambda e: dataclasses.replace(e, config=b"{}")),
    "config is no JSON": ("image", lambda e: dataclasses.replace(e, config=b"[" * 100_000)),
    "other layer order": ("image", lambda e: release(e, diff_ids=e.release.diff_ids[::-1])),
    "a layer less, image unseen": (
        "layers",
        lambda e: dataclasses.replace(release(e, diff_ids=e.release.diff_ids[:-1]), config=None),
    ),
    "no records": ("layers", lambda e: dataclasses.replace(e, records=())),
    "other command": ("release key", lambda e: release(e, argv=("sh",))),
    "other environment": ("release key", lambda e: release(e, env={"A": "b"})),
    "other tag": ("release key", lambda e: release(e, tag="sparkpin/other:base-000000000000")),
    "path above the project": ("release key", lambda e: release(e, inputs={"pins/../../evil": ZERO})),
    "absolute path": ("release key", lambda e: release(e, executable=("/bin/evil",))),
    "other build key": ("image", lambda e: rekeyed(e, build_key=ZERO)),
    "other build key, image unseen": (
        "build records",
        lambda e: dataclasses.replace(rekeyed(e, build_key=ZERO), config=None),
    ),
    "other parent": ("build records", lambda e: record(e, 1, parent_key=ZERO)),
    "chain without its start": ("build records", lambda e: dataclasses.replace(e, records=e.records[1:])),
    "config of a record": ("build records", lambda e: record(e, 0, config="{}")),
    "layer that is not in the image": (
        "build records",
        lambda e: record(
            e, 1, layers=[layer.model_copy(update={"diff_id": f"sha256:{ZERO}"}) for layer in e.records[1].layers]
        ),
    ),
    "kept input lost": ("kept inputs", lambda e: kept(e, "stages/base.yaml", None)),
    "kept input of other bytes": ("kept inputs", lambda e: dataclasses.replace(e, read=lambda sha256: b"other")),
    "wheel that no lock names": ("locks", lambda e: context(e, 0, "wheel torch", sha256=ZERO)),
    "lock of another time": ("locks", lambda e: kept(e, LOCK, b"{}")),
    "other mod": ("statement", lambda e: dataclasses.replace(context(e, 1, "mod ", sha256=ZERO), read=None)),
    "other project file": ("inputs", lambda e: kept(e, "stages/base.yaml", b"other")),
    "other model lock": ("statement", lambda e: kept(e, MODEL, b"{}")),
    "other Dockerfile": ("statement", lambda e: record(e, 0, dockerfile="FROM scratch\n")),
    "other checkpoint": ("statement", lambda e: rekeyed(e, checkpoint_key=ZERO)),
    "other recipe": ("statement", lambda e: rekeyed(e, recipe="other")),
    "other time": ("statement", lambda e: release(e, created="2020-01-01T00:00:00Z")),
    "statement of other image": (
        "statement",
        lambda e: statement(e, lambda v: v["subject"][0].update(digest={"sha256": ZERO})),
    ),
    "subject more": (
        "statement",
        lambda e: statement(e, lambda v: v["subject"].append({"name": "more", "digest": {"sha256": ZERO}})),
    ),
    "other build type": ("statement", lambda e: statement(e, lambda v: definition(v).update(buildType="other"))),
    "statement is no statement": (
        "statement",
        lambda e: dataclasses.replace(e, files={**e.files, STATEMENT: b"no"}),
    ),
    "input less": ("inputs", lambda e: statement(e, lambda v: definition(v)["resolvedDependencies"].pop(0))),
    "model file less": ("inputs", lambda e: statement(e, lambda v: drop(definition(v), "/config.json"))),
    "input more": (
        "inputs",
        lambda e: statement(
            e,
            lambda v: definition(v)["resolvedDependencies"].append({"name": "deb evil 1", "digest": {"sha256": ZERO}}),
        ),
    ),
    "other hash": (
        "inputs",
        lambda e: statement(e, lambda v: definition(v)["resolvedDependencies"][0].update(digest={"sha256": ZERO})),
    ),
    "SBOM gone": ("SBOM", lambda e: dataclasses.replace(e, files={STATEMENT: e.files[STATEMENT]})),
    "SBOM changed": ("SBOM", lambda e: sbom(e, b'"library"', b'"library" ', named=False)),
    "SBOM of other image": (
        "SBOM",
        lambda e: sbom(e, e.release.image.removeprefix("sha256:").encode(), ZERO.encode(), named=True),
    ),
    "SBOM with other hash": (
        "SBOM",
        lambda e: sbom(e, e.records[0].rootfs.debs[0].sha256.encode(), ZERO.encode(), named=True),  # type: ignore[union-attr]
    ),
    "SBOM is no SBOM": ("SBOM", lambda e: sbom(e, b'"components"', b'"other"', named=True)),
}


def drop(value: dict[str, Any], end: str) -> None:
    rows = value["resolvedDependencies"]
    rows.remove(next(row for row in rows if row["name"].endswith(end)))


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_found(sample: Sample, case: str) -> None:
    name, tamper = TAMPERED[case]
    checks = check_evidence(tamper(sample.evidence()), Keys())
    wrong = found(checks, "wrong")
    assert wrong and wrong[0] == name, [check.line for check in checks]
    with pytest.raises(IntegrityError):
        require(checks, "it")


@pytest.fixture(scope="module")
def engine() -> Any:
    with private_engine() as engine:
        yield engine


def load(engine: Engine, sample: Sample) -> Sample:
    """The sample's release with a real image of two layers under its tag, and records that name it."""
    tars = [file_layer("bottom", b"b" * 100_000), file_layer("top", b"t" * 1000)]
    records = list(sample.records)
    parts = [Part(layer=read_layer(io.BytesIO(tar), everything=True)) for tar in tars]
    labels = {"sparkpin.key": sample.release.build_key}
    sealed = engine.load_sealed(parts, {"Labels": labels}, os="linux", architecture="amd64", tag=sample.release.tag)
    below = image_config(
        {"Labels": {"sparkpin.key": records[0].key}}, os="linux", architecture="amd64", diff_ids=sealed.diff_ids[:1]
    )
    for record, config, diff_ids in zip(
        records, (below, sealed.config), (sealed.diff_ids[:1], sealed.diff_ids), strict=True
    ):
        write_record(
            sample.paths,
            record.model_copy(
                update={
                    "config": config.decode(),
                    "config_digest": f"sha256:{hashlib.sha256(config).hexdigest()}",
                    "diff_ids": list(diff_ids),
                    "layers": [],
                }
            ),
        )
    made = dataclasses.replace(sample.release, image=sealed.config_digest, diff_ids=sealed.diff_ids)
    Releases(sample.paths).save(made)
    attest(sample.paths, made, Keys())
    return Sample(sample.paths, made)


@pytest.fixture
def loaded(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    made = load(engine, make_sample(tmp_path))
    monkeypatch.setenv("SPARKPIN_HOME", str(made.paths.home))
    monkeypatch.setenv("SPARKPIN_CACHE", str(made.paths.cache))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(commands, "engine_of", lambda paths: engine)
    return made


@pytest.mark.engine
def test_task_says_what_it_checked(loaded: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    commands.verify(loaded.release.tag, deep=True, require_signature=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split("  ")[0] for line in lines[:-1]].count("ok") == 11, lines
    assert any(line.startswith("--") and "not signed" in line for line in lines)
    assert any("the layers' bytes: 2 of 2 hashes" in line for line in lines)
    assert "11 checks hold" in lines[-1] and "not checked: signature, fetched files" in lines[-1]
    with pytest.raises(IntegrityError, match="signature"):
        commands.verify(loaded.release.tag, deep=False, require_signature=True)


@pytest.mark.engine
def test_other_image_under_the_tag(engine: Engine, loaded: Sample) -> None:
    engine.untag(loaded.release.tag)
    part = Part(layer=read_layer(io.BytesIO(file_layer("other", b"x")), everything=True))
    engine.load_sealed([part], {}, os="linux", architecture="amd64", tag=loaded.release.tag)
    with pytest.raises(IntegrityError, match="engine: config digest"):
        commands.verify(loaded.release.tag, deep=False, require_signature=False)
    check = imagecheck.check_saved(loaded.paths, engine, loaded.release, lambda line: None)
    assert check.result == "wrong"
    engine.untag(loaded.release.tag)
    with pytest.raises(IntegrityError, match="engine: it has no"):
        commands.verify(loaded.release.tag, deep=False, require_signature=False)
    assert not list(loaded.paths.work.iterdir())


@pytest.mark.engine
def test_damaged_file_in_the_store(loaded: Sample) -> None:
    deb = loaded.records[0].rootfs.debs[0]  # type: ignore[union-attr]
    path = Store(loaded.paths.store).path(deb.sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    check = imagecheck.check_fetched(loaded.paths, loaded.release, loaded.records)
    assert check.result == "wrong" and str(path) in check.detail
