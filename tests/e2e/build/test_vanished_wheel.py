"""A real package index that lost a wheel: `fetch` says which release was made from it, and how that brings it back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, make_sample
from stack_samples import locked, stack
from wheelhouse import Index, make_wheel

from sparkpin.build import lost_files
from sparkpin.build.lost_files import how_to_get
from sparkpin.build.record import BuildInput, write_record
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.files import write_json
from sparkpin.fetch.stack import fetch_stack


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return make_sample(tmp_path)


def note(sample: Sample, name: str, *rows: dict[str, Any]) -> None:
    write_json(sample.folder / name, list(rows))


@pytest.mark.parametrize("lost", ["file", "version", "project", "bytes"])
def test_fetch_says_where_a_vanished_wheel_is(sample: Sample, index: Index, lost: str) -> None:
    """A real index, which loses a file, a version or all of a project, or has other bytes than before."""
    wheel = make_wheel(index.folder, "a", size=10)
    record = sample.records[0]
    row = BuildInput(path=f"wheels/all/{wheel.file}", sha256=wheel.sha256, size=wheel.size, what="wheel a 1.0")
    write_record(sample.paths, record.model_copy(update={"context": [*record.context, row]}))
    note(sample, lost_files.EXPORTS, {"file": "/mnt/b.tar", "with_store": True, "time": "2026-11-02T10:00:00Z"})
    path = index.folder / wheel.file
    if lost == "file":
        index.gone.add(wheel.file)
    elif lost == "bytes":
        make_wheel(index.folder, "a", size=11)
    else:
        path.unlink()
    if lost == "version":
        make_wheel(index.folder, "a", "2.0")
    with pytest.raises(IntegrityError if lost == "bytes" else NetworkError) as caught:
        fetch_stack(sample.paths, stack(), locked(sample.paths, wheel), print, partial(how_to_get, sample.paths))
    assert wheel.file in caught.value.message and wheel.sha256 in caught.value.message
    assert ("no longer offered by the index" in caught.value.message) == (lost != "bytes")
    advice = f"{sample.release.tag} was made from it: `invoke import /mnt/b.tar` (exported 2026-11-02 with its store)"
    assert advice in caught.value.next_step
