"""For who changes sparkpin: the tests and the checks."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from sparkpin.build.record import RenderedImage
from sparkpin.build.render import render_chain
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import project_folder
from sparkpin.core.terminal import show
from sparkpin.pins import manifests
from sparkpin.pins.values import SECRET_NAME, SHAPE

PYTHON = [sys.executable, "-m"]
PYTEST = [*PYTHON, "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "15"]
REAL = ["--maxprocesses", "4", "tests/engine", "tests/e2e", "tests/adversary"]  # each may run a server of 3 GB
# What goes into an image is either locked by hash and public, or a file of the project: all of those are searched for
# secrets. Inside wheels and Debian packages nothing is searched.
PARTS = ("pins", "recipes", "stages", "dockerfiles", "mods", "src/sparkpin/build/rootfs.sh")
CONFIG = ".hadolint.yaml"
HADOLINT = Path(sys.executable).with_name("hadolint")


@task("for developers")
def test(
    *,
    fast: Annotated[bool, "only the unit tests: no engine, no images"] = False,
    all: Annotated[bool, "every test, the slow ones too"] = False,
) -> int:
    """Run the tests; the slow ones only with --all.

    invoke test --fast
    """
    if fast and all:
        raise InputError("--fast and --all exclude each other", next_step="invoke test --all runs every test")
    parts = [["tests/unit", "mods/guard/tests"], *([] if fast else [[*REAL, *([] if all else ["-m", "not slow"])]])]
    return max(run_all([[*PYTEST, *part] for part in parts]))


@task("for developers")
def check() -> int:
    """Check the code, scripts, Dockerfiles, prose and documents.

    invoke check
    """
    project = project_folder()
    scripts = [path for top in ("src", "mods") for end in ("sh", "bash") for path in (project / top).rglob(f"*.{end}")]
    commands: list[list[str | Path]] = [
        [*PYTHON, "ruff", "check", "."],
        [*PYTHON, "ruff", "format", "--check", "."],
        [*PYTHON, "mypy"],
        [Path(sys.executable).with_name("shellcheck"), "install.sh", ".ci/run", *scripts],
        [sys.executable, ".ci/prose.py"],
        [sys.executable, ".ci/site.py"],
    ]
    return max(*run_all(commands), lint(project))


def run_all(commands: Sequence[Sequence[str | Path]]) -> list[int]:
    """Run each in the project, though one before it failed; returns the exit codes."""
    return [subprocess.run(command, cwd=project_folder()).returncode for command in commands]


def rendered(project: Path) -> dict[str, RenderedImage]:
    """`<stack>-<stage>.Dockerfile` -> image, of every stage on every stack that has a lock."""
    found: dict[str, RenderedImage] = {}
    for path in sorted(project.glob("pins/stacks/*.lock")):
        stack = manifests.load_stack(project, path.stem)
        lock = manifests.load_stack_lock(project, stack)
        for stage in sorted(project.glob("stages/*.yaml")):
            for image in render_chain(project, stack, lock, manifests.load_chain(project, stage.stem)):
                found[f"{image.stack}-{image.stage}.Dockerfile"] = image
    return found


def hadolint(project: Path, dockerfiles: Mapping[str, str]) -> list[str]:
    """Its findings, one a line, beginning with the Dockerfile's name."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in dockerfiles.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        argv: list[str | Path] = [HADOLINT, "--no-color", "--config", project / CONFIG, *dockerfiles]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines() or ["hadolint failed and printed nothing"] * bool(done.returncode)


def image_faults(name: str, image: RenderedImage) -> Iterator[str]:
    """The user is set by the stage `config`, or inherited from an image of ours below; it is a number and not root. No
    ENV or ARG is called as secrets are: both stay in the image's configuration and history."""
    users = re.findall(r"^USER +(.*)$", image.dockerfile.partition(" AS config\n")[2], re.M)
    if not users and image.parent_key is None:
        yield f"{name}: no USER in the stage `config`: the image would run as root"
    for user in users:
        if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
            yield f"{name}: USER {user}, expected numbers other than 0, such as 10001:10001"
    for match in re.finditer(r"^ARG +(\w+)|(\w+)=", image.dockerfile, re.M):
        if SECRET_NAME.search(variable := match[1] or match[2]):
            yield f"{name}: {variable}, a secret by its name, would stay in the image"


def secrets(name: str, text: str) -> Iterator[str]:
    """One line for each that a text shows. The secret itself is not repeated."""
    for number, line in enumerate(text.splitlines(), start=1):
        for what, shape in SHAPE.items():
            if shape.search(line):
                yield f"{name}:{number}: {what}"


def project_texts(project: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of each file of the project that an image or a bundle may carry, which no weights are."""
    for part in PARTS:
        for path in sorted([project / part, *(project / part).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".safetensors":
                yield str(path.relative_to(project)), path.read_text(encoding="utf-8", errors="replace")


def lint(project: Path) -> int:
    """Print all that is found; returns the exit code. Nothing looked at is not clean."""
    images = rendered(project)
    dockerfiles = {name: image.dockerfile for name, image in images.items()}
    found = hadolint(project, dockerfiles)
    for name, image in images.items():
        found += image_faults(name, image)
    for name, text in [*dockerfiles.items(), *project_texts(project)]:
        found += secrets(name, text)
    show("\n".join([*found, f"{len(images)} rendered Dockerfiles: {len(found)} findings"]))
    return int(bool(found) or not images)
