"""What `invoke check` looks for in the stacks' images: hadolint over rendered Dockerfiles, root as the user, secrets.

    python -m sparkpin.cli.lint [PROJECT]

What goes into an image is either locked by hash and public, or a file of the project: all of those are searched for
secrets. Inside wheels and Debian packages nothing is searched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sparkpin.build.record import RenderedImage
from sparkpin.build.render import instructions, render_chain
from sparkpin.core.errors import HostError, SparkpinError
from sparkpin.pins import manifests
from sparkpin.pins.values import SECRET_NAME, SHAPE

PARTS = ("pins", "recipes", "stages", "dockerfiles", "mods", "src/sparkpin/build/rootfs.sh")
CONFIG = ".hadolint.yaml"


def secrets(name: str, text: str) -> Iterator[str]:
    """One line for each that a text shows. The secret itself is not repeated."""
    for number, line in enumerate(text.splitlines(), start=1):
        for what, shape in SHAPE.items():
            if shape.search(line):
                yield f"{name}:{number}: {what}"


def variables(name: str, dockerfile: str) -> Iterator[str]:
    """ENV and ARG that are called as secrets are: both stay in the image's configuration and history."""
    for number, line in instructions(dockerfile):
        word, _, rest = line.partition(" ")
        if word.upper() in ("ENV", "ARG"):
            for key in re.findall(r"(?:^|\s)([A-Za-z_]\w*)(?==|\s|$)", rest):
                if SECRET_NAME.search(key):
                    yield f"{name}:{number}: {word.upper()} {key}, a secret by its name, would stay in the image"


def users(name: str, dockerfile: str, *, first: bool) -> Iterator[str]:
    """The image's user is set by its stage `config`, or inherited from the image below; it is a number and not root.

    first: whether what is below is no image of ours: then it has to be set.
    """
    stage, user = "", None
    for number, line in instructions(dockerfile):
        word, _, rest = line.partition(" ")
        if word.upper() == "FROM":
            stage = rest.split()[-1]
        elif word.upper() == "USER":
            if stage == "config":
                user = rest.strip()
            if stage == "config" and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", rest.strip()):
                yield f"{name}:{number}: USER {rest.strip()}, expected numbers other than 0, such as 10001:10001"
    if first and user is None:
        yield f"{name}: no USER in the stage `config`: the image would run as root"


def chains(project: Path) -> list[tuple[str, str]]:
    """(stack, last stage) of every recipe, and of its default recipe for a stack that no recipe names."""
    recipes = [manifests.load_recipe(project, path.stem) for path in sorted((project / "recipes").glob("*.yaml"))]
    found = [(recipe.stack, recipe.stage) for recipe in recipes]
    for path in sorted((project / "pins/stacks").glob("*.yaml")):
        if path.stem not in {recipe.stack for recipe in recipes}:
            default = manifests.load_stack(project, path.stem).default_recipe
            found.append((path.stem, manifests.load_recipe(project, default).stage))
    return list(dict.fromkeys(found))


def rendered(project: Path) -> tuple[dict[str, RenderedImage], list[str]]:
    """`<stack>-<stage>.Dockerfile` -> image, of every stack's chains; and the stacks that have no lock."""
    found: dict[str, RenderedImage] = {}
    without: dict[str, None] = {}
    for name, stage in chains(project):
        stack = manifests.load_stack(project, name)
        if not (project / f"pins/stacks/{name}.lock").is_file():
            without[name] = None
            continue
        chain = manifests.load_chain(project, stage)
        for image in render_chain(project, stack, manifests.load_stack_lock(project, stack), chain):
            found[f"{image.stack}-{image.stage}.Dockerfile"] = image
    return found, list(without)


def project_texts(project: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of each file of the project that an image or a bundle may carry, which no weights are."""
    for part in PARTS:
        top = project / part
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".safetensors":
                yield str(path.relative_to(project)), path.read_text(encoding="utf-8", errors="replace")


def find_hadolint() -> str:
    beside = Path(sys.executable).parent / "hadolint"
    if program := str(beside) if beside.is_file() else shutil.which("hadolint"):
        return program
    raise HostError(f"no hadolint at {beside}", next_step="./install.sh makes .venv anew from requirements.lock")


def hadolint(project: Path, dockerfiles: dict[str, str]) -> list[str]:
    """Its findings, one a line, beginning with the Dockerfile's name."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in dockerfiles.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        argv = [find_hadolint(), "--no-color", "--config", str(project / CONFIG), *dockerfiles]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode and not lines:
        lines = [f"hadolint ended with {done.returncode} and said nothing"]
    return lines


def findings(project: Path, images: dict[str, RenderedImage]) -> Iterable[str]:
    texts = {name: image.dockerfile for name, image in images.items()}
    yield from hadolint(project, texts)
    for name, image in images.items():
        yield from variables(name, image.dockerfile)
        yield from users(name, image.dockerfile, first=image.parent_key is None)
    for name, text in [*texts.items(), *project_texts(project)]:
        yield from secrets(name, text)


def main(arguments: Sequence[str]) -> int:
    project = Path(*arguments).resolve()
    try:
        images, without = rendered(project)
        found = list(findings(project, images))
    except SparkpinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for line in found:
        print(line)
    for stack in without:
        print(f"not looked at: stack {stack} has no lock (invoke lock --stack {stack})")
    print(f"{len(images)} rendered Dockerfiles: {f'{len(found)} findings' if found else 'clean'}")
    return 1 if found or not images else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
