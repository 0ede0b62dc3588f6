"""The note of what a build is about to make."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparkpin.build import begun
from sparkpin.core.files import PARTIAL
from sparkpin.core.paths import Paths


def test_a_note_that_a_killed_build_was_writing_goes_with_the_next(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    rendered: Any = SimpleNamespace(ref="a:b", stack="s", stage="base", key="k" * 64, rootfs=None)
    folder = begun.note_file(paths, rendered).parent
    folder.mkdir(parents=True)
    (folder / f"{PARTIAL}abc").write_text("{")
    begun.begun(paths, rendered)
    assert not list(folder.glob(f"{PARTIAL}*")) and list(begun.notes(paths)) == [begun.note_file(paths, rendered)]
