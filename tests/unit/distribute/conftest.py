"""A release with its evidence: one to look at, and one for each test to change."""

from __future__ import annotations

import pytest
from bundle_samples import sample_of
from evidence_samples import Sample
from evidence_samples import sboms_made_once as sboms_made_once

from sparkpin.distribute.signing import SIGNING_KEY


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample_of(tmp_path_factory.mktemp("sample"))


@pytest.fixture
def own(sample: Sample, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """In state folders that tasks find. No key is configured."""
    folder = tmp_path_factory.mktemp("own")
    for name, path in (("SPARKPIN_HOME", "home"), ("SPARKPIN_CACHE", "cache"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(name, str(folder / path))
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    return sample.copied(folder)
