"""A real package index that lost a wheel: `fetch` prints what brings it back."""

from __future__ import annotations

from pathlib import Path

import pytest
from stack_samples import locked, stack
from wheelhouse import Index, make_wheel

from sparkpin.build.lost_files import how_to_get
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch.stack import fetch_stack


@pytest.mark.parametrize("lost", ["file", "version", "project", "bytes"])
def test_fetch_says_how_to_get_a_vanished_wheel(tmp_path: Path, index: Index, lost: str) -> None:
    """A real index, which loses a file, a version or all of a project, or has other bytes than before."""
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    wheel = make_wheel(index.folder, "a", size=10)
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
        fetch_stack(paths, stack(), locked(paths, wheel), print, how_to_get)
    assert wheel.file in caught.value.message and wheel.sha256 in caught.value.message
    assert ("no longer offered by the index" in caught.value.message) == (lost != "bytes")
    assert "invoke import" in caught.value.next_step
