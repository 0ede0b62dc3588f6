"""Verifying a release whose image is in a real engine of the tests' own."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, make_sample
from private_engine import file_layer, private_engine

from sparkpin.build.record import write_record
from sparkpin.cli import evidence as commands_evidence
from sparkpin.core.errors import EngineError, IntegrityError
from sparkpin.distribute import verify as verifying
from sparkpin.distribute.signing import SIGNING_KEY, Keys, UntrustedError, attest
from sparkpin.host.engine import Engine
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.seal import image_config
from sparkpin.releases.record import Releases


@pytest.fixture(scope="module")
def engine() -> Any:
    with private_engine() as engine:
        yield engine


def load(engine: Engine, sample: Sample) -> Sample:
    """The sample's release with a real image of two layers under its tag, and records that name it."""
    tars = [file_layer("bottom", b"b" * 100_000), file_layer("top", b"t" * 1000)]
    records = list(sample.records)
    parts = [read_layer(io.BytesIO(tar), everything=True) for tar in tars]
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
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    monkeypatch.setattr(commands_evidence, "engine_of", lambda paths: engine)
    return made


def test_task_says_what_it_checked(loaded: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    commands_evidence.verify(loaded.release.tag, deep=True, require_signature=False)
    lines = capsys.readouterr().out.splitlines()
    results = {line[5:].partition(":")[0].strip(): line[:5].strip() for line in lines[:-1]}
    assert {name for name, result in results.items() if result != "ok"} == {"signature", "published"}, lines
    assert "WRONG" not in results.values() and results["the layers' bytes"] == "ok"
    with pytest.raises(UntrustedError) as failed:
        commands_evidence.verify(loaded.release.tag, deep=False, require_signature=True)
    assert SIGNING_KEY in failed.value.next_step, "without a key `--sign` alone leads in a circle"


def test_other_image_under_the_tag(engine: Engine, loaded: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    engine.untag(loaded.release.tag)
    part = read_layer(io.BytesIO(file_layer("other", b"x")), everything=True)
    engine.load_sealed([part], {}, os="linux", architecture="amd64", tag=loaded.release.tag)
    with pytest.raises(IntegrityError):
        commands_evidence.verify(loaded.release.tag, deep=True, require_signature=False)
    assert "WRONG  engine: config digest" in capsys.readouterr().out
    with pytest.raises(EngineError):
        verifying.check_saved(loaded.paths, engine, loaded.release)
