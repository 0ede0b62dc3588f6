"""What of a mod's folder goes into its wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sparkpin.core.errors import ManifestError
from sparkpin.pins.mods import build_wheel, read_mod

PYPROJECT = """
[project]
name = "sample"
version = "1"
description = "A sample."
[build-system]
requires = ["flit_core"]
build-backend = "flit_core.buildapi"
"""
INSIDE = ("sample/__init__.py", "sample/docs/__init__.py", "sample/build/dist.py")
OUTSIDE = ("docs/a.py", "tests/b.py", "README.md")


@pytest.fixture
def mod(tmp_path: Path) -> Path:
    folder = tmp_path / "mods/sample"
    for name in (*INSIDE, *OUTSIDE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder


def test_a_package_may_have_any_name_below_the_mod_s_folder(mod: Path, tmp_path: Path) -> None:
    """Folders of the mod itself that are called so hold nothing that runs in an image."""
    found = read_mod(tmp_path, "sample")
    assert {file.path for file in found.files} == {"pyproject.toml", *INSIDE}
    names = zipfile.ZipFile(build_wheel(found, tmp_path)).namelist()
    assert set(INSIDE) <= set(names) and not [name for name in names if name.startswith(("docs/", "tests/"))]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('version = "1"', "", "project.version"),
        ('"flit_core.buildapi"', '"other"', "build-system.build-backend"),
        ("[build", '[project.entry-points."sparkpin.kernels"]\nother = "a:b"\n[build', '"sparkpin.kernels"'),
        ("[build", "[[[", "(whole file)"),
    ],
)
def test_a_mod_that_cannot_be_a_wheel_is_refused(mod: Path, tmp_path: Path, old: str, new: str, key: str) -> None:
    (mod / "pyproject.toml").write_text(PYPROJECT.replace(old, new))
    with pytest.raises(ManifestError) as caught:
        read_mod(tmp_path, "sample")
    assert caught.value.file.endswith("pyproject.toml") and caught.value.key.endswith(key)
