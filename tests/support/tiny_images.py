"""A made-up project whose images take a second to build: a shell as root file system, no wheels, one mod."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests, schema

STACK = """\
description: made up
platform: linux/amd64
default_recipe: none
debian: {suite: bookworm, packages: [dash]}
python:
  version: "3.11"
  requirements: []
  layers:
    - {name: first, packages: [alpha]}
    - {name: rest, packages: ["*"]}
mods: []
"""
BASE = """\
FROM {{ parent_ref }} AS venv
RUN ["/bin/sh", "-c", "echo building; while read line; do echo $line; done </proc/net/dev >/tmp/net"]
FROM scratch AS venv-tree
COPY --from=venv /tmp/net /opt/net
FROM {{ parent_ref }} AS config
ENV GREETING=hello
USER 10001:10001
LABEL sparkpin.stage="{{ stage.name }}" sparkpin.key="{{ key }}"
FROM config
COPY --from=venv-tree / /
"""
CHILD = """\
{% for name in layers %}
FROM scratch AS {{ name }}-tree
COPY wheels/{{ name }}/ /opt/{{ name }}/
{% endfor %}
FROM {{ parent_ref }} AS config
LABEL sparkpin.stage="{{ stage.name }}" sparkpin.key="{{ key }}"
FROM config
{% for name in layers %}
COPY --from={{ name }}-tree / /
{% endfor %}
"""
STAGE = "description: made up\nsmoke: {checks: [chat, mods]}\n"
PYPROJECT = """\
[build-system]
requires = ["flit_core>=3.9"]
build-backend = "flit_core.buildapi"
[project]
name = "sparkpin-{name}"
version = "0.1.0"
description = "made up"
readme = "README.md"
requires-python = ">=3.11"
[tool.flit.module]
name = "{module}"
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def make_project(folder: Path, stack: str = "tiny") -> Path:
    """Stages base -> one (mod hello) -> two (no mod)."""
    write(folder / f"pins/stacks/{stack}.yaml", STACK)
    write(folder / "stages/base.yaml", f"{STAGE}parent: null\ntemplate: base.j2\ncheckpoint: copy\n")
    write(folder / "stages/one.yaml", f"{STAGE}parent: base\ntemplate: child.j2\nmods: [hello]\n")
    write(folder / "stages/two.yaml", f"{STAGE}parent: one\ntemplate: child.j2\n")
    write(folder / "dockerfiles/base.j2", BASE)
    write(folder / "dockerfiles/child.j2", CHILD)
    write(folder / "dockerfiles/install.py", "pass\n")
    make_mod(folder, "hello")
    return folder


def make_mod(folder: Path, name: str) -> None:
    module = f"sparkpin_{name.replace('-', '_')}"
    mod = folder / "mods" / name
    write(mod / "pyproject.toml", PYPROJECT.replace("{name}", name).replace("{module}", module))
    write(mod / "README.md", "about\n")
    write(mod / module / "__init__.py", '"""Made up."""\nVALUE = 1\n')
    write(mod / "tests/test_it.py", "def test(): pass\n")


def locked(*names: str) -> tuple[schema.LockedFile, ...]:
    return tuple(
        schema.LockedFile(name=name, version="1.0", file=f"{name}-1.0-py3-none-any.whl", size=9, sha256=char * 64)
        for name, char in zip(names, "abcdef", strict=False)
    )


def stack_lock(stack: schema.Stack, wheels: Sequence[schema.LockedFile] = ()) -> schema.StackLock:
    debs = [schema.LockedDeb(**deb.model_dump()) for deb in locked("dash")]
    return schema.StackLock(stack=stack.name, inputs=manifests.stack_inputs(stack), debs=debs, wheels=list(wheels))


def make_rootfs(path: Path, programs: Sequence[str] = ()) -> Path:
    """A shell, more programs and their libraries, from this machine."""
    wanted = {"sh": shutil.which("dash") or "/bin/sh", **{name: str(shutil.which(name)) for name in programs}}
    files = {f"bin/{name}": Path(program) for name, program in wanted.items()}
    for program in wanted.values():
        found = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        files |= {name.lstrip("/"): Path(name) for name in re.findall(r"(/\S+)", found)}
    with tarfile.open(path, "w") as tar:
        for name in ("tmp", "opt", "etc", "proc", "sys", "dev"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(info)
        for name, source in files.items():
            info, data = tarfile.TarInfo(name), source.read_bytes()
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return path


def without_programs(path: Path) -> None:
    """Leave only the folders of such a root file system."""
    with tarfile.open(path) as tar:
        folders = [member for member in tar.getmembers() if member.isdir()]
    with tarfile.open(path, "w") as tar:
        for folder in folders:
            tar.addfile(folder)


REVISION = "1" * 40
MODEL = f"""\
description: made up
base: int4
repositories:
  int4: {{repo: made/up, revision: "{REVISION}"}}
"""
RECIPE = f"""\
recipe_version: "1"
name: NAME
model: made/up
model_revision: "{REVISION}"
container: none
stack: STACK
stage: two
defaults: {{port: 8000}}
command: vllm serve /model --port {{port}}
"""


def add_recipe(folder: Path, name: str, stack: str, debs: Sequence[schema.LockedDeb]) -> None:
    """A recipe, its model and both locks: what `pairing.pair` reads of a project."""
    write(folder / "pins/models/made-up.yaml", MODEL)
    write(folder / f"recipes/{name}.yaml", RECIPE.replace("NAME", name).replace("STACK", stack))
    pin = manifests.load_model(folder, "made-up")
    repository = schema.RepositoryLock(repo="made/up", revision=REVISION, files=[])
    lock = schema.ModelLock(model=pin.name, inputs=manifests.model_inputs(pin), repositories={"int4": repository})
    write(folder / "pins/models/made-up.lock", manifests.lock_text(lock))
    stack_file = folder / f"pins/stacks/{stack}.yaml"
    write(stack_file, stack_file.read_text().replace("    - {name: first, packages: [alpha]}\n", ""))
    pins = manifests.load_stack(folder, stack)
    locked = schema.StackLock(stack=stack, inputs=manifests.stack_inputs(pins), debs=list(debs), wheels=[])
    write(folder / f"pins/stacks/{stack}.lock", manifests.lock_text(locked))


def whole(folder: Path, name: str, data: bytes) -> Paths:
    """A project whose stack and recipe have one name, and a store with all that it locks: one package of `data`."""
    project = make_project(folder / "project", name)
    paths = Paths(project, folder / "cache", folder / "home")
    deb = schema.LockedDeb(
        name="dash", version="1", file="dash_1_amd64.deb", size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    (folder / deb.file).write_bytes(data)
    Store(paths.store).add(folder / deb.file, deb)
    add_recipe(project, name, name, [deb])
    return paths
