"""Pins: one file a recipe, beside the records and not one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_releases import release

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.releases import keep
from sparkpin.releases.record import Releases


@pytest.fixture
def records(tmp_path: Path) -> Releases:
    records = Releases(Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home"))
    for number in (1, 2):
        records.save(release(number, "passed"))
    records.save(release(3, "passed", recipe="another"))
    return records


def test_a_pin_does_not_touch_the_record(records: Releases) -> None:
    first = release(1, "passed")
    before = records.record_path(first).read_bytes(), records.record_path(first).stat().st_mtime_ns
    keep.pin(records, first.tag.removeprefix("sparkpin/"), " the last one\n before the new vLLM ")
    assert (records.record_path(first).read_bytes(), records.record_path(first).stat().st_mtime_ns) == before
    assert keep.all_pins(records)[first.tag].note == "the last one before the new vLLM"
    assert records.of_recipe("tiny") == [first, release(2, "passed")]
    assert records.recipes() == ["another", "tiny"]


def test_a_pin_keeps_its_date_and_its_note(records: Releases) -> None:
    tag = release(1).tag
    _, made = keep.pin(records, tag, "why")
    assert keep.pin(records, tag)[1] == made
    assert keep.pin(records, tag, "another")[1] == made.model_copy(update={"note": "another"})
    assert keep.pins_of(records, "another") == {}
    keep.pin(records, release(2).tag)
    assert keep.unpin(records, tag)
    assert not keep.unpin(records, tag)
    assert list(keep.all_pins(records)) == [release(2).tag]


@pytest.mark.parametrize("act", [keep.pin, keep.unpin])
def test_an_unknown_release_lists_the_known(records: Releases, act: Any) -> None:
    with pytest.raises(InputError, match="unknown release 'tiny:v2-000000000000'") as caught:
        act(records, "tiny:v2-000000000000")
    assert release(1).tag in caught.value.next_step
    assert not (records.root / "tiny/pinned.json").exists()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("{", "(whole file)"),
        ('{"schema": 99, "pins": {}}', "schema"),
        ('{"schema": 1, "pins": {"sparkpin/tiny:v2-1": {"since": "2026"}}}', "pins.sparkpin/tiny:v2-1.note"),
    ],
)
def test_a_damaged_file_of_pins_is_named_and_nothing_counts_as_unpinned(
    records: Releases, content: str, key: str
) -> None:
    path = records.root / "tiny/pinned.json"
    path.write_text(content)
    for act in (keep.all_pins, lambda records: keep.pin(records, release(1).tag)):
        with pytest.raises(ManifestError) as caught:
            act(records)
        assert (caught.value.file, caught.value.key) == (str(path), key)
        assert caught.value.next_step
    assert path.read_text() == content
