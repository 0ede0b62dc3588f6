"""Protected releases: a file among the evidence of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_releases import release

from sparkpin.core.paths import Paths
from sparkpin.releases.protection import protect, protections_of, unprotect
from sparkpin.releases.record import Releases


@pytest.fixture
def records(tmp_path: Path) -> Releases:
    records = Releases(Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home"))
    for number in (1, 2):
        records.save(release(number, "passed"))
    return records


def test_protection_does_not_touch_the_record(records: Releases) -> None:
    first = release(1, "passed")
    before = records.record_path(first).read_bytes(), records.record_path(first).stat().st_mtime_ns
    protect(records, first, " the last one\n before the new vLLM ")
    assert (records.record_path(first).read_bytes(), records.record_path(first).stat().st_mtime_ns) == before
    assert protections_of(records, "tiny")[first.tag].note == "the last one before the new vLLM"
    assert records.of_recipe("tiny") == [first, release(2, "passed")]
    assert records.recipes() == ["tiny"]


def test_protection_keeps_its_date_and_its_note(records: Releases) -> None:
    first, second = release(1), release(2)
    made = protect(records, first, "why")
    assert protect(records, first) == made
    assert protect(records, first, "another").note == "another"
    protect(records, second)
    assert unprotect(records, first)
    assert not unprotect(records, first)
    assert list(protections_of(records, "tiny")) == [second.tag]
