"""`sparkpin` installed as a tool, from a wheel, without the clone that it came from: one for many folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from checkout import Checkout
from checkout_here import CheckoutHere
from places import PROJECT


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `uv tool install .` makes it, but for the other packages, which are those of .venv: nothing is fetched."""
    folder = tmp_path_factory.mktemp("tool")
    clone = Checkout.clone(folder / "clone").folder
    for name in ("README.md", "LICENSE"):
        shutil.copy(PROJECT / name, clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    subprocess.run([*uv, "--python", folder / "venv/bin/python", clone], check=True)
    shutil.rmtree(clone)
    return folder / "venv/bin/sparkpin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Data only, and code that must not run: a folder that somebody else may have made."""
    made = CheckoutHere.make(tmp_path / "project").folder
    (made / "tasks.py").write_text("open('ran', 'w')\n")
    return made


def run(tool: Path, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARKPIN_PROJECT")}
    return subprocess.run([tool, *words], cwd=folder, env=kept | env, capture_output=True, text=True)


def test_the_project_is_the_folder_s_or_the_one_that_is_named(tool: Path, project: Path, tmp_path: Path) -> None:
    here = Checkout(PROJECT, tmp_path / "home").done("build", "--render", "--stage", "v2-tq")
    line = ("build", "--render", "--stage", "v2-tq")
    for done in (
        run(tool, project / "pins/models", *line),
        run(tool, tmp_path, "--project", "project", *line),
        run(tool, tmp_path, *line, "--project", str(project)),
        run(tool, tmp_path, *line, SPARKPIN_PROJECT=str(project)),
        run(tool, PROJECT, *line, "--project", str(project), SPARKPIN_PROJECT=str(tmp_path)),
    ):
        assert (done.returncode, done.stdout) == (0, here), done.stderr
    (project / "stages/v2-tq.yaml").unlink()
    assert run(tool, project, *line).returncode == 2, "its own files count"
    assert not list(tmp_path.rglob("ran")), "code of the folder was run"


def test_without_a_project_one_error_says_how_to_name_one(tool: Path, tmp_path: Path) -> None:
    for done in (
        run(tool, tmp_path, "recipe", "list"),
        run(tool, tmp_path, "--project", "nowhere", "recipe", "list"),
        run(tool, tmp_path, "--project", str(tmp_path), "recipe", "list"),
    ):
        assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
        assert "--project FOLDER" in done.stderr.partition("next: ")[2]
    assert run(tool, tmp_path, "--list").returncode == run(tool, tmp_path, "--version").returncode == 0


def test_what_the_package_needs_beside_its_code_is_in_it(tool: Path) -> None:
    (site,) = (tool.parents[1] / "lib").glob("python*/site-packages/sparkpin")
    data = {path.relative_to(site) for path in site.rglob("*") if path.suffix not in (".pyc", "") and path.is_file()}
    own = PROJECT / "src/sparkpin"
    wanted = {path.relative_to(own) for path in own.rglob("*") if path.suffix not in (".pyc", "") and path.is_file()}
    assert data == wanted
