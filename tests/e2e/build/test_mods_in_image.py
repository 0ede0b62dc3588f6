"""The mods' own tests, run where the mods run: in the image that holds them, without a network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import PROJECT
from in_container import run
from places import SUPPORT

from sparkpin.build.pair import pair
from sparkpin.host.engine import Engine

pytestmark = pytest.mark.slow

PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
MODS = sorted(path.parent.name for path in (PROJECT / "mods").glob("*/tests"))
KERNELS = sorted(
    (path.parents[1].name, path.name, value)
    for value, name in (("0", "compiled"), ("1", "interpreted"))
    for path in (PROJECT / "mods").glob(f"*/tests/{name}")
)
TRITON = SUPPORT / "triton.lock"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton for the image's Python, as locked, and what else compiles kernels. Its interpreter runs them on a CPU, its
    compiler and NVRTC need no GPU."""
    folder = tmp_path_factory.mktemp("triton")
    folder.chmod(0o755)  # the image's user reads it
    install = ["pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    python = ["--compile-bytecode", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, *install, *python, "--target", str(folder), "-r", TRITON], check=True, timeout=1800)
    return folder


def run_pytest(tests: str, python_path: dict[str, Path], **environment: str) -> None:
    """Run the tests of a folder below mods/ in the image. python_path: what the image lacks, a name -> the folder."""
    paired = pair(PROJECT, "scripted-tiny")
    held = {mod for one in paired for mod in one.stage.mods}
    image = paired[-1].rendered.ref
    volumes = {str(PROJECT / "mods"): {"bind": "/mods", "mode": "ro"}}
    for name in PYTEST:  # the image has no pytest; it is pure Python, so the host's serves
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        origin = Path(spec.origin)
        source, target = (origin.parent, name) if origin.name == "__init__.py" else (origin, origin.name)
        volumes[str(source)] = {"bind": f"/pytest/{target}", "mode": "ro"}
    for name, folder in python_path.items():
        volumes[str(folder)] = {"bind": f"/{name}", "mode": "ro"}
    mod = tests.partition("/")[0]  # one that no stage of this chain bakes in is taken from the checkout
    paths = os.pathsep.join(
        ["/pytest", *(f"/{name}" for name in python_path), *([] if mod in held else [f"/mods/{mod}"])]
    )
    code, out, err = run(
        Engine.connect(),
        image,
        ["python", "-m", "pytest", "-p", "no:cacheprovider", "--confcutdir=/mods", "-q", f"/mods/{tests}"],
        environment={"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        volumes=volumes,
        tmpfs={"/tmp": "exec"},  # a test puts a program of its own in the place of ptxas
        seconds=3600,
    )
    assert code == 0, out[-8000:] + err[-2000:]


@pytest.mark.parametrize("mod", MODS)
def test_mod(mod: str) -> None:
    run_pytest(f"{mod}/tests", {})


@pytest.mark.parametrize(("mod", "how", "interpret"), KERNELS)
def test_kernels_of_the_mod(mod: str, how: str, interpret: str, triton: Path) -> None:
    """pytest ends with 5, which fails here, when it finds no tests."""
    nvrtc = "/triton/nvidia/cu13/lib"  # else it is sought where the image's Python has its packages
    run_pytest(f"{mod}/tests/{how}", {"triton": triton}, TRITON_INTERPRET=interpret, LD_LIBRARY_PATH=nvrtc)
